"""Names that installed distributions declare: who owns a name, what is similar to it, and whether it can be loaded.

Invariant: only ``load`` runs code of a package; ``claims`` and ``diagnose`` read metadata and parse files. Problems
that only appear when the code runs, such as a failing import inside the module, are found by ``load``.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.machinery
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkit.errors import ConfigError

DISTRIBUTION = "agentkit-rl"


@dataclass
class Claim:
    """A name that a distribution declares as an entry point."""

    name: str
    target: str
    """``package.module:object``."""
    distribution: str
    """Name and version of the distribution."""
    built_in: bool
    """The distribution is agentkit itself."""
    refusal: str | None = None
    """Why the name cannot be used: two distributions claim it."""


def claims(points: Iterable[importlib.metadata.EntryPoint], built_in: Collection[str] = ()) -> dict[str, Claim]:
    """Resolve conflicts of names: agentkit's own win with a warning; a name claimed by two plug-ins is refused.

    Args:
        points: entry points of one group.
        built_in: names that agentkit defines without an entry point.
    """
    found: dict[str, Claim] = {}
    described = [(point, point.dist.name if point.dist is not None else "?") for point in points]
    for point, name in sorted(described, key=lambda pair: pair[1] != DISTRIBUTION):
        version = f" {point.dist.version}" if point.dist is not None else ""
        claim = Claim(point.name, point.value, name + version, name == DISTRIBUTION)
        holder = found.get(claim.name)
        if claim.name in built_in or (holder is not None and holder.built_in):
            warnings.warn(
                f"{claim.distribution} declares {claim.name!r}, which is agentkit's own; it is ignored", stacklevel=3
            )
        elif holder is None:
            found[claim.name] = claim
        else:
            both = f"{holder.distribution} ({holder.target}) and {claim.distribution} ({claim.target})"
            holder.refusal = f"it is claimed by both {both}; uninstall one of them"
    return dict(sorted(found.items()))


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint for a name that is not among ``known``: similar ones, or all."""
    lowered = {one.lower(): one for one in known} | {one.lower().rsplit("-v", 1)[0]: one for one in known}
    near = list(dict.fromkeys(lowered[n] for n in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)))
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none'}"


def load(target: str) -> Any:
    """Import ``package.module:object``. Raises whatever the import raises, and ``AttributeError``."""
    module, _, attribute = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def load_coroutine(target: str, setting: str) -> Any:
    """Import the coroutine function that a setting names. Raises ``ConfigError``."""
    try:
        function = load(target)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting}={target} does not load: {type(error).__name__}: {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{setting}={target} is not a coroutine function: write `async def`")
    return function


def diagnose(value: str) -> str | None:
    """Return why ``package.module:Class`` cannot load, or None if no problem is found."""
    module, _, attribute = value.partition(":")
    if not module or not attribute:
        return f"{value!r} is not of the form package.module:Class"
    try:
        spec = _find(module)
    except (ImportError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"
    if spec is None:
        return f"no module {module!r}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"), spec.origin)
    except (OSError, SyntaxError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"
    name = attribute.split(".")[0]
    if name not in (bound := _bindings(tree)) and not bound & {"*", "__getattr__"}:
        return f"module {module!r} defines no {name!r}"
    return None


def _find(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module. Unlike ``importlib.util.find_spec``, do not import its parent packages."""
    spec: importlib.machinery.ModuleSpec | None = None
    path: Sequence[str] | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        found = (finder.find_spec(name, path, None) for finder in list(sys.meta_path) if hasattr(finder, "find_spec"))
        spec = next((candidate for candidate in found if candidate is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None
    return spec


def _bindings(tree: ast.Module) -> set[str]:
    """Return all names that a module may bind, also inside ``if`` and ``try``; ``*`` for a star import."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
