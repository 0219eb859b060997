"""A router: several inference engines as one ``InferenceEngine``.

Invariant: every request gets exactly one answer, even if the engine that computes it is lost, and it is computed by
engines that serve the router's version. Requests pass only while the router is open; an engine joins, or stays after
an update, only with the router's version. Nothing is computed twice for a caller that got its answer.

A request contains its whole history, so any engine can compute it. The router sends the turns of a session to one
engine, its home, where their prefix is cached, as long as the home has not promised many more tokens than the idlest
engine.

A request runs in its caller's task: the event loop takes most of the time of a request, and another task would double
that. If the engine of a request is lost, the router cancels the call of the engine, as ``asyncio.timeout`` does, and
calls another one. So engines must end a cancelled call at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from agentkit.errors import EngineError, RoleError
from agentkit.trainers.inference.base import EngineStats, Generation, ManagedEngine, PauseMode, Sampling
from agentkit.trainers.weights.base import Weights

T = TypeVar("T")
Send = Callable[[Any], Coroutine[Any, Any, int]]

SLACK = 4096
"""Promised tokens by which the home of a session may exceed the idlest engine before its requests go there."""
_PROMPTS = 4096
"""Latest first prompts whose home is remembered, for further sessions with the same one."""
_NONE = EngineStats(0, 0, 0, 0.0, 0, 0)
_PROMISED = attrgetter("promised")
_LOAD = attrgetter("promised", "sessions", "index")


class Replica:
    """One engine behind a router. A lost engine never returns; another replica takes its index."""

    def __init__(self, index: int, engine: ManagedEngine) -> None:
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
    """One call of ``generate``: it waits, or an engine computes it, or it is interrupted and has not noticed yet."""

    task: asyncio.Task[Any]
    cancellations: int
    """Those of ``task`` that are not due to this request."""
    replica: Replica | None = None
    cost: int = 0
    waiting: asyncio.Future[None] | None = None
    aborted: bool = False


@dataclasses.dataclass(slots=True)
class _Session:
    home: Replica
    cached: int = 0
    """Leading tokens of the history whose keys and values the home has, as far as known."""


class Router:
    """Implements ``InferenceEngine`` over replicas, which ``join`` after they have been started."""

    def __init__(
        self,
        size: int,
        *,
        send: Send | None = None,
        verify: bool = False,
        deterministic: bool = False,
        slack: int = SLACK,
    ) -> None:
        """
        Args:
            size: number of replicas; their indices are ``0 … size - 1``.
            send: lets the learner send weights of which it keeps no copy; awaited during each update with such weights.
            verify: compare the weights that the engines serve after each update, and expel those that differ.
            deterministic: the home of a session depends on its name only, and the loss of an engine is an error.
            slack: tokens by which a home may exceed the idlest engine, see ``SLACK``.
        """
        self._size, self._send, self._deterministic, self._slack = size, send, deterministic, slack
        self._live: dict[int, Replica] = {}
        self._held: dict[str, list[_Request]] = {}
        """Requests that wait until the router is open and has an engine, by session."""
        self._sessions: dict[str, _Session] = {}
        self._prompts: OrderedDict[int, Replica] = OrderedDict()
        """Hashes of first prompts, with the engine that got the last one: the members of a group share it."""
        self._open = True
        self._weights: Weights | None = None
        self._verify = verify
        self._checksum: str | None = None
        """Of the served weights, as far as compared."""
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
                answer = (await self._update(self._weights, [replica]))[replica]
                if isinstance(answer, Exception):
                    raise answer
                replica.version = answer
                if replica.version != self._weights.version:
                    raise _wrong_version(replica, self._weights.version)
                if self._verify and self._checksum is not None:
                    checksum = await self._ask(replica, engine.checksum())
                    if checksum != self._checksum:
                        raise _wrong_weights(replica)
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
        _interrupt(replica)

    def fail(self, cause: Exception) -> None:
        """End all requests, and all later calls, with ``cause``. The first cause stays."""
        self._failure = self._failure or cause
        for replica in self._live.values():
            _interrupt(replica)
        self._release()

    async def close(self) -> None:
        """End all requests and all later calls with an error. Each engine is closed by its owner. Idempotent."""
        self.fail(EngineError("the engines are closed", fatal=True))

    # -- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        task = asyncio.current_task()
        assert task is not None
        request = _Request(task, _cancellations(task))
        while True:
            self._check()
            if not self._open or not self._live:
                await self._hold(request, session)
                if request.aborted:
                    return Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
                continue
            home = self._choose(prompt_ids, session)
            replica = home.home
            _place(request, replica, max(len(prompt_ids) - home.cached, 1) + sampling.max_tokens)
            try:
                generation = await replica.engine.generate(prompt_ids, sampling, session=session)
            except (Exception, asyncio.CancelledError) as error:
                if _take_back(request):
                    cause = _loss(request, replica, error)
                    if cause is None:
                        raise
                    self.expel(replica, cause)
                else:
                    _acknowledge(request)
            else:
                if _take_back(request):
                    home.cached = len(prompt_ids) + len(generation.ids) - 1
                    return generation
                _acknowledge(request)
            finally:
                _take_back(request)

    async def abort(self, session: str) -> None:
        """End a session's requests where they are, and forget its home."""
        if self._failure is not None:
            return  # They have ended.
        for request in self._held.get(session, ()):
            request.aborted = True
            _wake(request)
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

    def _choose(self, prompt: Sequence[int] | np.ndarray, session: str) -> _Session:
        """Return the session with the engine for its next request, and how many tokens are cached there."""
        known = self._sessions.get(session)
        if known is not None and (self._deterministic or self._has_room(known.home)):
            return known
        if self._deterministic:
            home, cached = self._live[zlib.crc32(session.encode()) % self._size], 0
        elif known is None:
            home, cached = self._of_prompt(prompt)
        else:
            home, cached = self._idlest(), 0
        if known is not None:
            known.home.sessions -= 1
        home.sessions += 1
        self._sessions[session] = chosen = _Session(home, cached)
        return chosen

    def _has_room(self, home: Replica) -> bool:
        least = min(map(_PROMISED, self._live.values()))
        return not home.lost.done() and home.promised <= least + self._slack

    def _idlest(self) -> Replica:
        return min(self._live.values(), key=_LOAD)

    def _of_prompt(self, ids: Sequence[int] | np.ndarray) -> tuple[Replica, int]:
        """Return the engine that got the last session with this first prompt, else the idlest; and what it caches."""
        prompt = hash(np.asarray(ids, np.int32).tobytes())
        home = self._prompts.get(prompt)
        if home is not None and self._has_room(home):
            cached = len(ids)
        else:
            home, cached = self._idlest(), 0
        self._prompts[prompt] = home
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > _PROMPTS:
            self._prompts.popitem(last=False)
        return home, cached

    async def _hold(self, request: _Request, session: str) -> None:
        """Wait until the router may be open, or has failed, or the request is aborted."""
        request.waiting = asyncio.get_running_loop().create_future()
        held = self._held.setdefault(session, [])
        held.append(request)
        try:
            await request.waiting
        finally:
            held.remove(request)
            if not held:
                del self._held[session]

    def _release(self) -> None:
        for requests in self._held.values():
            for request in requests:
                _wake(request)

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
            answers = await self._update(weights, self.live)
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
            self._weights = weights
            if self._verify:
                await self._compare()
            self._check()
            self._prompts.clear()
            for known in self._sessions.values():
                known.cached = 0
        return weights.version

    async def _update(self, weights: Weights, replicas: Sequence[Replica]) -> dict[Replica, int | Exception]:
        """Update replicas. Raises the learner's error if it sends the weights and fails."""
        weights = weights.for_engines(len(replicas))
        updating = asyncio.ensure_future(self._answers(lambda engine: engine.update_weights(weights), replicas))
        if not weights.sent or not replicas:
            return await updating
        assert self._send is not None
        sending = asyncio.ensure_future(self._send(weights))
        try:
            await asyncio.wait((sending, updating), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            answers = await updating
            if weights.version in answers.values():
                await sending
            return answers
        finally:
            sending.cancel()
            updating.cancel()
            await asyncio.gather(sending, updating, return_exceptions=True)

    async def _compare(self) -> None:
        """Expel the engines whose weights differ from those of most; without a majority, all of them."""
        answers = await self._answers(lambda engine: engine.checksum(), self.live)
        votes = Counter(answer for answer in answers.values() if isinstance(answer, str))
        self._checksum = next((checksum for checksum, count in votes.items() if 2 * count > len(answers)), None)
        for replica, answer in answers.items():
            if isinstance(answer, Exception):
                self.expel(replica, answer)
            elif answer != self._checksum:
                self.expel(replica, _wrong_weights(replica))

    async def sleep(self) -> None:
        """Let all engines sleep until the next update."""
        self._check()
        async with self._fence:
            await self._each(lambda engine: engine.sleep())

    async def checksum(self) -> str:
        """Return the checksum of the served weights, which the engines were compared by; empty without a comparison."""
        return self._checksum or ""

    async def _each(self, call: Callable[[ManagedEngine], Coroutine[Any, Any, Any]]) -> None:
        """Call all engines at once; expel those that fail."""
        for replica, answer in (await self._answers(call, self.live)).items():
            if isinstance(answer, Exception):
                self.expel(replica, answer)
        self._check()

    async def _answers(
        self, call: Callable[[ManagedEngine], Coroutine[Any, Any, T]], replicas: Sequence[Replica]
    ) -> dict[Replica, T | Exception]:
        async def answer(replica: Replica) -> T | Exception:
            try:
                return await self._ask(replica, call(replica.engine))
            except Exception as error:
                return error

        return dict(zip(replicas, await asyncio.gather(*map(answer, replicas)), strict=True))

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
        for replica, answer in (await self._answers(lambda engine: engine.stats(), self.live)).items():
            if isinstance(answer, Exception):
                self.expel(replica, answer)
            else:
                replica.stats = answer
        self._check()
        engines = tuple(self._total(index, self._live.get(index)) for index in range(self._size))
        total, held = _sum(engines), sum(map(len, self._held.values()))
        return dataclasses.replace(
            total, busy_s=total.busy_s / self._size, waiting=total.waiting + held, engines=engines
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


def _place(request: _Request, replica: Replica, cost: int) -> None:
    request.replica, request.cost = replica, cost
    replica.promised += cost
    replica.requests[request] = None


def _take_back(request: _Request) -> bool:
    """Remove a request from its engine. Return False if it has none, because it was interrupted."""
    replica, request.replica = request.replica, None
    if replica is None:
        return False
    replica.promised -= request.cost
    del replica.requests[request]
    return True


def _interrupt(replica: Replica) -> None:
    """Take back all requests of an engine. Their tasks notice it by a cancellation."""
    for request in list(replica.requests):
        _take_back(request)
        request.task.cancel()


def _acknowledge(request: _Request) -> None:
    """Go on after an interruption. Raises ``CancelledError`` if the caller has cancelled the task, too."""
    if sys.version_info >= (3, 11) and request.task.uncancel() > request.cancellations:
        raise asyncio.CancelledError


def _loss(request: _Request, replica: Replica, error: BaseException) -> Exception | None:
    """Return why an engine is lost that ended a request with ``error``; None if it is not, and the error the caller's.

    Python 3.10 does not count cancellations: there each one is the caller's.
    """
    if isinstance(error, asyncio.CancelledError):
        if sys.version_info < (3, 11) or request.task.cancelling() > request.cancellations:
            return None
        return EngineError(f"engine {replica.index} cancelled a request of its own accord", fatal=True)
    return error if isinstance(error, Exception) and is_lost(error) else None


def _cancellations(task: asyncio.Task[Any]) -> int:
    """Return the number of cancellations of a task that are under way."""
    return task.cancelling() if sys.version_info >= (3, 11) else 0


def _wake(request: _Request) -> None:
    if request.waiting is not None and not request.waiting.done():
        request.waiting.set_result(None)


def is_lost(error: Exception) -> bool:
    """Return whether an engine that raised ``error`` serves nothing any more."""
    return isinstance(error, RoleError) or (isinstance(error, EngineError) and error.fatal)


def _wrong_version(replica: Replica, version: int) -> EngineError:
    return EngineError(
        f"engine {replica.index} serves version {replica.version} after an update to version {version}", fatal=True
    )


def _wrong_weights(replica: Replica) -> EngineError:
    return EngineError(
        f"engine {replica.index} serves other weights than most engines after the update to version {replica.version}",
        fatal=True,
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
        request_s=sum(part.request_s for part in parts),
    )
