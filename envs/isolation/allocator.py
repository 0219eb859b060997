"""Allocate environments to sandboxes: which sandbox a new environment goes into, and when sandboxes are removed.

Invariant: only environments that declare ``inline`` share a process, as they would on the host; every other
environment, and one that runs code of the policy, has a sandbox to itself. A sandbox whose process broke takes no
environment and is removed as soon as this is noticed; ``close`` removes every sandbox.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentkit.envs.isolation import protocol
from agentkit.envs.isolation.placement import Placement
from agentkit.envs.isolation.process import EnvProcess
from agentkit.envs.isolation.validation import Description, check_description
from agentkit.errors import EnvContractError, EnvCrashed, EnvError, SandboxError
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.tasks import finished

CLOSE_TIMEOUT = 5.0
"""Seconds that an environment gets for its ``close`` before its process is killed."""
_POOL_SIZE = 4096
_POOL_TIMEOUT = 600.0
"""Seconds to wait for a sandbox of a pool while many are being created."""


class SandboxSource(Protocol):
    """Creates or lends sandboxes."""

    async def acquire(self) -> tuple[Sandbox, Callable[[], Awaitable[None]]]:
        """Return a sandbox and a function that removes it. Raises ``SandboxError``."""
        ...

    async def close(self) -> None: ...


class NewSandboxes:
    """Creates each sandbox on demand."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    async def acquire(self) -> tuple[Sandbox, Callable[[], Awaitable[None]]]:
        box = await Sandbox.create(self._placement.spec, backend=self._placement.backend)
        return box, box.close

    async def close(self) -> None:
        return


class PooledSandboxes:
    """Takes sandboxes from a pool that keeps ``spare`` of them ready, so that a failed one is replaced at once."""

    def __init__(self, placement: Placement, spare: int = 1) -> None:
        self._pool = SandboxPool(
            placement.spec, placement.backend, min_idle=spare, max_size=_POOL_SIZE, drain_timeout=0.0
        )

    async def acquire(self) -> tuple[Sandbox, Callable[[], Awaitable[None]]]:
        await self._pool.start()
        lease = await self._pool.acquire(_POOL_TIMEOUT)

        async def remove() -> None:
            lease.release(discard=True)

        return lease.box, remove

    async def close(self) -> None:
        await self._pool.close()


@dataclass(eq=False)
class EnvSandbox:
    """A sandbox with one process that serves environments."""

    process: EnvProcess
    remove: Callable[[], Awaitable[None]]
    slots: set[int] = field(default_factory=set)
    """Numbers of the environments in it, counted from the moment they are allocated."""


@dataclass(eq=False)
class _StartingSandbox:
    """A sandbox that is being created, and the environments allocated to it."""

    task: asyncio.Task[EnvSandbox]
    slots: set[int]


@dataclass(frozen=True)
class EnvSlot:
    """An environment that was made in a sandbox."""

    sandbox: EnvSandbox
    number: int
    description: Description


def choose_sandbox(fills: Sequence[int], share: int, spread: int) -> int | None:
    """Choose the sandbox for one more environment.

    Args:
        fills: number of environments in each sandbox.
        share: most environments in one sandbox.
        spread: one sandbox holds at most 1 / ``spread`` of all environments, but at least one.

    Returns:
        The index of the emptiest sandbox, or None if a new sandbox is needed.
    """
    limit = min(share, max(1, (sum(fills) + 1) // spread))
    emptiest = min(range(len(fills)), key=fills.__getitem__, default=None)
    return emptiest if emptiest is not None and fills[emptiest] < limit else None


class SandboxAllocator:
    """Environments of one placement, spread over as many sandboxes as needed.

    Args:
        placement: the environment and the specification of its sandboxes.
        source: where sandboxes come from; by default each is created on demand.
        share: most environments in one sandbox, for environments that declare ``inline``.
        spread: see ``choose_sandbox``.
    """

    def __init__(
        self, placement: Placement, source: SandboxSource | None = None, *, share: int = 1, spread: int = 1
    ) -> None:
        self.placement = placement
        self._source = source or NewSandboxes(placement)
        self._share, self._spread = share, spread
        self._capacity: int | None = None
        self._sandboxes: list[EnvSandbox] = []
        self._numbers = itertools.count(1)
        self._first = asyncio.Lock()
        self._starting: list[_StartingSandbox] = []
        self._closed = False

    async def acquire(self, timeout: float) -> EnvSlot:
        """Make an environment; ``timeout`` (seconds) applies to making it, once there is a sandbox.

        Raises ``SandboxError``, ``RegistryError`` and ``EnvError``.
        """
        if self._capacity is None:
            async with self._first:  # the first environment tells how many may share a sandbox
                if self._capacity is None:
                    return await self._allocate(timeout)
        return await self._allocate(timeout)

    async def release(self, slot: EnvSlot) -> None:
        """Close the environment, in bounded time. Errors of the environment are ignored."""
        sandbox = slot.sandbox
        try:
            await sandbox.process.call(slot.number, "close", timeout=CLOSE_TIMEOUT)
        except EnvError:
            pass
        finally:
            sandbox.slots.discard(slot.number)
            if sandbox.process.broken is not None:
                await self._remove(sandbox)

    async def discard(self, slot: EnvSlot) -> None:
        """Remove the sandbox of an environment, with all environments in it."""
        slot.sandbox.slots.discard(slot.number)
        await self._remove(slot.sandbox)

    async def close(self) -> None:
        """Remove every sandbox. Idempotent."""
        self._closed = True
        starting = [starting.task for starting in self._starting]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        await asyncio.gather(*(self._remove(sandbox) for sandbox in list(self._sandboxes)), return_exceptions=True)
        await finished(self._source.close())

    async def _allocate(self, timeout: float) -> EnvSlot:
        for sandbox in [one for one in self._sandboxes if one.process.broken is not None and not one.slots]:
            await self._remove(sandbox)
        number = next(self._numbers)
        sandbox = await self._sandbox_for(number)
        placement = self.placement
        arguments = (placement.id, placement.entry_point, dict(placement.kwargs), protocol.VERSION)
        try:
            description = check_description(await sandbox.process.call(number, "make", *arguments, timeout=timeout))
        except BaseException as error:
            sandbox.slots.discard(number)
            if isinstance(error, EnvContractError) or sandbox.process.broken is not None or not sandbox.slots:
                await finished(self._remove(sandbox))
            raise
        if self._capacity is None:
            shared = description.concurrency == "inline" and not description.runs_policy_code
            self._capacity = self._share if shared else 1
        return EnvSlot(sandbox, number, description)

    async def _sandbox_for(self, number: int) -> EnvSandbox:
        candidates: list[EnvSandbox | _StartingSandbox] = [
            sandbox for sandbox in self._sandboxes if sandbox.process.broken is None
        ]
        candidates += self._starting
        chosen = choose_sandbox([len(one.slots) for one in candidates], self._capacity or 1, self._spread)
        sandbox = None if chosen is None else candidates[chosen]
        if isinstance(sandbox, EnvSandbox):
            sandbox.slots.add(number)
            return sandbox
        return await self._started(number, sandbox)

    async def _started(self, number: int, starting: _StartingSandbox | None) -> EnvSandbox:
        """Wait for a sandbox that is being created; create one if ``starting`` is None."""
        if starting is None:
            slots: set[int] = set()
            starting = _StartingSandbox(asyncio.ensure_future(self._create(slots)), slots)
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

    async def _create(self, slots: set[int]) -> EnvSandbox:
        if self._closed:
            raise EnvCrashed("the sandboxes of this environment are closed")
        box, remove = await self._source.acquire()
        try:
            sandbox = EnvSandbox(await EnvProcess.start(box, self.placement.command), remove, slots)
        except BaseException:
            await finished(remove())
            raise
        self._sandboxes.append(sandbox)
        return sandbox

    async def _remove(self, sandbox: EnvSandbox) -> None:
        if sandbox not in self._sandboxes:
            return
        self._sandboxes.remove(sandbox)
        try:
            await finished(sandbox.process.close())
        finally:
            try:
                await finished(sandbox.remove())
            except SandboxError:
                if self._closed:
                    raise
