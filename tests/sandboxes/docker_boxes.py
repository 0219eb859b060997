"""Small sandboxes on a real engine, and commands in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.backends.docker.backend import DockerBackend
from agentkit.sandboxes.spec import Resources, SandboxSpec
from agentkit.sandboxes.types import ExecRequest, ExecResult

SMALL = SandboxSpec(
    resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20, pids=64, cpus=0.5),
    start_timeout=300,
)


class WatchedDocker(DockerBackend):
    """The Docker back end; records the ids of created sandboxes."""

    def __init__(self, host: str | None = None) -> None:
        super().__init__(host)
        self.asked: set[str] = set()

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        self.asked.add(id)
        return await super().create(id, spec, labels)

    async def left(self) -> list[str]:
        """Return the containers and directories that are left of them."""
        there = [id for id in self.asked if (await self.inspect(id)).state != "absent"]
        return there + [str(paths.sandbox_directory(id)) for id in self.asked if paths.sandbox_directory(id).exists()]

    async def clear(self) -> None:
        for id in self.asked:
            await self.remove(id)


def request(*argv: str, timeout: float = 120, **fields: Any) -> ExecRequest:
    return ExecRequest(argv, timeout, 1 << 20, cwd=fields.pop("cwd", "/"), **fields)


async def sh(channel: Channel, script: str, **fields: Any) -> ExecResult:
    return await channel.exec(request("/bin/sh", "-c", script, **fields))


def spec(**fields: Any) -> SandboxSpec:
    return SandboxSpec(**{**{name: getattr(SMALL, name) for name in SMALL.model_fields_set}, **fields})


async def make(backend: WatchedDocker, description: SandboxSpec = SMALL) -> tuple[str, Channel]:
    id = paths.new_id()
    return id, await backend.create(id, description, {})
