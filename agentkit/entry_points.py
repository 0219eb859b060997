"""Check entry points without importing them.

Invariant: no code of the package is run; files are found and parsed, never imported. Problems that only appear when
the code runs, such as a failing import inside the module, are found when the environment is made.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path


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
