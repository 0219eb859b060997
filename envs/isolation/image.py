"""Build ``agentkit/env``, the image of environments in Docker containers."""

from __future__ import annotations

import importlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from agentkit.envs.isolation.placement import ENV_IMAGE
from agentkit.errors import ImageError
from agentkit.sandboxes.images.build import build_folder, build_packages
from agentkit.sandboxes.spec import DEFAULT_IMAGE

_PACKAGES = ("gymnasium", "pydantic")
"""The packages that all environments need."""
_EXTRAS = ("bm25s", "PyStemmer")
"""Packages that some environments need (the search of WebShop); added if the host has them."""


def build_env_image(
    base: str = DEFAULT_IMAGE, *, packages: Sequence[str] = (), host: str | None = None, tag: str = ENV_IMAGE
) -> str:
    """Build ``agentkit/env``, which is ``base`` with the installed agentkit, and return the id of the image.

    Args:
        base: the image to build on; it needs python3 and glibc.
        packages: further installed distributions to add, with their requirements. All packages get the host's
            versions; the host's pip fetches them.
        host: address of the engine's socket.
        tag: the name of the image.

    Raises:
        ImageError: a package is not installed or cannot be fetched, or the build fails.
        EngineUnavailable: the engine does not answer.
    """
    extras = [name for name in _EXTRAS if _installed(name)]
    pins = sorted({f"{name}=={_version(name)}" for name in (*_PACKAGES, *extras, *packages)})
    filled = build_packages(base, pins, _host_versions(), host=host)
    with tempfile.TemporaryDirectory(prefix="agentkit-") as folder:
        for name, data in _own_files():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return build_folder("env", tag, filled, Path(folder), host=host)


def _own_files() -> Iterator[tuple[str, bytes]]:
    """Yield the path below site-packages and the content of each file of agentkit without the trainers."""
    for package in ("agentkit", "agentkit.envs", "agentkit.sandboxes"):
        module, prefix = importlib.import_module(package), package.replace(".", "/")
        if module.__file__ is None:
            raise ImageError(f"cannot find the files of {module.__name__}; reinstall agentkit-rl")
        root = Path(module.__file__).parent
        for path in sorted(root.rglob("*")):
            name = f"{prefix}/{path.relative_to(root).as_posix()}"
            if path.is_file() and "__pycache__" not in path.parts and not name.startswith("agentkit/trainers/"):
                yield name, path.read_bytes()
    # The entry points register the environments.
    distribution = metadata.distribution("agentkit-rl")
    folder = f"agentkit_rl-{distribution.version}.dist-info"
    # The metadata of a checkout may have the older file name.
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
            f"{name} is not installed; pip install {name}, because images get the versions of this host"
        ) from error


def _host_versions() -> list[str]:
    """Return the installed distributions as constraints."""
    pinned: dict[str, str] = {}
    for found in metadata.distributions():
        if re.fullmatch(r"[\w.!]+", found.version):
            pinned.setdefault(re.sub(r"[-_.]+", "-", found.name).lower(), found.version)  # the first is imported
    return [f"{name}=={version}" for name, version in sorted(pinned.items())]
