"""Build images from folders with a Dockerfile, and read the defaults of an image: user, working directory, variables.

Invariant: equal folders give one image, which is built once; the name of the image is a digest of the folder. Reading
the defaults of an image runs no code of it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import ImageError
from agentkit.sandboxes.images import build

if TYPE_CHECKING:
    from docker import APIClient

_FILE_LIMIT = 4 << 20


@dataclass(frozen=True)
class User:
    """A user of an image."""

    uid: int
    gid: int
    home: str


@dataclass(frozen=True)
class Defaults:
    """What an image says about the containers that are made of it."""

    user: User
    workdir: str
    volumes: tuple[str, ...]
    users: Mapping[str, User]
    """The users of the image by name."""

    def user_of(self, name: str | int | None) -> User:
        """Return a user of the image by its name or number, or as ``uid:gid``; None is the default user.

        Raises:
            ImageError: the image has no user of this name.
        """
        if name is None:
            return self.user
        user = find_user(str(name), self.users)
        if user is None:
            raise ImageError(f"the image has no user {name!r}, only {', '.join(sorted(self.users))}")
        return user


def name_of(folder: Path, repository: str) -> str:
    """Return the name of the image of a folder: ``repository`` with the digest of the folder."""
    return f"{repository}:{digest_of(folder)}"


def digest_of(folder: Path) -> str:
    """Return a hexadecimal digest of the paths, modes and contents in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_symlink():
            part = f"link {relative} {os.readlink(path)}".encode()
        elif path.is_file():
            data = path.read_bytes()
            part = f"file {relative} {path.stat().st_mode & 0o111:o} {len(data)} ".encode() + data
        else:
            part = f"folder {relative}".encode()
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def build_image(folder: Path, repository: str, timeout: float, *, again: bool = False) -> str:
    """Build the image of a folder with a Dockerfile, unless the engine has it, and return its name.

    The build runs the command ``docker``, with BuildKit where it is installed, and with a network. Blocks.

    Args:
        folder: the folder.
        repository: the name of the image without its tag.
        timeout: seconds that the build may take.
        again: build it although the engine has it, without the engine's cache.

    Raises:
        ImageError: the image cannot be built.
        EngineUnavailable: the engine does not answer.
    """
    tag = name_of(folder, repository)
    if not again and build.exists(tag):
        return tag
    docker = shutil.which("docker")
    if docker is None:
        raise ImageError(f"building {folder} needs the command docker, which is not installed", image=tag)
    fresh = ["--no-cache"] if again else []
    command = [docker, "build", "--quiet", "--force-rm", *fresh, "--tag", tag, os.fspath(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ImageError(f"the image of {folder} was not built in {timeout:g} s", image=tag) from None
    if done.returncode != 0:
        raise ImageError(f"the image of {folder} cannot be built: {done.stderr.strip()[-2000:]}", image=tag)
    return tag


def defaults_of(image: str) -> Defaults:
    """Return the defaults of an image, which is pulled if the engine does not have it. Blocks.

    Raises:
        ImageError: there is no such image, or its default user does not exist.
        EngineUnavailable: the engine does not answer.
    """
    with build.engine(None) as client:
        build.ensure(client, image)
        config = client.inspect_image(image)["Config"] or {}
        users = parse_users(_read(client, image, "/etc/passwd"))
    name = config.get("User") or "0"
    user = find_user(name, users)
    if user is None:
        raise ImageError(f"the default user {name!r} of {image} does not exist in it", image=image)
    return Defaults(user, config.get("WorkingDir") or "/", tuple(config.get("Volumes") or ()), users)


def parse_users(passwd: str) -> dict[str, User]:
    """Return the users of a file in the format of ``/etc/passwd``; lines of another form are left out."""
    fields = (line.split(":") for line in passwd.splitlines())
    return {
        part[0]: User(int(part[2]), int(part[3]), part[5] or "/")
        for part in fields
        if len(part) == 7 and part[2].isdecimal() and part[3].isdecimal()
    }


def find_user(name: str, users: Mapping[str, User]) -> User | None:
    """Return the user ``NAME``, ``UID``, ``NAME:GID`` or ``UID:GID``; None if there is no such name."""
    first, _, group = name.partition(":")
    user = users.get(first)
    if user is None and re.fullmatch(r"\d+", first):
        known = (known for known in users.values() if known.uid == int(first))
        user = next(known, User(int(first), 0, "/root" if int(first) == 0 else "/"))
    if user is None or not group:
        return user
    return User(user.uid, int(group), user.home) if group.isdecimal() else None


def _read(client: APIClient, image: str, path: str) -> str:
    """Return a text file of an image; empty if it has none. Reads it from a container that is never started."""
    from docker.errors import NotFound

    config: Any = {"Image": image, "Entrypoint": ["/"], "Cmd": [], "Labels": {"agentkit.build": "1"}}
    container = client.create_container_from_config(config)["Id"]
    try:
        chunks, found = client.get_archive(container, path)
        if found["size"] > _FILE_LIMIT:
            raise ImageError(f"{path} of {image} has more than {_FILE_LIMIT} bytes", image=image)
        return "".join(_texts(chunks))
    except NotFound:
        return ""
    finally:
        client.remove_container(container, force=True, v=True)


def _texts(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the contents of the regular files of a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield file.read().decode("utf-8", "replace")
