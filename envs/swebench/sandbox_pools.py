"""Pools of sandboxes for SWE-bench instances, with spares of the images that were used last.

Invariant: every sandbox is used once. All environments of one event loop share the pools of a back end with the same
settings; the last one that releases them closes them, with all their sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator

from agentkit.envs.isolation.redundancy import Redundancy
from agentkit.envs.swebench.evaluation import ENVIRONMENT, REPOSITORY
from agentkit.envs.swebench.git_history import HIDE_FUTURE
from agentkit.envs.swebench.instance import Instance
from agentkit.envs.swebench.releases import locations
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.pool.health import usage_of
from agentkit.sandboxes.pool.pool import Lease, SandboxPool
from agentkit.sandboxes.recovery.hedge import Hedge
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import Resources, SandboxSpec
from agentkit.sandboxes.tasks import finished

WARM_IMAGES = 4
"""Number of images with spare sandboxes."""
MAX_SIZE = 256
"""Most sandboxes of one image at a time."""


def spec_of(task: Instance, resources: Resources) -> SandboxSpec:
    """Return the specification of an instance's sandbox.

    It has no network, the user of the image, and a writable root, because the repository and its packages are there.
    Commits after the task's commit are removed from the repository.
    """
    return SandboxSpec(
        image=task.image,
        user=task.user,
        env={**ENVIRONMENT, "HOME": "/tmp"},
        readonly_root=False,
        resources=resources,
        setup=("/bin/sh", "-c", f"cd {REPOSITORY}\n{HIDE_FUTURE}"),
        pull="never" if task.image.startswith(locations.IMAGES) else "missing",
        ttl=None,
        idle_timeout=3600.0,
        start_timeout=300.0,
    )


class SandboxPools:
    """One pool of fresh sandboxes for each specification."""

    def __init__(self, backend: str | Backend, redundancy: Redundancy) -> None:
        self._backend, self._redundancy = backend, redundancy
        self._pools: OrderedDict[str, SandboxPool] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Lock()
        self.users = 0

    async def acquire(self, spec: SandboxSpec) -> Lease:
        """Return the lease of an unused sandbox; the caller releases it. Raises ``SandboxError``."""
        async with self._starting:
            pool = self._pools.get(spec.digest)
            if pool is None:
                hedge = self._redundancy.hedge
                pool = SandboxPool(
                    spec,
                    self._backend,
                    min_idle=self._redundancy.spares,
                    max_size=MAX_SIZE,
                    drain_timeout=0,
                    health=self._redundancy.health,
                    hedge=None if hedge is None else Hedge(hedge),
                    host=usage_of(self._backend),
                )
                await pool.start()
                self._pools[spec.digest] = pool
        self._pools.move_to_end(spec.digest)
        acquiring = pool.acquire(spec.start_timeout + spec.pull_timeout)
        self._close_unused()
        return await acquiring

    @contextlib.asynccontextmanager
    async def fresh(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """Provide an unused sandbox for the body of ``async with``."""
        lease = await self.acquire(spec)
        try:
            yield lease.box
        finally:
            lease.release(discard=True)

    async def close(self) -> None:
        pools = list(self._pools.values())
        self._pools.clear()
        await asyncio.gather(*(pool.close() for pool in pools), *self._closing, return_exceptions=True)

    def _close_unused(self) -> None:
        """Close the pools of images that were not used lately, unless sandboxes of them are in use."""
        for digest, pool in list(self._pools.items())[:-WARM_IMAGES]:
            stats = pool.stats()
            if not stats.busy and not stats.waiting:
                del self._pools[digest]
                task = asyncio.ensure_future(pool.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)


_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[object, Redundancy], SandboxPools]] = (
    weakref.WeakKeyDictionary()
)


def acquire_pools(backend: str | Backend, redundancy: Redundancy) -> SandboxPools:
    """Return the pools that the running loop shares for these settings; the caller calls ``release_pools``."""
    shared = _shared.setdefault(asyncio.get_running_loop(), {})
    pools = shared.setdefault((backend, redundancy), SandboxPools(backend, redundancy))
    pools.users += 1
    return pools


async def release_pools(pools: SandboxPools) -> None:
    """Close the pools when their last user releases them."""
    pools.users -= 1
    if pools.users == 0:
        shared = _shared[asyncio.get_running_loop()]
        for key in [key for key, known in shared.items() if known is pools]:
            del shared[key]
        await finished(pools.close())
