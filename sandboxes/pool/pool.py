"""Pool of ready sandboxes.

Invariant: ``idle + busy + creating + degraded`` never exceeds ``max_size``. Callers are served in order of arrival. No
dead, hung or failed sandbox is handed out. Every sandbox of the pool is removed when ``close`` returns. An acquired
sandbox returns to the pool exactly once, even if its caller is cancelled at any point.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, Literal

from agentkit.errors import AgentkitError, ConfigError, PoolClosed, SandboxError
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.arguments import (
    check_choice,
    check_integer,
    check_not_negative,
    check_positive,
    check_type,
)
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.backends import check_backend
from agentkit.sandboxes.pool.breaker import Breaker
from agentkit.sandboxes.pool.decisions import OnExhausted, PoolSettings
from agentkit.sandboxes.pool.health import HealthPolicy, HostUsage
from agentkit.sandboxes.pool.monitor import HealthMonitor
from agentkit.sandboxes.pool.provisioner import Provisioner, Reset, Warm
from agentkit.sandboxes.pool.scheduler import Scheduler
from agentkit.sandboxes.pool.slots import PoolStats, Slot, SlotState
from agentkit.sandboxes.recovery.hedge import Hedge
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import stopped


class Lease:
    """A sandbox acquired from a pool, until ``release``.

    Attributes:
        box: the sandbox.
    """

    def __init__(self, scheduler: Scheduler, slot: Slot) -> None:
        self.box = slot.box
        self._scheduler = scheduler
        self._slot: Slot | None = slot
        slot.spare = False

    @property
    def host(self) -> str:
        """Name of the host on which the sandbox runs."""
        return self.box.backend.host_of(self.box.id)

    @property
    def sandbox_id(self) -> str:
        return self.box.id

    @property
    def failure(self) -> str:
        """Why the sandbox must not be used any more (lost, hung, slow); empty if the pool knows no reason."""
        return self._slot.failure if self._slot is not None else "released"

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the reason when the sandbox fails before it is released, at once if it has failed.

        Args:
            callback: must neither block nor raise.
        """
        if self._slot is not None:
            self._slot.on_failure.append(callback)
            if self._slot.failure:
                callback(self._slot.failure)

    def mark_spare(self, spare: bool) -> None:
        """Note for the telemetry whether the sandbox is only kept ready, and not in use."""
        if self._slot is not None:
            self._slot.spare = spare

    async def restart(self) -> bool:
        """Restart the sandbox with empty temporary file systems.

        Returns:
            Whether the sandbox works again.
        """
        try:
            await self.box.restart()
        except SandboxError:
            return False
        if self._slot is not None:
            self._slot.failure = ""
        return True

    def release(self, *, discard: bool = False) -> None:
        """Return the sandbox to the pool, which resets or removes it in the background. Further calls do nothing.

        Args:
            discard: whether the sandbox must not be used again.
        """
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.on_failure.clear()
            self._scheduler.release(slot, discard=discard)


class Acquisition:
    """Result of ``SandboxPool.acquire``: await it for a ``Lease``, or enter it with ``async with`` for the sandbox."""

    def __init__(self, pool: SandboxPool, timeout: float, avoid_hosts: tuple[str, ...]) -> None:
        self._pool, self._timeout, self._avoid_hosts = pool, timeout, avoid_hosts
        self._lease: Lease | None = None

    def __await__(self) -> Generator[Any, None, Lease]:
        return self._acquire().__await__()

    async def __aenter__(self) -> Sandbox:
        self._lease = await self
        return self._lease.box

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._lease is not None:
            self._lease.release(discard=isinstance(error, AgentkitError))

    async def _acquire(self) -> Lease:
        scheduler = self._pool.scheduler
        elsewhere = self._avoid_hosts and set(self._pool.hosts()) - set(self._avoid_hosts)
        return Lease(scheduler, await scheduler.acquire(self._timeout, self._avoid_hosts if elsewhere else ()))


class SandboxPool:
    """Pool of sandboxes of one specification, created in advance and checked before each use.

    Args:
        spec: specification of the sandboxes, or the name of an image.
        backend: a back end, or its name.
        min_idle: number of sandboxes that are kept ready.
        max_size: largest number of sandboxes, in use or not.
        warm: how idle sandboxes wait: ``running`` (acquired in about 1 ms), or ``paused`` (use no processor time).
        max_uses: number of uses after which a sandbox is replaced; None means no limit.
        max_age: age in seconds from which a sandbox is replaced.
        acquire_timeout: default timeout of ``acquire``, in seconds.
        drain_timeout: seconds that ``close`` waits for sandboxes in use.
        refill_concurrency: number of concurrent creations while no caller waits; by default 20 % of ``min_idle``. While
            callers wait, at least ``Backend.concurrency``.
        on_exhausted: what happens when ``max_size`` sandboxes are in use: ``wait`` for a release, ``fail`` at once with
            ``PoolExhausted``, or ``create`` an extra sandbox for one use.
        reset: what happens between two uses: ``recreate`` gives each use a new sandbox, ``snapshot`` restores the
            initial files, and a coroutine function is called with the sandbox.
        health: intervals and thresholds of the health checks.
        hedge: hedges creations.
        breaker: circuit breaker of the engine, which pools of one engine may share; by default the pool has its own.
        host: measures the machine on which the sandboxes run, e.g. ``health.local_host``. Nothing is created beyond
            ``health.watermark``.
        seed: seed of the jitter.

    Raises:
        ConfigError: a setting is wrong, or settings contradict each other.

    Example:
        ```python
        async with SandboxPool(SandboxSpec(image="python:3.12"), min_idle=4) as pool:
            async with pool.acquire() as box:
                print((await box.exec("echo hi")).stdout)
        ```
    """

    _monitor: HealthMonitor
    _draining: asyncio.Task[None]

    def __init__(
        self,
        spec: SandboxSpec | str | None = None,
        backend: Backend | str = "docker",
        *,
        min_idle: int = 2,
        max_size: int = 8,
        warm: Warm = "running",
        max_uses: int | None = 1,
        max_age: float = 3600.0,
        acquire_timeout: float = 60.0,
        drain_timeout: float = 30.0,
        refill_concurrency: int | None = None,
        on_exhausted: OnExhausted = "wait",
        reset: Reset = "recreate",
        health: HealthPolicy | None = None,
        hedge: Hedge | None = None,
        breaker: Breaker | None = None,
        host: Callable[[], HostUsage] | None = None,
        seed: int | None = None,
    ) -> None:
        check_integer("min_idle", min_idle, 0)
        check_integer("max_size", max_size, 1)
        if min_idle > max_size:
            raise ConfigError(
                f"min_idle={min_idle} and max_size={max_size}: choose 0 <= min_idle <= max_size and max_size >= 1"
            )
        check_choice("warm", warm, Warm)
        check_choice("on_exhausted", on_exhausted, OnExhausted)
        if not callable(reset):
            check_choice("reset", reset, Literal["recreate", "snapshot"])
        check_positive(max_uses=max_uses, max_age=max_age, refill_concurrency=refill_concurrency)
        check_not_negative(acquire_timeout=acquire_timeout, drain_timeout=drain_timeout)
        check_backend("backend", backend)
        check_type("health", health, HealthPolicy, "a HealthPolicy")
        check_type("hedge", hedge, Hedge, "a Hedge")
        check_type("breaker", breaker, Breaker, "a Breaker")
        if host is not None and not callable(host):
            raise ConfigError(f"host={host!r} must be a function, such as health.local_host")
        if (max_uses == 1) != (reset == "recreate"):
            raise ConfigError(
                f"max_uses={max_uses} contradicts reset={reset!r}: sandboxes that are used more than once need "
                "reset='snapshot' or a function, and sandboxes that are used once need reset='recreate'"
            )
        self.spec = SandboxSpec.of(spec)
        self.acquire_timeout, self.drain_timeout = acquire_timeout, drain_timeout
        self.rng = random.Random(seed)
        self._settings = PoolSettings(min_idle, max_size, max_uses, max_age, refill_concurrency, on_exhausted)
        self._policy, self._breaker, self._host = health or HealthPolicy(), breaker, host
        self._provisioner = Provisioner(self.spec, backend, warm, reset, self._policy, hedge)
        self._scheduler: Scheduler | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect to the engine and begin to create sandboxes; done by ``async with``.

        Raises:
            EngineUnavailable: the engine does not answer.
            UnsupportedFeature: the back end does not support the specification.
        """
        if self._scheduler is not None:
            return
        await self._provisioner.start()
        clock = asyncio.get_running_loop().time
        breaker = self._breaker or Breaker(f"the {self._provisioner.backend.name} engine", time=clock)
        self._scheduler = Scheduler(self._settings, self._provisioner, breaker, self.rng)
        self._monitor = HealthMonitor(self._scheduler, self._provisioner, self._policy, self.rng, self._host)
        self._monitor.start()
        telemetry.opened(self)
        self._scheduler.update()

    async def close(self, drain_timeout: float | None = None) -> None:
        """Reject waiting callers, wait for sandboxes in use, and remove all sandboxes. Further calls only wait.

        Args:
            drain_timeout: seconds to wait for sandboxes in use, by default ``drain_timeout`` of the pool. If the call
                is cancelled, it stops waiting for them but still removes all sandboxes.
        """
        if self._scheduler is None:
            return
        if self._closing is None:
            self._scheduler.stop()
            self._draining = asyncio.ensure_future(self._scheduler.drained())
            timeout = self.drain_timeout if drain_timeout is None else drain_timeout
            self._closing = asyncio.ensure_future(self._close(self._scheduler, timeout))
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._draining.cancel()
            await asyncio.wait({self._closing})
            raise

    async def __aenter__(self) -> SandboxPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def acquire(self, timeout: float | None = None, *, avoid_hosts: Collection[str] = ()) -> Acquisition:
        """Acquire the next healthy sandbox, in order of arrival.

        ``async with pool.acquire() as box`` releases the sandbox at the end of the body, and discards it if the body
        raises an ``AgentkitError``. ``lease = await pool.acquire()`` leaves the release to the caller.

        Args:
            timeout: seconds to wait, by default ``acquire_timeout`` of the pool.
            avoid_hosts: create a sandbox for this caller, on one of these hosts only if no other has room; it does not
                count towards ``max_size``. Ignored while the pool has no sandbox on another host.

        Raises:
            PoolExhausted: no sandbox became free in time; or, at once, all new sandboxes fail.
            BreakerOpen: the engine is down and no sandbox is left; raised at once.
            ImageError, UnsupportedFeature: sandboxes of this specification cannot be created.
            PoolClosed: the pool is not started, closing or closed.
            SandboxError: with ``on_exhausted="create"`` or ``avoid_hosts``, any error of ``Sandbox.create``.
        """
        return Acquisition(self, self.acquire_timeout if timeout is None else timeout, tuple(avoid_hosts))

    async def wait_filled(self) -> None:
        """Wait until ``min_idle`` sandboxes are ready.

        Raises:
            PoolClosed: the pool is not started, or is closed before.
        """
        await self.scheduler.wait_filled()

    def stats(self) -> PoolStats:
        """Return the current state of the pool. Thread-safe.

        Raises:
            PoolClosed: the pool was never started.
        """
        return self.scheduler.stats()

    def sandboxes(self, *states: SlotState) -> list[Sandbox]:
        """Return the sandboxes of the pool whose slot is in one of these states.

        Args:
            states: for example ``"idle"``, ``"checking"``, ``"busy"`` and ``"degraded"``; all states if empty.

        Raises:
            PoolClosed: the pool was never started.
        """
        slots = [slot for slot in self.scheduler.slots if not states or slot.state in states]
        return [slot.box for slot in slots if slot.sandbox is not None]

    def hosts(self) -> Counter[str]:
        """Return the number of sandboxes on each host. Thread-safe.

        Raises:
            PoolClosed: the pool was never started.
        """
        backend = self._provisioner.backend
        return Counter(backend.host_of(box.id) for box in self.sandboxes())

    def servers(self) -> Sequence[Any]:
        """Return the state of each sandbox server; none with a back end of this machine. Thread-safe."""
        return self._provisioner.backend.hosts()

    def usage(self) -> dict[str, HostUsage]:
        """Return what of each host is in use, where it is known. Thread-safe."""
        found = {server.host: HostUsage(server.memory, server.disk, server.cpu) for server in self.servers()}
        if not found and self._scheduler is not None and self._monitor.usage is not None:
            found[self._provisioner.backend.host_of("")] = self._monitor.usage
        return found

    @property
    def labels(self) -> dict[str, str]:
        """Labels of all sandboxes of this pool, and of no others; see ``Sandbox.list``."""
        return self._provisioner.labels

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of a started pool. Raises ``PoolClosed`` if it was never started."""
        if self._scheduler is None:
            raise PoolClosed("the pool has not been started; use `async with pool`")
        return self._scheduler

    async def _close(self, scheduler: Scheduler, drain_timeout: float) -> None:
        await asyncio.wait({self._draining}, timeout=drain_timeout)
        await stopped([self._draining])
        await self._monitor.stop()
        await scheduler.close()
        scheduler.counters.left_behind += await self._provisioner.close()
        telemetry.closed(self)
