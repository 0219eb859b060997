"""Supervised episodes on hosts that fail, simulated and real: no episode is lost, and no sandbox is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from docker_boxes import WatchedDocker
from seeds import over_all_seeds

from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.testing import virtual_time
from benchmarks.scale.cluster import Cluster
from benchmarks.scale.servers import measure, running_servers
from benchmarks.scale.simulation import Scenario, simulate

SMALL = Scenario(sandboxes=12, spares=3, seconds=30.0, actions=6, think=2.0, host_faults=0.3)


def test_small_cluster() -> None:
    report = simulate(SMALL, 0)
    assert report.episodes >= SMALL.sandboxes
    assert report.recoveries > 0


def test_standbys() -> None:
    assert simulate(dataclasses.replace(SMALL, sandboxes=8, standbys=1), 0).recoveries > 0


def test_callers_wait_while_all_hosts_are_full() -> None:
    async def scenario() -> None:
        cluster = Cluster(hosts=2, limit=2, seed=0)
        await cluster.start()
        backend = cluster.backend()
        await backend.start()

        async def use(pool: SandboxPool) -> None:
            async with pool.acquire(timeout=120) as box:
                assert (await box.exec("true")).ok
                await asyncio.sleep(10)

        async with SandboxPool(backend=backend, min_idle=0, max_size=12) as pool:
            await asyncio.gather(*(use(pool) for _ in range(12)))
            assert pool.stats().counters.create_failures > 0
            assert pool.stats().breaker == "closed"
        await backend.close()
        await cluster.stop()

    virtual_time.run(scenario())


@over_all_seeds
def test_small_cluster_over_all_seeds(seeds: range) -> None:
    for seed in seeds[::10]:  # a seed takes seconds
        simulate(SMALL, seed)


@pytest.mark.docker
@pytest.mark.slow
async def test_real_servers(docker_backend: WatchedDocker, tmp_path: Path) -> None:
    with running_servers(2, "docker", limit=20, directory=tmp_path) as servers:
        measured = await measure(servers, "docker", users=6, seconds=5.0)
    assert (measured.lost, measured.wrong, measured.left) == (0, 0, 0)
    assert sorted(measured.per_host) == sorted(server.host for server in servers)
    assert len(measured.recovered) == measured.killed_with > 0
