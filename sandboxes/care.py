"""What a pool does to a single sandbox: make it, look at it, wake it, make it as new, remove it.

Invariant: every call ends in bounded time and changes no account of the pool. What is wrong with a sandbox is said, not
raised, wherever it is an answer (``unusable``, ``ready``, ``check``, ``remove``).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Literal, Union

from agentkit.errors import CommandNotFound, SandboxError
from agentkit.sandboxes import backends
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.claims import Claim
from agentkit.sandboxes.health import HealthPolicy, exhausted
from agentkit.sandboxes.ledger import Place
from agentkit.sandboxes.lifecycle import WORKING
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Observed, Transition

Reset = Union[Literal["recreate", "snapshot"], Callable[[Sandbox], Awaitable[None]]]  # noqa: UP007

_CANARY = ":"
"""The least a shell can do: it takes the way of all work and needs a process."""


_QUICK_MISSES = 2
"""Misses in a row after which one that is about to be handed out is replaced by another."""
LOOK_TIMEOUT = 10.0
"""Seconds that the engine gets to say what is there."""
REMOVE_TIMEOUT = 30.0
"""Seconds that it gets to remove one sandbox."""


class Care:
    """Knows how the sandboxes of one pool are made and kept."""

    backend: Backend

    def __init__(
        self,
        spec: SandboxSpec,
        backend: Backend | str,
        warm: Literal["running", "paused"],
        reset: Reset,
        policy: HealthPolicy,
    ) -> None:
        labels = {**spec.labels, "pool": uuid.uuid4().hex}
        self._spec = spec.model_copy(update={"labels": labels})
        self._labels = Claim.user_labels({"pool": labels["pool"]})
        self._given = backend
        self._rests_paused = warm == "paused"
        self._reset, self._policy = reset, policy
        self._has_shell = True
        self._extended: dict[str, float] = {}
        self._making: dict[object, float] = {}

    async def start(self) -> None:
        """Raises ``EngineUnavailable``, ``UnsupportedFeature``, ``ConfigError``."""
        self.backend, self._release = await backends.borrow(self._given)
        try:
            self.backend.check(self._spec)
        except BaseException:
            await self._release()
            raise

    async def close(self) -> None:
        await self._release()

    # Making.

    async def create(self) -> Sandbox:
        """Raises what ``Sandbox.create`` raises; then nothing is left."""
        token, self._making[token] = object(), self._now()
        try:
            return await Sandbox.create(self._spec, backend=self.backend)
        finally:
            del self._making[token]

    @property
    def making_since(self) -> float:
        """When the oldest creation under way began; infinity if there is none."""
        return min(self._making.values(), default=float("inf"))

    async def prepare(self, place: Place) -> None:
        """See that a new one works. Raises ``SandboxError``."""
        self._extended[place.box.id] = self._now()
        if self._has_shell:
            try:
                await place.box.exec(_CANARY, timeout=self._spec.start_timeout)
            except CommandNotFound:
                self._has_shell = False  # an image without any: pings must do

    @property
    def engine_resets(self) -> bool:
        """Whether ``renew`` is the engine's work, not that of a function of the pool's user."""
        return not callable(self._reset)

    async def renew(self, place: Place) -> None:
        """Make it as good as new between two uses. Raises whatever went wrong."""
        if callable(self._reset):
            await asyncio.wait_for(self._reset(place.box), self._spec.start_timeout)
        else:
            await place.box.reset()

    async def rest(self, place: Place) -> None:
        """Bring it into the state in which it waits. Raises ``SandboxError``."""
        if self._rests_paused:
            place.paused = True  # before it is true: nobody is to take it for somebody else's doing
            await place.box.pause()

    async def remove(self, box: Sandbox) -> bool:
        """Whether nothing is left of it."""
        try:
            await box.close()
        except SandboxError:
            return False
        self._extended.pop(box.id, None)
        return True

    async def remove_stray(self, id: str) -> bool:
        """Remove what nobody knows of; whether that worked."""
        try:
            await asyncio.wait_for(self.backend.remove(id), REMOVE_TIMEOUT)
            await Claim(id, self._spec, self.backend).drop()
        except (SandboxError, asyncio.TimeoutError):
            return False
        return True

    # Looking.

    def watch(self, place: Place, lost: Callable[[Place, str], None]) -> None:
        """Call ``lost`` when its sandbox is of no more use, at the very moment that it is known."""

        def look(transition: Transition) -> None:
            if transition.after in ("unhealthy", "stopping", "failed"):
                lost(place, place.box.loss or "removed")

        place.unwatch = place.box.watch(look)

    def unusable(self, box: Sandbox) -> str:
        """Why it must not be used again, as far as is known here; empty if nothing speaks against it."""
        if box.loss is not None:
            return box.loss
        return "" if box.state in WORKING or box.state == "paused" else box.state

    async def pulse(self, box: Sandbox) -> float | None:
        """Seconds until a sign of life; None if it is hung. Raises ``SandboxError``."""
        return await box.pulse(self._policy.ping_timeout, self._policy.ping_failures)

    async def ready(self, place: Place) -> str:
        """Wake it for its next user. Why it cannot be used, or empty."""
        box = place.box
        try:
            await self._rouse(place)
            if await box.pulse(self._policy.ping_timeout, _QUICK_MISSES) is None:
                return "hung"
            await self._extend(box)
        except (SandboxError, asyncio.TimeoutError):
            return self.unusable(box) or "hung"
        return self.unusable(box)

    async def check(self, place: Place) -> str:
        """Let it do real work, the least there is. What is wrong with it, or empty."""
        box, limit = place.box, self._policy.canary_timeout
        try:
            await self._rouse(place)
            if self._has_shell and not (await asyncio.wait_for(box.exec(_CANARY), limit)).ok:
                return "canary failed"
            if why := exhausted(await asyncio.wait_for(box.stats(), limit), self._spec, self._policy):
                return why
            await self._extend(box)
            await self.rest(place)
        except (SandboxError, asyncio.TimeoutError):
            return self.unusable(box) or "canary failed"
        return self.unusable(box)

    async def sweep(self) -> int:
        """Remove all that carries this pool's label, at its end; how many the engine did not remove."""
        try:
            left = await asyncio.wait_for(self.observe(), LOOK_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            return 0
        removed = await asyncio.gather(*(self.remove_stray(one.id) for one in left))
        return removed.count(False)

    async def observe(self) -> list[Observed]:
        """All sandboxes of this pool that the engine knows. Raises ``EngineUnavailable``."""
        return await self.backend.list(self._labels)

    # Their parts.

    async def _rouse(self, place: Place) -> None:
        if place.box.state == "paused":
            await place.box.resume()
        place.paused = False

    async def _extend(self, box: Sandbox) -> None:
        """Its time to live counts from its use: whoever gets it has at least half of it before them."""
        ttl, now = self._spec.ttl, self._now()
        if ttl is not None and now - self._extended[box.id] > ttl / 2:
            await box.extend(ttl)
            self._extended[box.id] = now

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
