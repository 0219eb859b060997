"""The image of a task: the old release as a repository, and the packages that its tests need.

Invariant: code of a release (its ``setup.py``, its build backend) runs only in a sandbox without a network. Images are
built from wheels that were fetched before, and from files; equal content is built once.
"""

from __future__ import annotations

import io
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentkit.envs.swebench.releases import locations
from agentkit.envs.swebench.releases.source_trees import Tree
from agentkit.errors import ConfigError, ImageError
from agentkit.sandboxes.images import build as images
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import Resources

BASE = "agentkit/swe-base"
"""agentkit/base with git and patch, which the evaluation needs."""
DEBIAN = "agentkit/debian:bookworm-git"
REGISTRY_BASE = "python:3.11"
BUILDERS = (
    "pip==24.3.1", "setuptools==75.8.0", "wheel==0.45.1", "flit-core==3.10.1", "hatchling==1.27.0",
    "poetry-core==1.9.1", "setuptools-scm==8.1.0", "hatch-vcs==0.4.0",
)  # fmt: skip
"""Requirements for building packages, installed only in the sandbox that builds."""
_ROOTS = ("", "src/", "lib/", "python/")
_BUILD_TIMEOUT = 300.0
_WHEEL_LIMIT = 64 << 20
_METADATA_LIMIT = 4 << 20
_NAME = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*")


@dataclass(frozen=True)
class Built:
    """The result of building a release."""

    metadata: Mapping[str, bytes]
    """Files of its ``.dist-info`` by path."""
    modules: frozenset[str]
    """Top-level modules and packages."""


def builder() -> str:
    """Build the image that releases are built in and return its id. Raises ``ImageError``, ``EngineUnavailable``."""
    return images.build_packages(base(), BUILDERS)


def base() -> str:
    """Build the base image and return its name. Raises ``ImageError``, ``EngineUnavailable``."""
    try:
        images.build_base(DEBIAN if images.exists(DEBIAN) else REGISTRY_BASE, tag=BASE)
    except ImageError as error:
        remedy = f"INCLUDE=git,patch images/debootstrap.sh {DEBIAN}"
        raise ImageError(f"{error}; without a registry, `{remedy}` makes what it is built on") from error
    return BASE


async def build(image: str, tree: Tree, version: str) -> Built:
    """Build a release in a sandbox of ``image``. Raises ``SandboxError``, and ``ConfigError`` if it does not build."""
    resources = Resources(memory=2 << 30, tmp=256 << 20)
    async with Sandbox.create(image=image, resources=resources, pull="never", start_timeout=300.0) as box:
        await box.files.write("/tmp/tree.tar", packed(tree))
        await box.exec("mkdir tree && tar -xf /tmp/tree.tar -C tree", check=True)
        done = await box.exec(
            "python3 -m pip wheel --no-deps --no-index --no-build-isolation --no-cache-dir -w wheels ./tree 2>&1",
            env={"HOME": "/tmp", "SETUPTOOLS_SCM_PRETEND_VERSION": version, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            timeout=_BUILD_TIMEOUT,
        )
        if not done.ok:
            raise ConfigError(f"version {version} does not build: {done.stdout[-2000:]}")
        wheels = [file for file in await box.files.list("wheels") if file.path.endswith(".whl")]
        if len(wheels) != 1:
            raise ConfigError(f"the build of version {version} left {len(wheels)} wheels instead of one")
        return unpacked(await box.files.read(wheels[0].path, limit=_WHEEL_LIMIT))


def unpacked(wheel: bytes) -> Built:
    """Read an untrusted wheel. Raises ``ConfigError`` if it is not a wheel, or compiled."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            names = archive.namelist()
            infos = [item for item in archive.infolist() if item.filename.partition("/")[0].endswith(".dist-info")]
            infos = [item for item in infos if not item.is_dir()]
            if sum(item.file_size for item in infos) > _METADATA_LIMIT:
                raise ConfigError("the metadata of the wheel are too large")
            metadata = {item.filename: archive.read(item) for item in infos}
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as problem:
        raise ConfigError(f"the build left no wheel: {problem}") from problem
    odd = [name for name in metadata if not _NAME.fullmatch(name) or ".." in name.split("/")]
    tags = next((data for name, data in metadata.items() if name.endswith(".dist-info/WHEEL")), b"")
    if odd or b"Root-Is-Purelib: true" not in tags:
        raise ConfigError("only packages of pure Python can be made a task: this one is compiled, or its wheel is odd")
    modules = {name.partition("/")[0] for name in names if name.endswith(".py") and ".data/" not in name}
    return Built(metadata, frozenset(modules))


def roots(tree: Tree, modules: frozenset[str]) -> list[str]:
    """Return the folders of the repository that modules are imported from. Raises ``ConfigError`` if one is missing."""
    found: list[str] = []
    for module in sorted(modules):
        for root in _ROOTS:
            if f"{root}{module}" in tree or any(path.startswith(f"{root}{module}/") for path in tree):
                if root not in found:
                    found.append(root)
                break
        else:
            raise ConfigError(f"the module {module} lies neither in the release's folder nor in src, lib or python")
    return found


def make(name: str, title: str, tree: Tree, built: Built, packages: Sequence[str]) -> str:
    """Build the image of a task and return its name. Raises ``ImageError``, ``EngineUnavailable``."""
    tag = f"{locations.IMAGES}:{name}"
    with tempfile.TemporaryDirectory(prefix="agentkit-swe-") as temporary:
        folder = Path(temporary)
        for path, data in built.metadata.items():
            _write(folder / "metadata" / path, data)
        for path, file in tree.items():
            _write(folder / "testbed" / path, file.data, file.executable)
        where = ":".join(f"/testbed/{root}".rstrip("/") for root in roots(tree, built.modules))
        images.build_folder(
            "swe", tag, images.build_packages(base(), packages), folder, {"ROOTS": where, "MESSAGE": title}
        )
    return tag


def packed(tree: Tree) -> bytes:
    """Return a tree as a tar file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, file in sorted(tree.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(file.data), 0o755 if file.executable else 0o644
            info.mtime = 946684800  # zip files, including wheels, cannot store times before 1980
            archive.addfile(info, io.BytesIO(file.data))
    return buffer.getvalue()


def _write(path: Path, data: bytes, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o755 if executable else 0o644)
