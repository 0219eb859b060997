"""Allocate environments to sandboxes: which sandbox a new environment goes into, and when sandboxes are removed.

Invariant: only environments that declare ``inline`` share a process, as they would on the host; every other
environment, and one that runs code of the policy, has a sandbox to itself. A sandbox whose process broke takes no
environment and is removed when its environments have noticed it; ``close`` removes every sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkit.envs.isolation import protocol, validation
from agentkit.envs.isolation.placement import Placement
from agentkit.envs.isolation.process import EnvProcess
from agentkit.envs.isolation.redundancy import Redundancy, check_redundancy
from agentkit.envs.isolation.replay import cause_of_loss
from agentkit.envs.isolation.validation import Description, check_description
from agentkit.errors import AgentkitError, EnvContractError, EnvCrashed, EnvError, SandboxError
from agentkit.sandboxes import telemetry
from agentkit.sandboxes.attribution import Cause
from agentkit.sandboxes.backoff import Backoff
from agentkit.sandboxes.pool.health import usage_of
from agentkit.sandboxes.pool.pool import Lease, SandboxPool
from agentkit.sandboxes.recovery.hedge import Hedge
from agentkit.sandboxes.recovery.record import Means, RecoveryLog
from agentkit.sandboxes.tasks import finished, loop_time, stopped, tracked

CLOSE_TIMEOUT = 5.0
"""Seconds that an environment gets for its ``close`` before its process is killed."""
MAKE_TIMEOUT = 60.0
"""Seconds that making an environment may take."""
MAKE_ATTEMPTS = 3
"""Number of sandboxes in which an environment is made if they are lost meanwhile."""
HEDGE_LEAST = 0.25
"""Smallest delay of a second attempt in seconds, because the attempt itself takes time."""
_POOL_SIZE = 4096
_POOL_TIMEOUT = 600.0
"""Seconds to wait for a sandbox of a pool while many are being created."""


@dataclass(eq=False)
class EnvSandbox:
    """A sandbox with one process that serves environments."""

    process: EnvProcess
    lease: Lease
    slots: set[int] = field(default_factory=set)
    """Numbers of the environments in it, counted from the moment they are allocated."""


@dataclass(eq=False)
class _StartingSandbox:
    """A sandbox that is being created, and the environments allocated to it."""

    task: asyncio.Task[EnvSandbox]
    slots: set[int]


class EnvSlot:
    """An environment that was made in a sandbox.

    Attributes:
        used: whether an action was taken in it, which may have run code of the policy.
        error: the error of its last call that failed.
    """

    def __init__(
        self, sandbox: EnvSandbox, number: int, description: Description, release: Callable[[EnvSlot], None]
    ) -> None:
        self.sandbox, self.number, self.description = sandbox, number, description
        self.used = False
        self.error: EnvError | None = None
        self._release: Callable[[EnvSlot], None] | None = release

    @property
    def host(self) -> str:
        return self.sandbox.lease.host

    @property
    def sandbox_id(self) -> str:
        return self.sandbox.lease.box.id

    @property
    def failure(self) -> str:
        """Why its process is broken; empty if it works."""
        broken = self.sandbox.process.broken
        return "" if broken is None else cause_of_loss(broken)

    @property
    def suspect(self) -> bool:
        """Whether code of the policy may have run in it."""
        return self.used and self.description.runs_policy_code

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Call ``callback`` with the cause when its process breaks before the environment is released."""

        def broken() -> None:
            if self._release is not None:
                callback(self.failure)

        if self.failure:
            broken()
        else:
            self.sandbox.process.on_broken.append(broken)

    def release(self, *, discard: bool = False) -> None:
        """Close it in the background, and remove its sandbox if that must not be used again. Idempotent.

        Args:
            discard: ignored, because the allocator knows which sandboxes must not be used again.
        """
        release, self._release = self._release, None
        if release is not None:
            release(self)

    async def reset(self, seed: int | None, options: dict[str, Any] | None, timeout: float) -> Any:
        return await self.call("reset", seed, options, timeout=timeout, check=validation.check_reset)

    async def step(self, action: str, timeout: float) -> Any:
        self.used, began = True, loop_time()
        result = await self.call("step", action, timeout=timeout, check=validation.check_step)
        telemetry.report(telemetry.Stepped(self.host, loop_time() - began))
        return result

    async def call(self, name: str, *arguments: Any, timeout: float, check: Callable[[Any], Any]) -> Any:
        """Call the environment and return its checked reply. Raises as ``EnvProcess.call``."""
        process = self.sandbox.process
        try:
            value = await process.call(self.number, name, *arguments, timeout=timeout)
            try:
                return check(value)
            except EnvContractError as error:
                process.reject(error)  # our server validates too, so another program sent this
                raise
        except EnvError as error:
            self.error = error
            raise

    async def cause(self) -> Cause:
        """Return what broke its process. Takes at most 5 s; call it before the release."""
        return await self.sandbox.process.cause()


def choose_sandbox(
    fills: Sequence[int], share: int, spread: int, *, excluded: Sequence[int] = (), last: Sequence[int] = ()
) -> int | None:
    """Choose the sandbox for one more environment.

    Args:
        fills: number of environments in each sandbox.
        share: most environments in one sandbox.
        spread: one sandbox holds at most 1 / ``spread`` of all environments, but at least one.
        excluded: indices of sandboxes that are not chosen.
        last: indices of sandboxes that are chosen only if no other has room.

    Returns:
        The index of the emptiest sandbox, or None if a new sandbox is needed.
    """
    limit = min(share, max(1, (sum(fills) + 1) // spread))
    room = [index for index, fill in enumerate(fills) if fill < limit and index not in excluded]
    return min(room, key=lambda index: (index in last, fills[index]), default=None)


class SandboxAllocator:
    """Environments of one placement, spread over as many sandboxes as needed.

    Args:
        placement: the environment and the specification of its sandboxes.
        redundancy: how environments share sandboxes, and how many spares there are.
        make_timeout: seconds that making an environment may take, once there is a sandbox.
        log: where recoveries and hedged calls are recorded.

    Attributes:
        log: the recoveries of all environments, and their hedged calls.
        hedge: hedges calls of environments; None: they are not hedged.
    """

    def __init__(
        self,
        placement: Placement,
        redundancy: Redundancy | None = None,
        *,
        make_timeout: float = MAKE_TIMEOUT,
        log: RecoveryLog | None = None,
    ) -> None:
        check_redundancy(redundancy)
        redundancy = redundancy or Redundancy()
        self.placement, self.redundancy = placement, redundancy
        self.log = log or RecoveryLog()
        after = redundancy.hedge
        self.hedge = None if after is None else Hedge(after, least=HEDGE_LEAST, log=self.log)
        self._make_timeout = make_timeout
        self._pool = SandboxPool(
            placement.spec,
            placement.backend,
            min_idle=0,
            max_size=_POOL_SIZE,
            acquire_timeout=_POOL_TIMEOUT,
            drain_timeout=0.0,
            health=redundancy.health,
            hedge=None if after is None else Hedge(after, log=self.log),
            host=usage_of(placement.backend),
        )
        self._capacity: int | None = None
        self._sandboxes: list[EnvSandbox] = []
        self._starting: list[_StartingSandbox] = []
        self._spares: dict[EnvSlot, asyncio.Event] = {}
        """Environments that are kept ready; the event is set when one is taken or fails."""
        self._keeping: list[asyncio.Task[None]] = []
        self._releasing: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._first = asyncio.Lock()
        self._closed = False

    @property
    def spares(self) -> int:
        """Number of environments that are ready to replace others."""
        return len(self._spares)

    async def acquire(self, apart: Sequence[EnvSlot] = ()) -> tuple[EnvSlot, Means]:
        """Make an environment, or take a spare one.

        Args:
            apart: environments with which it shares no sandbox, and if possible no host.

        Returns:
            The environment, and where it came from.

        Raises:
            SandboxError, RegistryError, EnvError: it cannot be made.
        """
        if self._capacity is None:
            async with self._first:  # its description says how many environments may share a sandbox
                if self._capacity is None:
                    return await self._allocated(apart)
        return await self._allocated(apart)

    async def close(self) -> None:
        """Remove every sandbox. Idempotent."""
        self._closed = True
        await stopped([*self._keeping, *(starting.task for starting in self._starting)])
        if self.hedge is not None:
            await self.hedge.close()
        for slot in list(self._spares):
            slot.release()
        if self._releasing:
            await asyncio.wait(self._releasing)
        await asyncio.gather(*(self._remove(sandbox) for sandbox in list(self._sandboxes)), return_exceptions=True)
        await finished(self._pool.close())

    # Sandboxes.

    async def _allocated(self, apart: Sequence[EnvSlot]) -> tuple[EnvSlot, Means]:
        for _ in range(MAKE_ATTEMPTS - 1):
            try:
                return await self._allocate(apart)
            except EnvCrashed as error:
                if not isinstance(error.__cause__, SandboxError):
                    raise  # the environment is to blame, not its sandbox
        return await self._allocate(apart)

    async def _allocate(self, apart: Sequence[EnvSlot]) -> tuple[EnvSlot, Means]:
        number = next(self._numbers)
        chosen = self._choose(apart)
        if chosen is None and (spare := self._take_spare(apart)) is not None:
            return spare, "spare"
        if isinstance(chosen, EnvSandbox):
            chosen.slots.add(number)
            return await self._make(chosen, number), "spare"
        # A lost environment may be replaced on its own host; a standby should be on another host than a working one.
        hosts = {slot.host for slot in apart if not slot.failure}
        return await self._make(await self._started(number, chosen, hosts), number), "new"

    def _choose(self, apart: Sequence[EnvSlot]) -> EnvSandbox | _StartingSandbox | None:
        kept = {slot.sandbox for slot in self._spares}
        working = [one for one in self._sandboxes if one.process.broken is None and one not in kept]
        taken = {slot.sandbox for slot in apart}
        hosts = {slot.host for slot in apart}
        chosen = choose_sandbox(
            [len(one.slots) for one in (*working, *self._starting)],
            self._capacity or 1,
            self.redundancy.spread,
            excluded=[index for index, one in enumerate(working) if one in taken],
            last=[index for index, one in enumerate(working) if one.lease.host in hosts],
        )
        return None if chosen is None else [*working, *self._starting][chosen]

    def _take_spare(self, apart: Sequence[EnvSlot]) -> EnvSlot | None:
        hosts = {slot.host for slot in apart}
        spares = [slot for slot in self._spares if not slot.failure]
        spare = min(spares, key=lambda slot: slot.host in hosts, default=None)
        if spare is not None:
            self._spares.pop(spare).set()
            spare.sandbox.lease.mark_spare(False)
        return spare

    async def _keep_spare(self) -> None:
        """Keep one environment ready in a sandbox of its own."""
        failures, backoff = 0, Backoff()
        while True:
            try:
                number = next(self._numbers)
                sandbox = await self._create({number})
                sandbox.lease.mark_spare(True)
                spare = await self._warmed(await self._make(sandbox, number))
            except AgentkitError:
                failures += 1
                await asyncio.sleep(backoff.delay(failures, random.Random()))
                continue
            failures, gone = 0, asyncio.Event()
            self._spares[spare] = gone
            spare.on_failure(lambda _, gone=gone: gone.set())
            await gone.wait()
            if self._spares.pop(spare, None) is not None:
                spare.release()

    async def _warmed(self, spare: EnvSlot) -> EnvSlot:
        """Reset a spare once, so that an episode need not wait for what the first ``reset`` loads."""
        try:
            await spare.reset(0, None, self._make_timeout)
        except BaseException:
            spare.release()
            raise
        return spare

    async def _started(self, number: int, starting: _StartingSandbox | None, avoid_hosts: set[str]) -> EnvSandbox:
        """Wait for a sandbox that is being created; create one if ``starting`` is None."""
        if starting is None:
            slots: set[int] = set()
            starting = _StartingSandbox(asyncio.ensure_future(self._create(slots, avoid_hosts)), slots)
            self._starting.append(starting)
            starting.task.add_done_callback(lambda _, done=starting: self._starting.remove(done))
        starting.slots.add(number)
        try:
            return await asyncio.shield(starting.task)
        except asyncio.CancelledError:
            starting.slots.discard(number)
            if starting.task.cancelled():
                raise EnvCrashed("the environment was closed while its sandbox started") from None
            raise

    async def _create(self, slots: set[int], avoid_hosts: Collection[str] = ()) -> EnvSandbox:
        """Create a sandbox with a process, for the environments ``slots``."""
        if self._closed:
            raise EnvCrashed("the sandboxes of this environment are closed")
        await self._pool.start()
        lease = await self._pool.acquire(avoid_hosts=avoid_hosts)
        try:
            process = await EnvProcess.start(lease.box, self.placement.command)
        except BaseException:
            lease.release(discard=True)
            raise
        lease.on_failure(process.lose)
        sandbox = EnvSandbox(process, lease, slots)
        self._sandboxes.append(sandbox)
        process.on_broken.append(lambda: None if slots else self._discard(sandbox))
        return sandbox

    async def _make(self, sandbox: EnvSandbox, number: int) -> EnvSlot:
        placement = self.placement
        arguments = (placement.id, placement.entry_point, dict(placement.kwargs), protocol.VERSION)
        try:
            made = await sandbox.process.call(number, "make", *arguments, timeout=self._make_timeout)
            description = check_description(made)
        except BaseException as error:
            sandbox.slots.discard(number)
            if isinstance(error, EnvContractError) or sandbox.process.broken is not None or not sandbox.slots:
                self._discard(sandbox)
            raise
        if self._capacity is None:
            shared = description.concurrency == "inline" and not description.runs_policy_code
            self._capacity = self.redundancy.share if shared else 1
            self._keeping = [asyncio.ensure_future(self._keep_spare()) for _ in range(self.redundancy.spares)]
        return EnvSlot(sandbox, number, description, self._release)

    def _release(self, slot: EnvSlot) -> None:
        if not slot.suspect:  # otherwise nothing else may enter the sandbox
            slot.sandbox.slots.discard(slot.number)  # its process closes it before it makes the next one
        tracked(self._dispose(slot), self._releasing)

    async def _dispose(self, slot: EnvSlot) -> None:
        sandbox = slot.sandbox
        if not slot.suspect and sandbox.process.broken is None:
            # A call that was given up may still be carried out before.
            timeout = self._make_timeout if sandbox.process.busy else CLOSE_TIMEOUT
            with contextlib.suppress(EnvError):
                await sandbox.process.call(slot.number, "close", timeout=timeout)
        if slot.suspect or sandbox.process.broken is not None:
            await self._remove(sandbox)

    def _discard(self, sandbox: EnvSandbox) -> None:
        tracked(self._remove(sandbox), self._releasing)

    async def _remove(self, sandbox: EnvSandbox) -> None:
        if sandbox not in self._sandboxes:
            return
        self._sandboxes.remove(sandbox)
        sandbox.lease.release(discard=True)
        await finished(sandbox.process.close())
