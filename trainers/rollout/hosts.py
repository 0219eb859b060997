"""Handles of environments in the event loop, in threads and in processes, and the pool that owns them.

Invariant: every call to an environment ends within its timeout, with a validated result or with an ``EnvError``. An
inline environment cannot be interrupted: the overrun is reported afterwards. An environment that did not answer in
time is never reused, and never delays the exit of the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from agentkit.envs.workers.client import ForkServer
from agentkit.errors import EnvError, EnvTimeout, UnexplainedCrash
from agentkit.sandboxes.recovery.record import RecoveryLog
from agentkit.sandboxes.tasks import bounded, tracked
from agentkit.trainers.rollout.contract import (
    TurnResult,
    check_reset,
    crashed,
    run_actions,
    run_actions_async,
    run_reset,
)
from agentkit.trainers.rollout.processes import CLOSE_TIMEOUT, WORKER, ProcessEnv
from agentkit.trainers.rollout.sandboxes import ReplayedEnv, SandboxEnv, new_allocator
from agentkit.trainers.rollout.source import EnvSource, Where
from agentkit.types import Places

if TYPE_CHECKING:
    from agentkit.envs.isolation.allocator import SandboxAllocator


class EnvHandle(Protocol):
    """One environment. One call at a time; after an ``EnvError`` only ``close`` is allowed."""

    @property
    def busy(self) -> bool:
        """Whether a call has not ended; it may never end."""
        ...

    @property
    def sandboxes(self) -> Places:
        """The sandboxes that the present episode was in."""
        ...

    async def reset(self, seed: int) -> str: ...

    async def act(self, actions: Sequence[str]) -> TurnResult: ...

    def close(self) -> Coroutine[Any, Any, None]:
        """Release the environment, in bounded time. Never raises."""
        ...


class InlineEnv:
    """An environment called directly in the event loop."""

    busy = False
    sandboxes: Places = ()

    def __init__(self, source: EnvSource) -> None:
        self._source = source
        self._env: Any = None

    async def reset(self, seed: int) -> str:
        start = time.perf_counter()
        if self._env is None:
            self._env = self._source.make()
        observation = run_reset(self._env, seed)
        self._check(start, "reset", self._source.reset_timeout)
        return observation

    async def act(self, actions: Sequence[str]) -> TurnResult:
        start = time.perf_counter()
        result = run_actions(self._env, actions)
        self._check(start, "step", self._source.step_timeout * len(actions))
        return result

    async def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            with contextlib.suppress(Exception):
                env.close()

    @staticmethod
    def _check(start: float, call: str, timeout: float) -> None:
        if time.perf_counter() - start > timeout:
            raise EnvTimeout(
                f"{call} took {time.perf_counter() - start:.1f} s, more than {timeout:g} s, and nothing else ran "
                "meanwhile; set env.concurrency to thread or process"
            )


class AsyncEnv:
    """An environment whose methods are coroutines."""

    sandboxes: Places = ()

    def __init__(self, source: EnvSource) -> None:
        self._source = source
        self._env: Any = None
        self.busy = False

    async def reset(self, seed: int) -> str:
        return await self._call(self._reset(seed), "reset", self._source.reset_timeout)

    async def act(self, actions: Sequence[str]) -> TurnResult:
        timeout = self._source.step_timeout * len(actions)
        try:
            return await self._call(run_actions_async(self._env, actions), "step", timeout)
        except EnvTimeout as error:
            if self._env.policy_code_ran:
                raise UnexplainedCrash(f"{error} while code of the policy ran") from error
            raise

    async def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            with contextlib.suppress(Exception):
                await bounded(env.close(), CLOSE_TIMEOUT)

    async def _call(self, call: Awaitable[Any], name: str, timeout: float) -> Any:
        self.busy = True
        try:
            result = await bounded(call, timeout)
        except asyncio.TimeoutError:
            raise EnvTimeout(f"{name} took longer than {timeout:g} s") from None
        self.busy = False
        return result

    async def _reset(self, seed: int) -> str:
        if self._env is None:
            self._env = self._source.make()
        try:
            result = await self._env.reset(seed=seed)
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise crashed("reset", error) from error
        return check_reset(result)


class ThreadEnv:
    """A blocking environment in a daemon thread, which is abandoned if it hangs."""

    sandboxes: Places = ()

    def __init__(self, source: EnvSource) -> None:
        self._source = source
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = False

    async def reset(self, seed: int) -> str:
        return await self._call("reset", seed, self._source.reset_timeout)

    async def act(self, actions: Sequence[str]) -> TurnResult:
        return await self._call("step", tuple(actions), self._source.step_timeout * len(actions))

    async def close(self) -> None:
        if self._thread is None:
            return
        if self.busy:
            self._calls.put(None)  # if the call ever returns, the thread closes the environment and ends
        else:
            with contextlib.suppress(EnvError):
                await self._call("close", None, CLOSE_TIMEOUT)
        self._thread = None

    async def _call(self, name: str, argument: Any, timeout: float) -> Any:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve_thread, args=(self._source, self._calls), name=f"env-{self._source.id}", daemon=True
            )
            self._thread.start()
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        self.busy = True
        self._calls.put((name, argument, loop, reply))
        timer = loop.call_later(timeout, _expire, reply, name, timeout)
        try:
            result = await reply
        except EnvTimeout:
            raise
        except EnvError:
            self.busy = False
            raise
        finally:
            timer.cancel()
        self.busy = False
        return result


def _expire(reply: asyncio.Future[Any], call: str, timeout: float) -> None:
    if not reply.done():
        reply.set_exception(EnvTimeout(f"{call} took longer than {timeout:g} s; its thread was abandoned"))


def _settle(reply: asyncio.Future[Any], result: Any, error: EnvError | None) -> None:
    if reply.done():
        return
    if error is not None:
        reply.set_exception(error)
    else:
        reply.set_result(result)


def _serve_thread(source: EnvSource, calls: queue.SimpleQueue[Any]) -> None:
    env: Any = None
    while True:
        item = calls.get()
        if item is None:
            if env is not None:
                with contextlib.suppress(Exception):
                    env.close()
            return
        name, argument, loop, reply = item
        result, failure = None, None
        try:
            if name == "reset":
                if env is None:
                    env = source.make()
                result = run_reset(env, argument)
            elif name == "step":
                result = run_actions(env, argument)
            elif env is not None:
                env.close()
        except EnvError as error:
            failure = error
        except BaseException as error:
            failure = crashed(name, error)
        with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
            loop.call_soon_threadsafe(_settle, reply, result, failure)
        if name == "close":
            return


class EnvPool:
    """Environments of one source, made on demand and reused until one fails."""

    def __init__(self, source: EnvSource) -> None:
        self.source = source
        self.recoveries = RecoveryLog()
        """Recoveries of environments, and hedged calls."""
        self._idle: list[EnvHandle] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._fork_server = ForkServer(WORKER)
        makers: dict[Where, Callable[[], EnvHandle]] = {
            "inline": lambda: InlineEnv(source),
            "async": lambda: AsyncEnv(source),
            "thread": lambda: ThreadEnv(source),
            "process": lambda: ProcessEnv(source, self._fork_server),
            "sandbox": lambda: SandboxEnv(source, self._shared_allocator()),
        }
        self._make = makers[source.where]
        if source.recovery == "replay" and source.where != "sandbox":  # where every environment has its supervisor
            self._make = lambda: ReplayedEnv(makers[source.where], self._dispose, self.recoveries)
        self._allocator: SandboxAllocator | None = None

    @property
    def spares(self) -> int:
        """Number of environments in sandboxes that are ready to replace others."""
        return 0 if self._allocator is None else self._allocator.spares

    def acquire(self, *, fresh: bool = False) -> EnvHandle:
        """Return an environment to ``reset``; with ``fresh`` one that was not used before. Starts nothing."""
        if self._idle and not fresh:
            return self._idle.pop()
        return self._make()

    def release(self, handle: EnvHandle, *, failed: bool = False) -> None:
        """Return an environment to the pool; close or kill it if it failed or was interrupted in a call."""
        if not failed and not handle.busy:
            self._idle.append(handle)
            return
        self._dispose(handle)

    async def close(self) -> None:
        """Close all environments that were released. Idempotent."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(handle.close() for handle in idle), return_exceptions=True)
        while self._closing:  # to close one may dispose of another
            await asyncio.wait(self._closing)
        if self.source.where == "process":
            await asyncio.to_thread(self._fork_server.close)
        allocator, self._allocator = self._allocator, None
        if allocator is not None:
            await allocator.close()

    def _shared_allocator(self) -> SandboxAllocator:
        if self._allocator is None:
            self._allocator = new_allocator(self.source, self.recoveries)
        return self._allocator

    def _dispose(self, handle: EnvHandle) -> None:
        tracked(handle.close(), self._closing)
