"""Create, check, reset, wake and remove the sandboxes of a pool.

Invariant: every call ends in bounded time. ``unusable``, ``wake``, ``check`` and ``remove`` return what is wrong with a
sandbox instead of raising.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Literal, Union

from agentkit.errors import CommandNotFound, SandboxError
from agentkit.sandboxes import backends
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.lifecycle import WORKING
from agentkit.sandboxes.pool.health import HealthPolicy, exhausted
from agentkit.sandboxes.pool.slots import Slot
from agentkit.sandboxes.reaper.labels import user_labels
from agentkit.sandboxes.reaper.registration import Registration
from agentkit.sandboxes.recovery.hedge import Hedge
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import loop_time
from agentkit.sandboxes.types import Observed, Transition

Warm = Literal["running", "paused"]
Reset = Union[Literal["recreate", "snapshot"], Callable[[Sandbox], Awaitable[None]]]  # noqa: UP007

_CANARY = ":"
"""A minimal shell command: it takes the same path as all work and needs a process."""
_WAKE_MISSES = 2
"""Missed pings in a row after which a sandbox is not handed out."""
LIST_TIMEOUT = 10.0
"""Seconds that the engine gets to list or inspect sandboxes."""
REMOVE_TIMEOUT = 30.0
"""Seconds that the engine gets to remove one sandbox."""


class Provisioner:
    """Operations on single sandboxes of one pool."""

    backend: Backend

    def __init__(
        self,
        spec: SandboxSpec,
        backend: Backend | str,
        warm: Warm,
        reset: Reset,
        policy: HealthPolicy,
        hedge: Hedge | None,
    ) -> None:
        self.labels = {"pool": uuid.uuid4().hex}
        """Labels of all sandboxes of this pool, and of no others."""
        self._spec = spec.model_copy(update={"labels": {**spec.labels, **self.labels}})
        self._backend_or_name = backend
        self._keep_paused = warm == "paused"
        self._reset, self._policy, self._hedge = reset, policy, hedge
        self._has_shell = True
        self._extended: dict[str, float] = {}
        """Time at which the time to live of each sandbox last began."""
        self._creations: dict[object, float] = {}

    async def start(self) -> None:
        """Connect to the engine. Raises ``EngineUnavailable``, ``UnsupportedFeature``, ``ConfigError``."""
        self.backend, self._release_backend = await backends.borrow(self._backend_or_name)
        try:
            self.backend.check(self._spec)
        except BaseException:
            await self._release_backend()
            raise

    async def close(self) -> int:
        """Remove all sandboxes of this pool; return how many the engine did not remove."""
        if self._hedge is not None:
            await self._hedge.close()
        try:
            left = await asyncio.wait_for(self.observe(), LIST_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            left = []
        removed = await asyncio.gather(*(self.remove_stray(one.id) for one in left))
        await self._release_backend()
        return removed.count(False)

    # Creation and removal.

    async def create(self, may_hedge: Callable[[], bool], avoid_hosts: tuple[str, ...] = ()) -> Sandbox:
        """Create a sandbox. Raises what ``Sandbox.create`` raises; nothing is left then."""
        spec = self._spec.model_copy(update={"avoid_hosts": avoid_hosts}) if avoid_hosts else self._spec
        if self._hedge is None:
            return await self._create(spec)
        return await self._hedge.run("create", lambda: self._create(spec), discard=Sandbox.close, may=may_hedge)

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        token, self._creations[token] = object(), loop_time()
        try:
            return await Sandbox.create(spec, backend=self.backend)
        finally:
            del self._creations[token]

    @property
    def creating_since(self) -> float:
        """When the oldest creation under way began; infinity without one."""
        return min(self._creations.values(), default=float("inf"))

    async def prepare(self, box: Sandbox) -> None:
        """Check that a new sandbox works. Raises ``SandboxError``."""
        self._extended[box.id] = loop_time()
        if self._has_shell:
            try:
                await box.exec(_CANARY, timeout=self._spec.start_timeout)
            except CommandNotFound:
                self._has_shell = False  # an image without a shell: only pings check it

    @property
    def engine_resets(self) -> bool:
        """Whether the engine resets sandboxes, not a function of the user."""
        return not callable(self._reset)

    async def reset(self, box: Sandbox) -> None:
        """Restore the initial state between two uses. Raises any error of the reset."""
        if callable(self._reset):
            await asyncio.wait_for(self._reset(box), self._spec.start_timeout)
        else:
            await box.reset()

    async def rest(self, slot: Slot) -> None:
        """Pause the sandbox if idle sandboxes are kept paused. Raises ``SandboxError``."""
        if self._keep_paused:
            slot.paused = True  # set first, so that the monitor does not report the pause
            await slot.box.pause()

    async def remove(self, box: Sandbox) -> bool:
        """Remove a sandbox; return whether that worked."""
        try:
            await box.close()
        except SandboxError:
            return False
        self._extended.pop(box.id, None)
        return True

    async def remove_stray(self, id: str) -> bool:
        """Remove a sandbox without a slot; return whether that worked."""
        try:
            await asyncio.wait_for(self.backend.remove(id), REMOVE_TIMEOUT)
            await Registration(id, self._spec, self.backend).unregister()
        except (SandboxError, asyncio.TimeoutError):
            return False
        return True

    # Checks.

    def watch(self, slot: Slot, lost: Callable[[str], None]) -> Callable[[], None]:
        """Call ``lost`` with the reason when the sandbox ends; return a function that stops watching."""

        def on_transition(transition: Transition) -> None:
            if transition.after in ("unhealthy", "stopping", "failed"):
                lost(slot.box.loss or "removed")

        return slot.box.watch(on_transition)

    def unusable(self, box: Sandbox) -> str:
        """Return why a sandbox must not be used, as far as this process knows, or an empty string."""
        if box.loss is not None:
            return box.loss
        return "" if box.state in WORKING or box.state == "paused" else box.state

    async def wake(self, slot: Slot) -> str:
        """Resume and ping a sandbox that is about to be handed out; return what is wrong with it."""
        box = slot.box
        try:
            await self._resume(slot)
            if await box.probe(self._policy.ping_timeout, _WAKE_MISSES) is None:
                return "hung"
            await self._extend(box)
        except (SandboxError, asyncio.TimeoutError):
            return self.unusable(box) or "hung"
        return self.unusable(box)

    async def check(self, slot: Slot) -> str:
        """Run a command in an idle sandbox and check its resources; return what is wrong with it."""
        box, limit = slot.box, self._policy.canary_timeout
        try:
            await self._resume(slot)
            if self._has_shell and not (await asyncio.wait_for(box.exec(_CANARY), limit)).ok:
                return "canary failed"
            if why := exhausted(await asyncio.wait_for(box.stats(), limit), self._spec, self._policy):
                return why
            await self._extend(box)
            await self.rest(slot)
        except (SandboxError, asyncio.TimeoutError):
            return self.unusable(box) or "canary failed"
        return self.unusable(box)

    async def observe(self) -> list[Observed]:
        """Return all sandboxes of this pool that the engine knows. Raises ``EngineUnavailable``."""
        return await self.backend.list(user_labels(self.labels))

    async def _resume(self, slot: Slot) -> None:
        if slot.box.state == "paused":
            await slot.box.resume()
        slot.paused = False

    async def _extend(self, box: Sandbox) -> None:
        """Restart the time to live, so that the next user has at least half of it."""
        ttl = self._spec.ttl
        if ttl is not None and loop_time() - self._extended[box.id] > ttl / 2:
            await box.extend(ttl)
            self._extended[box.id] = loop_time()
