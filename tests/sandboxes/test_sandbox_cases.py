"""Run the cases of ``sandbox_cases`` on a real engine, and over many seeds in virtual time."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import pytest
from docker_boxes import WatchedDocker
from sandbox_cases import CASES, COMMANDS
from seeds import over_all_seeds

from agentkit.errors import SandboxLost
from agentkit.sandboxes import Resources, Sandbox, SandboxSpec, diagnosis, paths
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend

SMALL = SandboxSpec(
    resources=Resources(memory=64 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20, pids=64), start_timeout=300
)
TINY = SandboxSpec(resources=Resources(memory=8 << 20, tmp=1 << 20, workspace=2 << 20, shm=1 << 18, pids=16))
NUMBERED = [pytest.param(number, marks=pytest.mark.fault(number), id=CASES[number].__name__) for number in CASES]


class Docker:
    """Containers of the engine on this machine."""

    patience = float(os.environ.get("AGENTKIT_TEST_PATIENCE", "10"))
    flood = 10**9

    def __init__(self, backend: WatchedDocker) -> None:
        self._backend = backend
        self._boxes: list[Sandbox] = []

    async def create(self, spec: SandboxSpec = SMALL, **fields: Any) -> Sandbox:
        self._boxes.append(await Sandbox.create(spec, backend=self._backend, **fields))
        return self._boxes[-1]

    async def exists(self, id: str) -> bool:
        return (await self._backend.inspect(id)).state != "absent" or paths.sandbox_directory(id).exists()

    async def out_of_memory(self) -> tuple[Sandbox, SandboxLost]:
        """Exceed the memory limit with files, which valid specifications prevent; the agent is the largest process."""
        resources = Resources.model_construct(**{**dict(SMALL.resources), "workspace": 256 << 20})
        box = await self.create(SMALL.model_copy(update={"resources": resources}))
        with pytest.raises(SandboxLost) as caught:
            await box.exec("echo 500 > /proc/self/oom_score_adj; exec cat /dev/zero > fill")
        return box, caught.value

    def memory(self) -> int:
        return psutil.Process().memory_info().rss

    async def close(self) -> None:
        for box in self._boxes:
            await box.close()


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", NUMBERED)
async def test_on_a_real_engine(number: int, docker_backend: WatchedDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Docker(docker_backend)
    monkeypatch.setattr(diagnosis, "SETTLE_TIME", 0.5 * host.patience)
    try:
        await CASES[number](host, random.Random(number))
    finally:
        await host.close()


class Simulated:
    """Sandboxes in virtual time."""

    patience = 1.0

    def __init__(self, backend: FakeBackend, rng: random.Random) -> None:
        self._backend = backend
        self._boxes: list[Sandbox] = []
        self._rng = rng
        self.flood = rng.randint(2_500_000, 5_000_000)

    async def create(self, **fields: Any) -> Sandbox:
        self._boxes.append(await Sandbox.create(TINY, backend=self._backend, **fields))
        return self._boxes[-1]

    async def exists(self, id: str) -> bool:
        return id in self._backend.boxes

    async def out_of_memory(self) -> tuple[Sandbox, SandboxLost]:
        box = await self.create()
        asyncio.get_running_loop().call_later(self._rng.uniform(0.01, 5), self._backend.oom, box.id)
        with pytest.raises(SandboxLost) as caught:
            await box.exec("sleep 1000", timeout=2000)
        return box, caught.value

    def memory(self) -> int:
        return 0  # the sandbox is in this process too

    async def close(self) -> None:
        for box in self._boxes:
            await box.close()
        assert self._backend.boxes == {}
        leftover = asyncio.all_tasks() - {asyncio.current_task()}
        assert not leftover, leftover


def simulate(number: int, seed: int) -> None:
    async def play() -> None:
        rng = random.Random(seed)
        backend = FakeBackend(seed, commands=COMMANDS)
        await backend.start()
        host = Simulated(backend, rng)
        await CASES[number](host, rng)
        await host.close()
        await backend.close()

    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)  # virtual time excludes threads

    try:
        with mock.patch("agentkit.sandboxes.files.in_thread", at_once):
            virtual_time.run(play(), limit=100_000)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("number", NUMBERED)
def test_simulated(number: int) -> None:
    for seed in range(2):
        simulate(number, seed)


@over_all_seeds
@pytest.mark.parametrize("number", NUMBERED)
def test_simulated_over_all_seeds(number: int, seeds: range) -> None:
    for seed in seeds:
        simulate(number, seed)
