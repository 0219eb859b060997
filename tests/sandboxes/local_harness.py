"""What tests of local sandboxes share: a runtime directory of their own, and a back end that is watched for leaks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.backends import local_cgroup, local_state
from agentkit.sandboxes.backends.local import Isolation, LocalBackend
from agentkit.sandboxes.spec import SandboxSpec


@pytest.fixture(scope="module")
def runtime_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests of a module: a new one for each would start a reaper for each."""
    path = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTKIT_RUNTIME_DIR", str(path))
        yield path


class WatchedLocal(LocalBackend):
    """The local back end as it is; remembers what it was asked to make."""

    def __init__(self, isolation: Isolation | None = None) -> None:
        super().__init__(isolation)
        self.asked: set[str] = set()

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        self.asked.add(id)
        return await super().create(id, spec, labels)

    def left(self) -> list[str]:
        return [entry for id in self.asked for entry in left_of(id)]


def left_of(id: str) -> list[str]:
    """What is still there of a sandbox: its directory, record, state, control groups (which go after its processes)."""
    left = []
    if paths.sandbox_directory(id).exists():
        left.append(f"the directory of {id}")
    if paths.record_path(id).exists():
        left.append(f"the record of {id}")
    if local_state.load(id) is not None:
        left.append(f"the state of {id}")
    site = local_cgroup.find()
    groups = site.group(id).directories.values() if site is not None else ()
    return left + [directory for directory in groups if os.path.exists(directory)]
