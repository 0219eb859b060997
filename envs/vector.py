"""Many environments stepped as one, with gymnasium's ``VectorEnv`` semantics, for text.

Invariant: the environments of one step run at the same time and know nothing of each other: seed and actions of one
give the episode that they give alone. One that fails costs its own episode only, which is truncated and says so; its
next episode has a fresh environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode, VectorEnv

from agentkit import errors, registry
from agentkit.envs import answers
from agentkit.envs.answers import Description, Step
from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.children import Child
from agentkit.envs.house import House
from agentkit.envs.placement import importable, place
from agentkit.envs.portal import portal
from agentkit.envs.sandboxed import RESET_TIMEOUT, STEP_TIMEOUT, SandboxedEnv
from agentkit.envs.serve import describe
from agentkit.errors import ConfigError, EnvCrashed, EnvError, EnvTimeout
from agentkit.sandboxes.lane import Lane, bounded
from agentkit.sandboxes.spec import SandboxSpec

R = TypeVar("R")
_RESET_TRIES = 3
_SHARE = 64
"""Environments that declare ``inline`` which one sandbox holds."""


def make_vec(
    id: str,
    num_envs: int,
    *,
    mode: str = "async",
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    max_steps: int | None = None,
    step_timeout: float = STEP_TIMEOUT,
    reset_timeout: float = RESET_TIMEOUT,
    **kwargs: Any,
) -> TextVectorEnv:
    """``num_envs`` environments of one name as a gymnasium ``VectorEnv`` of texts.

    Args:
        id: a registered name.
        num_envs: how many.
        mode: ``"async"`` (in this process: coroutines are awaited together, what blocks has a thread each),
            ``"process"`` (each in a process of its own, which is killed when it hangs), or a sandbox's back end:
            ``"docker"``, ``"local"``, … (as ``sandbox`` of ``agentkit.make``).
        sandbox_spec: fields of the sandboxes' specification, instead of the defaults.
        autoreset_mode: gymnasium's ``NEXT_STEP``, ``SAME_STEP`` or ``DISABLED``.
        max_steps: steps after which an episode is truncated; by default the environment's turns times actions a turn.
        step_timeout, reset_timeout: seconds that a call may take.
        kwargs: arguments of the environment; plain data unless ``mode="async"``.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` is less than 1, or there is no such ``autoreset_mode``.
        RegistryError, ConfigError, SandboxError, EnvError: as ``agentkit.make`` does.
    """
    if num_envs < 1 or (max_steps is not None and max_steps < 1):
        raise ValueError(f"num_envs={num_envs} and max_steps={max_steps} must be at least 1")
    autoreset = AutoresetMode(autoreset_mode)
    if sandbox_spec is not None and mode in ("async", "process"):
        raise ConfigError(f"sandbox_spec describes a sandbox and mode={mode!r} has none: mode='docker', say")
    if mode not in ("async", "process"):
        here = registry.arguments_here(id, kwargs, mode, sandbox_spec)
        mode, kwargs = (mode, kwargs) if here is None else ("async", here)
    timeouts = Timeouts(reset_timeout, step_timeout)
    house: House | None = None
    slots: list[Slot]
    if mode == "async":
        slots = [_Here(id, kwargs, timeouts) for _ in range(num_envs)]
    elif mode == "process":
        slots = [_Process(id, kwargs, timeouts) for _ in range(num_envs)]
    else:
        house = House(place(id, kwargs, mode, sandbox_spec), share=_SHARE)
        slots = [
            SandboxedEnv(id, house=house, step_timeout=step_timeout, reset_timeout=reset_timeout)
            for _ in range(num_envs)
        ]
    return TextVectorEnv(slots, house, autoreset, max_steps)


class Slot(Protocol):
    """One environment, wherever it is. Each call ends in time, or raises ``EnvError``; ``reset`` may follow that."""

    async def start(self) -> Description: ...

    async def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]: ...

    async def step(self, action: str) -> Step: ...

    async def close(self) -> None: ...


class Timeouts(NamedTuple):
    """Seconds that a call may take."""

    reset: float
    step: float


class TextVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], np.ndarray]):
    """What ``make_vec`` returns. Observations are a tuple of n texts, actions n texts; rewards float64 ``[n]``,
    terminations and truncations bool ``[n]``.

    ``infos`` are merged as gymnasium does. An environment that fails in ``step`` (crashes, hangs, breaks the contract)
    ends its episode truncated, with an empty observation, reward 0, and the reason as ``infos["failure"]``, in every
    autoreset mode: leave such episodes out of training.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        house: House | None,
        autoreset_mode: AutoresetMode,
        max_steps: int | None,
    ) -> None:
        self.num_envs = len(slots)
        self._slots = slots
        self._everything = _Everything(slots, house)
        self._run = portal().run
        portal().opened(self._everything)
        try:
            described = self._run(self._slots[0].start())
        except BaseException:
            self.close()
            raise
        self.description = described
        """What the first environment says of itself."""
        self._max_steps = max_steps or described.max_turns * described.actions_per_turn
        self.metadata = {"autoreset_mode": autoreset_mode}
        self._mode = autoreset_mode
        self.single_observation_space, self.single_action_space = described.spaces()
        self.observation_space = Tuple([self.single_observation_space] * self.num_envs)
        self.action_space = Tuple([self.single_action_space] * self.num_envs)
        self._observations = [""] * self.num_envs
        self._steps = np.zeros(self.num_envs, dtype=np.int64)
        self._done = np.zeros(self.num_envs, dtype=bool)
        self._begun = np.zeros(self.num_envs, dtype=bool)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Begin an episode everywhere, or where ``options["reset_mask"]`` (bool ``[n]``) is true.

        ``seed``: n of them, or the first of n consecutive ones. Raises ``EnvError`` when an environment cannot be reset
        in three attempts, ``ValueError`` for seeds or a mask of another length, ``ClosedEnvironmentError`` after
        ``close``.
        """
        self._check_open()
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, dtype=bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise ValueError(f"reset_mask must hold {self.num_envs} booleans, one of them true; it is {mask!r}")
        seeds = [seed + k for k in range(self.num_envs)] if isinstance(seed, int) else seed
        seeds = [None] * self.num_envs if seeds is None else list(seeds)
        if len(seeds) != self.num_envs:
            raise ValueError(f"{len(seeds)} seeds for {self.num_envs} environments")
        chosen = np.flatnonzero(mask).tolist()
        infos: dict[str, Any] = {}
        for k, (observation, info) in self._together({k: self._begin(k, seeds[k], options or None) for k in chosen}):
            self._observations[k] = observation
            infos = self._add_info(infos, info, k)
        return tuple(self._observations), infos

    def step(
        self, actions: Sequence[str]
    ) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one action in each environment; half of a surrogate pair, which no encoding can carry, becomes a ``?``.

        Raises ``ValueError`` for a wrong number of actions, ``ResetNeeded`` for an episode that is over or was not
        begun, ``EnvError`` when an environment cannot be begun again, ``ClosedEnvironmentError`` after ``close``.
        """
        self._check_open()
        if isinstance(actions, str) or len(actions) != self.num_envs:
            raise ValueError(f"step takes {self.num_envs} texts, one for each environment; it got {actions!r:.80}")
        if not self._begun.all():
            waiting = np.flatnonzero(~self._begun).tolist()
            raise ResetNeeded(f"the episodes of {waiting} were not begun: reset them first")
        if self._done.any() and self._mode is not AutoresetMode.NEXT_STEP:
            done = np.flatnonzero(self._done).tolist()
            raise ResetNeeded(f"the episodes of {done} are over: reset them, with options={{'reset_mask': ...}}")
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        ended = np.zeros((2, self.num_envs), dtype=bool)
        infos: dict[str, Any] = {}
        for k, (step, begun) in self._together({k: self._advance(k, actions[k]) for k in range(self.num_envs)}):
            info: Info = {}
            if step is not None:
                self._observations[k], rewards[k], ended[0, k], ended[1, k], info = step
            if begun is not None:
                final = {} if step is None else {"final_obs": self._observations[k], "final_info": info}
                self._observations[k], first = begun
                failure = {"failure": info["failure"]} if "failure" in info else {}
                info = {**first, **final, **failure}
            infos = self._add_info(infos, info, k)
        return tuple(self._observations), rewards, ended[0], ended[1], infos

    def close_extras(self, **kwargs: Any) -> None:
        """Close every environment; called once, by ``close``."""
        self._run(self._everything.close())
        portal().closed(self._everything)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the vector is closed: make another one")

    def _together(self, work: Mapping[int, Awaitable[R]]) -> list[tuple[int, R]]:
        """The results of all, once all have ended; then what the first of them raised, if any did."""

        async def gathered() -> list[R | BaseException]:
            return await asyncio.gather(*work.values(), return_exceptions=True)

        results = self._run(gathered())
        for k, result in zip(work, results, strict=True):
            if isinstance(result, EnvError):
                raise type(result)(f"environment {k} of {self.num_envs}: {result}") from result
            if isinstance(result, BaseException):
                raise result
        return list(zip(work, results, strict=True))  # pyright: ignore[reportReturnType]

    async def _advance(self, k: int, action: str) -> tuple[Step | None, tuple[str, Info] | None]:
        """What the action led to, if it was taken, and the beginning of a new episode, if there is one."""
        if self._done[k]:
            return None, await self._begin(k, None, None)
        try:
            observation, reward, terminated, truncated, info = await self._slots[k].step(_transportable(action))
        except EnvError as failure:
            info: Info = {"failure": f"{type(failure).__name__}: {failure}", "success": False}
            observation, reward, terminated, truncated = "", 0.0, False, True
        self._steps[k] += 1
        if self._steps[k] >= self._max_steps:
            truncated = True
        self._done[k] = terminated or truncated
        step = (observation, reward, terminated, truncated, info)
        if self._done[k] and self._mode is AutoresetMode.SAME_STEP:
            return step, await self._begin(k, None, None)
        return step, None

    async def _begin(self, k: int, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        self._begun[k] = False
        for _ in range(_RESET_TRIES - 1):
            with contextlib.suppress(EnvError):
                begun = await self._slots[k].reset(seed=seed, options=options)
                break
        else:
            begun = await self._slots[k].reset(seed=seed, options=options)
        self._steps[k], self._done[k], self._begun[k] = 0, False, True
        return begun


def _transportable(action: str) -> str:
    """What JSON and UTF-8 can carry of it, so that an action leads to the same in every mode."""
    return action.encode("utf-8", "replace").decode() if isinstance(action, str) else action


@dataclass(frozen=True, eq=False)
class _Everything:
    """What is to be closed at the end."""

    slots: Sequence[Slot]
    house: House | None

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self.slots))
        if self.house is not None:
            await self.house.close()


class _Here:
    """An environment in this process: awaited, called in place if it is ``inline``, else in a thread of its own."""

    def __init__(self, id: str, kwargs: Mapping[str, Any], timeouts: Timeouts) -> None:
        self._id, self._kwargs, self._timeouts = id, dict(kwargs), timeouts
        self._env: Any = None
        self._lane: Lane[None] | None = None

    async def start(self) -> Description:
        return answers.check_description(describe(self._id, self._kwargs, self._made()))

    async def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        env = self._made()
        return answers.check_reset(
            await self._call("reset", lambda: env.reset(seed=seed, options=options), self._timeouts.reset)
        )

    async def step(self, action: str) -> Step:
        env = self._env
        return answers.check_step(await self._call("step", lambda: env.step(action), self._timeouts.step))

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
                self._lane = Lane("agentkit-vector", 1, lambda: None, lambda _: None)
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
        """Forget an environment; a call that hangs keeps its thread, which holds up nobody."""
        self._env = None
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()


class _Process:
    """An environment in a process of its own."""

    def __init__(self, id: str, kwargs: Mapping[str, Any], timeouts: Timeouts) -> None:
        entry_point, known = importable(id)
        self._made = (id, entry_point, {**known, **kwargs})
        try:
            json.dumps(self._made)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"mode='process' takes arguments of plain data (texts, numbers): {error}") from None
        self._timeouts = timeouts
        self._child = Child("agentkit.envs.vector_child")
        self._lane: Lane[None] = Lane("agentkit-vector", 1, lambda: None, lambda _: None)

    async def start(self) -> Description:
        return answers.check_description(await self._make())

    async def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        if not self._child.alive:
            await self._make()
        return answers.check_reset(await self._call("reset", seed, options, timeout=self._timeouts.reset))

    async def step(self, action: str) -> Step:
        return answers.check_step(await self._call("step", action, timeout=self._timeouts.step))

    async def close(self) -> None:
        if self._child.alive:
            with contextlib.suppress(EnvError):
                await self._call("close", timeout=self._timeouts.step)
        self._child.kill()
        self._lane.close()

    async def _make(self) -> Any:
        return await self._call("make", *self._made, timeout=self._timeouts.reset)

    async def _call(self, name: str, *arguments: Any, timeout: float) -> Any:
        kind, value = await asyncio.wrap_future(
            self._lane.submit(lambda _: self._child.call(name, *arguments, timeout=timeout))
        )
        if kind == "ok":
            return value
        self._child.kill()
        raise getattr(errors, kind, EnvCrashed)(value)
