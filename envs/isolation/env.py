"""Environments that run in a sandbox, with the interfaces of environments in this process.

Invariant: the host runs no code of the environment and validates all its replies. An environment that failed is not
used again: another one continues its episode (``replay``) or plays the next one, in another sandbox if the process
hung, died or broke the protocol.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from agentkit.envs.base import AsyncTextEnv, Info, TextEnv
from agentkit.envs.isolation import validation
from agentkit.envs.isolation.allocator import EnvSlot, SandboxAllocator
from agentkit.envs.isolation.placement import Placement, place
from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.envs.isolation.replay import SupervisedEnv
from agentkit.envs.isolation.validation import Description
from agentkit.errors import (
    AgentkitError,
    ConfigError,
    EnvCrashed,
    EnvError,
    QuotaExceeded,
    SandboxError,
    UnexplainedCrash,
)
from agentkit.portal import portal
from agentkit.sandboxes import backends
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.recovery.hedge import Operation
from agentkit.sandboxes.recovery.record import Means
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished

R = TypeVar("R")

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
        redundancy: how it survives failures.
        allocator: sandboxes shared with other environments, and their redundancy; by default the environment has its
            own.
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
        redundancy: Redundancy | None = None,
        allocator: SandboxAllocator | None = None,
    ) -> None:
        self._owns_allocator = allocator is None
        if allocator is None:
            placement = place(id, kwargs or {}, sandbox, sandbox_spec)
            allocator = SandboxAllocator(placement, redundancy, make_timeout=reset_timeout)
        self._allocator = allocator
        self._step_timeout, self._reset_timeout = step_timeout, reset_timeout
        self._env = _SupervisedSlot(allocator)
        self._begun = False
        """Whether an episode is in progress."""
        self._runs_policy_code = True

    @property
    def places(self) -> Sequence[tuple[str, str]]:
        """Host and id of the sandboxes that the present episode was in, in order."""
        return self._env.places

    async def start(self) -> Description:
        """Make the environment if there is none, and return its description.

        Raises ``SandboxError``, ``RegistryError``, ``EnvError``, and ``ConfigError`` for settings that need a
        deterministic environment.
        """
        description = (await self._env.running()).description
        self._declare(description)
        return description

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        self._begun = False
        # Code of the policy of an earlier episode must not affect this one.
        await self._env.begin(fresh=self._env.target is not None and self._env.target.suspect)
        if seed is None:
            self._env.forbid_replay("its reset had no seed, and chance cannot be replayed")
        result = await self._call(
            "reset", lambda slot: slot.reset(seed, options, self._reset_timeout), None if seed is None else "reset"
        )
        self._declare((await self._env.running()).description)
        self._begun = True
        return result

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        # Code of the policy must not get a second attempt by being slow.
        hedge: Operation | None = None if self._runs_policy_code else "step"
        return await self._go_on("step", lambda slot: slot.step(action, self._step_timeout), hedge)

    async def render(self) -> Any:
        """Return a text, a picture (uint8, height x width x 3 or 4) or None, depending on ``render_mode``."""
        check, timeout = validation.check_rendering, self._step_timeout
        return await self._go_on("render", lambda slot: slot.call("render", timeout=timeout, check=check))

    async def plan(self) -> list[str]:
        """Return the expert's plan from the current state. Raises ``NotImplementedError``."""
        check, timeout = validation.check_plan, self._reset_timeout
        return await self._go_on("expert", lambda slot: slot.call("expert", timeout=timeout, check=check))

    async def close(self) -> None:
        try:
            await self._env.stop()
        finally:
            if self._owns_allocator:
                await self._allocator.close()

    async def _go_on(self, name: str, run: Callable[[EnvSlot], Awaitable[R]], hedge: Operation | None = None) -> R:
        """Make a call in the episode, which ends if the call fails."""
        if not self._begun:
            raise EnvCrashed(f"{name} without an episode: call reset first")
        try:
            return await self._call(name, run, hedge if self._env.replays else None)
        except EnvError:
            self._begun = False
            raise

    async def _call(self, name: str, run: Callable[[EnvSlot], Awaitable[R]], hedge: Operation | None) -> R:
        try:
            return await self._env.act(name, run, record=name in ("reset", "step"), hedge=hedge)
        except SandboxError as error:
            if not error.retryable:
                raise
            raise EnvCrashed(f"no sandbox for the environment: {error}") from error

    def _declare(self, description: Description) -> None:
        self.instructions = description.instructions
        self._runs_policy_code = description.runs_policy_code
        self.max_turns, self.actions_per_turn = description.max_turns, description.actions_per_turn
        self.tools = description.tools
        self.deterministic = description.deterministic  # pyright: ignore[reportAttributeAccessIssue]
        self.observation_space, self.action_space = description.spaces()
        self.render_mode = description.render_mode
        self.metadata = _metadata(description)  # pyright: ignore[reportAttributeAccessIssue]


class _SupervisedSlot(SupervisedEnv[EnvSlot]):
    """An environment in a sandbox of an allocator, and its standbys."""

    def __init__(self, allocator: SandboxAllocator) -> None:
        self._allocator = allocator
        super().__init__(replays=True, standbys=allocator.redundancy.standbys, log=allocator.log, hedge=allocator.hedge)

    async def acquire(self, apart: Sequence[EnvSlot]) -> tuple[EnvSlot, Means]:
        slot, means = await self._allocator.acquire(apart)
        try:
            mode = self._allocator.redundancy.mode(slot.description.deterministic)
        except ConfigError:
            slot.release()
            raise
        self.replays = mode == "replay"
        return slot, means

    async def irrecoverable(self, target: EnvSlot, error: AgentkitError | None) -> AgentkitError | None:
        process = target.sandbox.process
        error = error or target.error or (None if process.broken is None else process.error())
        if target.suspect and process.broken is not None and await target.cause() != "external":
            crash = UnexplainedCrash(f"after code of the policy ran in it: {type(error).__name__}: {error}")
            crash.__cause__ = error
            return crash
        return await super().irrecoverable(target, error)


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
        self.tools = description.tools
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

    All sandbox servers that accept sandboxes need the image; they fetch it if it is missing. Blocks. Raises
    ``SandboxError``, ``RegistryError``, ``EnvError``.
    """
    if placement.digest not in _descriptions:
        _descriptions[placement.digest] = portal().run(_describe(placement))
    return _descriptions[placement.digest]


async def _describe(placement: Placement) -> Description:
    backend, release = await backends.borrow(placement.backend)
    allocator = SandboxAllocator(placement)
    try:
        await _check_image(backend, placement.spec)
        return (await allocator.acquire())[0].description
    finally:
        await allocator.close()
        await finished(release())


async def _check_image(backend: Backend, spec: SandboxSpec) -> None:
    """Raise ``ImageError`` if one of several servers lacks the image and cannot obtain it."""
    if len(backend.hosts()) > 1 and spec.pull != "never":
        with contextlib.suppress(QuotaExceeded):  # from a server that accepts no sandboxes; the others have the image
            await backend.pull(spec.image, timeout=spec.pull_timeout)


_descriptions: dict[str, Description] = {}


def _metadata(description: Description) -> dict[str, Any]:
    fps = {} if description.render_fps is None else {"render_fps": description.render_fps}
    return {"render_modes": list(description.render_modes), **fps}
