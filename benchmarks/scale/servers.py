"""Measure a pool on real sandbox servers: latencies under load, memory, balance, and recovery when a server is killed.

The servers are separate processes on this machine, and the sandboxes are real. The phases are separate, so that one
does not disturb the figures of another:

1. fill: every user acquires a sandbox and keeps it;
2. load: the users run commands, whose results show whether a sandbox has the right state, and write files; one after
   another replaces its sandbox, at a quarter of the rate at which they were created;
3. kill: one server dies, and its users run a command until they have its result from another one;
4. close: all sandboxes are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
from agentkit.sandboxes.pool.health import HealthPolicy
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.reaper.labels import user_labels
from agentkit.sandboxes.recovery.supervisor import SupervisedSandbox, Supervisor
from agentkit.sandboxes.spec import Resources, SandboxSpec

T = TypeVar("T")

SMALL = Resources(memory=64 << 20, tmp=4 << 20, workspace=8 << 20, shm=1 << 20, pids=32, cpus=0.5)
THINK = 10.0
"""Mean seconds between two operations of a user, as between two turns of a model."""
HEALTH = HealthPolicy(ping_interval=10.0, ping_timeout=3.0)
"""The default policy would send 100 pings per second to 200 sandboxes, which share two processors here."""
TURNOVER = 0.25
"""Sandboxes replaced per second under load, as a share of those created per second before."""
FILL_LIMIT = 1500.0
"""Seconds in which all users must have a sandbox."""
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
def running_servers(number: int, backend: str, limit: int, directory: Path) -> Iterator[list[Server]]:
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
    ping_interval: float = HEALTH.ping_interval
    ping_timeout: float = HEALTH.ping_timeout
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations by operation: of creations until the end, of all others until the kill."""
    use: dict[str, Use] = field(default_factory=dict)
    """By process, under load."""
    per_host: Mapping[str, int] = field(default_factory=dict)
    """Sandboxes of each host under load."""
    filled: float = 0.0
    """Time until all users had a sandbox."""
    loaded: float = 0.0
    """Time under load."""
    machine_load: float = 0.0
    """Mean number of processes of the machine that could run, including those of other programs."""
    replaced: int = 0
    """Sandboxes that users replaced under load."""
    lost: int = 0
    """Sandboxes that were lost before the server was killed."""
    wrong: int = 0
    """Commands that did not find the state that earlier commands had made."""
    killed_with: int = 0
    """Sandboxes in use on the server that was killed."""
    recovered: list[float] = field(default_factory=list)
    """Times from the kill until each of their users had the result of a command again."""
    closed: float = 0.0
    """Time in which the pool removed its sandboxes."""
    also_lost: int = 0
    """Sandboxes on the other server that were lost after the kill."""
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

    def __init__(self, pool: SandboxPool, backend: RemoteBackend, measured: Measured) -> None:
        self._backend, self._measured = backend, measured
        self._supervisor = Supervisor(pool, recovery="replay", max_recoveries=10)
        self._boxes: dict[int, SupervisedSandbox] = {}
        self._renewing: set[int] = set()
        """Users that replace their sandboxes after their current operation."""
        self.filled = asyncio.Event()
        """All users have a sandbox, and begin."""
        self._killed = asyncio.Event()
        self._killed_at = 0.0
        self._waiting: set[int] = set()
        self._recovered = asyncio.Event()

    async def turnover(self, rate: float) -> None:
        """Let one user after another replace its sandbox, ``rate`` per second, until cancelled."""
        for number in itertools.cycle(range(self._measured.sandboxes)):
            await asyncio.sleep(1 / rate)
            self._renewing.add(number)

    async def recovered(self, host: str) -> None:
        """A server was killed just now: wait until all its users have the result of a command again."""
        self._killed_at = time.perf_counter()
        self._waiting = {user for user, box in self._boxes.items() if self._backend.host_of(box.id) == host}
        self._measured.killed_with = len(self._waiting)
        self._killed.set()
        if self._waiting:
            await self._recovered.wait()

    async def user(self, number: int) -> None:
        """Run episodes until cancelled."""
        rng = random.Random(number)
        while True:
            began = time.perf_counter()
            async with self._supervisor.run(FILL_LIMIT) as box:
                self._note("acquire" if self.filled.is_set() else "acquire while filling", began)
                self._boxes[number] = box
                if len(self._boxes) == self._measured.sandboxes:
                    self.filled.set()
                await self.filled.wait()
                await self._episode(number, box, rng)
                del self._boxes[number]
            self._renewing.discard(number)
            self._measured.replaced += 1

    async def _episode(self, number: int, box: SupervisedSandbox, rng: random.Random) -> None:
        lines: list[str] = []
        for turn in itertools.count(1):
            if number in self._renewing and not self._killed.is_set():
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._killed.wait(), rng.expovariate(1 / THINK))
            if number in self._waiting:
                await self._check(box, lines)
                self._measured.recovered.append(time.perf_counter() - self._killed_at)
                self._waiting.discard(number)
                if not self._waiting:
                    self._recovered.set()
            elif self._killed.is_set():
                await asyncio.sleep(rng.expovariate(1 / THINK))
            match turn % 4:
                case 0:
                    await self._act("exec", lambda: box.exec(["true"]), box)
                case 1:
                    data = rng.randbytes(4096)
                    await self._act("write 4 kB", lambda data=data: box.write("data", data), box)
                case 2:
                    lines.append(str(turn))
                    command = f"echo {turn} >> log"
                    await self._act("exec of a shell", lambda command=command: box.exec(command), box)
                case _:
                    await self._check(box, lines)

    async def _check(self, box: SupervisedSandbox, lines: list[str]) -> None:
        result = await self._act("exec of a shell", lambda: box.exec("cat log 2>/dev/null"), box)
        self._measured.wrong += result.stdout.split() != lines

    async def _act(self, name: str, work: Callable[[], Awaitable[T]], box: SupervisedSandbox) -> T:
        while True:
            began = time.perf_counter()
            try:
                result = await work()
            except (SandboxLost, EngineUnavailable):
                self._measured.lost += not self._killed.is_set()
                if box.failure is not None:
                    raise
                await asyncio.sleep(0.05)
                continue
            self._note(name, began)
            return result

    def _note(self, name: str, began: float) -> None:
        if not self._killed.is_set():
            self._measured.seconds.setdefault(name, []).append(time.perf_counter() - began)


async def _watch(processes: Mapping[str, psutil.Process], measured: Measured) -> None:
    """Measure processes until cancelled."""
    use, loads = measured.use, list[float]()
    began = time.monotonic()
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    while True:
        for name, process in processes.items():
            one = use.setdefault(name, Use())
            one.memory = max(one.memory, process.memory_info().rss)
            one.descriptors = max(one.descriptors, process.num_fds())
            used = sum(process.cpu_times()[:2]) - before[name]
            one.processor = used / max(time.monotonic() - began, 1e-9)
        loads.append(os.getloadavg()[0])
        measured.machine_load = sum(loads) / len(loads)
        await asyncio.sleep(2.0)


async def _show(pool: SandboxPool) -> None:
    """Show the progress until cancelled."""
    while True:
        await asyncio.sleep(10.0)
        now = pool.stats()
        lost = {reason: number for reason, number in now.counters.retired.items() if reason != "used"}
        text = f"{now.busy} in use, {now.idle} idle, {now.creating} being created, {now.counters.created} created"
        print(f"{text}, {now.counters.create_failures} not created, lost: {lost}", file=sys.stderr)


@contextlib.asynccontextmanager
async def _running(*works: Coroutine[Any, Any, None]) -> AsyncIterator[set[asyncio.Task[None]]]:
    """Run works that never end by themselves."""
    tasks = {asyncio.ensure_future(work) for work in works}
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(work: Coroutine[Any, Any, object], timeout: float, tasks: set[asyncio.Task[None]]) -> None:
    """Wait for ``work``. Raises the error of a task that ends before, or ``TimeoutError``."""
    async with _running(_forget(work)) as (own,):
        done, _ = await asyncio.wait({own, *tasks}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if not done:
            raise TimeoutError(f"not done in {timeout:g} s")


async def _forget(work: Coroutine[Any, Any, object]) -> None:
    await work


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
        async with SandboxPool(spec, backend, min_idle=spares, max_size=users + 2 * spares, health=HEALTH) as pool:
            began = time.perf_counter()
            load = Load(pool, backend, measured)
            async with _running(_show(pool), *(load.user(number) for number in range(users))) as tasks:
                await _until(load.filled.wait(), FILL_LIMIT, tasks)
                measured.filled = time.perf_counter() - began
                processes = {f"server {number}": server.process for number, server in enumerate(running, 1)}
                watch = _watch({"client": psutil.Process(), **processes}, measured)
                began = time.perf_counter()
                async with _running(watch, load.turnover(TURNOVER * users / measured.filled)) as more:
                    await _until(asyncio.sleep(seconds), seconds + 60, tasks | more)
                measured.loaded = time.perf_counter() - began
                measured.per_host = dict(Counter(backend.host_of(box.id) for box in pool.sandboxes("busy", "idle")))
                running[-1].end(signal.SIGKILL)
                await _until(load.recovered(running[-1].host), RECOVERY_LIMIT, tasks)
            retired = pool.stats().counters.retired
            measured.also_lost = sum(retired.get(reason, 0) for reason in ("hung", "frozen", "slow", "agent_dead"))
            began = time.perf_counter()
        measured.closed = time.perf_counter() - began
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
