"""Where a sandboxed environment runs: which back end, which specification, which command.

Invariant: deciding this imports no environment: modules are found, not run. What of the host a local sandbox sees is
read-only, and is the interpreter, its packages, agentkit without what trains, and the module of an environment that
was registered by hand.
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
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import Mount, SandboxSpec

ENV_IMAGE = "agentkit/env"
"""What ``agentkit sandbox build`` makes for environments."""
SERVE = ("-I", "-m", "agentkit.envs.serve")
_SYSTEM = Path("/usr")
"""What local sandboxes show anyway."""


@dataclass(frozen=True)
class Placement:
    """One environment as it is asked for, and the sandbox for it."""

    id: str
    entry_point: str | None
    """Where the class is, for an environment that only this process knows."""
    kwargs: Mapping[str, Any]
    backend: str | Backend
    spec: SandboxSpec
    python: str

    @property
    def command(self) -> list[str]:
        """What serves the environment inside."""
        return [self.python, *SERVE, *self.spec.env.get("PYTHONPATH", "").split(":")]

    @property
    def digest(self) -> str:
        """Equal for equal placements."""
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

    ``sandbox``: a back end's name, a started back end, or a specification for docker. ``overrides``: fields of the
    specification. Raises ``ConfigError`` for a specification or arguments that cannot be, ``RegistryError`` for an
    environment that no other process can load.
    """
    if isinstance(sandbox, SandboxSpec):
        if overrides is not None:
            raise ConfigError("sandbox is a specification and sandbox_spec another: give one of them")
        backend, given = "docker", sandbox
    else:
        backend, given = sandbox, overrides or {}
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
    """What another process has to be told about a name: its entry point and arguments, unless a package declares it.

    Raises ``RegistryError`` for an environment that no other process can load.
    """
    known = next((entry for entry in registry.list_envs() if entry.id == id), None)
    if known is None or known.source != "explicit":
        return None, {}  # a name that nobody knows here may exist in the image
    if "<locals>" in known.target or known.target.startswith("__main__:"):
        raise RegistryError(
            f"environment {id!r} ({known.target}) cannot be imported by another process: move its class to the top "
            "level of a module of its own"
        )
    return known.target, known.spec.kwargs


def _spec(given: Mapping[str, Any], shown: list[Path], entry_point: str | None) -> SandboxSpec:
    fields: dict[str, Any] = {"image": ENV_IMAGE, "ttl": None, **given}
    mounts = [mount if isinstance(mount, Mount) else dict(mount) for mount in fields.pop("mounts", ())]
    taken = {mount.target if isinstance(mount, Mount) else mount.get("target") for mount in mounts}
    mounts += [{"source": str(path), "target": str(path)} for path in shown if str(path) not in taken]
    path = [part for part in [fields.get("env", {}).get("PYTHONPATH", ""), _directory(entry_point)] if part]
    # One thread a process: many environments share a processor.
    env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **fields.pop("env", {})}
    if path:
        env["PYTHONPATH"] = ":".join(path)
    try:
        return SandboxSpec(**fields, mounts=tuple(mounts), env=env)  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"sandbox_spec is no specification of a sandbox: {problems}") from None


def _shown(entry_point: str | None) -> Iterator[Path]:
    """What a local sandbox needs to see of this host, at the same paths, each once."""
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
    """The file or the directory of the top-level module of an entry point; runs nothing of it."""
    module = entry_point.partition(":")[0].partition(".")[0]
    found = importlib.util.find_spec(module)
    if found is None or not found.has_location or found.origin is None:
        raise RegistryError(f"there is no module {module!r}, which {entry_point} names, to show to a sandbox")
    origin = Path(found.origin)
    return origin.parent if found.submodule_search_locations else origin


def _directory(entry_point: str | None) -> str:
    return "" if entry_point is None else str(_home(entry_point).parent)
