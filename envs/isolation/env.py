"""Environments that run in a sandbox, with the interfaces of environments in this process.

Invariant: the host runs no code of the environment and validates all its replies. An environment that failed is not
used again: the next ``reset`` makes a fresh one, in a fresh sandbox if the process hung, died or broke the protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from agentkit.envs.base import AsyncTextEnv, Info, TextEnv
from agentkit.envs.isolation import validation
from agentkit.envs.isolation.allocator import EnvSlot, SandboxAllocator
from agentkit.envs.isolation.placement import Placement, place
from agentkit.envs.isolation.replay import Recovery, Replay
from agentkit.envs.isolation.validation import Description
from agentkit.errors import ConfigError, EnvContractError, EnvCrashed, EnvError, SandboxError, UnexplainedCrash
from agentkit.portal import portal
from agentkit.sandboxes.attribution import Cause
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import SandboxSpec

STEP_TIMEOUT = 30.0
RESET_TIMEOUT = 60.0


class SandboxedEnv(AsyncTextEnv):
    """An environment in a sandbox, with coroutines as methods.

    Attributes such as ``instructions``, ``max_turns`` and the spaces are known after ``start`` or ``reset``.
    ``reset`` and ``step`` raise ``EnvCrashed`` (with the exception of the environment in the message and the traceback
    from inside in ``__cause__``), ``EnvTimeout`` or ``EnvContractError``; ``reset`` may follow each of these.

    Args:
        id: a registered name, or one that is registered in the image.
        kwargs: arguments of the environment, plain data.
        sandbox: name of a back end, a started back end, or a specification for docker.
        sandbox_spec: fields of the specification that differ from the defaults.
        step_timeout: seconds that ``step`` may take.
        reset_timeout: seconds that ``reset`` may take.
        recovery: ``"replay"`` continues an episode whose environment failed, by replaying it in a fresh one.
        allocator: sandboxes shared with other environments; by default the environment has its own.
    """

    def __init__(
        self,
        id: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        sandbox: str | SandboxSpec | Backend = "docker",
        sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
        step_timeout: float = STEP_TIMEOUT,
        reset_timeout: float = RESET_TIMEOUT,
        recovery: Recovery = "retry",
        allocator: SandboxAllocator | None = None,
    ) -> None:
        self._owns_allocator = allocator is None
        self._allocator = allocator or SandboxAllocator(place(id, kwargs or {}, sandbox, sandbox_spec))
        self._step_timeout, self._reset_timeout = step_timeout, reset_timeout
        self._recovery: Recovery = recovery
        self._slot: EnvSlot | None = None
        self._used = False
        self._replay: Replay[SandboxedEnv] = Replay(self, SandboxedEnv._renewed)

    async def start(self) -> Description:
        """Make the environment if there is none, and return its description.

        Raises ``SandboxError``, ``RegistryError``, ``EnvError``, and ``ConfigError`` for ``recovery='replay'`` of an
        environment that is not deterministic.
        """
        if self._slot is not None and self._slot.sandbox.process.broken is not None:
            await self._abandon()
        if self._slot is None:
            self._slot = await self._allocator.acquire(self._reset_timeout)
            self._declare(self._slot.description)
        return self._slot.description

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        self._replay.begin()
        if self._recovery != "replay" or seed is None:  # without a seed, chance cannot be replayed
            return await self._reset(seed, options)
        return await self._replay.do(lambda env: env._reset(seed, options))

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._recovery != "replay" or not self._replay.begun:
            return await self._step(action)
        return await self._replay.do(lambda env: env._step(action))

    async def render(self) -> Any:
        """Return a text, a picture (uint8, height x width x 3 or 4) or None, depending on ``render_mode``."""
        return validation.check_rendering(await self._call("render", timeout=self._step_timeout))

    async def plan(self) -> list[str]:
        """Return the expert's plan from the current state. Raises ``NotImplementedError``."""
        return validation.check_plan(await self._call("expert", timeout=self._reset_timeout))

    async def close(self) -> None:
        slot, self._slot = self._slot, None
        try:
            if slot is not None:
                await self._allocator.release(slot)
        finally:
            if self._owns_allocator:
                await self._allocator.close()

    async def _reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        if self._used and self._slot is not None and self._slot.description.runs_policy_code:
            await self._abandon()  # policy code of an earlier episode must not affect this one
        self._used = False
        try:
            await self.start()
        except SandboxError as error:
            if not error.retryable:
                raise
            raise EnvCrashed(f"no sandbox for the environment: {error}") from error
        return await self._checked(validation.check_reset, "reset", seed, options, timeout=self._reset_timeout)

    async def _step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self._used = True
        return await self._checked(validation.check_step, "step", action, timeout=self._step_timeout)

    async def _checked(self, check: Any, name: str, *arguments: Any, timeout: float) -> Any:
        value = await self._call(name, *arguments, timeout=timeout)
        try:
            return check(value)
        except EnvContractError as error:
            attributed = self._attributed(error, "unexplained")
            await self._abandon()  # our server validates too, so another program sent this
            raise attributed from None

    async def _call(self, name: str, *arguments: Any, timeout: float) -> Any:
        if self._slot is None:
            raise EnvCrashed(f"{name} without an environment: call reset first")
        process = self._slot.sandbox.process
        try:
            return await process.call(self._slot.number, name, *arguments, timeout=timeout)
        except EnvError as error:
            if process.broken is None:
                raise
            suspect = self._used and self._slot.description.runs_policy_code
            attributed = self._attributed(error, await process.cause()) if suspect else error
            await self._abandon()
            if attributed is error:
                raise
            raise attributed from error

    def _attributed(self, error: EnvError, cause: Cause) -> EnvError:
        """Return the error to raise for ``error``, which code of the policy may have caused."""
        assert self._slot is not None
        if self._used and self._slot.description.runs_policy_code and cause != "external":
            return UnexplainedCrash(f"after code of the policy ran in it: {type(error).__name__}: {error}")
        return error

    async def _renewed(self) -> SandboxedEnv:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            await self._allocator.release(slot)
        return self

    async def _abandon(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            with contextlib.suppress(SandboxError):  # the reaper tries again to remove it
                await self._allocator.discard(slot)

    def _declare(self, description: Description) -> None:
        if self._recovery == "replay" and not description.deterministic:
            raise ConfigError(
                f"recovery='replay' needs a deterministic environment, and {self._allocator.placement.id} declares "
                "itself not deterministic; use 'retry' or 'void'"
            )
        self.instructions = description.instructions
        self.max_turns, self.actions_per_turn = description.max_turns, description.actions_per_turn
        self.deterministic = description.deterministic  # pyright: ignore[reportAttributeAccessIssue]
        self.observation_space, self.action_space = description.spaces()
        self.render_mode = description.render_mode
        self.metadata = _metadata(description)  # pyright: ignore[reportAttributeAccessIssue]


class SandboxedTextEnv(TextEnv):
    """An environment in a sandbox as a gymnasium environment, as returned by ``agentkit.make(..., sandbox=…)``.

    The sandbox is created at once, and removed by ``close`` or when the interpreter ends.

    Args:
        id: a registered name, or one that is registered in the image.
        kwargs: arguments of the environment, plain data.
        options: further arguments of ``SandboxedEnv``.

    Raises:
        SandboxError, RegistryError, ConfigError, EnvError: the environment cannot be made.
    """

    def __init__(self, id: str, kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        self._env = SandboxedEnv(id, kwargs, **options)
        self._portal = portal()
        self._portal.opened(self._env)
        try:
            description = self._portal.run(self._env.start())
        except BaseException:
            self.close()
            raise
        self.description = description
        self.instructions = description.instructions
        self.max_turns, self.actions_per_turn = description.max_turns, description.actions_per_turn
        self.concurrency = "thread"  # pyright: ignore[reportAttributeAccessIssue]
        self.deterministic = description.deterministic  # pyright: ignore[reportAttributeAccessIssue]
        self.observation_space, self.action_space = description.spaces()
        self.metadata = _metadata(description)
        self.render_mode = description.render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        return self._portal.run(self._env.reset(seed=seed, options=options))

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return self._portal.run(self._env.step(action))

    def render(self) -> Any:
        return self._portal.run(self._env.render())

    def expert(self) -> Iterator[str]:
        yield from self._portal.run(self._env.plan())

    def close(self) -> None:
        """Remove the sandbox. Idempotent."""
        self._portal.run(self._env.close())
        self._portal.closed(self._env)


def describe(placement: Placement) -> Description:
    """Make an environment in a sandbox and return its description. Cached for equal placements.

    Blocks. Raises ``SandboxError``, ``RegistryError``, ``EnvError``.
    """
    if placement.digest not in _descriptions:
        _descriptions[placement.digest] = portal().run(_describe(placement))
    return _descriptions[placement.digest]


async def _describe(placement: Placement) -> Description:
    allocator = SandboxAllocator(placement)
    try:
        return (await allocator.acquire(RESET_TIMEOUT)).description
    finally:
        await allocator.close()


_descriptions: dict[str, Description] = {}


def _metadata(description: Description) -> dict[str, Any]:
    fps = {} if description.render_fps is None else {"render_fps": description.render_fps}
    return {"render_modes": list(description.render_modes), **fps}
