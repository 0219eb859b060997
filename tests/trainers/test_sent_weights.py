"""Runs whose learner sends its weights to engines in other processes: all get every version, also replacements."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from requiring import require
from role_batch import batch

from agentkit.config import RunConfig
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.roles import Roles, start_roles

# A busy machine needs minutes to start Ray and the processes of its actors.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

Event = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    require("ray", "pip install 'agentkit-rl[ray]'")
    from agentkit.trainers.cluster import ray_cluster

    with ray_cluster.local_cluster(6):
        yield


def configuration(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "cluster": {"colocate": changes["weights"] == "ipc"},
            "env": {"id": "FrozenLake-v1", "kwargs": {"size": 2}, "max_turns": 2},
            "engine": {
                "max_context": 256,
                "max_batch": 8,
                "threads": 1,
                "replicas": 2,
                "verify_weights": True,
                **changes,
            },
            "rollout": {"groups": 1, "group_size": 2},
            "learner": {"lr": 1e-2, "threads": 1, "ranks": 2, "backend": "fsdp"},
        }
    )


async def versions(roles: Roles) -> list[int]:
    return [engine.version for engine in (await roles.engine.stats()).engines]


def kill_engine(roles: Roles, index: int) -> None:
    router: Any = roles.engine
    replica = next(replica for replica in router.live if replica.index == index)
    for pid in replica.engine.pids:
        os.kill(pid, signal.SIGKILL)


async def until(events: list[Event], kind: str) -> Event:
    while True:
        for event in events:
            if event[0] == kind:
                return event
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("weights", ["gloo", "ipc"])
async def test_replacements_get_the_current_version(weights: str) -> None:
    events: list[Event] = []
    prompt = np.arange(9, dtype=np.int32)
    async with start_roles(
        configuration(weights=weights), lambda kind, **fields: events.append((kind, fields))
    ) as roles:
        await roles.publish(0)
        await roles.train(batch(), 0)
        await roles.publish(1)
        assert await versions(roles) == [1, 1]
        kill_engine(roles, 1)
        assert (await asyncio.wait_for(until(events, "engine_joined"), 300))[1]["version"] == 1
        # One that starts when the learner has trained gets the next version: those weights exist no more.
        events.clear()
        kill_engine(roles, 0)
        await asyncio.wait_for(until(events, "engine_lost"), 60)
        for step in range(1, 4):
            await roles.train(batch(), step)
        assert not [event for event in events if event[0] == "engine_joined"]
        await roles.publish(2)
        assert (await asyncio.wait_for(until(events, "engine_joined"), 300))[1]["version"] == 2
        await roles.publish(3)
        assert await versions(roles) == [3, 3]
        answers = await asyncio.gather(
            *(roles.engine.generate(prompt, Sampling(8, seed=1), session=f"{k}") for k in range(8))
        )
    assert {tuple(answer.ids.tolist()) for answer in answers} == {tuple(answers[0].ids.tolist())}
    assert {version for answer in answers for version, _ in answer.versions} == {3}


def test_a_run_with_an_unknown_way_of_weights_is_refused(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "agentkit",
        "run",
        "examples/cluster.yaml",
        "engine.weights=ipc",
        f"dir={tmp_path}",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "cluster.colocate=true" in done.stderr
