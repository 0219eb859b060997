"""Supervise sandboxes: when one is lost, rebuild its state in another one.

Invariant: a call in flight when its sandbox is lost raises ``SandboxLost`` and is never repeated. The next call finds
the state after all calls that succeeded (``replay``, ``snapshot``), or an empty sandbox (``restart``), and never
anything in between. A sandbox that must be recovered more than ``max_recoveries`` times within ``period`` seconds has
failed for good.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from agentkit.errors import ConfigError, EngineUnavailable, SandboxError, SandboxLost
from agentkit.sandboxes.arguments import check_choice
from agentkit.sandboxes.backoff import Backoff, RestartLimit
from agentkit.sandboxes.pool.pool import Lease, SandboxPool
from agentkit.sandboxes.recovery.hedge import first_healthy
from agentkit.sandboxes.recovery.replay import ActionLog, Diverged
from agentkit.sandboxes.recovery.standby import Standbys
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.tasks import finished, stopped
from agentkit.sandboxes.types import ExecResult, Snapshot

T = TypeVar("T")

RESTORE_TIMEOUT = 60.0
"""Seconds that the engine gets to restore the files of a snapshot."""
Recovery = Literal["fail", "restart", "replay", "snapshot"]
Observed = Literal["running", "recovering", "failed", "stopped"]


@dataclass(frozen=True)
class Status:
    """State of one supervised sandbox."""

    id: str
    desired: Literal["running", "stopped"]
    observed: Observed
    recoveries: int
    cause: str
    """Cause of the last recovery, or of the failure."""


class Supervisor:
    """Recovers the sandboxes that run under it, each independently.

    Args:
        pool: where sandboxes are acquired.
        recovery: what happens when a sandbox is lost. ``fail``: it stays lost. ``restart``: it is restarted or replaced
            without its files. ``replay``: all successful calls are repeated in a fresh sandbox, and each must have the
            same result. ``snapshot``: the last ``checkpoint`` is restored and the calls since then are repeated.
        replicas: number of hot standbys that follow each sandbox, so that a recovery takes a moment; with ``replay``.
        max_recoveries: number of recoveries within ``period`` after which a sandbox has failed.
        period: seconds.

    Raises:
        ConfigError: settings are wrong or contradict each other, or ``snapshot`` is used without ``readonly_root``.

    Example:
        ```python
        async with SandboxPool() as pool, Supervisor(pool, recovery="replay").run() as box:
            await box.exec("echo kept > file")
        ```
    """

    def __init__(
        self,
        pool: SandboxPool,
        *,
        recovery: Recovery = "restart",
        replicas: int = 0,
        max_recoveries: int = 3,
        period: float = 60.0,
    ) -> None:
        check_choice("recovery", recovery, Recovery)
        if replicas < 0:
            raise ConfigError(f"replicas={replicas} must not be negative")
        if replicas and recovery != "replay":
            raise ConfigError(f"replicas={replicas} needs recovery='replay', not {recovery!r}")
        if recovery == "snapshot" and not pool.spec.readonly_root:
            raise ConfigError("recovery='snapshot' restores only the working directory; set readonly_root in the spec")
        self._pool, self._replicas = pool, replicas
        self._recovery: Recovery = recovery
        self._max_recoveries, self._period = max_recoveries, period
        self._sandboxes: list[SupervisedSandbox] = []

    @contextlib.asynccontextmanager
    async def run(self, timeout: float | None = None) -> AsyncIterator[SupervisedSandbox]:
        """Acquire a sandbox and supervise it for the body of ``async with``.

        Args:
            timeout: seconds to wait for a sandbox, by default ``acquire_timeout`` of the pool.

        Raises:
            SandboxError: see ``SandboxPool.acquire``.
        """
        lease = await self._pool.acquire(timeout)
        limit = RestartLimit(self._max_recoveries, self._period)
        sandbox = SupervisedSandbox(self._pool, lease, self._recovery, self._replicas, limit)
        self._sandboxes.append(sandbox)
        try:
            yield sandbox
        finally:
            self._sandboxes.remove(sandbox)
            await finished(sandbox.stop())

    def status(self) -> list[Status]:
        """Return the state of all sandboxes under this supervisor."""
        return [sandbox.status for sandbox in self._sandboxes]


class SupervisedSandbox:
    """A sandbox that its supervisor recovers; made by ``Supervisor.run``. Calls run one after another.

    Attributes:
        recoveries: number of recoveries so far.
    """

    def __init__(self, pool: SandboxPool, lease: Lease, recovery: Recovery, replicas: int, limit: RestartLimit) -> None:
        self._pool, self._recovery, self._limit = pool, recovery, limit
        self._lease = lease
        self._log: ActionLog[Sandbox] = ActionLog(_describe)
        self._standbys = Standbys(pool, self._log, replicas) if replicas else None
        self._checkpoint: Snapshot | None = None
        self._order = asyncio.Lock()
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
        """Run a command like ``Sandbox.exec``.

        Raises:
            SandboxLost: the sandbox was lost during the call, or cannot be recovered.
        """

        def run(box: Sandbox) -> Awaitable[ExecResult]:
            return box.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)

        return await self._act(f"exec {command!r:.80}", run, len(stdin))

    async def write(self, path: str, data: bytes) -> None:
        """Write a file like ``Sandbox.files.write``."""
        await self._act(f"write {path}", lambda box: box.files.write(path, data), len(data))

    async def remove(self, path: str) -> None:
        """Remove a file or directory like ``Sandbox.files.remove``."""
        await self._act(f"remove {path}", lambda box: box.files.remove(path))

    async def mkdir(self, path: str) -> None:
        """Make a directory like ``Sandbox.files.mkdir``."""
        await self._act(f"mkdir {path}", lambda box: box.files.mkdir(path))

    async def read(self, path: str) -> bytes:
        """Return the content of a file, from the first replica that answers."""
        return await self._ask(lambda box: box.files.read(path))

    async def verify(self, command: str | Sequence[str], *, timeout: float | None = None) -> ExecResult:
        """Run a command on all replicas and return the first result.

        Only for commands without lasting effects: it is not known which replicas have completed the command.
        """
        return await self._ask(lambda box: box.exec(command, timeout=timeout))

    async def checkpoint(self) -> None:
        """Save the current files; ``snapshot`` recovers from here.

        Raises:
            ConfigError: ``recovery`` is not ``snapshot``.
        """
        if self._recovery != "snapshot":
            raise ConfigError(f"checkpoint needs recovery='snapshot', not {self._recovery!r}")
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
                self._log.give_up(f"{name} was cancelled, so its effect is not known")
                raise
            if lease is not self._lease or self._recovering is not None:
                # The call succeeded in a sandbox that has been replaced, so its effects are lost.
                raise SandboxLost(f"{name}: sandbox {lease.box.id} was replaced during the call", reason="replaced")
            if isinstance(result, ExecResult) and result.timed_out:
                self._log.give_up(f"{name} was killed by its timeout, so its effect is not known")
            elif self._recovery in ("replay", "snapshot"):
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
        """Wait until the sandbox runs. Raises ``SandboxLost`` if it cannot be recovered."""
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
        lease.on_failure(lambda reason: self._notice(lease, reason))

    def _notice(self, lease: Lease, reason: str) -> None:
        """Start a recovery, unless one is under way."""
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
        if self._failure is None and self._lease.failure:
            self._notice(self._lease, self._lease.failure)

    async def _until_rebuilt(self) -> Lease:
        """Rebuild until it works. Raises ``SandboxError`` if it cannot."""
        now = asyncio.get_running_loop().time
        while True:
            if self._recovery == "fail":
                raise SandboxLost(f"sandbox {self._lease.box.id} is lost: {self._cause}", reason=self._cause)
            if not self._limit.allow(now()):
                cause = f"{self._limit.limit} recoveries in {self._limit.window:g} s, the last because of {self._cause}"
                raise SandboxLost(f"sandbox {self._lease.box.id} is in a crash loop: {cause}", reason="exited")
            if self._limit.recent > 1:
                await asyncio.sleep(self._backoff.delay(self._limit.recent - 1, self._pool.rng))
            try:
                return await self._rebuild()
            except SandboxError as error:
                if error.details.get("reason") in ("diverged", "unreplayable"):
                    raise
                self._cause = str(error)

    async def _rebuild(self) -> Lease:
        if self._recovery == "restart" and await self._lease.restart():
            return self._lease
        if self._recovery != "restart" and self._log.unreplayable is not None:
            raise SandboxLost(f"the state cannot be rebuilt: {self._log.unreplayable}", reason="unreplayable")
        standby = await self._standbys.promote() if self._standbys is not None else None
        self._lease.release(discard=True)  # before the pool is asked, which may have no other slot
        if standby is not None:
            return standby
        lease = await self._pool.acquire()
        try:
            if self._checkpoint is not None:
                await asyncio.wait_for(lease.box.backend.restore(lease.box.id, self._checkpoint), RESTORE_TIMEOUT)
            await self._log.repeat_all(lease.box)
        except BaseException as error:
            lease.release(discard=True)
            if isinstance(error, Diverged):
                raise SandboxLost(
                    f"the state cannot be rebuilt: {error} in {lease.box.id}. Commands whose output depends on time or "
                    "chance cannot be replayed",
                    reason="diverged",
                    step=error.index,
                    action=error.name,
                ) from None
            if isinstance(error, asyncio.TimeoutError):
                raise EngineUnavailable(f"the engine did not restore the snapshot in {RESTORE_TIMEOUT:g} s") from None
            raise
        return lease

    async def stop(self) -> None:
        """Return all sandboxes to the pool. Further calls do nothing."""
        self._stopped = True
        if self._recovering is not None:
            await stopped([self._recovering])
        if self._standbys is not None:
            await self._standbys.close()
        self._lease.release(discard=self._recovery != "fail" and bool(self._lease.failure))
        if self._checkpoint is not None:
            checkpoint, self._checkpoint = self._checkpoint, None
            await self._discard(checkpoint)

    async def _discard(self, snapshot: Snapshot) -> None:
        # If it fails, the snapshot only takes space until unused snapshots are removed.
        with contextlib.suppress(SandboxError):
            await Sandbox.discard(snapshot, backend=self._lease.box.backend)


def _describe(result: object) -> bytes:
    """Return what two runs of one action must have in common: exit code and output of a command."""
    if not isinstance(result, ExecResult):
        return b""
    return b"%r %d " % (result.exit_code, len(result.stdout_bytes)) + result.stdout_bytes + result.stderr_bytes
