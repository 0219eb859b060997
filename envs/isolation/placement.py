"""Placement of a sandboxed environment: its back end, the specification of its sandbox, and the server's command.

Invariant: no environment is imported; modules are located but not executed. A local sandbox sees these files of the
host, read-only: the interpreter, its packages, agentkit without the trainers, and the module of an environment that
was registered explicitly.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentkit import registry
from agentkit.errors import ConfigError, RegistryError
from agentkit.sandboxes.arguments import check_type
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends import check_backend
from agentkit.sandboxes.spec import Mount, SandboxSpec

ENV_IMAGE = "agentkit/env"
"""The image that ``agentkit sandbox build`` builds for environments."""
SERVE = ("-I", "-m", "agentkit.envs.isolation.server")
_SYSTEM = Path("/usr")
"""Always visible in local sandboxes."""


@dataclass(frozen=True)
class Placement:
    """A requested environment and the sandbox for it."""

    id: str
    entry_point: str | None
    """``"module:Class"`` of an environment that only this process has registered."""
    kwargs: Mapping[str, Any]
    backend: str | Backend
    spec: SandboxSpec
    python: str

    @property
    def command(self) -> list[str]:
        """The command of the server inside the sandbox."""
        return [self.python, *SERVE, *self.spec.env.get("PYTHONPATH", "").split(":")]

    @property
    def digest(self) -> str:
        """A hash that is equal for equal placements."""
        backend = self.backend if isinstance(self.backend, str) else f"{self.backend.name} {id(self.backend)}"
        parts = [self.id, self.entry_point, json.dumps(dict(self.kwargs), sort_keys=True), backend, self.spec.digest]
        return hashlib.sha256(json.dumps([*parts, self.python]).encode()).hexdigest()


def place(
    id: str,
    kwargs: Mapping[str, Any],
    sandbox: str | SandboxSpec | Backend,
    overrides: SandboxSpec | Mapping[str, Any] | None = None,
) -> Placement:
    """Decide where environment ``id`` runs.

    Args:
        id: name of the environment.
        kwargs: its arguments, plain data.
        sandbox: name of a back end, a started back end, or a specification for docker.
        overrides: fields of the specification that differ from the defaults.

    Raises:
        ConfigError: the specification or the arguments are invalid.
        RegistryError: the environment cannot be loaded by another process.
    """
    if isinstance(sandbox, SandboxSpec):
        if overrides is not None:
            raise ConfigError("sandbox and sandbox_spec are both specifications: give only one of them")
        backend, given = "docker", sandbox
    else:
        check_backend("sandbox", sandbox)
        backend, given = sandbox, overrides or {}
    check_type("sandbox_spec", given, (SandboxSpec, Mapping), "a SandboxSpec or a dict of its fields")
    if isinstance(given, SandboxSpec):
        given = {name: getattr(given, name) for name in given.model_fields_set}
    entry_point, known = importable(id)
    arguments = {**known, **kwargs}
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{id} in a sandbox takes arguments of plain data (texts, numbers, lists): {error}") from None
    local = (backend if isinstance(backend, str) else backend.name) == "local"
    spec = _spec(given, list(_shown(entry_point)) if local else [], entry_point if local else None)
    return Placement(id, entry_point, arguments, backend, spec, sys.executable if local else "python3")


def importable(id: str) -> tuple[str | None, Mapping[str, Any]]:
    """Return the entry point and arguments that another process needs to register a name.

    They are ``(None, {})`` for a name that an installed package declares. Raises ``RegistryError`` for an environment
    that cannot be loaded by another process.
    """
    known = next((entry for entry in registry.list_envs() if entry.id == id), None)
    if known is None or known.source != "explicit":
        return None, {}  # a name that is unknown here may exist in the image
    if "<locals>" in known.target or known.target.startswith("__main__:"):
        raise RegistryError(
            f"environment {id!r} ({known.target}) cannot be imported by another process: move its class to the top "
            "level of a separate module"
        )
    return known.target, known.spec.kwargs


def _spec(given: Mapping[str, Any], shown: list[Path], entry_point: str | None) -> SandboxSpec:
    fields: dict[str, Any] = {"image": ENV_IMAGE, "ttl": None, **given}
    mounts = [mount if isinstance(mount, Mount) else dict(mount) for mount in fields.pop("mounts", ())]
    taken = {mount.target if isinstance(mount, Mount) else mount.get("target") for mount in mounts}
    mounts += [{"source": str(path), "target": str(path)} for path in shown if str(path) not in taken]
    path = [part for part in [fields.get("env", {}).get("PYTHONPATH", ""), _directory(entry_point)] if part]
    # One thread per process, because many environments share a processor.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **fields.pop("env", {})}
    if path:
        env["PYTHONPATH"] = ":".join(path)
    try:
        return SandboxSpec(**fields, mounts=tuple(mounts), env=env)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"sandbox_spec is invalid: {problems}") from None


def _shown(entry_point: str | None) -> Iterator[Path]:
    """Yield the paths of this host that a local sandbox needs to see."""
    wanted = [Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)]
    for package in ("agentkit", "agentkit.envs", "agentkit.sandboxes"):
        wanted += map(Path, sys.modules[package].__path__)
    if entry_point is not None:
        wanted.append(_home(entry_point))
    shown: list[Path] = []
    for path in wanted:
        holds_packages = path.name in ("site-packages", "dist-packages") or path not in map(Path, sys.path)
        inside = any(path.is_relative_to(other) for other in [_SYSTEM, *shown])
        if path.is_absolute() and path.exists() and holds_packages and not inside:
            shown.append(path)
            yield path


def _home(entry_point: str) -> Path:
    """Return the file or the directory of the top-level module of an entry point, without importing it."""
    module = entry_point.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(module)
    if found is None or not found.has_location or found.origin is None:
        raise RegistryError(f"module {module!r} of {entry_point} was not found, so a sandbox cannot import it")
    origin = Path(found.origin)
    return origin.parent if found.submodule_search_locations else origin


def _directory(entry_point: str | None) -> str:
    return "" if entry_point is None else str(_home(entry_point).parent)
