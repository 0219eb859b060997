"""Throw-away distributions that declare plug-ins."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from agentkit import plugins

Install = Callable[[str, Mapping[str, Mapping[str, str]], Mapping[str, str]], None]


def forget() -> None:
    """Forget what was loaded and read."""
    plugins._claims.cache_clear()
    plugins._load.cache_clear()
    if learner := sys.modules.get("agentkit.trainers.algorithms.plugin"):
        learner._bound_to.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution: ``install(name, {group: {name: target}}, {module: source})``."""
    place = tmp_path / "packages"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))
    modules: set[str] = set()

    def add(name: str, groups: Mapping[str, Mapping[str, str]], sources: Mapping[str, str]) -> None:
        modules.update(sources)
        info = place / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [
            f"[{group}]\n" + "".join(f"{point} = {target}\n" for point, target in points.items())
            for group, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, source in sources.items():
            (place / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        forget()

    forget()
    yield add
    for module in modules:
        sys.modules.pop(module, None)
    forget()
