"""The life of one sandbox from its making to its removal: who may work in it, and when it ends.

Invariant: every call ends, with a result or a typed error, also when the engine or the sandbox hangs. What was made is
removed exactly once: by ``close``, at the end of its time to live, or at once if it never became ready or its caller
was cancelled meanwhile. Commands reach only a sandbox that is fit for them: one that is lost, expired, or tainted by
processes that nobody could kill refuses them. Time is the event loop's, which never jumps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from agentkit.errors import EngineUnavailable, InvalidTransition, LeaseExpired, SandboxError, SandboxLost, StartTimeout
from agentkit.sandboxes import calls
from agentkit.sandboxes.aio import finished, stopped
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends import Release
from agentkit.sandboxes.claims import ORIGIN, Claim
from agentkit.sandboxes.lifecycle import WORKING, Lifecycle
from agentkit.sandboxes.pulse import MISSES, PERIOD, pulse
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import ExecRequest, ExecResult, Snapshot, State, Transition

T = TypeVar("T")

_log = logging.getLogger(__name__)

ANSWER_GRACE = 10.0
"""Seconds beyond its own timeout that a command gets whose agent answers pings: killing what ran out of time takes the
agent up to 2 s."""
OVERDUE_PERIOD, OVERDUE_MISSES = 0.95, 2
"""After its own timeout, silence of so many periods shows that the agent is hung."""
CALL_TIMEOUT = 60.0
"""Seconds after which a call that is no command means the same."""
ENGINE_TIMEOUT = 30.0
"""Seconds that removing, pausing and the like may take."""
_READY_POLL = 0.05
_FIND_OUT = 0.5
"""Seconds after which a sandbox whose connection ended counts as running on, if the engine still says so."""
_FIND_OUT_MOST = 5.0
"""Seconds that the engine gets to say it."""
_LOG_TAIL = 50
_RETRY_MOST = 60.0


class Living:
    """A sandbox without what it can do; see ``Sandbox``."""

    def __init__(self, id: str, spec: SandboxSpec, backend: Backend, release: Release) -> None:
        self.id = id
        self.spec = spec
        self.backend = backend
        self._release = release
        self._lifecycle = Lifecycle(id, monotonic=asyncio.get_running_loop().time)
        self._claim = Claim(id, spec, backend)
        self._owned = True
        self._channel: Channel | None = None
        self._loss: str | None = None
        self._tainted = False
        self._expired = False
        self._finding: asyncio.Task[dict[str, Any]] | None = None
        self._in_flight = 0
        self._waiting = 0
        self._vigil: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._origin: Snapshot | None = None
        self._discard_origin = False
        self._created = time.time()
        self._expires_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def call(self, work: Callable[[Channel], Awaitable[T]], cause: str) -> T:
        """One call on the channel of a working sandbox, bounded in time. Raises like ``exec``."""
        with self._work(cause) as channel:
            return await self._answered(channel, work(channel), CALL_TIMEOUT, 0.0)

    async def working(self, work: Awaitable[T], cause: str) -> T:
        """Work that bounds its own time, for which the sandbox counts as busy. Raises like ``exec``."""
        try:
            with self._work(cause), self.watched():
                return await work
        finally:
            if isinstance(work, Coroutine):
                work.close()

    async def ping(self, timeout: float = 2.0) -> float:
        """Seconds of a round trip to the agent. Raises ``asyncio.TimeoutError``, ``SandboxLost``."""
        return await self._usable().ping(timeout)

    async def pulse(self, period: float, misses: int) -> float | None:
        """Seconds until a sign of life; None if there was none for ``misses`` periods in a row.

        Raises ``SandboxLost``, and ``InvalidTransition`` if it was paused meanwhile.
        """
        channel, began = self._usable(), self._now()
        latency = await pulse(channel, period, misses)
        if latency is None and self.was_paused(began):
            raise self._impossible("answer")
        return latency

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While the body waits for something in the sandbox, look every second whether it lives.

        Once it is silent for some seconds it is lost (``hung``), and all that waits for it raises ``SandboxLost``.
        """
        self._waiting += 1
        if self._vigil is None:
            self._vigil = asyncio.get_running_loop().call_later(PERIOD, self._begin_vigil)
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting and self._vigil is not None:
                self._vigil.cancel()
                self._vigil = None

    def condemn(self, reason: str) -> None:
        """It is lost, as seen from outside: what waits for it fails at once, and it takes no more commands."""
        channel = self._channel
        if channel is None or channel.lost.done() or self.state in ("unhealthy", "stopping", "removed", "failed"):
            return
        channel.lose(reason)
        self._on_lost(channel)

    def was_paused(self, since: float) -> bool:
        """Whether its owner paused it, or let it go on, at any time since then (of the event loop)."""
        return self.state == "paused" or any(
            "paused" in (change.before, change.after) and change.monotonic >= since for change in self.history
        )

    def note_slowness(self, slow: bool, cause: str) -> None:
        """It answers far more slowly than its peers, or does so no longer: the state tells, and it works on."""
        before, after = ("ready", "degraded") if slow else ("degraded", "ready")
        if self.state == before:
            self._lifecycle.to(after, cause)

    def note_result(self, result: ExecResult) -> None:
        """Draw the consequences: a sandbox with processes that could not be killed is used no more."""
        if result.tainted and not self._tainted:
            self._tainted = True
            self._fall_ill("tainted: processes survived their kill")

    async def close(self, *, remove: bool | None = None) -> None:
        """Remove it and all that belongs to it; twice is fine, and so is one that is gone already.

        ``remove=False`` only ends the connection, which is the default for one that was connected to. Bounded by
        40 s. Raises ``EngineUnavailable`` if it could not be removed; another ``close`` then tries again.
        """
        if self._closing is None or (self._closing.done() and self.state != "removed"):
            self._closing = asyncio.ensure_future(self._close(self._owned if remove is None else remove))
        await finished(self._closing)

    # Seeing.

    @property
    def state(self) -> State:
        return self._lifecycle.state

    @property
    def generation(self) -> int:
        """Counts starts; what was started in an earlier one is lost."""
        return self._lifecycle.generation

    @property
    def history(self) -> Sequence[Transition]:
        """The last changes of its state and their causes, oldest first."""
        return self._lifecycle.history

    @property
    def loss(self) -> str | None:
        """Why it can do no more work (``exited``, ``oom``, ``agent_dead``, ``tainted``, …); None if it can."""
        return "tainted" if self._tainted else self._loss

    async def events(self) -> AsyncIterator[Transition]:
        """Changes of its state from now on, until it is removed. A slow reader misses the oldest."""
        waiting: asyncio.Queue[Transition] = asyncio.Queue(100)

        def take(transition: Transition) -> None:
            if waiting.full():
                waiting.get_nowait()
            waiting.put_nowait(transition)

        stop = self._lifecycle.watch(take)
        try:
            while self.state != "removed" or not waiting.empty():
                yield await waiting.get()
        finally:
            stop()

    def watch(self, watcher: Callable[[Transition], None]) -> Callable[[], None]:
        """Call ``watcher`` at each change of state; returns what ends it. It must neither raise nor block."""
        return self._lifecycle.watch(watcher)

    # Beginning and end.

    async def _begin(self) -> None:
        self.backend.check(self.spec)
        self._lifecycle.to("creating", "create")
        labels = await self._claim.make()
        if self._origin is not None:
            labels = self._claim.labels = {**labels, ORIGIN: self._origin.id}
        channel = await self.backend.create(self.id, self.spec, labels)
        self._lifecycle.to("starting", "created")
        self._adopt(channel)
        await self._restore(self._origin)
        await self._prepare(channel)
        await self._claim.live()
        self._set_expiry(self.spec.ttl)
        self._become_ready("ready to work")

    async def _prepare(self, channel: Channel) -> None:
        """Run what the specification wants run before the sandbox is handed out."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.spec.start_timeout
        if self.spec.setup:
            request = calls.request(self.spec, self.spec.setup, timeout=self.spec.start_timeout)
            result = await self._answered(channel, channel.exec(request), request.timeout)
            if not result.ok:
                raise self._not_started("setup", request, result)
        while self.spec.ready:
            request = calls.request(self.spec, self.spec.ready, timeout=max(end - loop.time(), 0.1))
            result = await self._answered(channel, channel.exec(request), request.timeout)
            if result.ok:
                return
            if loop.time() + _READY_POLL >= end:
                raise self._not_started("ready", request, result)
            await asyncio.sleep(_READY_POLL)

    def _not_started(self, phase: str, request: ExecRequest, result: ExecResult) -> StartTimeout:
        how = "ran out of time" if result.timed_out else f"ended with {result.exit_code}"
        return StartTimeout(
            f"sandbox {self.id} is not ready: {phase} command {shown(request)} {how}: {end_of(result)}",
            phase=phase,
            log_tail=end_of(result),
        )

    def _become_ready(self, cause: str) -> None:
        if self._channel is None or self._channel.lost.done():
            self._loss = self._loss or (self._channel.lost.result() if self._channel else "removed")
            raise SandboxLost(f"sandbox {self.id} was lost while it started: {self._loss}", reason=self._loss)
        self._lifecycle.to("ready", cause)

    async def _give_up(self, error: BaseException) -> None:
        """Leave nothing of a sandbox that did not begin because of ``error``."""
        asked = self.state != "pending"
        self._lifecycle.to("failed", f"{type(error).__name__}: {error}")
        # An engine that does not answer cannot remove anything either: its callers must not wait for a second timeout.
        silent = isinstance(error, EngineUnavailable) and self._channel is None
        if asked and not (silent and await self._claim.abandon()):
            # The state does not tell how far the back end came; removing what is not there is fine.
            try:
                await self.close(remove=True)
            except SandboxError as problem:
                _log.warning("sandbox %s, which did not start, was not removed: %s", self.id, problem)
        await self._release()

    async def _close(self, remove: bool) -> None:
        self._stop_timer()
        if self.state != "stopping":
            self._lifecycle.to("stopping", "time to live ended" if self._expired else "close")
        self._loss = self._loss or "removed"
        if self._channel is not None:
            with contextlib.suppress(asyncio.TimeoutError, SandboxError):
                await asyncio.wait_for(self._channel.close(), ANSWER_GRACE)
        if self._finding is not None:
            await asyncio.wait({self._finding})  # nobody can say how it ended once it is gone
        if remove:
            try:
                await self._engine(self.backend.remove(self.id), "close")
            except SandboxError:
                await self._claim.abandon()
                raise
            await self._claim.drop()
            if self._discard_origin and self._origin is not None:
                await self._engine(self.backend.discard(self._origin), "close")
        self._lifecycle.to("removed", "removed" if remove else "connection ended")
        await self._release()

    def _set_expiry(self, ttl: float | None) -> None:
        self._stop_timer()
        self._expires_at = None
        if ttl is not None:
            loop = asyncio.get_running_loop()
            self._expires_at = loop.time() + ttl
            self._timer = loop.call_at(self._expires_at, self._begin_to_expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_to_expire(self) -> None:
        self._expired = True
        self._expiry = asyncio.ensure_future(self._expire())

    async def _expire(self) -> None:
        pause = 1.0
        while True:
            try:
                await self.close(remove=True)
                return
            except SandboxError as problem:
                _log.warning("sandbox %s, whose time has ended, was not removed: %s", self.id, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST)

    # Changing generation.

    async def _recover(self, cause: str, start: Callable[[str], Awaitable[Channel]], origin: Snapshot | None) -> None:
        async with self._changing:
            self._check_there()
            self._lifecycle.to("recovering", cause)
            old, self._channel, self._loss = self._channel, None, None
            try:
                # Whoever waits for an answer of the old generation hears of its end first.
                if old is not None:
                    await asyncio.wait_for(old.close(), ANSWER_GRACE)
                limit = ENGINE_TIMEOUT + self.spec.start_timeout
                channel = await self._engine(start(self.id), cause, limit)
                if self.state != "recovering":
                    await channel.close()
                    raise self._gone()
                self._tainted = False
                self._adopt(channel)
                await self._restore(origin)
                await self._prepare(channel)
                self._become_ready(cause)
            except BaseException as error:
                if self._lifecycle.can("unhealthy"):
                    self._loss = self._loss or "exited"
                    self._lifecycle.to("unhealthy", f"{cause} failed: {type(error).__name__}: {error}")
                raise

    async def _restore(self, origin: Snapshot | None) -> None:
        if origin is not None:
            await self._engine(self.backend.restore(self.id, origin), "restore", CALL_TIMEOUT)

    def _adopt(self, channel: Channel) -> None:
        self._channel, self._finding = channel, None
        channel.lost.add_done_callback(lambda lost: self._on_lost(channel))

    def _on_lost(self, channel: Channel) -> None:
        if channel is not self._channel or channel.lost.cancelled() or self.state in ("stopping", "removed"):
            return
        self._loss = channel.lost.result()
        if self._loss == "agent_dead" and self._in_flight:
            self._finding = asyncio.ensure_future(self._find_out())
        self._fall_ill(f"connection lost: {self._loss}")

    def _fall_ill(self, cause: str) -> None:
        if self._lifecycle.can("unhealthy"):
            self._lifecycle.to("unhealthy", cause)

    # Guards.

    @contextlib.contextmanager
    def _work(self, cause: str) -> Iterator[Channel]:
        channel, generation = self._usable(), self.generation
        self._in_flight += 1
        if self.state == "ready":
            self._lifecycle.to("busy", cause)
        try:
            yield channel
        finally:
            self._in_flight -= 1
            if not self._in_flight and self.state == "busy" and self.generation == generation:
                self._lifecycle.to("ready", "done")

    def _begin_vigil(self) -> None:
        self._vigil = asyncio.ensure_future(self._keep_vigil())

    async def _keep_vigil(self) -> None:
        while True:
            if self._channel is not None and await self._is_silent(self._channel, PERIOD, MISSES):
                self.condemn("hung")
            await asyncio.sleep(PERIOD)

    async def _is_silent(self, channel: Channel, period: float, misses: int) -> bool:
        """Whether the agent gives no sign of life, though it could."""
        began = self._now()
        try:
            return await pulse(channel, period, misses) is None and not self.was_paused(began)
        except SandboxError:
            return False  # lost already, or its server is away: what waits hears of it otherwise

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _usable(self) -> Channel:
        """The channel of a sandbox that takes commands."""
        self._check_there()
        if self.loss is not None:
            advice = "restart or replace it" if self._tainted else "make a new one, or restart it"
            raise SandboxLost(f"sandbox {self.id} is lost: {self.loss}; {advice}", reason=self.loss)
        if self.state not in WORKING or self._channel is None:
            raise self._impossible("run commands")
        return self._channel

    def _check_there(self) -> None:
        if self._expired:
            raise LeaseExpired(f"sandbox {self.id} has outlived its time to live; set ttl, or extend it in time")
        if self.state in ("stopping", "removed", "failed"):
            raise self._gone()

    def _gone(self) -> SandboxLost:
        return SandboxLost(f"sandbox {self.id} is {self.state}", reason="removed")

    def _impossible(self, what: str) -> InvalidTransition:
        return InvalidTransition(f"sandbox {self.id} is {self.state} and cannot {what} now", state=self.state)

    async def _answered(self, channel: Channel, work: Awaitable[T], limit: float, grace: float = ANSWER_GRACE) -> T:
        """What comes of ``work``, which a sandbox that is well answers for within ``limit`` seconds.

        Raises ``SandboxLost`` at most 2 s later if the agent gives no sign of life, and after ``grace`` if it does.
        """
        task = asyncio.ensure_future(work)
        try:
            with self.watched():
                await asyncio.wait({task}, timeout=limit)
                if not task.done() and grace:
                    await self._overdue(channel, task, grace)
            if not task.done():
                if channel is self._channel:
                    self._loss = self._loss or "agent_dead"
                    self._fall_ill(f"no answer for {limit + grace:g} s")
                raise SandboxLost(
                    f"sandbox {self.id} did not answer for {limit + grace:g} s; replace or restart it",
                    reason="agent_dead",
                )
            return task.result()
        except SandboxLost as error:
            if error.details.get("reason") == "agent_dead" and channel is self._channel and self._finding is not None:
                await self._explain(error, self._finding)
            raise
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _overdue(self, channel: Channel, task: asyncio.Future[T], grace: float) -> None:
        """The agent should have ended it by itself: tell one that takes long from one that is hung."""
        silence = asyncio.ensure_future(self._is_silent(channel, OVERDUE_PERIOD, OVERDUE_MISSES))
        try:
            await asyncio.wait({task, silence}, return_when=asyncio.FIRST_COMPLETED)
            if silence.done() and silence.result() and channel is self._channel:
                self.condemn("hung")
        finally:
            await stopped([silence])
        await asyncio.wait({task}, timeout=grace)

    async def _explain(self, error: SandboxLost, finding: asyncio.Future[dict[str, Any]]) -> None:
        found = await asyncio.shield(finding)
        error.details.update(found)
        if "reason" in found:
            self._loss = found["reason"]
            error.args = (f"{error} (the engine: {self._loss})",)

    async def why_lost(self) -> Mapping[str, Any]:
        """What the engine recorded of the end of this sandbox, or of its silence. Takes at most 5 s.

        Returns:
            ``reason`` and ``exit_code`` as in ``SandboxLost``; ``external``: whether the host, the engine or a request
            to it ended the sandbox. Empty if the engine knows nothing.
        """
        if self._finding is None or (self._finding.done() and not self._finding.result()):
            self._finding = asyncio.ensure_future(self._find_out())
        return await asyncio.shield(self._finding)

    async def _find_out(self) -> dict[str, Any]:
        """Why a connection ended: with its sandbox (which the engine learns a moment later), or alone, or unknown."""
        try:
            return await asyncio.wait_for(self._end_seen(), _FIND_OUT_MOST)
        except EngineUnavailable:
            return {"external": True}
        except (SandboxError, asyncio.TimeoutError):
            return {}

    async def _end_seen(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time
        end = now() + _FIND_OUT
        while (seen := await self.backend.inspect(self.id)).state == "running":
            if now() >= end:
                return {}
            await asyncio.sleep(_READY_POLL)
        if seen.state == "paused":
            return {"reason": "frozen", "external": True}
        if seen.state == "absent":
            return {"reason": "removed", "external": True}
        log = b""
        with contextlib.suppress(SandboxError):  # it may be on its way out
            log = await self.backend.logs(self.id, _LOG_TAIL)
        return {
            "reason": "oom" if seen.oom_killed else "exited",
            "exit_code": seen.exit_code,
            "external": seen.external,
            "log_tail": log.decode("utf-8", "replace"),
        }

    async def _engine(self, work: Awaitable[T], what: str, limit: float = ENGINE_TIMEOUT) -> T:
        try:
            return await asyncio.wait_for(work, limit)
        except asyncio.TimeoutError:
            raise EngineUnavailable(
                f"the engine of the {self.backend.name} back end did not {what} sandbox {self.id} within {limit:g} s"
            ) from None


def shown(request: ExecRequest) -> str:
    """A command, short enough for a message."""
    text = request.argv[2] if request.argv[:2] == ("/bin/sh", "-c") else " ".join(request.argv)
    return repr(text if len(text) <= 200 else f"{text[:200]}…")


def end_of(result: ExecResult) -> str:
    """The last that a command said, for a message."""
    return (result.stderr or result.stdout)[-1000:].strip()
