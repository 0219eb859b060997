"""Measure a pool on real sandbox servers: latencies under load, memory, balance, and recovery when a server is killed.

Every user runs a supervised episode after another: commands whose results show whether a sandbox has the right state,
and files. The servers are separate processes on this machine, and the sandboxes are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from agentkit.errors import EngineUnavailable, SandboxLost
from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.backends import backend as backend_named
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.reaper.labels import user_labels
from agentkit.sandboxes.recovery.supervisor import SupervisedSandbox, Supervisor
from agentkit.sandboxes.spec import Resources, SandboxSpec

T = TypeVar("T")

SMALL = Resources(memory=64 << 20, tmp=4 << 20, workspace=8 << 20, shm=1 << 20, pids=32, cpus=0.5)
THINK = 10.0
"""Mean seconds between two operations of a user, as between two turns of a model."""
OPERATIONS = 30
"""Operations of an episode."""
REAPED = 120
"""Seconds in which the reaper removes the sandboxes of the server that was killed."""
RECOVERY_LIMIT = 300.0
"""Seconds in which all users must continue after the death of a server."""


class Server:
    """`agentkit sandbox serve` in a process."""

    def __init__(self, number: int, backend: str, limit: int, directory: Path) -> None:
        config = directory / f"server-{number}.yaml"
        config.write_text(f"quota: {{sandboxes: {limit}}}\nwatermarks: {{memory: 0.97, disk: 0.99}}\n")
        command = [str(Path(sys.executable).with_name("agentkit")), "sandbox", "serve", "--backend", backend]
        command += ["--port", "0", "--config", str(config), "--name", f"scale-{number}", "--keep", "0"]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        self.url = self._popen.stdout.readline().split()[-1]
        self.host = self.url.partition("//")[2]
        self.process = psutil.Process(self._popen.pid)

    def end(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)
        self._popen.wait(120)
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@contextlib.contextmanager
def servers(number: int, backend: str, limit: int, directory: Path) -> Iterator[list[Server]]:
    """Run servers that accept ``limit`` sandboxes each, until the end of the body."""
    before = dict(os.environ)
    os.environ["AGENTKIT_SANDBOX_TOKEN"] = secrets.token_hex(16)
    os.environ["AGENTKIT_RUNTIME_DIR"] = str(directory / "agentkit")
    running: list[Server] = []
    try:
        for one in range(number):
            running.append(Server(one, backend, limit, directory))
        yield running
    finally:
        for server in running:
            server.end(signal.SIGINT)
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Use:
    """Resources of one process during the load."""

    memory: int = 0
    """Most bytes in memory."""
    descriptors: int = 0
    processor: float = 0.0
    """Share of one processor."""


@dataclass
class Measured:
    """What was measured; times are in seconds."""

    sandboxes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations by operation."""
    use: dict[str, Use] = field(default_factory=dict)
    """By process."""
    per_host: Mapping[str, int] = field(default_factory=dict)
    """Sandboxes of each host under load."""
    duration: float = 0.0
    """Time under load."""
    lost: int = 0
    """Sandboxes that were lost before the server was killed."""
    wrong: int = 0
    """Episodes with another result than expected."""
    killed_with: int = 0
    """Sandboxes in use on the server that was killed."""
    recovered: list[float] = field(default_factory=list)
    """Times from the kill until each of their users had the result of a command again."""
    left: int = 0
    """Sandboxes that still exist at the end."""


class _TimedBackend(RemoteBackend):
    def __init__(self, urls: list[str], durations: list[float]) -> None:
        super().__init__(urls)
        self._durations = durations

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        began = time.perf_counter()
        channel = await super().create(id, spec, labels)
        self._durations.append(time.perf_counter() - began)
        return channel


class Load:
    """Users of one pool."""

    def __init__(self, pool: SandboxPool, backend: RemoteBackend, users: int, measured: Measured) -> None:
        self._pool, self._backend, self._number, self._measured = pool, backend, users, measured
        self._supervisor = Supervisor(pool, recovery="replay", max_recoveries=10)
        self._boxes: dict[int, SupervisedSandbox] = {}
        self._killed_at: float | None = None
        self._waiting: set[int] = set()
        self.recovered = asyncio.Event()
        self.all_in_use = asyncio.Event()

    def killed(self, host: str) -> None:
        """A server was killed just now: measure when its users continue."""
        self._killed_at = time.perf_counter()
        self._waiting = {user for user, box in self._boxes.items() if self._backend.host_of(box.id) == host}
        self._measured.killed_with = len(self._waiting)

    async def user(self, number: int) -> None:
        """Run episodes until cancelled."""
        rng = random.Random(number)
        while True:
            with self._timed("acquire"):
                entered = self._supervisor.run(600.0)
                box = await entered.__aenter__()
            try:
                self._boxes[number] = box
                if len(self._boxes) == self._number:
                    self.all_in_use.set()
                await self._episode(number, box, rng)
            finally:
                self._boxes.pop(number, None)
                self._waiting.discard(number)
                await entered.__aexit__(None, None, None)

    async def _episode(self, number: int, box: SupervisedSandbox, rng: random.Random) -> None:
        lines: list[str] = []
        for turn in range(rng.randrange(1, OPERATIONS), OPERATIONS):
            await asyncio.sleep(rng.expovariate(1 / THINK))
            match turn % 4:
                case 0:
                    await self._act(number, "exec", lambda: box.exec(["true"]), box)
                case 1:
                    data = rng.randbytes(4096)
                    await self._act(number, "write 4 kB", lambda data=data: box.write("data", data), box)
                case 2:
                    lines.append(str(turn))
                    command = f"echo {turn} >> log"
                    await self._act(number, "exec of a shell", lambda command=command: box.exec(command), box)
                case _:
                    result = await self._act(number, "exec of a shell", lambda: box.exec("cat log 2>/dev/null"), box)
                    self._measured.wrong += result.stdout.split() != lines

    async def _act(self, number: int, name: str, work: Callable[[], Awaitable[T]], box: SupervisedSandbox) -> T:
        while True:
            began = time.perf_counter()
            try:
                result = await work()
            except (SandboxLost, EngineUnavailable):
                self._measured.lost += self._killed_at is None
                if box.failure is not None:
                    raise
                await asyncio.sleep(0.05)
                continue
            now = time.perf_counter()
            if self._killed_at is None:
                self._measured.seconds.setdefault(name, []).append(now - began)
            elif number in self._waiting:
                self._waiting.discard(number)
                self._measured.recovered.append(now - self._killed_at)
                if not self._waiting:
                    self.recovered.set()
            return result

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._killed_at is None and self.all_in_use.is_set():
            self._measured.seconds.setdefault(name, []).append(time.perf_counter() - began)


async def _watch(processes: Mapping[str, psutil.Process], use: dict[str, Use]) -> None:
    """Measure processes until cancelled."""
    began = time.monotonic()
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    while True:
        for name, process in processes.items():
            one = use.setdefault(name, Use())
            one.memory = max(one.memory, process.memory_info().rss)
            one.descriptors = max(one.descriptors, process.num_fds())
            used = sum(process.cpu_times()[:2]) - before[name]
            one.processor = used / max(time.monotonic() - began, 1e-9)
        await asyncio.sleep(2.0)


@contextlib.asynccontextmanager
async def _running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(running: list[Server], name: str, users: int, seconds: float) -> Measured:
    """Put a load on the servers for a time, then kill the last of them.

    Args:
        running: the servers; each accepts all sandboxes.
        name: the name of their back end.
        users: number of sandboxes that are in use at one time.
        seconds: time under load with all of them in use.
    """
    measured = Measured(users)
    mark = {"scale": secrets.token_hex(8)}
    spec = SandboxSpec(resources=SMALL, ttl=3600, labels=mark)
    backend = _TimedBackend([server.url for server in running], measured.seconds.setdefault("create", []))
    await backend.start()
    spares = max(2, users // 20)
    try:
        async with SandboxPool(spec, backend, min_idle=spares, max_size=users + 2 * spares) as pool:
            load = Load(pool, backend, users, measured)
            tasks = [load.user(number) for number in range(users)]
            async with _running(*tasks):
                await asyncio.wait_for(load.all_in_use.wait(), 900)
                processes = {f"server {number}": server.process for number, server in enumerate(running, 1)}
                began = time.perf_counter()
                async with _running(_watch({"client": psutil.Process(), **processes}, measured.use)):
                    await asyncio.sleep(seconds)
                measured.duration = time.perf_counter() - began
                measured.per_host = Counter(backend.host_of(box.id) for box in pool.sandboxes("busy", "idle"))
                running[-1].end(signal.SIGKILL)
                load.killed(running[-1].host)
                await asyncio.wait_for(load.recovered.wait(), RECOVERY_LIMIT)
    finally:
        await backend.close()
    engine = backend_named(name)
    await engine.start()
    try:
        for _ in range(REAPED):
            measured.left = len(await engine.list(user_labels(mark)))
            if not measured.left:
                break
            await asyncio.sleep(1.0)
    finally:
        await engine.close()
    return measured
