"""Sandboxes of instances: fresh ones, with spares for the images that were asked for last.

Invariant: every sandbox is used once. All environments of one event loop share one supply for each back end, which
ends with the last of them, and with it every sandbox that it made.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator

from agentkit.envs.swebench.evaluation import ENVIRONMENT, REPOSITORY
from agentkit.envs.swebench.history import HIDE_FUTURE
from agentkit.envs.swebench.instance import Instance
from agentkit.envs.swebench.releases import store
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.pool import Lease, SandboxPool
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import Resources, SandboxSpec

IMAGES = 4
"""Images that spares are kept of."""
MOST = 256
"""Sandboxes of one image at one time."""


def spec_of(task: Instance, resources: Resources) -> SandboxSpec:
    """The sandbox of an instance: no network, its image's own user, and a root that can be written to, since the
    repository and its packages lie there. Nothing of the repository's future is left in it."""
    return SandboxSpec(
        image=task.image,
        user=task.user,
        env={**ENVIRONMENT, "HOME": "/tmp"},
        readonly_root=False,
        resources=resources,
        setup=("/bin/sh", "-c", f"cd {REPOSITORY}\n{HIDE_FUTURE}"),
        pull="never" if task.image.startswith(store.IMAGES) else "missing",
        ttl=None,
        idle_timeout=3600.0,
        start_timeout=300.0,
    )


class Supply:
    """Fresh sandboxes by specification."""

    def __init__(self, backend: str | Backend, spares: int) -> None:
        self._backend, self._spares = backend, spares
        self._pools: OrderedDict[str, SandboxPool] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self.users = 0

    async def take(self, spec: SandboxSpec) -> Lease:
        """A sandbox that nobody has used; ``release`` it. Raises ``SandboxError``."""
        async with self._starting:
            pool = self._pools.get(spec.digest)
            if pool is None:
                pool = SandboxPool(spec, self._backend, min_idle=self._spares, max_size=MOST, drain_timeout=0)
                await pool.start()
                self._pools[spec.digest] = pool
        self._pools.move_to_end(spec.digest)
        taking = pool.take(spec.start_timeout + spec.pull_timeout)
        self._let_go()
        return await taking

    @contextlib.asynccontextmanager
    async def fresh(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """A sandbox for the body of ``async with``."""
        lease = await self.take(spec)
        try:
            yield lease.box
        finally:
            lease.release(discard=True)

    async def close(self) -> None:
        pools = list(self._pools.values())
        self._pools.clear()
        await asyncio.gather(*(pool.close() for pool in pools), *self._closing, return_exceptions=True)

    def _let_go(self) -> None:
        """Close the pools of images that were not asked for lately, unless they are in use."""
        for digest, pool in list(self._pools.items())[:-IMAGES]:
            stats = pool.stats()
            if not stats.busy and not stats.waiting:
                del self._pools[digest]
                task = asyncio.ensure_future(pool.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


_supplies: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[object, int], Supply]] = (
    weakref.WeakKeyDictionary()
)


def join(backend: str | Backend, spares: int) -> Supply:
    """The supply of the running loop for this back end; ``leave`` it."""
    supplies = _supplies.setdefault(asyncio.get_running_loop(), {})
    supply = supplies.setdefault((backend, spares), Supply(backend, spares))
    supply.users += 1
    return supply


async def leave(supply: Supply) -> None:
    """The last to leave closes it."""
    supply.users -= 1
    if supply.users == 0:
        supplies = _supplies[asyncio.get_running_loop()]
        for key in [key for key, known in supplies.items() if known is supply]:
            del supplies[key]
        await finished(supply.close())
