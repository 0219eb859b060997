"""Keeps single sandboxes going: what is wanted is compared with what is there, and what is missing is rebuilt.

Invariant: a call in flight when its sandbox is lost raises ``SandboxLost`` and is never repeated; the next call meets
the sandbox as recovery left it, with the effects of all calls that succeeded (``replay``, ``snapshot``), or none
(``restart``), and never anything in between. More than ``intensity`` recoveries within ``period`` seconds are a crash
loop: the sandbox has failed for good, with its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from agentkit.errors import ConfigError, EngineUnavailable, SandboxError, SandboxLost
from agentkit.sandboxes.aio import finished, stopped
from agentkit.sandboxes.backoff import Backoff, Intensity
from agentkit.sandboxes.hedge import first_healthy
from agentkit.sandboxes.pool import Lease, SandboxPool
from agentkit.sandboxes.redundancy import Standbys
from agentkit.sandboxes.replay import ActionLog
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.types import ExecResult, Snapshot

T = TypeVar("T")

RESTORE_TIMEOUT = 60.0
"""Seconds that the engine gets to put a snapshot's files in place."""
Recovery = Literal["fail", "restart", "replay", "snapshot"]
Observed = Literal["running", "recovering", "failed", "stopped"]


@dataclass(frozen=True)
class Status:
    """One supervised sandbox: what is wanted, what is there, and how often it had to be recovered."""

    id: str
    desired: Literal["running", "stopped"]
    observed: Observed
    recoveries: int
    cause: str
    """Of the last recovery, or of the failure."""


class Supervisor:
    """Recovers the sandboxes that run under it, each on its own; ``async with supervisor.run() as box``.

    ``recovery``: ``fail`` leaves it lost; ``restart`` begins again with an empty one; ``replay`` does everything again
    in a fresh one and checks that each action comes out the same; ``snapshot`` does so from the last ``checkpoint`` on.
    ``replicas`` hot standbys (with ``replay``) follow each sandbox, so that recovery takes a moment.
    """

    def __init__(
        self,
        pool: SandboxPool,
        *,
        recovery: Recovery = "restart",
        replicas: int = 0,
        intensity: int = 3,
        period: float = 60.0,
    ) -> None:
        if replicas and recovery != "replay":
            raise ConfigError(f"replicas={replicas} follow by replay: they need recovery='replay', not {recovery!r}")
        if recovery == "snapshot" and not pool.spec.readonly_root:
            raise ConfigError(
                "recovery='snapshot' puts back what is below the working directory: it needs readonly_root"
            )
        self._pool, self._replicas = pool, replicas
        self._recovery: Recovery = recovery
        self._intensity, self._period = intensity, period
        self._children: list[Supervised] = []

    @contextlib.asynccontextmanager
    async def run(self, timeout: float | None = None) -> AsyncIterator[Supervised]:
        """A sandbox of the pool, kept going for the body of ``async with``. Raises what ``SandboxPool.take`` raises."""
        lease = await self._pool.take(timeout)
        child = Supervised(self._pool, lease, self._recovery, self._replicas, Intensity(self._intensity, self._period))
        self._children.append(child)
        try:
            yield child
        finally:
            self._children.remove(child)
            await finished(child.stop())

    def status(self) -> list[Status]:
        return [child.status for child in self._children]


class Supervised:
    """A sandbox that comes back. Calls are carried out one after another; made by ``Supervisor.run``."""

    def __init__(
        self, pool: SandboxPool, lease: Lease, recovery: Recovery, replicas: int, intensity: Intensity
    ) -> None:
        self._pool, self._recovery, self._intensity = pool, recovery, intensity
        self._lease = lease
        self._log = ActionLog()
        self._keeps_log = recovery in ("replay", "snapshot")
        self._standbys = Standbys(pool, self._log, replicas) if replicas else None
        self._checkpoint: Snapshot | None = None
        self._order = asyncio.Lock()
        self._changed = asyncio.Event()
        self._recovering: asyncio.Task[None] | None = None
        self._backoff = Backoff()
        self._failure: SandboxError | None = None
        self._stopped = False
        self._cause = ""
        self.recoveries = 0
        self._adopt(lease)

    @property
    def status(self) -> Status:
        observed: Observed = "running"
        if self._stopped:
            observed = "stopped"
        elif self._failure is not None:
            observed = "failed"
        elif self._recovering is not None:
            observed = "recovering"
        desired = "stopped" if self._stopped else "running"
        return Status(self._lease.box.id, desired, observed, self.recoveries, self._cause)

    # Calls.

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """As ``Sandbox.exec``. Raises ``SandboxLost`` if the sandbox is lost meanwhile, or cannot be recovered."""

        def run(box: Sandbox) -> Awaitable[ExecResult]:
            return box.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

        return await self._act(f"exec {command!r:.80}", run, len(stdin))

    async def write(self, path: str, data: bytes) -> None:
        """As ``Sandbox.files.write``."""
        await self._act(f"write {path}", lambda box: box.files.write(path, data), len(data))

    async def remove(self, path: str) -> None:
        """As ``Sandbox.files.remove``."""
        await self._act(f"remove {path}", lambda box: box.files.remove(path))

    async def mkdir(self, path: str) -> None:
        """As ``Sandbox.files.mkdir``."""
        await self._act(f"mkdir {path}", lambda box: box.files.mkdir(path))

    async def read(self, path: str) -> bytes:
        """A file's content, from the first of all replicas that answers."""
        return await self._ask(lambda box: box.files.read(path))

    async def verify(self, command: str | Sequence[str], *, timeout: float | None = None) -> ExecResult:
        """Run a command on all replicas and take the first answer. For commands that change nothing that later ones
        depend on: which replicas have run it to its end is not known."""
        return await self._ask(lambda box: box.exec(command, timeout=timeout))

    async def checkpoint(self) -> None:
        """Keep the present state: ``snapshot`` recovers from here. Raises ``ConfigError`` under other recoveries."""
        if self._recovery != "snapshot":
            raise ConfigError(f"a checkpoint is for recovery='snapshot', not {self._recovery!r}")
        async with self._order:
            lease = await self._running()
            snapshot = await lease.box.snapshot()
            old, self._checkpoint = self._checkpoint, snapshot
            self._log.clear()
            if old is not None:
                await self._discard(old)

    async def _act(self, name: str, run: Callable[[Sandbox], Awaitable[T]], size: int = 0) -> T:
        async with self._order:
            lease = await self._running()
            try:
                result = await run(lease.box)
            except SandboxLost as error:
                self._notice(lease, error.details.get("reason", "lost"))
                raise
            except asyncio.CancelledError:
                self._log.spoil(f"{name} was cancelled: what it had done by then is not known")
                raise
            if lease is not self._lease or self._recovering is not None:
                # It came from a sandbox that was given up meanwhile: what it did there is gone.
                raise SandboxLost(f"{name}: sandbox {lease.box.id} was replaced meanwhile", reason="replaced")
            if self._keeps_log:
                self._log.record(name, run, result, size)
            if self._standbys is not None:
                self._standbys.wake()
            if isinstance(result, ExecResult) and result.tainted:
                self._notice(lease, "tainted")
            return result

    async def _ask(self, run: Callable[[Sandbox], Awaitable[T]]) -> T:
        async with self._order:
            lease = await self._running()
            replicas = [lease.box, *(self._standbys.caught_up() if self._standbys is not None else ())]
            return await first_healthy([lambda box=box: run(box) for box in replicas])

    async def _running(self) -> Lease:
        """The sandbox, once it runs. Raises ``SandboxLost`` if it never will."""
        while self._recovering is not None:
            await asyncio.wait({self._recovering})
        if self._failure is not None or self._stopped:
            cause = self._failure or "it was stopped"
            raise SandboxLost(
                f"sandbox {self._lease.box.id} is not recovered: {cause}", reason="exited", cause=str(cause)
            )
        return self._lease

    # Recovery.

    def _adopt(self, lease: Lease) -> None:
        self._lease = lease
        lease.watch(lambda reason: self._notice(lease, reason))

    def _notice(self, lease: Lease, reason: str) -> None:
        """It is no good any more: recover, unless that is under way."""
        if lease is self._lease and self._recovering is None and self._failure is None and not self._stopped:
            self._cause = reason
            self._recovering = asyncio.ensure_future(self._recover())

    async def _recover(self) -> None:
        try:
            self._adopt(await self._until_rebuilt())
            self.recoveries += 1
        except SandboxError as error:
            self._failure, self._cause = error, str(error)
            self._lease.release(discard=True)
        finally:
            self._recovering = None
        if self._failure is None and self._lease.ill:
            self._notice(self._lease, self._lease.ill)

    async def _until_rebuilt(self) -> Lease:
        """A sandbox in the right state. Raises ``SandboxError`` if that is beyond hope."""
        now = asyncio.get_running_loop().time
        while True:
            if self._recovery == "fail":
                raise SandboxLost(f"sandbox {self._lease.box.id} is lost: {self._cause}", reason=self._cause)
            if not self._intensity.allow(now()):
                cause = (
                    f"{self._intensity.limit} recoveries in {self._intensity.window:g} s, the last for: {self._cause}"
                )
                raise SandboxLost(f"sandbox {self._lease.box.id} is in a crash loop: {cause}", reason="exited")
            if self._intensity.recent > 1:
                await asyncio.sleep(self._backoff.delay(self._intensity.recent - 1, self._pool.rng))
            try:
                return await self._rebuild()
            except SandboxError as error:
                if error.details.get("reason") in ("diverged", "spoiled"):
                    raise
                self._cause = str(error)

    async def _rebuild(self) -> Lease:
        if self._recovery == "restart" and await self._lease.restart():
            return self._lease
        if self._log.spoiled is not None:
            raise SandboxLost(f"the state cannot be rebuilt: {self._log.spoiled}", reason="spoiled")
        if self._standbys is not None and (standby := await self._standbys.promote()) is not None:
            self._lease.release(discard=True)
            return standby
        # Given back before another is taken: the pool may have no other place.
        self._lease.release(discard=True)
        lease = await self._pool.take()
        try:
            if self._checkpoint is not None:
                await asyncio.wait_for(lease.box.backend.restore(lease.box.id, self._checkpoint), RESTORE_TIMEOUT)
            for index in range(len(self._log)):
                await self._log.replay(lease.box, index)
        except BaseException as error:
            lease.release(discard=True)
            if isinstance(error, asyncio.TimeoutError):
                raise EngineUnavailable(f"no snapshot was restored in {RESTORE_TIMEOUT:g} s") from None
            raise
        return lease

    async def stop(self) -> None:
        """Give everything back to the pool. Twice is fine."""
        self._stopped = True
        if self._recovering is not None:
            await stopped([self._recovering])
        if self._standbys is not None:
            await self._standbys.close()
        self._lease.release(discard=self._recovery != "fail" and bool(self._lease.ill))
        if self._checkpoint is not None:
            checkpoint, self._checkpoint = self._checkpoint, None
            await self._discard(checkpoint)

    async def _discard(self, snapshot: Snapshot) -> None:
        # What it holds costs only space, and goes with the engine's next clearing up.
        with contextlib.suppress(SandboxError):
            await Sandbox.discard(snapshot, backend=self._lease.box.backend)
