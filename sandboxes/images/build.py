"""Build the images of sandboxes: ``agentkit/base`` (Python and a shell), and images with packages or files.

Invariant: a build uses no network; the host fetches the base image and the packages before it. A label of the image
records the digest of its content, and an image with the same digest is not built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import EngineUnavailable, ImageError
from agentkit.sandboxes.backends.docker.engine import engine_host, make_client, unreachable
from agentkit.sandboxes.backends.docker.runtime import run_once
from agentkit.sandboxes.spec import DEFAULT_IMAGE

if TYPE_CHECKING:
    from docker import APIClient

PACKAGES_IMAGE = "agentkit/packages"
"""An image with packages; its tag is a digest of them."""
REGISTRY_BASE = "python:3.11-slim"
"""The default base image."""
DEBIAN = "agentkit/debian:bookworm"
"""The base image that ``images/debootstrap.sh`` creates on machines without a registry."""
_CONTENT = "agentkit.content"
_BUILD_TIMEOUT = 900.0
_PIP_TIMEOUT = 900.0
_PROBE = (
    "import json, platform, site, sys;"
    "print(json.dumps([sys.version_info[:2], platform.machine(), platform.libc_ver(), site.getsitepackages()[0]]))"
)


def build_base(base: str | None = None, *, host: str | None = None, tag: str = DEFAULT_IMAGE) -> str:
    """Build ``agentkit/base`` and return the id of the image.

    Args:
        base: the image to build on. Default: the image of ``images/debootstrap.sh`` if it exists, else
            ``python:3.11-slim``, which is pulled.
        host: address of the engine's socket (``unix:///path``).
        tag: the name of the image.

    Raises:
        ImageError: the base cannot be obtained, or the build fails.
        EngineUnavailable: the engine does not answer.
    """
    with engine(host) as client:
        base = base or (DEBIAN if _inspect(client, DEBIAN) else REGISTRY_BASE)
        recipe = _recipe("base")
        return _build(client, tag, _digest(ensure(client, base), recipe), recipe, lambda _: {"BASE": base})


def build_packages(base: str, pins: Sequence[str], constraints: Sequence[str] = (), *, host: str | None = None) -> str:
    """Build ``base`` with packages from the index and return the id of the image.

    The host's pip fetches them as wheels and runs none of their code.

    Args:
        base: the image to build on; it needs python3 and glibc.
        pins: requirements of pip.
        constraints: constraints of pip. Without any, the newest versions are taken.
        host: address of the engine's socket.

    Raises:
        ImageError: a package cannot be fetched, or the build fails.
        EngineUnavailable: the engine does not answer.
    """
    recipe, pins = _recipe("packages"), sorted(pins)
    with engine(host) as client:

        def lay_out(folder: Path) -> dict[str, str]:
            python = _probe(client, base)
            _fetch(folder, pins, python, constraints)
            return {"BASE": base, "SITE": python.site}

        content = _digest(ensure(client, base), recipe, *pins, *([] if constraints else ["newest"]))
        return _build(client, f"{PACKAGES_IMAGE}:{content[:16]}", content, recipe, lay_out)


def build_folder(
    recipe: str,
    tag: str,
    base: str,
    folder: Path,
    arguments: Mapping[str, str] | None = None,
    *,
    host: str | None = None,
) -> str:
    """Build an image from one of agentkit's recipes and a folder, and return the id of the image.

    Args:
        recipe: name of the recipe; it gets the folder as ``site``.
        tag: the name of the image.
        base: the image to build on; it needs python3 and glibc.
        folder: a folder of plain files.
        arguments: build arguments, in addition to ``BASE`` and ``SITE`` (the package folder of the base's Python).
        host: address of the engine's socket.

    Raises:
        ImageError: the base cannot be obtained, or the build fails.
        EngineUnavailable: the engine does not answer.
    """
    text, given = _recipe(recipe), dict(arguments or {})
    parts: list[str | bytes] = [json.dumps(given, sort_keys=True)]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        parts += [path.relative_to(folder).as_posix(), f"{path.stat().st_mode & 0o100:o}", path.read_bytes()]
    with engine(host) as client:

        def lay_out(target: Path) -> dict[str, str]:
            shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)
            return {"BASE": base, "SITE": _probe(client, base).site, **given}

        return _build(client, tag, _digest(ensure(client, base), text, *parts), text, lay_out)


def exists(tag: str, *, host: str | None = None) -> bool:
    """Return whether the engine has an image with this name."""
    with engine(host) as client:
        return _inspect(client, tag) is not None


@contextlib.contextmanager
def engine(host: str | None) -> Iterator[APIClient]:
    """Yield a client of the engine and translate its errors. Raises ``ImageError``, ``EngineUnavailable``."""
    client = make_client(host, timeout=_BUILD_TIMEOUT)
    import requests
    from docker.errors import APIError, DockerException

    try:
        yield client
    except APIError as error:
        raise ImageError(f"the engine cannot build an image: {error.explanation or error}") from error
    except (requests.exceptions.RequestException, DockerException) as error:
        raise EngineUnavailable(unreachable(engine_host(host), error)) from error
    finally:
        client.close()


def _recipe(name: str) -> bytes:
    return resources.files("agentkit.images").joinpath(f"{name}.Dockerfile").read_bytes()


@dataclass(frozen=True)
class Python:
    """The Python of an image."""

    version: str
    machine: str
    libc: tuple[int, int]
    site: str
    """Path of its site-packages."""


def _fetch(target: Path, pins: Sequence[str], python: Python, constraints: Sequence[str]) -> None:
    """Install packages and their requirements for the image's Python into ``target``."""
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    file = scratch / "constraints.txt"
    file.write_text("".join(f"{line}\n" for line in constraints))
    (major, newest), machine = python.libc, python.machine
    platforms = [f"manylinux_{major}_{minor}_{machine}" for minor in range(newest, 16, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    install = ["install", "--no-compile", "--target", str(target), "--only-binary=:all:", "--implementation=cp"]
    install += [f"--python-version={python.version}", *(f"--platform={name}" for name in platforms)]
    install += ["--constraint", str(file)]
    done = _pip(install, pins)
    if done.returncode != 0:
        # Packages without a wheel in the index were built here at their installation; pip has cached their wheels.
        wheel = ["wheel", "--wheel-dir", str(scratch), "--constraint", str(file)]
        if _pip(wheel, pins).returncode == 0:
            done = _pip([*install, "--find-links", str(scratch)], pins)
    if done.returncode != 0:
        raise ImageError(
            f"pip cannot fetch {', '.join(pins)} for Python {python.version}: {done.stderr.strip()[-2000:]}"
        )


def _pip(arguments: Sequence[str], pins: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", *pins]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"pip did not fetch {', '.join(pins)} in {_PIP_TIMEOUT:g} s; check that it can reach an index"
        ) from error


def _probe(client: APIClient, image: str) -> Python:
    """Return the Python of an image. Raises ``ImageError`` if the image cannot hold packages of this host."""
    status, output = run_once(client, image, ["python3", "-c", _PROBE], timeout=60)
    try:
        (major, minor), machine, (name, libc), site = json.loads(output)
        if status != 0 or name != "glibc" or re.fullmatch(r"\w+", machine) is None:
            raise ValueError(output)
        found = re.fullmatch(r"(\d+)\.(\d+).*", libc)
        if found is None or not re.fullmatch(r"/[\w./-]+", site):
            raise ValueError(output)
        return Python(f"{int(major)}.{int(minor)}", machine, (int(found[1]), int(found[2])), site)
    except (ValueError, TypeError) as error:
        raise ImageError(
            f"{image} cannot hold environments: it needs python3 and glibc (output: {output[-500:]!r})"
        ) from error


def ensure(client: APIClient, image: str) -> str:
    """Return the id of an image; pull it if necessary. Raises ``ImageError``."""
    from docker.errors import APIError
    from docker.utils import parse_repository_tag

    if found := _inspect(client, image):
        return found["Id"]
    remedy = "choose another base, or create one with images/debootstrap.sh (needs root and debootstrap)"
    if image.startswith("agentkit/"):
        raise ImageError(f"no image {image!r}; build it with `agentkit sandbox build`")
    try:
        name, version = parse_repository_tag(image)
        client.pull(name, tag=version or "latest")
    except APIError as error:
        raise ImageError(f"cannot pull {image}: {error.explanation}; {remedy}") from error
    if found := _inspect(client, image):
        return found["Id"]
    raise ImageError(f"cannot pull {image}; {remedy}")


def _inspect(client: APIClient, image: str) -> dict[str, Any] | None:
    from docker.errors import ImageNotFound

    try:
        return client.inspect_image(image)
    except ImageNotFound:
        return None


def _digest(*parts: str | bytes) -> str:
    """Return a digest of the parts and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def _build(client: APIClient, tag: str, content: str, recipe: bytes, lay_out: Callable[[Path], dict[str, str]]) -> str:
    """Build ``tag`` unless it exists with the digest ``content``, and return the id of the image.

    ``lay_out`` writes the files of the image into a folder and returns the build arguments.
    """
    found = _inspect(client, tag)
    if found and (found["Config"].get("Labels") or {}).get(_CONTENT) == content:
        return found["Id"]
    with tempfile.TemporaryDirectory(prefix="agentkit-image-") as folder, tempfile.TemporaryFile() as context:
        site = Path(folder, "site")
        site.mkdir()
        arguments = lay_out(site)
        _pack(context, recipe, site)
        context.seek(0)
        output: list[str] = []
        for message in client.build(
            fileobj=context,
            custom_context=True,
            encoding=None,
            tag=tag,
            rm=True,
            forcerm=True,
            network_mode="none",
            buildargs=arguments,
            labels={_CONTENT: content},
            decode=True,
        ):
            output.append(str(message.get("stream") or ""))
            if "error" in message:
                raise ImageError(f"cannot build {tag}: {message['error']}\n{''.join(output)[-2000:]}")
    built = _inspect(client, tag)
    if built is None:
        raise ImageError(f"the engine built {tag}, but does not have it: {''.join(output)[-500:]}")
    if found is not None and found["Id"] != built["Id"]:
        from docker.errors import APIError

        with contextlib.suppress(APIError):  # it has other names, or is in use
            client.remove_image(found["Id"])
    return built["Id"]


def _pack(target: Any, recipe: bytes, site: Path) -> None:
    """Write a build context as a tar file. Root owns the files, and every user may read them."""

    def normalized(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    with tarfile.open(fileobj=target, mode="w") as archive:
        info = tarfile.TarInfo("Dockerfile")
        info.size = len(recipe)
        archive.addfile(normalized(info), io.BytesIO(recipe))
        archive.add(os.fspath(site), arcname="site", filter=normalized)
