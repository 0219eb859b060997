"""Import the public names of a package on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_exports(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: name of the package.
        modules: module of each public name.
    """
    namespace = vars(sys.modules[package])

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(modules)}")
        value = namespace[name] = getattr(importlib.import_module(modules[name]), name)
        return value

    return get, lambda: sorted({*namespace, *modules})
