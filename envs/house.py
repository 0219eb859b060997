"""Sandboxes for the environments of one placement: rooms with seats, taken and left.

Invariant: environments that declare ``inline`` may share a process, as they would on the host; any other, and one that
runs code of the policy, has a sandbox of its own. A room whose process broke takes no environment in and is given
up as soon as that is seen; ``close`` removes every sandbox.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentkit.envs import frames
from agentkit.envs.answers import Description, check_description
from agentkit.envs.placement import Placement
from agentkit.envs.remote import EnvProcess
from agentkit.errors import EnvContractError, EnvCrashed, EnvError, SandboxError
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.pool import SandboxPool
from agentkit.sandboxes.sandbox import Sandbox

CLOSE_TIMEOUT = 5.0
"""Seconds that an environment gets for its ``close`` before its process is killed."""
_MOST = 4096
"""Sandboxes of one house."""
_PATIENCE = 600.0
"""Seconds to wait for a sandbox while many are being made."""


class Supply(Protocol):
    """Where sandboxes come from."""

    async def take(self) -> tuple[Sandbox, Callable[[], Awaitable[None]]]:
        """A sandbox, and what removes it. Raises ``SandboxError``."""
        ...

    async def close(self) -> None: ...


class Single:
    """Makes each sandbox when it is asked for."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    async def take(self) -> tuple[Sandbox, Callable[[], Awaitable[None]]]:
        box = await Sandbox.create(self._placement.spec, backend=self._placement.backend)
        return box, box.close

    async def close(self) -> None:
        return


class Pooled:
    """Takes sandboxes from a pool that keeps ``spare`` of them ready, so that a replacement is there at once."""

    def __init__(self, placement: Placement, spare: int = 1) -> None:
        self._pool = SandboxPool(placement.spec, placement.backend, min_idle=spare, max_size=_MOST, drain_timeout=0.0)

    async def take(self) -> tuple[Sandbox, Callable[[], Awaitable[None]]]:
        await self._pool.start()
        lease = await self._pool.take(_PATIENCE)

        async def remove() -> None:
            lease.release(discard=True)

        return lease.box, remove

    async def close(self) -> None:
        await self._pool.close()


@dataclass(eq=False)
class Room:
    """A sandbox with one process; ``seats`` that are taken count from the moment they are promised."""

    process: EnvProcess
    remove: Callable[[], Awaitable[None]]
    seats: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Opening:
    """A room that is being made, and who is promised a seat in it."""

    room: asyncio.Task[Room]
    seats: set[int]


@dataclass(frozen=True)
class Seat:
    """A place for one environment, which is made and described."""

    room: Room
    number: int
    description: Description


def choose(fills: Sequence[int], share: int, spread: int) -> int | None:
    """Which room takes one more environment.

    Args:
        fills: taken seats of each room.
        share: most seats of a room.
        spread: the share of all taken seats that one room may hold is 1 / ``spread``, or one seat if that is less.

    Returns:
        The index of the emptiest room, or None if a new room is needed.
    """
    limit = min(share, max(1, (sum(fills) + 1) // spread))
    emptiest = min(range(len(fills)), key=fills.__getitem__, default=None)
    return emptiest if emptiest is not None and fills[emptiest] < limit else None


class House:
    """Seats for environments of one placement, in as many sandboxes as it takes.

    Environments that declare ``inline`` may share a process, as ``choose`` has it.
    """

    def __init__(self, placement: Placement, supply: Supply | None = None, *, share: int = 1, spread: int = 1) -> None:
        self.placement = placement
        self._supply = supply or Single(placement)
        self._share, self._spread = share, spread
        self._capacity: int | None = None
        self._rooms: list[Room] = []
        self._numbers = itertools.count(1)
        self._first = asyncio.Lock()
        self._opening: list[_Opening] = []
        self._closed = False

    async def take(self, timeout: float) -> Seat:
        """A seat with a new environment; ``timeout`` in seconds is for making it, once there is a sandbox.

        Raises ``SandboxError``, ``RegistryError`` and ``EnvError``.
        """
        if self._capacity is None:
            async with self._first:  # nobody knows yet how many may share a room
                if self._capacity is None:
                    return await self._sit(timeout)
        return await self._sit(timeout)

    async def leave(self, seat: Seat) -> None:
        """Give a seat back; its environment is closed, in bounded time. Never raises what the environment does."""
        room = seat.room
        try:
            await room.process.call(seat.number, "close", timeout=CLOSE_TIMEOUT)
        except EnvError:
            pass
        finally:
            room.seats.discard(seat.number)
            if room.process.broken is not None:
                await self._give_up(room)

    async def give_up(self, seat: Seat) -> None:
        """Give up the whole room: what happened in it must not go on."""
        seat.room.seats.discard(seat.number)
        await self._give_up(seat.room)

    async def close(self) -> None:
        """Remove every sandbox. Twice is fine."""
        self._closed = True
        opening = [opening.room for opening in self._opening]
        for task in opening:
            task.cancel()
        if opening:
            await asyncio.wait(opening)
        await asyncio.gather(*(self._give_up(room) for room in list(self._rooms)), return_exceptions=True)
        await finished(self._supply.close())

    async def _sit(self, timeout: float) -> Seat:
        for room in [room for room in self._rooms if room.process.broken is not None and not room.seats]:
            await self._give_up(room)
        number = next(self._numbers)
        room = await self._enter(number)
        placement = self.placement
        arguments = (placement.id, placement.entry_point, dict(placement.kwargs), frames.VERSION)
        try:
            described = await room.process.call(number, "make", *arguments, timeout=timeout)
            description = check_description(described)
        except BaseException as error:
            room.seats.discard(number)
            if isinstance(error, EnvContractError) or room.process.broken is not None or not room.seats:
                await finished(self._give_up(room))
            raise
        if self._capacity is None:
            shared = description.concurrency == "inline" and not description.runs_policy_code
            self._capacity = self._share if shared else 1
        return Seat(room, number, description)

    async def _enter(self, number: int) -> Room:
        rooms: list[Room | _Opening] = [room for room in self._rooms if room.process.broken is None]
        rooms += self._opening
        chosen = choose([len(room.seats) for room in rooms], self._capacity or 1, self._spread)
        room = None if chosen is None else rooms[chosen]
        if isinstance(room, Room):
            room.seats.add(number)
            return room
        return await self._open(number, room)

    async def _open(self, number: int, opening: _Opening | None) -> Room:
        """A seat in a room that is being made: in ``opening``, or in a new one."""
        if opening is None:
            seats: set[int] = set()
            opening = _Opening(asyncio.ensure_future(self._furnish(seats)), seats)
            self._opening.append(opening)
            opening.room.add_done_callback(lambda _, done=opening: self._opening.remove(done))
        opening.seats.add(number)
        try:
            return await asyncio.shield(opening.room)
        except asyncio.CancelledError:
            opening.seats.discard(number)
            if opening.room.cancelled():
                raise EnvCrashed("the environment was closed while its sandbox started") from None
            raise

    async def _furnish(self, seats: set[int]) -> Room:
        if self._closed:
            raise EnvCrashed("the sandboxes of this environment are closed")
        box, remove = await self._supply.take()
        try:
            room = Room(await EnvProcess.start(box, self.placement.command), remove, seats)
        except BaseException:
            await finished(remove())
            raise
        self._rooms.append(room)
        return room

    async def _give_up(self, room: Room) -> None:
        if room not in self._rooms:
            return
        self._rooms.remove(room)
        try:
            await finished(room.process.close())
        finally:
            try:
                await finished(room.remove())
            except SandboxError:
                if self._closed:
                    raise
