"""The Mixture environment: several environments in fixed ratios.

Invariant: the seed alone decides the domain of an episode. The episode is the one that the domain's environment plays
with the same seed; only its instructions are added before the first observation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from gymnasium.error import ResetNeeded
from pydantic import Field, TypeAdapter, ValidationError

from agentkit import registry
from agentkit.config import Strict
from agentkit.envs.base import AsyncTextEnv, Info, TextEnv
from agentkit.errors import ConfigError


class Domain(Strict):
    """One domain of a mixture."""

    id: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Relative frequency of its episodes."""
    reward_scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of its rewards, to balance domains with different rewards."""
    name: str | None = None
    """Prefix of its metrics; its ``id`` if None."""
    sandbox: str | None = None
    """Back end of its sandbox; None runs it in this process."""

    @property
    def label(self) -> str:
        return self.name or self.id


_DOMAINS = TypeAdapter(list[Domain])


class Mixture(AsyncTextEnv):
    """Play an episode of an environment that the seed chooses.

    Action space, observation space and rewards are those of the chosen environment.

    Args:
        domains: the environments, each with ``id`` and optionally ``kwargs``, ``weight`` (1), ``reward_scale`` (1),
            ``name`` (the id) and ``sandbox`` (None).

    Raises:
        ConfigError: the domains are malformed, or one of them needs a separate process and has no sandbox.
        RegistryError: an environment is unknown.
    """

    instructions = "Each task comes with rules of its own. Follow those."
    deterministic = False  # overwritten if all domains are

    def __init__(self, *, domains: Sequence[Domain | dict[str, Any]] = ()) -> None:
        self.domains = _read(domains)
        for domain in self.domains:
            _check(domain)
        self.max_turns = self.max_turns_for(domains=domains)
        weights = np.array([domain.weight for domain in self.domains])
        self._bounds = np.cumsum(weights / weights.sum())
        self._rules = [_rules(domain) for domain in self.domains]
        self._envs: dict[int, TextEnv | AsyncTextEnv] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._current: int | None = None
        self._steps = 0

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        return max(_turns(domain) for domain in _read(kwargs.get("domains", ()))) if kwargs else cls.max_turns

    @classmethod
    def runs_policy_code(cls, **kwargs: Any) -> bool:
        parts = (_class(domain) for domain in _read(kwargs.get("domains", ()))) if kwargs else ()
        return any(part.runs_policy_code(**arguments) for part, arguments in parts)

    @property
    def policy_code_ran(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._current is not None and getattr(self._envs[self._current], "policy_code_ran", False)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        # A separate generator, because the domain's environment starts with the same seed and its draws must not depend
        # on this one. The last bound may be a rounding error below 1.
        place = self.np_random.spawn(1)[0].random()
        drawn = min(int(np.searchsorted(self._bounds, place, "right")), len(self.domains) - 1)
        seed = int(self.np_random.integers(2**31)) if seed is None else seed
        if drawn not in self._envs:
            self._envs[drawn] = await self._make(self.domains[drawn])
        self._current, self._steps = drawn, 0
        env = self._envs[drawn]
        self.action_space = env.action_space
        observation, info = await self._call(env.reset, seed=seed, options=options)
        return f"{self._rules[drawn]}\n\n{observation}", info | {"domain": self.domains[drawn].label}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._current is None:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        domain, env = self.domains[self._current], self._envs[self._current]
        observation, reward, terminated, truncated, info = await self._call(env.step, action)
        self._steps += 1
        truncated = truncated or (not terminated and self._steps >= _turns(domain) * env.actions_per_turn)
        if terminated or truncated:
            self._current = None
        label = domain.label
        own = {f"{label}/{name}": value for name, value in info.get("metrics", {}).items()}
        metrics = {**own, f"{label}/success": float(info["success"])}
        info = {**info, "domain": label, "metrics": metrics}
        return observation, reward * domain.reward_scale, terminated, truncated, info

    def expert(self) -> Iterator[str]:
        """Yield the actions of the chosen domain's expert."""
        if self._current is not None:
            yield from self._envs[self._current].expert()

    async def close(self) -> None:
        self._current = None
        while self._envs:
            await self._call(self._envs.popitem()[1].close)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _make(self, domain: Domain) -> TextEnv | AsyncTextEnv:
        here = registry.arguments_here(domain.id, domain.kwargs, domain.sandbox)
        if here is not None:
            return registry.make(domain.id, **here)
        assert domain.sandbox is not None
        from agentkit.envs.isolation.env import SandboxedEnv

        env = SandboxedEnv(domain.id, domain.kwargs, sandbox=domain.sandbox)
        await env.start()
        return env

    async def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        env = method.__self__
        if isinstance(env, AsyncTextEnv):
            return await method(*arguments, **named)
        if env.concurrency == "inline":
            return method(*arguments, **named)
        if self._thread is None:  # one thread for all calls, because an environment may be tied to its thread
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="mixture")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*arguments, **named))


def _read(domains: Sequence[Domain | dict[str, Any]]) -> list[Domain]:
    if not domains:
        raise ConfigError("a mixture needs domains: a list of {id: …, weight: …, kwargs: …}")
    try:
        read = _DOMAINS.validate_python(domains)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, ('domains', *item['loc'])))}: {item['msg']}" for item in error.errors())
        raise ConfigError("; ".join(problems)) from None
    labels = [domain.label for domain in read]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"domains: {', '.join(labels)} are not all different; give those of one id a `name` each")
    return read


def _class(domain: Domain) -> tuple[type[Any], dict[str, Any]]:
    spec = registry.entry(domain.id).load()
    return spec.entry_point, {**spec.kwargs, **domain.kwargs}  # pyright: ignore[reportReturnType]


def _check(domain: Domain) -> None:
    cls, arguments = _class(domain)
    registry.check_arguments(domain.id, cls, arguments)
    if cls.tools_for(**arguments):
        raise ConfigError(f"{domain.id} has tools, which differ between domains; train on it without a mixture")
    if domain.sandbox is None and issubclass(cls, TextEnv) and cls.concurrency == "process":
        raise ConfigError(
            f"{domain.id} needs a separate process, because it may hang; give its domain a sandbox, such as "
            "`sandbox: local`"
        )


def _turns(domain: Domain) -> int:
    cls, arguments = _class(domain)
    return cls.max_turns_for(**arguments)


def _rules(domain: Domain) -> str:
    cls, arguments = _class(domain)
    return cls.instructions_for(**arguments).strip()
