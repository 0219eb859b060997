"""Vector environments: many text environments stepped together, with the semantics of gymnasium's ``VectorEnv``.

Invariant: the environments of one step run concurrently and do not affect each other: with the same seed and actions
each plays the same episode as alone. A failed environment ends only its own episode, which is truncated and marked;
its next episode has a fresh environment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.spaces import Tuple
from gymnasium.vector import AutoresetMode, VectorEnv

from agentkit import registry
from agentkit.envs.base import Info
from agentkit.envs.isolation.env import RESET_TIMEOUT, STEP_TIMEOUT
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.envs.isolation.validation import Step
from agentkit.envs.spaces import encodable
from agentkit.envs.vector.slots import Slot, Slots, Timeouts
from agentkit.errors import ConfigError, EnvError
from agentkit.portal import portal
from agentkit.sandboxes.arguments import check_positive, check_type
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import SandboxSpec

R = TypeVar("R")
_RESET_TRIES = 3


def make_vec(
    id: str,
    num_envs: int,
    *,
    mode: str = "async",
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
    redundancy: Redundancy | None = None,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    max_steps: int | None = None,
    step_timeout: float = STEP_TIMEOUT,
    reset_timeout: float = RESET_TIMEOUT,
    **kwargs: Any,
) -> TextVectorEnv:
    """Make a vector of ``num_envs`` environments.

    Args:
        id: a registered name.
        num_envs: number of environments.
        mode: ``"async"`` (in this process; coroutines are awaited together, each blocking environment has a thread),
            ``"process"`` (each in a worker process, which is killed if it hangs), or a sandbox back end:
            ``"docker"``, ``"local"``, ``"remote"``, ``"remote:URL,URL"``, … (as ``sandbox`` of ``agentkit.make``).
        sandbox_spec: fields of the sandbox specification that differ from the defaults.
        redundancy: how the sandboxes survive failures. None: an episode whose sandbox fails is replayed in another one
            if the environment is deterministic, and up to 64 environments that declare ``inline`` share a sandbox.
        autoreset_mode: gymnasium's ``NEXT_STEP``, ``SAME_STEP`` or ``DISABLED``.
        max_steps: steps after which an episode is truncated; by default ``max_turns`` times ``actions_per_turn``.
        step_timeout: seconds that a step may take.
        reset_timeout: seconds that a reset may take.
        kwargs: arguments of the environment; plain data unless ``mode="async"``.

    Returns:
        A gymnasium ``VectorEnv`` of texts.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` is no integer of at least 1, or ``autoreset_mode`` is unknown.
        RegistryError, ConfigError, SandboxError, EnvError: as ``agentkit.make``.
    """
    numbers = (num_envs,) if max_steps is None else (num_envs, max_steps)
    if not all(isinstance(number, Integral) and number >= 1 for number in numbers):
        raise ValueError(f"num_envs={num_envs!r} and max_steps={max_steps!r} must be integers, at least 1")
    check_type("mode", mode, (str, SandboxSpec, Backend), "'async', 'process' or the name of a sandbox back end")
    check_positive(step_timeout=step_timeout, reset_timeout=reset_timeout)
    autoreset = AutoresetMode(autoreset_mode)
    if "sandbox" in kwargs:
        raise ConfigError(f"make_vec has no argument sandbox={kwargs['sandbox']!r}: give the back end as mode")
    if sandbox_spec is not None and mode in ("async", "process"):
        raise ConfigError(f"sandbox_spec describes a sandbox and mode={mode!r} has none; use mode='docker'")
    if redundancy is not None and mode == "process":
        raise ConfigError("redundancy needs sandboxes and mode='process' has none; use mode='docker'")
    if mode not in ("async", "process"):
        here = registry.arguments_here(id, kwargs, mode, sandbox_spec)
        mode, kwargs = (mode, kwargs) if here is None else ("async", here)
    if redundancy is not None and mode == "async":  # ``make`` passes it to an environment that makes sandboxes itself
        kwargs = {**kwargs, "redundancy": redundancy}
    slots = Slots(id, kwargs, mode, Timeouts(reset_timeout, step_timeout), sandbox_spec, redundancy)
    return TextVectorEnv([slots.make() for _ in range(num_envs)], slots, autoreset, max_steps)


class TextVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], np.ndarray]):
    """A gymnasium ``VectorEnv`` of text environments; made by ``make_vec``.

    Observations are a tuple of n texts, actions n texts; rewards are float64 ``[n]``, terminations and truncations
    bool ``[n]``. ``infos`` are merged as gymnasium does.

    If an environment fails in ``step`` (it crashes, hangs or breaks the contract), its episode is truncated with an
    empty observation, reward 0, and the reason in ``infos["failure"]``, in every autoreset mode. Exclude such episodes
    from training.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        place: Slots,
        autoreset_mode: AutoresetMode,
        max_steps: int | None,
    ) -> None:
        self.num_envs = len(slots)
        self._slots = slots
        self._resources = _Resources(slots, place)
        self._run = portal().run
        portal().opened(self._resources)
        try:
            described = self._run(self._slots[0].start())
        except BaseException:
            self.close()
            raise
        self.description = described
        """Description of the first environment."""
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
        """Start an episode in all environments, or where ``options["reset_mask"]`` (bool ``[n]``) is true.

        Args:
            seed: n seeds, or the first of n consecutive seeds.
            options: passed to the environments, without ``reset_mask``.

        Raises:
            EnvError: an environment could not be reset in three attempts.
            ValueError: the seeds or the mask have another length.
            ClosedEnvironmentError: after ``close``.
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
        """Take one action in each environment.

        Args:
            actions: n texts; an unpaired surrogate, which cannot be encoded, is replaced by ``?``.

        Raises:
            ValueError: the number of actions is not n.
            ResetNeeded: an episode is over or was not started.
            EnvError: an environment could not be reset.
            ClosedEnvironmentError: after ``close``.
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
        self._run(self._resources.close())
        portal().closed(self._resources)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the vector is closed: make another one")

    def _together(self, work: Mapping[int, Awaitable[R]]) -> list[tuple[int, R]]:
        """Return all results once all have ended; raise the first exception if there is one."""

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
        """Return the step if an action was taken, and the start of the next episode if one started."""
        if self._done[k]:
            return None, await self._begin(k, None, None)
        action = encodable(action) if isinstance(action, str) else action
        try:
            observation, reward, terminated, truncated, info = await self._slots[k].step(
                encodable(action) if isinstance(action, str) else action
            )
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


@dataclass(frozen=True, eq=False)
class _Resources:
    """What a vector closes at its end."""

    slots: Sequence[Slot]
    place: Slots

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self.slots))
        await self.place.close()
