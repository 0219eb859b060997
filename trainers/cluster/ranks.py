"""The proxy of a role in one actor, or in one actor per rank.

Invariant: every call goes to all ranks, and the first error of any rank is raised and ends the whole group: the others
may hang in a collective.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import ray

from agentkit.errors import RoleError
from agentkit.trainers.cluster.channel import Channel, RoleCall
from agentkit.trainers.cluster.encoding import Encoded, encode, size
from agentkit.trainers.cluster.host import Kind, Surroundings
from agentkit.trainers.cluster.placement import Slot

logger = logging.getLogger(__name__)

START_S = 600.0
"""Seconds for starting the actors, importing and constructing the role."""
CLOSE_S = 30.0
"""Seconds for a role's ``close`` before its processes are killed."""
NOTICE_S = 3.0
"""Seconds to notice the death of a rank after another one failed: the others fail in a collective because of it."""
GRACE_S = 5.0
"""Seconds for the other ranks to finish their calls after one rank failed."""
SHARED_BYTES = 100_000
"""Arguments of at least this size are stored once for all ranks, in one copy per node."""


class RemoteRole:
    """The proxy of a role in actors; it has the role's coroutine methods. Created by ``place``."""

    def __init__(self, name: str, ranks: int) -> None:
        self._name = name
        names = [name if ranks == 1 else f"{name} rank {rank}" for rank in range(ranks)]
        self._channels = [Channel(of_rank, self._on_end) for of_rank in names]
        self._methods: frozenset[str] = frozenset()
        self.lost: asyncio.Future[RoleError] = asyncio.get_running_loop().create_future()
        """Done when the role cannot be used any more because a process died or hung, or because one of several ranks
        raised another error than an ``AgentkitError``; its result is the cause."""
        self._failure: str | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{self._name} in {len(self._channels)} actor(s){'' if self.alive() else ', ended'}>"

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_") or method not in self._methods:
            raise AttributeError(f"the role {self.__dict__.get('_name')!r} has no public coroutine method {method!r}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, args, kwargs)

        call.__name__ = method
        self.__dict__[method] = call  # later lookups skip this function
        return call

    def alive(self) -> bool:
        """Return whether all processes of the role run. (A process that hangs is alive.)"""
        return self._failure is None and all(channel.alive for channel in self._channels)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank, each on the node of its rank."""
        return [pid for _, pid in self.processes]

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Address of the node and process id, by rank."""
        identities = [channel.identity for channel in self._channels if channel.identity is not None]
        return [(identity.address, identity.pid) for identity in identities]

    async def _launch(self, slots: Sequence[Slot], factory: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start the actors and construct the role; on an error nothing remains."""
        try:
            await asyncio.wait_for(self._start(slots, factory, args, kwargs), START_S)
        except BaseException as error:
            tails = [await channel.tail() for channel in self._channels] if _timed_out(error) else []
            self._failure = f"{self._name} could not be started"
            await asyncio.shield(asyncio.get_running_loop().create_task(self._end_all(self._failure)))
            if _timed_out(error):
                raise RoleError(
                    f"{self._name} was not constructed within {START_S:g} s, so it was killed. Its last output:\n"
                    + "\n".join(tails)
                ) from None
            raise

    async def _start(self, slots: Sequence[Slot], factory: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around = Surroundings(sys.path, os.getcwd())
        await asyncio.gather(
            *(channel.start(slot, around) for channel, slot in zip(self._channels, slots, strict=True))
        )
        extra: list[dict[str, Any]] = [{}]
        ranks = len(self._channels)
        if ranks > 1:
            init_method = await self._channels[0].rendezvous()
            extra = [{"rank": rank, "world_size": ranks, "init_method": init_method} for rank in range(ranks)]
        calls = [
            channel.request(Kind.CONSTRUCT, "its constructor", encode((factory, args, {**kwargs, **more})))
            for channel, more in zip(self._channels, extra, strict=True)
        ]
        self._methods = await self._results(calls)

    async def close(self) -> None:
        """Await the role's ``close`` for at most ``CLOSE_S``, then end its actors. Idempotent.

        After the actors have ended, raises the error of the role's ``close``, if any.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        elif self._closing.done():
            return
        await asyncio.shield(self._closing)

    async def kill(self) -> None:
        """End the actors at once, without the role's ``close``: for a role that hangs. Idempotent."""
        self._failure = self._failure or f"{self._name} was killed"
        await self._end_all(self._failure)

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._failure is not None:
            raise RoleError(self._failure)
        body: Encoded | Any = encode((method, args, kwargs))
        if len(self._channels) > 1 and size(body) >= SHARED_BYTES:
            body = ray.put(body)
        return await self._results([channel.request(Kind.CALL, method, body) for channel in self._channels])

    async def _results(self, calls: list[RoleCall]) -> Any:
        """Wait for all calls and return the first one's result; raise the error of the first call that fails."""
        try:
            if len(calls) == 1:
                return await calls[0].future
            futures = [call.future for call in calls]
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            if any(future.done() and future.exception() is not None for future in futures):
                await asyncio.wait(futures, timeout=NOTICE_S)
            ended_first = sorted(zip(futures, self._channels, strict=True), key=lambda pair: pair[1].alive)
            for future, channel in ended_first:
                error = future.exception() if future.done() else None
                if error is not None:
                    for other in futures:
                        other.add_done_callback(_forget)
                    if isinstance(error, RoleError):
                        self._lose(error)
                    await self._fail(f"{self._name} has ended because {channel.name} failed: {error}")
                    raise error
            return futures[0].result()
        except asyncio.CancelledError:
            for call, channel in zip(calls, self._channels, strict=True):
                channel.cancel(call)
            raise

    def _on_end(self, error: RoleError) -> None:
        """Handle the end of an actor: the others cannot continue without it."""
        first, self._failure = self._failure is None, self._failure or str(error)
        if first:
            self._lose(error)
        if first and any(channel.alive for channel in self._channels):
            self._ending = asyncio.get_running_loop().create_task(self._end_failed())

    def _lose(self, cause: RoleError) -> None:
        if not self.lost.done():
            self.lost.set_result(cause)

    async def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_failed())
        await asyncio.shield(self._ending)

    async def _end_failed(self) -> None:
        futures = [future for channel in self._channels for future in channel.pending()]
        if futures:
            await asyncio.wait(futures, timeout=GRACE_S)
        await self._end_all(str(self._failure))

    async def _end_all(self, cause: str) -> None:
        await asyncio.gather(*(channel.kill(cause) for channel in self._channels))

    async def _close(self) -> None:
        try:
            if self._failure is None and "close" in self._methods:
                await asyncio.wait_for(self._call("close", (), {}), CLOSE_S)
        except asyncio.TimeoutError:
            logger.warning("%s did not close within %s s; its processes are killed", self._name, CLOSE_S)
        finally:
            self._failure = self._failure or f"{self._name} is closed"
            if self._ending is not None:
                await asyncio.shield(self._ending)
            await self._end_all(f"{self._name} is closed")


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, asyncio.TimeoutError)


def _forget(future: asyncio.Future[Any]) -> None:
    """Mark a future's error as retrieved; another rank's error is reported."""
    if not future.cancelled():
        future.exception()
