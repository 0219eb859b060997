"""The places of environments that other code steps: in this process, in worker processes, in sandboxes.

Invariant: every call to a slot ends within its timeout, with a validated result or with an ``EnvError``. A slot whose
environment failed has a fresh one after its next ``reset``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from agentkit import errors, registry
from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.isolation import validation
from agentkit.envs.isolation.allocator import SandboxAllocator
from agentkit.envs.isolation.env import SandboxedEnv
from agentkit.envs.isolation.placement import importable, place
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.envs.isolation.server import describe
from agentkit.envs.isolation.validation import Description, Step
from agentkit.envs.workers.client import shared_server
from agentkit.envs.workers.worker import Worker
from agentkit.errors import ConfigError, EnvCrashed, EnvError, EnvTimeout
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import bounded
from agentkit.sandboxes.threads import DaemonThreadPool

_SHARE = 64
"""Most environments in one sandbox, for environments that declare ``inline``."""


class Slot(Protocol):
    """One environment in any place. Each call ends within its timeout or raises ``EnvError``, after which only
    ``reset`` is allowed."""

    async def start(self) -> Description: ...

    async def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]: ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None: ...


class Timeouts(NamedTuple):
    """Seconds that a call may take."""

    reset: float
    step: float


class Slots:
    """Makes slots for one environment, all in the same kind of place. Starts nothing.

    Args:
        id: a registered name.
        kwargs: arguments of the environment; plain data unless ``mode="async"``.
        mode: ``"async"`` (in this process), ``"process"`` (each in a worker process), or a sandbox back end.
        timeouts: seconds that the calls may take.
        sandbox_spec: fields of the sandbox specification that differ from the defaults.
        redundancy: how the sandboxes survive failures.

    Raises:
        ConfigError: the arguments contradict each other, or cannot be sent to another process.
        RegistryError: the environment cannot be loaded by another process.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any],
        mode: str | SandboxSpec | Backend,
        timeouts: Timeouts,
        sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
        redundancy: Redundancy | None = None,
    ) -> None:
        self._id, self._kwargs, self._mode, self._timeouts = id, kwargs, mode, timeouts
        self._allocator: SandboxAllocator | None = None
        if mode not in ("async", "process"):
            placement = place(id, kwargs, mode, sandbox_spec)
            redundancy = redundancy or Redundancy(share=_SHARE)
            self._allocator = SandboxAllocator(placement, redundancy, make_timeout=timeouts.reset)

    def make(self) -> Slot:
        """Return a slot, without an environment until ``start`` or ``reset``."""
        if self._mode == "async":
            return LocalEnv(self._id, self._kwargs, self._timeouts)
        if self._mode == "process":
            return ProcessEnv(self._id, self._kwargs, self._timeouts)
        return SandboxedEnv(
            self._id,
            allocator=self._allocator,
            step_timeout=self._timeouts.step,
            reset_timeout=self._timeouts.reset,
        )

    async def close(self) -> None:
        """Release what the slots share. They must be closed."""
        if self._allocator is not None:
            await self._allocator.close()


class LocalEnv:
    """An environment in this process: awaited, called in place if it is ``inline``, otherwise called in a thread."""

    def __init__(self, id: str, kwargs: Mapping[str, Any], timeouts: Timeouts) -> None:
        self._id, self._kwargs, self._timeouts = id, dict(kwargs), timeouts
        self._env: Any = None
        self._lane: DaemonThreadPool[None] | None = None

    async def start(self) -> Description:
        return validation.check_description(describe(self._id, self._kwargs, self._made()))

    async def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        env = self._made()
        return validation.check_reset(
            await self._call("reset", lambda: env.reset(seed=seed, options=options), self._timeouts.reset)
        )

    async def step(self, action: str) -> Step:
        env = self._env
        return validation.check_step(await self._call("step", lambda: env.step(action), self._timeouts.step))

    async def close(self) -> None:
        env = self._env
        if env is not None:
            with contextlib.suppress(EnvError):
                await self._call("close", env.close, self._timeouts.step)
        self._abandon()

    def _made(self) -> Any:
        if self._env is None:
            self._env = registry.make(self._id, **self._kwargs)
        return self._env

    async def _call(self, name: str, function: Callable[[], Any], timeout: float) -> Any:
        try:
            if isinstance(self._env, AsyncTextEnv):
                return await bounded(function(), timeout)
            if self._env.concurrency == "inline":
                return function()
            if self._lane is None:
                self._lane = DaemonThreadPool("agentkit-vector", 1, lambda: None, lambda _: None)
            return await bounded(asyncio.wrap_future(self._lane.submit(lambda _: function())), timeout)
        except asyncio.TimeoutError:
            self._abandon()
            raise EnvTimeout(f"{name} took longer than {timeout:g} s") from None
        except EnvError:
            self._abandon()
            raise
        except (Exception, SystemExit) as error:
            self._abandon()
            raise EnvCrashed(f"{name} raised {type(error).__name__}: {error}") from error

    def _abandon(self) -> None:
        """Forget the environment; a call that hangs keeps its daemon thread."""
        self._env = None
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()


class ProcessEnv:
    """An environment in a worker process."""

    def __init__(self, id: str, kwargs: Mapping[str, Any], timeouts: Timeouts) -> None:
        entry_point, known = importable(id)
        self._made = (id, entry_point, {**known, **kwargs})
        try:
            json.dumps(self._made)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"arguments for mode='process' must be plain data (texts, numbers): {error}") from None
        self._timeouts = timeouts
        self._worker = Worker(shared_server("agentkit.envs.vector.worker"))

    async def start(self) -> Description:
        return validation.check_description(await self._make())

    async def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        if not self._worker.alive:
            await self._make()
        return validation.check_reset(await self._call("reset", seed, options, timeout=self._timeouts.reset))

    async def step(self, action: str) -> Step:
        return validation.check_step(await self._call("step", action, timeout=self._timeouts.step))

    async def close(self) -> None:
        if self._worker.alive:
            with contextlib.suppress(EnvError):
                await self._call("close", timeout=self._timeouts.step)
        self._worker.kill()

    async def _make(self) -> Any:
        return await self._call("make", *self._made, timeout=self._timeouts.reset)

    async def _call(self, name: str, *arguments: Any, timeout: float) -> Any:
        kind, value = await self._worker.call_async(name, *arguments, timeout=timeout)
        if kind == "ok":
            return value
        self._worker.kill()
        raise getattr(errors, kind, EnvCrashed)(value)
