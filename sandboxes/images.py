"""Build the images that sandboxes run: ``agentkit/base`` (Python, a shell) and ``agentkit/env`` (agentkit too).

Invariant: a build needs no network; what it needs (the base, the packages) is fetched by the host before it. An image
says what it was made of by a label, and is not made again while that has not changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import EngineUnavailable, ImageError
from agentkit.sandboxes.backends.docker_engine import engine_host, make_client, unreachable
from agentkit.sandboxes.spec import DEFAULT_IMAGE

if TYPE_CHECKING:
    from docker import APIClient

ENV_IMAGE = "agentkit/env"
"""What ``agentkit.make(..., sandbox="docker")`` runs."""
PACKAGES_IMAGE = "agentkit/packages"
"""What the environments' image is made from; its tag says of what."""
REGISTRY_BASE = "python:3.11-slim"
"""The base for those who can reach a registry."""
DEBIAN = "agentkit/debian:bookworm"
"""What ``images/debootstrap.sh`` makes, for those who cannot."""
LIGHT = ("gymnasium", "pydantic")
"""What environments import; neither torch nor anything else that learns."""
EXTRAS = ("bm25s", "PyStemmer")
"""What some environments import as well, where the host has it: the search of WebShop."""

_CONTENT = "agentkit.content"
_BUILD_TIMEOUT = 900.0
_PIP_TIMEOUT = 900.0
_PROBE = (
    "import json, platform, site, sys;"
    "print(json.dumps([sys.version_info[:2], platform.machine(), platform.libc_ver(), site.getsitepackages()[0]]))"
)


def build_base(base: str | None = None, *, host: str | None = None, tag: str = DEFAULT_IMAGE) -> str:
    """Build ``agentkit/base`` from ``base`` and return its image id.

    ``base=None``: the image that ``images/debootstrap.sh`` made, if it is there, else ``python:3.11-slim``, pulled.
    ``host`` is the engine's socket (``unix:///…``). Raises ``ImageError``, ``EngineUnavailable``.
    """
    with _engine(host) as client:
        base = base or (DEBIAN if _inspect(client, DEBIAN) else REGISTRY_BASE)
        recipe = _recipe("base")
        content = _digest(_ensure(client, base), recipe)
        return _build(client, tag, content, {"Dockerfile": recipe}, None, {"BASE": base})


def build_environments(
    base: str = DEFAULT_IMAGE, *, packages: Sequence[str] = (), host: str | None = None, tag: str = ENV_IMAGE
) -> str:
    """Build ``agentkit/env``: ``base`` with the agentkit that runs here, and return its image id.

    ``packages`` are further installed distributions, with what they require, for environments of other packages. All
    have the host's versions. They are fetched by the host's pip. Raises ``ImageError``, ``EngineUnavailable``.
    """
    extras = [name for name in EXTRAS if _installed(name)]
    pins = sorted({f"{name}=={_version(name)}" for name in (*LIGHT, *extras, *packages)})
    own = dict(_own_files())
    with _engine(host) as client:
        probed = _Probed(client, base)
        filled = _packages(client, base, pins, probed, _host_versions())
        recipe = _recipe("env")
        content = _digest(filled, recipe, *(part for item in sorted(own.items()) for part in item))
        if (found := _inspect(client, tag)) and _label(found) == content:
            return found["Id"]
        with tempfile.TemporaryDirectory(prefix="agentkit-image-") as folder:
            for name, data in own.items():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            arguments = {"BASE": filled, "SITE": probed.python.site}
            return _build(client, tag, content, {"Dockerfile": recipe}, Path(folder), arguments)


def build_packages(base: str, pins: Sequence[str], *, host: str | None = None) -> str:
    """Build ``base`` with packages from the index, and return its image id; ``pins`` are pip's requirements.

    They are fetched by the host's pip as wheels, which run nothing. Raises ``ImageError``, ``EngineUnavailable``.
    """
    with _engine(host) as client:
        return _packages(client, base, sorted(pins), _Probed(client, base), [])


def build_folder(
    recipe: str,
    tag: str,
    base: str,
    folder: Path,
    arguments: Mapping[str, str] | None = None,
    *,
    host: str | None = None,
) -> str:
    """Build ``tag`` by one of agentkit's recipes from ``base`` and a folder of plain files, and return its image id.

    The recipe is given ``BASE``, ``SITE`` (where the base's Python has its packages) and ``arguments``; it finds the
    folder as ``site``. Raises ``ImageError``, ``EngineUnavailable``.
    """
    text = _recipe(recipe)
    given = dict(arguments or {})
    parts: list[str | bytes] = [json.dumps(given, sort_keys=True)]
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        parts += [path.relative_to(folder).as_posix(), f"{path.stat().st_mode & 0o100:o}", path.read_bytes()]
    with _engine(host) as client:
        content = _digest(_ensure(client, base), text, *parts)
        if (found := _inspect(client, tag)) and _label(found) == content:
            return found["Id"]
        site = _probe(client, base).site
        return _build(client, tag, content, {"Dockerfile": text}, folder, {"BASE": base, "SITE": site, **given})


def exists(tag: str, *, host: str | None = None) -> bool:
    """Whether the engine has an image of this name."""
    with _engine(host) as client:
        return _inspect(client, tag) is not None


def _packages(client: APIClient, base: str, pins: Sequence[str], probed: _Probed, constraints: Sequence[str]) -> str:
    """The id of ``base`` with the packages: they change seldom and are slow to fetch, so they are an image of their
    own."""
    recipe = _recipe("packages")
    content = _digest(_ensure(client, base), recipe, *pins, *([] if constraints else ["newest"]))
    tag = f"{PACKAGES_IMAGE}:{content[:16]}"
    if found := _inspect(client, tag):
        return found["Id"]
    with tempfile.TemporaryDirectory(prefix="agentkit-image-") as folder:
        site = Path(folder) / "site"
        _fetch(site, pins, probed.python, constraints)
        return _build(client, tag, content, {"Dockerfile": recipe}, site, {"BASE": base, "SITE": probed.python.site})


@contextlib.contextmanager
def _engine(host: str | None) -> Iterator[APIClient]:
    """A client whose failures are ours."""
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


def _own_files() -> Iterator[tuple[str, bytes]]:
    """Path below site-packages → content, of the installed agentkit without what trains."""
    from agentkit import envs, sandboxes

    here = {"agentkit": sys.modules["agentkit"], "agentkit/envs": envs, "agentkit/sandboxes": sandboxes}
    for prefix, module in here.items():
        if module.__file__ is None:
            raise ImageError(f"cannot find the files of {module.__name__}; reinstall agentkit-rl")
        root = Path(module.__file__).parent
        for path in sorted(root.rglob("*")):
            name = f"{prefix}/{path.relative_to(root).as_posix()}"
            if path.is_file() and "__pycache__" not in path.parts and not name.startswith("agentkit/trainers/"):
                yield name, path.read_bytes()
    # Environments are found by their entry points.
    distribution = metadata.distribution("agentkit-rl")
    folder = f"agentkit_rl-{distribution.version}.dist-info"
    # A checkout's metadata may be of the older form, whose first file has another name.
    yield (
        f"{folder}/METADATA",
        (distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "").encode(),
    )
    yield f"{folder}/entry_points.txt", (distribution.read_text("entry_points.txt") or "").encode()
    yield f"{folder}/INSTALLER", b"agentkit\n"


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise ImageError(
            f"{name} is not installed here, so that no version of it can be put into the image; pip install {name}"
        ) from error


@dataclass(frozen=True)
class Python:
    """The Python of an image."""

    version: str
    machine: str
    libc: tuple[int, int]
    site: str
    """The folder of its packages."""


class _Probed:
    """An image's Python, asked for once and only if it matters."""

    def __init__(self, client: APIClient, image: str) -> None:
        self._client, self._image = client, image

    @functools.cached_property
    def python(self) -> Python:
        return _probe(self._client, self._image)


def _host_versions() -> list[str]:
    """This host's distributions at their versions."""
    pinned: dict[str, str] = {}
    for found in metadata.distributions():
        if re.fullmatch(r"[\w.!]+", found.version):
            pinned.setdefault(re.sub(r"[-_.]+", "-", found.name).lower(), found.version)  # the first is imported
    return [f"{name}=={version}" for name, version in sorted(pinned.items())]


def _fetch(target: Path, pins: Sequence[str], python: Python, constraining: Sequence[str]) -> None:
    """Lay out packages, and what they require, for the image's Python, at the versions of ``constraining``."""
    constraints = target.with_name("constraints.txt")
    constraints.write_text("".join(f"{line}\n" for line in constraining))
    (major, newest), machine = python.libc, python.machine
    platforms = [f"manylinux_{major}_{minor}_{machine}" for minor in range(newest, 16, -1)]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--target", str(target), "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={python.version}"]
    command += [f"--platform={name}" for name in platforms] + ["--constraint", str(constraints), *pins]
    done = _pip(command, pins)
    if done.returncode != 0:
        # What the index has no wheel of was built here when it was installed, and is again: pip remembers such wheels.
        wheels = target.with_name("wheels")
        making = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
        if _pip([*making, "--wheel-dir", str(wheels), "--constraint", str(constraints), *pins], pins).returncode == 0:
            done = _pip([*command, "--find-links", str(wheels)], pins)
    if done.returncode != 0:
        raise ImageError(
            f"pip cannot fetch {', '.join(pins)} for Python {python.version}: {done.stderr.strip()[-2000:]}"
        )


def _pip(command: Sequence[str], pins: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        raise ImageError(
            f"pip did not fetch {', '.join(pins)} in {_PIP_TIMEOUT:g} s; can it reach an index?"
        ) from error


def _probe(client: APIClient, image: str) -> Python:
    """Raises ``ImageError`` for an image whose Python can hold no packages of ours."""
    container = client.create_container_from_config(
        {
            "Image": image,
            "Entrypoint": ["python3", "-c", _PROBE],
            "Cmd": [],
            "NetworkDisabled": True,
            "Labels": {"agentkit.build": "1"},
            "HostConfig": {"NetworkMode": "none", "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"]},
        }
    )["Id"]
    try:
        client.start(container)
        status = client.wait(container, timeout=60)["StatusCode"]
        output = client.logs(container, tail=50).decode("utf-8", "replace")
    finally:
        client.remove_container(container, force=True, v=True)
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
            f"{image} cannot hold environments: it needs python3 and glibc; it said {output[-500:]!r}"
        ) from error


def _ensure(client: APIClient, image: str) -> str:
    """The id of an image, pulled if it must be. Raises ``ImageError``."""
    from docker.errors import APIError

    if found := _inspect(client, image):
        return found["Id"]
    remedy = "give another base, or make one without a registry by images/debootstrap.sh (needs root and debootstrap)"
    if image.startswith("agentkit/"):
        raise ImageError(f"{image} is not here; build it: agentkit sandbox build")
    try:
        name, _, version = image.partition(":")
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


def _label(found: dict[str, Any]) -> str | None:
    return (found["Config"].get("Labels") or {}).get(_CONTENT)


def _digest(*parts: str | bytes) -> str:
    """Of all parts, lengths included."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def _build(
    client: APIClient,
    tag: str,
    content: str,
    files: dict[str, bytes],
    site: Path | None,
    arguments: dict[str, str],
) -> str:
    """Build ``tag`` unless it is there with this very content."""
    if (found := _inspect(client, tag)) and _label(found) == content:
        return found["Id"]
    with tempfile.TemporaryFile() as context:
        _pack(context, files, site)
        context.seek(0)
        said: list[str] = []
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
            said.append(str(message.get("stream") or ""))
            if "error" in message:
                raise ImageError(f"cannot build {tag}: {message['error']}\n{''.join(said)[-2000:]}")
    built = _inspect(client, tag)
    if built is None:
        raise ImageError(f"the engine built {tag}, but has no such image: {''.join(said)[-500:]}")
    if found is not None and found["Id"] != built["Id"]:
        _drop(client, found["Id"])
    return built["Id"]


def _drop(client: APIClient, image: str) -> None:
    """Remove the image that another has taken the place of, unless it has other names or users."""
    from docker.errors import APIError

    with contextlib.suppress(APIError):
        client.remove_image(image)


def _pack(target: Any, files: dict[str, bytes], site: Path | None) -> None:
    """A build context as a tar: everything root's and readable by all, whatever the umask here is."""

    def tidy(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
        return info

    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(tidy(info), io.BytesIO(data))
        if site is not None:
            archive.add(os.fspath(site), arcname="site", filter=tidy)
