"""A router: several inference engines as one ``InferenceEngine``.

Invariant: every request gets exactly one answer, even if the engine that computes it is lost, and it is computed by
engines that serve the router's version. Requests pass only while the router is open; an engine joins, or stays after
an update, only with the router's version. Nothing is computed twice for a caller that got its answer.

A request contains its whole history, so any engine can compute it. The router sends the turns of a session to one
engine, its home, where their prefix is cached, as long as the home has not promised many more tokens than the idlest
engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from agentkit.errors import EngineError, RoleError
from agentkit.trainers.inference.base import EngineStats, Generation, InferenceEngine, PauseMode, Sampling
from agentkit.trainers.weights.base import Weights

T = TypeVar("T")

SLACK = 4096
"""Promised tokens by which the home of a session may exceed the idlest engine before its requests go there."""
_PROMPTS = 4096
"""Latest first prompts whose home is remembered, for further sessions with the same one."""
_NONE = EngineStats(0, 0, 0, 0.0, 0, 0)


class Replica:
    """One engine behind a router. A lost engine never returns; another replica takes its index."""

    def __init__(self, index: int, engine: InferenceEngine) -> None:
        self.index, self.engine = index, engine
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Done when the engine is lost; its result is the cause."""
        self.version = 0
        """The version that the engine has acknowledged."""
        self.promised = 0
        """Tokens of its requests: those of prompts that are not known to be cached there, and ``max_tokens``."""
        self.sessions = 0
        self.requests: dict[_Request, None] = {}
        self.stats = _NONE
        """The last known counters."""


@dataclasses.dataclass(eq=False, slots=True)
class _Request:
    prompt: Sequence[int] | np.ndarray
    sampling: Sampling
    session: str
    answer: asyncio.Future[Generation]
    replica: Replica | None = None
    call: asyncio.Task[Generation] | None = None
    cost: int = 0


@dataclasses.dataclass(slots=True)
class _Session:
    home: Replica
    cached: int = 0
    """Leading tokens of the history whose keys and values the home has, as far as known."""


class Router:
    """Implements ``InferenceEngine`` over replicas, which ``join`` after they have been started."""

    def __init__(self, size: int, *, deterministic: bool = False, slack: int = SLACK) -> None:
        """
        Args:
            size: number of replicas; their indices are ``0 … size - 1``.
            deterministic: the home of a session depends on its name only, and the loss of an engine is an error.
            slack: tokens by which a home may exceed the idlest engine, see ``SLACK``.
        """
        self._size, self._deterministic, self._slack = size, deterministic, slack
        self._live: dict[int, Replica] = {}
        self._held: dict[_Request, None] = {}
        """Requests that wait until the router is open and has an engine, in order of arrival."""
        self._sessions: dict[str, _Session] = {}
        self._requests: dict[str, dict[_Request, None]] = {}
        """Unanswered requests by session."""
        self._prompts: OrderedDict[int, Replica] = OrderedDict()
        """Hashes of first prompts, with the engine that got the last one: the members of a group share it."""
        self._open = True
        self._weights: Weights | None = None
        self._fence = asyncio.Lock()
        """Held while the engines pause, resume or change their weights."""
        self._past = [_NONE] * size
        """Counters of lost engines, by index."""
        self._lost = [0] * size
        self._failure: Exception | None = None

    @property
    def live(self) -> list[Replica]:
        """The replicas that serve, by index."""
        return [self._live[index] for index in sorted(self._live)]

    # -- engines ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Do nothing: each engine is started before it joins."""

    async def join(self, replica: Replica) -> None:
        """Admit a started engine, after an update to the router's version.

        Raises the engine's error if the update fails, or the cause if the replica is lost meanwhile.
        """
        async with self._fence:
            self._check()
            engine = replica.engine
            await self._ask(replica, engine.pause("abort"))
            if self._weights is not None:
                replica.version = await self._ask(replica, engine.update_weights(self._weights))
                if replica.version != self._weights.version:
                    raise _wrong_version(replica, self._weights.version)
            if self._open:
                await self._ask(replica, engine.resume())
            if not self._open:  # Closed meanwhile: the pause waits for the fence.
                await self._ask(replica, engine.pause("abort"))
            self._check()
            self._live[replica.index] = replica
        self._release()

    def expel(self, replica: Replica, cause: Exception) -> None:
        """Stop using a replica; other engines compute its requests. The caller closes the engine. Idempotent."""
        if replica.lost.done():
            return
        replica.lost.set_result(cause)
        if self._live.get(replica.index) is replica:
            del self._live[replica.index]
        self._past[replica.index] = self._total(replica.index, replica)
        self._lost[replica.index] += 1
        if self._deterministic:
            self.fail(cause)
        requests = list(replica.requests)
        for request in requests:
            self._take_back(request)
        for request in requests:
            self._place(request)

    def fail(self, cause: Exception) -> None:
        """End all requests, and all later calls, with ``cause``. The first cause stays."""
        self._failure = self._failure or cause
        for requests in list(self._requests.values()):
            for request in list(requests):
                self._take_back(request)
                if not request.answer.done():
                    request.answer.set_exception(self._failure)
        self._held.clear()

    async def close(self) -> None:
        """End all requests and all later calls with an error. Each engine is closed by its owner. Idempotent."""
        self.fail(EngineError("the engines are closed", fatal=True))

    # -- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        self._check()
        request = _Request(prompt_ids, sampling, session, asyncio.get_running_loop().create_future())
        requests = self._requests.setdefault(session, {})
        requests[request] = None
        self._place(request)
        try:
            return await request.answer
        finally:
            self._take_back(request)
            self._held.pop(request, None)
            del requests[request]
            if not requests and self._requests.get(session) is requests:
                del self._requests[session]

    async def abort(self, session: str) -> None:
        """End a session's requests where they are, and forget its home."""
        if self._failure is not None:
            return  # They have ended.
        for request in list(self._requests.get(session, ())):
            if request in self._held:
                del self._held[request]
                request.answer.set_result(Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort"))
        known = self._sessions.pop(session, None)
        if known is None or known.home.lost.done():
            return
        known.home.sessions -= 1
        try:
            await self._ask(known.home, known.home.engine.abort(session))
        except Exception as error:
            if not is_lost(error):
                raise
            self.expel(known.home, error)

    def _place(self, request: _Request) -> None:
        """Send a request to an engine, or hold it back."""
        if request.answer.done():
            return
        if not self._open or not self._live:
            self._held[request] = None
            return
        replica, cached = self._choose(request)
        request.cost = max(len(request.prompt) - cached, 1) + request.sampling.max_tokens
        request.replica = replica
        replica.promised += request.cost
        replica.requests[request] = None
        generation = replica.engine.generate(request.prompt, request.sampling, session=request.session)
        request.call = asyncio.ensure_future(generation)
        request.call.add_done_callback(partial(self._answered, request, replica))

    def _choose(self, request: _Request) -> tuple[Replica, int]:
        """Return the engine for a request, and how many of its prompt's tokens are cached there; make it the home."""
        known = self._sessions.get(request.session)
        if self._deterministic:
            home, cached = self._live[zlib.crc32(request.session.encode()) % self._size], 0
        else:
            idlest = min(self._live.values(), key=lambda replica: (replica.promised, replica.sessions, replica.index))
            home, cached = (known.home, known.cached) if known is not None else self._of_prompt(request, idlest)
            if home.lost.done() or home.promised > idlest.promised + self._slack:
                home, cached = idlest, 0
        if known is not None:
            known.home.sessions -= 1
        self._sessions[request.session] = _Session(home, cached)
        home.sessions += 1
        return home, cached

    def _of_prompt(self, request: _Request, idlest: Replica) -> tuple[Replica, int]:
        """Return the engine that got the last session with this first prompt, else the idlest; and what it caches."""
        prompt = hash(np.asarray(request.prompt, np.int32).tobytes())
        home = self._prompts.get(prompt)
        if home is None or home.lost.done() or home.promised > idlest.promised + self._slack:
            home, cached = idlest, 0
        else:
            cached = len(request.prompt)
        self._prompts[prompt] = home
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > _PROMPTS:
            self._prompts.popitem(last=False)
        return home, cached

    def _answered(self, request: _Request, replica: Replica, call: asyncio.Task[Generation]) -> None:
        cancelled = EngineError(f"engine {replica.index} cancelled a request of its own accord", fatal=True)
        error = cancelled if call.cancelled() else call.exception()
        if request.call is not call:
            return  # It was cancelled, or another engine computes it.
        if isinstance(error, Exception) and is_lost(error):
            self.expel(replica, error)
            return
        self._take_back(request)
        if request.answer.done():
            return
        if error is not None:
            request.answer.set_exception(error)
            return
        generation, known = call.result(), self._sessions.get(request.session)
        if known is not None and known.home is replica:
            known.cached = len(request.prompt) + len(generation.ids) - 1
        request.answer.set_result(generation)

    def _take_back(self, request: _Request) -> None:
        """Remove a request from its engine, if it has one."""
        replica, call = request.replica, request.call
        request.replica = request.call = None
        if replica is not None and call is not None:
            del replica.requests[request]
            replica.promised -= request.cost
            call.cancel()

    def _release(self) -> None:
        held, self._held = self._held, {}
        for request in held:
            self._place(request)

    # -- fences -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        self._check()
        self._open = False
        async with self._fence:
            await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        self._check()
        async with self._fence:
            await self._each(lambda engine: engine.resume())
            self._open = True
        self._release()

    async def update_weights(self, weights: Weights) -> int:
        """Update all engines. One that fails is expelled; if all refuse the weights, the engines keep the old ones.

        Engines that join later get these weights.
        """
        self._check()
        if self._open:
            raise EngineError("update_weights was called while the engines sample: call pause first")
        async with self._fence:
            version = weights.version
            answers = await self._answers(lambda engine: engine.update_weights(weights))
            refusals = [answer for answer in answers.values() if isinstance(answer, Exception) and not is_lost(answer)]
            if refusals and version not in answers.values():
                raise refusals[0]
            for replica, answer in answers.items():
                if isinstance(answer, Exception):
                    self.expel(replica, answer)
                    continue
                replica.version = answer
                if answer != version:
                    self.expel(replica, _wrong_version(replica, version))
            self._check()
            self._weights = weights
            self._prompts.clear()
            for known in self._sessions.values():
                known.cached = 0
        return weights.version

    async def _each(self, call: Callable[[InferenceEngine], Coroutine[Any, Any, Any]]) -> None:
        """Call all engines at once; expel those that fail."""
        for replica, answer in (await self._answers(call)).items():
            if isinstance(answer, Exception):
                self.expel(replica, answer)
        self._check()

    async def _answers(self, call: Callable[[InferenceEngine], Coroutine[Any, Any, T]]) -> dict[Replica, T | Exception]:
        async def answer(replica: Replica) -> T | Exception:
            try:
                return await self._ask(replica, call(replica.engine))
            except Exception as error:
                return error

        live = self.live
        return dict(zip(live, await asyncio.gather(*map(answer, live)), strict=True))

    async def _ask(self, replica: Replica, call: Coroutine[Any, Any, T]) -> T:
        """Await a control call. Raises ``EngineError`` with the cause as soon as the replica is lost."""
        task = asyncio.ensure_future(call)
        try:
            await asyncio.wait((task, replica.lost), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineError(f"engine {replica.index} was lost: {replica.lost.result()}", fatal=True)
            return task.result()
        finally:
            task.cancel()

    # -- state ------------------------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """Return the sums over all engines, with those of each index in ``engines``.

        Counters of lost engines stay in the sums, so that no counter goes back. ``busy_s`` is the mean.
        """
        self._check()
        for replica, answer in (await self._answers(lambda engine: engine.stats())).items():
            if isinstance(answer, Exception):
                self.expel(replica, answer)
            else:
                replica.stats = answer
        self._check()
        engines = tuple(self._total(index, self._live.get(index)) for index in range(self._size))
        total = _sum(engines)
        return dataclasses.replace(
            total, busy_s=total.busy_s / self._size, waiting=total.waiting + len(self._held), engines=engines
        )

    def _total(self, index: int, replica: Replica | None) -> EngineStats:
        """Return the counters of all engines that had this index, and the state of ``replica``, the present one."""
        past = dataclasses.replace(self._past[index], running=0, waiting=0, restarts=self._lost[index])
        if replica is None:
            return past
        return dataclasses.replace(_sum([past, replica.stats]), version=replica.version)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def is_lost(error: Exception) -> bool:
    """Return whether an engine that raised ``error`` serves nothing any more."""
    return isinstance(error, RoleError) or (isinstance(error, EngineError) and error.fatal)


def _wrong_version(replica: Replica, version: int) -> EngineError:
    return EngineError(
        f"engine {replica.index} serves version {replica.version} after an update to version {version}", fatal=True
    )


def _sum(parts: Sequence[EngineStats]) -> EngineStats:
    return EngineStats(
        generated_tokens=sum(part.generated_tokens for part in parts),
        prefilled_tokens=sum(part.prefilled_tokens for part in parts),
        reused_tokens=sum(part.reused_tokens for part in parts),
        busy_s=sum(part.busy_s for part in parts),
        running=sum(part.running for part in parts),
        waiting=sum(part.waiting for part in parts),
        version=max((part.version for part in parts), default=0),
        restarts=sum(part.restarts for part in parts),
    )
