"""Shared parts of the tests of local sandboxes: a private runtime directory, and a back end that detects leaks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.backends.local import cgroup
from agentkit.sandboxes.backends.local import state as local_state
from agentkit.sandboxes.backends.local.backend import IsolationLevel, LocalBackend
from agentkit.sandboxes.spec import SandboxSpec


@pytest.fixture(scope="module")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set a runtime directory for all tests of a module; each directory starts one reaper."""
    path = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTKIT_RUNTIME_DIR", str(path))
        yield path


class WatchedLocal(LocalBackend):
    """The local back end; records the ids of created sandboxes."""

    def __init__(self, isolation: IsolationLevel | None = None) -> None:
        super().__init__(isolation)
        self.asked: set[str] = set()

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        self.asked.add(id)
        return await super().create(id, spec, labels)

    def left(self) -> list[str]:
        return [entry for id in self.asked for entry in left_of(id)]


def left_of(id: str) -> list[str]:
    """Return what is left of a sandbox: its directory, record, state, or control groups."""
    left = []
    if paths.sandbox_directory(id).exists():
        left.append(f"the directory of {id}")
    if paths.record_path(id).exists():
        left.append(f"the record of {id}")
    if local_state.load(id) is not None:
        left.append(f"the state of {id}")
    parents = cgroup.find()
    groups = cgroup.Cgroup.of(id, parents).directories.values() if parents is not None else ()
    return left + [directory for directory in groups if os.path.exists(directory)]
