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

from agentkit.errors import AgentkitError, ConfigError, EngineUnavailable, SandboxError, SandboxLost
from agentkit.sandboxes.arguments import check_choice
from agentkit.sandboxes.backoff import RestartLimit
from agentkit.sandboxes.pool.pool import Lease, SandboxPool
from agentkit.sandboxes.recovery.hedge import first_healthy
from agentkit.sandboxes.recovery.record import Means, RecoveryLog
from agentkit.sandboxes.recovery.replay import Diverged
from agentkit.sandboxes.recovery.supervision import GivenUp, Supervised
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.tasks import finished
from agentkit.sandboxes.types import ExecResult, Snapshot

T = TypeVar("T")

RESTORE_TIMEOUT = 60.0
"""Seconds that the engine gets to restore the files of a snapshot."""
SandboxRecovery = Literal["fail", "restart", "replay", "snapshot"]
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
        log: where finished recoveries are recorded.

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
        recovery: SandboxRecovery = "restart",
        replicas: int = 0,
        max_recoveries: int = 3,
        period: float = 60.0,
        log: RecoveryLog | None = None,
    ) -> None:
        check_choice("recovery", recovery, SandboxRecovery)
        if replicas < 0:
            raise ConfigError(f"replicas={replicas} must not be negative")
        if replicas and recovery != "replay":
            raise ConfigError(f"replicas={replicas} needs recovery='replay', not {recovery!r}")
        if recovery == "snapshot" and not pool.spec.readonly_root:
            raise ConfigError("recovery='snapshot' restores only the working directory; set readonly_root in the spec")
        self._pool, self._replicas = pool, replicas
        self._recovery: SandboxRecovery = recovery
        self._max_recoveries, self._period = max_recoveries, period
        self._log = log
        self._sandboxes: dict[SupervisedSandbox, None] = {}

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
        sandbox = SupervisedSandbox(self._pool, lease, self._recovery, self._replicas, limit, self._log)
        self._sandboxes[sandbox] = None
        try:
            yield sandbox
        finally:
            del self._sandboxes[sandbox]
            await finished(sandbox.stop())

    def status(self) -> list[Status]:
        """Return the state of all sandboxes under this supervisor."""
        return [sandbox.status for sandbox in self._sandboxes]


class SupervisedSandbox(Supervised[Lease]):
    """A sandbox that its supervisor recovers; made by ``Supervisor.run``. Calls run one after another."""

    repeats = False  # a call may have had effects outside of the sandbox
    target: Lease  # pyright: ignore[reportIncompatibleVariableOverride]  # from the start

    def __init__(
        self,
        pool: SandboxPool,
        lease: Lease,
        recovery: SandboxRecovery,
        replicas: int,
        limit: RestartLimit,
        log: RecoveryLog | None,
    ) -> None:
        replays = recovery in ("replay", "snapshot")
        super().__init__(_describe, replays=replays, standbys=replicas, limit=limit, log=log, rng=pool.rng)
        self._pool, self._recovery = pool, recovery
        self._checkpoint: Snapshot | None = None
        self._adopt(lease)

    @property
    def id(self) -> str:
        return self.target.box.id

    @property
    def status(self) -> Status:
        observed: Observed = "running"
        if self._stopped:
            observed = "stopped"
        elif self.failure is not None:
            observed = "failed"
        elif self._recovering is not None:
            observed = "recovering"
        desired = "stopped" if self._stopped else "running"
        return Status(self.id, desired, observed, self.recoveries, self.cause)

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
        name = f"exec {command!r:.80}"

        async def run(lease: Lease) -> ExecResult:
            result = await lease.box.exec(command, timeout=timeout, cwd=cwd, env=env, stdin=stdin)
            if result.timed_out and self.replays:
                self.forbid_replay(f"{name} was killed by its timeout, so its effect is not known")
            return result

        result = await self.act(name, run, size=len(stdin))
        if result.tainted:
            self.notice(self.target, "tainted")
        return result

    async def write(self, path: str, data: bytes) -> None:
        """Write a file like ``Sandbox.files.write``."""
        await self.act(f"write {path}", lambda lease: lease.box.files.write(path, data), size=len(data))

    async def remove(self, path: str) -> None:
        """Remove a file or directory like ``Sandbox.files.remove``."""
        await self.act(f"remove {path}", lambda lease: lease.box.files.remove(path))

    async def mkdir(self, path: str) -> None:
        """Make a directory like ``Sandbox.files.mkdir``."""
        await self.act(f"mkdir {path}", lambda lease: lease.box.files.mkdir(path))

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
            lease = await self.running()
            snapshot = await lease.box.snapshot()
            old, self._checkpoint = self._checkpoint, snapshot
            self._log.clear()
            if old is not None:
                await self._discard(old)

    async def stop(self) -> None:
        await super().stop()
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            await self._discard(checkpoint)

    async def _ask(self, run: Callable[[Sandbox], Awaitable[T]]) -> T:
        async with self._order:
            leases = [await self.running(), *(self._standbys.caught_up() if self._standbys is not None else ())]
            return await first_healthy([lambda box=lease.box: run(box) for lease in leases])

    # Recovery.

    async def acquire(self, apart: Sequence[Lease]) -> tuple[Lease, Means]:
        means: Means = "spare" if self._pool.scheduler.slots.count("idle") else "new"
        return await self._pool.acquire(avoid_hosts={one.host for one in apart if not one.failure}), means

    async def renew(self, lost: Lease) -> tuple[Lease, Means]:
        if self._recovery == "restart" and await lost.restart():
            return lost, "restart"
        lease, means = await super().renew(lost)
        if self._checkpoint is None:
            return lease, means
        try:
            await asyncio.wait_for(lease.box.backend.restore(lease.box.id, self._checkpoint), RESTORE_TIMEOUT)
        except BaseException as error:
            lease.release(discard=True)
            if isinstance(error, asyncio.TimeoutError):
                raise EngineUnavailable(f"the engine did not restore the snapshot in {RESTORE_TIMEOUT:g} s") from None
            raise
        return lease, "snapshot"

    def loss(self, error: AgentkitError) -> str | None:
        return error.details.get("reason", "lost") if isinstance(error, SandboxLost) else None

    async def irrecoverable(self, target: Lease, error: AgentkitError | None) -> AgentkitError | None:
        if self._recovery == "fail":
            return SandboxLost(f"sandbox {self.id} is lost: {self.cause}", reason=self.cause)
        return None

    def given_up(self, why: GivenUp, text: str, last: Exception | None) -> AgentkitError:
        if why == "crash loop":
            return SandboxLost(f"sandbox {self.id} is in a crash loop: {text}", reason="exited")
        details = {"step": last.index, "action": last.name} if isinstance(last, Diverged) else {}
        hint = ". Commands whose output depends on time or chance cannot be replayed" if details else ""
        return SandboxLost(f"the state cannot be rebuilt: {text}{hint}", reason=why, **details)

    def failed(self, failure: AgentkitError) -> AgentkitError:
        text = f"sandbox {self.id} is not recovered: {failure}"
        return SandboxLost(text, reason="exited", cause=str(failure))

    async def _discard(self, snapshot: Snapshot) -> None:
        # If it fails, the snapshot only takes space until unused snapshots are removed.
        with contextlib.suppress(SandboxError):
            await Sandbox.discard(snapshot, backend=self.target.box.backend)


def _describe(result: object) -> bytes:
    """Return what two runs of one action must have in common: exit code and output of a command."""
    if not isinstance(result, ExecResult):
        return b""
    return b"%r %d " % (result.exit_code, len(result.stdout_bytes)) + result.stdout_bytes + result.stderr_bytes
