"""Environments that run in a sandbox, behind the interfaces that they would have without one.

Invariant: the host runs no code of the environment and believes none of its answers unchecked. An environment that
failed is never used again: the next ``reset`` has a fresh one, in a fresh sandbox if the old one hung, died or lied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from agentkit.envs import answers
from agentkit.envs.answers import Description
from agentkit.envs.base import AsyncTextEnv, Info, TextEnv
from agentkit.envs.house import House, Seat
from agentkit.envs.placement import Placement, place
from agentkit.envs.portal import portal
from agentkit.envs.recovery import Recovery, Replay
from agentkit.errors import ConfigError, EnvContractError, EnvCrashed, EnvError, SandboxError, UnexplainedCrash
from agentkit.sandboxes.attribution import Cause
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.spec import SandboxSpec

STEP_TIMEOUT = 30.0
RESET_TIMEOUT = 60.0


class SandboxedEnv(AsyncTextEnv):
    """Environment ``id`` in a sandbox, as coroutines.

    Args:
        id: a registered name, or one that is registered in the image.
        kwargs: arguments of the environment, plain data.
        sandbox: a back end's name, a back end that is started, or a specification for docker.
        sandbox_spec: fields of the specification, instead of the defaults.
        step_timeout, reset_timeout: seconds that a call may take.
        recovery: ``replay`` plays an episode whose environment died again, in a fresh one, up to where it was.
        house: where it lives, shared with others; by default it has a house of its own.

    What it says of itself (``instructions``, ``max_turns``, the spaces, …) is known once it was ``start``-ed or reset.
    ``reset`` and ``step`` raise ``EnvCrashed`` (what the environment raised is in the message, the traceback from
    inside in ``__cause__``), ``EnvTimeout`` or ``EnvContractError``; ``reset`` may follow each of these.
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
        house: House | None = None,
    ) -> None:
        self._own_house = house is None
        self._house = house or House(place(id, kwargs or {}, sandbox, sandbox_spec))
        self._step_timeout, self._reset_timeout = step_timeout, reset_timeout
        self._recovery: Recovery = recovery
        self._seat: Seat | None = None
        self._used = False
        self._replay: Replay[SandboxedEnv] = Replay(self, SandboxedEnv._renewed)

    async def start(self) -> Description:
        """Make the environment, if there is none, and return what it says of itself.

        Raises ``SandboxError``, ``RegistryError``, ``EnvError``, and ``ConfigError`` for ``recovery='replay'`` of an
        environment that is not deterministic.
        """
        if self._seat is not None and self._seat.room.process.broken is not None:
            await self._abandon()
        if self._seat is None:
            self._seat = await self._house.take(self._reset_timeout)
            self._declare(self._seat.description)
        return self._seat.description

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        self._replay.begin()
        if self._recovery != "replay" or seed is None:  # what chance will give is not known without a seed
            return await self._reset(seed, options)
        return await self._replay.do(lambda env: env._reset(seed, options))

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._recovery != "replay" or not self._replay.begun:
            return await self._step(action)
        return await self._replay.do(lambda env: env._step(action))

    async def render(self) -> Any:
        """A text, a picture (uint8, height x width x 3 or 4), or None, as ``render_mode`` says."""
        return answers.check_rendering(await self._call("render", timeout=self._step_timeout))

    async def plan(self) -> list[str]:
        """The expert's actions from the current state, as far as it can be certain. Raises ``NotImplementedError``."""
        return answers.check_plan(await self._call("expert", timeout=self._reset_timeout))

    async def close(self) -> None:
        seat, self._seat = self._seat, None
        try:
            if seat is not None:
                await self._house.leave(seat)
        finally:
            if self._own_house:
                await self._house.close()

    async def _reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[str, Info]:
        if self._used and self._seat is not None and self._seat.description.runs_policy_code:
            await self._abandon()  # an episode never meets what the code of an earlier one left
        self._used = False
        try:
            await self.start()
        except SandboxError as error:
            if not error.retryable:
                raise
            raise EnvCrashed(f"there is no sandbox for the environment: {error}") from error
        return await self._checked(answers.check_reset, "reset", seed, options, timeout=self._reset_timeout)

    async def _step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        self._used = True
        return await self._checked(answers.check_step, "step", action, timeout=self._step_timeout)

    async def _checked(self, check: Any, name: str, *arguments: Any, timeout: float) -> Any:
        value = await self._call(name, *arguments, timeout=timeout)
        try:
            return check(value)
        except EnvContractError as error:
            attributed = self._attributed(error, "unexplained")
            await self._abandon()  # its own side checks too: whoever sends this is no environment of ours
            raise attributed from None

    async def _call(self, name: str, *arguments: Any, timeout: float) -> Any:
        if self._seat is None:
            raise EnvCrashed(f"{name} without an environment: call reset first")
        process = self._seat.room.process
        try:
            return await process.call(self._seat.number, name, *arguments, timeout=timeout)
        except EnvError as error:
            if process.broken is None:
                raise
            suspect = self._used and self._seat.description.runs_policy_code
            attributed = self._attributed(error, await process.cause()) if suspect else error
            await self._abandon()
            if attributed is error:
                raise
            raise attributed from error

    def _attributed(self, error: EnvError, cause: Cause) -> EnvError:
        """What to raise for ``error``, which code of the policy may have caused if any ran here."""
        assert self._seat is not None
        if self._used and self._seat.description.runs_policy_code and cause != "external":
            return UnexplainedCrash(f"after code of the policy ran in it: {type(error).__name__}: {error}")
        return error

    async def _renewed(self) -> SandboxedEnv:
        if self._seat is not None:
            seat, self._seat = self._seat, None
            await self._house.leave(seat)
        return self

    async def _abandon(self) -> None:
        seat, self._seat = self._seat, None
        if seat is not None:
            with contextlib.suppress(SandboxError):  # removing it is tried again by the reaper
                await self._house.give_up(seat)

    def _declare(self, description: Description) -> None:
        if self._recovery == "replay" and not description.deterministic:
            raise ConfigError(
                f"recovery='replay' needs an environment that plays the same again, and "
                f"{self._house.placement.id} calls itself not deterministic; use 'retry' or 'void'"
            )
        self.instructions = description.instructions
        self.max_turns, self.actions_per_turn = description.max_turns, description.actions_per_turn
        self.deterministic = description.deterministic  # pyright: ignore[reportAttributeAccessIssue]
        self.observation_space, self.action_space = description.spaces()
        self.render_mode = description.render_mode
        self.metadata = _metadata(description)  # pyright: ignore[reportAttributeAccessIssue]


class SandboxedTextEnv(TextEnv):
    """The same as a gymnasium environment: what ``agentkit.make(..., sandbox=…)`` returns.

    Its sandbox is made at once, and removed by ``close``, or at the latest when the interpreter ends.
    """

    def __init__(self, id: str, kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """As ``SandboxedEnv``, without ``house``. Raises ``SandboxError``, ``RegistryError``, ``ConfigError``,
        ``EnvError``."""
        self._env = SandboxedEnv(id, kwargs, **options)
        self._portal = portal()
        self._portal.opened(self._env)
        try:
            description = self._portal.run(self._env.start())
        except BaseException:
            self.close()
            raise
        self.description = description
        """What the environment says of itself."""
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
        """Remove the sandbox. Twice is harmless."""
        self._portal.run(self._env.close())
        self._portal.closed(self._env)


def describe(placement: Placement) -> Description:
    """What an environment says of itself, asked in a sandbox that is made for it; asked once for equal placements.

    Blocks. Raises ``SandboxError``, ``RegistryError``, ``EnvError``.
    """
    known = _described.get(placement.digest)
    if known is None:
        known = _described[placement.digest] = portal().run(_ask(placement))
    return known


async def _ask(placement: Placement) -> Description:
    env = SandboxedEnv(placement.id, house=House(placement))
    try:
        return await env.start()
    finally:
        await env.close()
        await env._house.close()


_described: dict[str, Description] = {}


def _metadata(description: Description) -> dict[str, Any]:
    fps = {} if description.render_fps is None else {"render_fps": description.render_fps}
    return {"render_modes": list(description.render_modes), **fps}
