"""Weights between two simulated nodes of a Ray cluster, and places that two roles share there."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from requiring import require
from weights_reading import state_of

from agentkit.errors import EngineError
from agentkit.trainers.cluster.placement import RolePlan, Slot
from agentkit.trainers.weights.base import Bucket, Weights
from agentkit.trainers.weights.sender import Sender
from agentkit.trainers.weights.sent import SentWeights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEGABYTES = 40
STORE = 160_000_000
"""Bytes of each node's store: too few for five versions."""


def tensors(version: int) -> dict[str, torch.Tensor]:
    """``MEGABYTES`` in three buckets, and one tensor of each further kind."""
    generator = torch.Generator().manual_seed(version)
    large = {f"layer.{k}": torch.rand(MEGABYTES * 250_000 // 3, generator=generator) for k in range(3)}
    half = torch.linspace(-version, version, 1001).to(torch.bfloat16)
    return {**large, "half": half, "scalar": torch.tensor(version), "empty": torch.empty(0, 3)}


def buckets(version: int) -> Iterator[Bucket]:
    items = list(tensors(version).items())
    return iter([items[:1], items[1:2], items[2:]])


class LearnerProcess:
    """Stages weights in its process, as a learner does."""

    def __init__(self) -> None:
        from agentkit.trainers.weights.object_store import StoredStaging

        self.staging = StoredStaging()

        self.sender = Sender("gloo", rank=0, ranks=1, device="cpu", workers=1)

    def publish(self, version: int) -> list[Weights]:
        return [self.staging.stage(version, buckets(version))]

    def announce(self, version: int, engines: int) -> SentWeights:
        return self.sender.stage(version, buckets(version)).for_engines(engines)

    def send(self, weights: SentWeights) -> int:
        return self.sender.send(weights, lambda: buckets(weights.version))

    def release(self) -> None:
        self.staging.release()

    def pid(self) -> int:
        return os.getpid()


class EngineProcess:
    """Copies weights into its own tensors, as an engine does."""

    def load(self, weights: Weights) -> tuple[int, dict[str, torch.Tensor]]:
        return weights.version, {name: value[..., :7].clone() for name, value in compare(weights).items()}

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


def compare(weights: Weights) -> dict[str, torch.Tensor]:
    got, expected = state_of(weights), tensors(weights.version)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
    return {name: value.reshape(-1) for name, value in got.items()}


@pytest.fixture(scope="module")
def roles() -> Iterator[tuple[Any, list[Any]]]:
    """A learner on one node; an engine there and one on another node."""
    require("ray", "pip install 'agentkit-rl[ray]'")
    from agentkit.trainers.cluster import ray_cluster  # noqa: F401 (its environment, before Ray is imported)

    import ray  # isort: skip
    from ray.cluster_utils import Cluster  # isort: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_health_check_failure_threshold", "60")  # on a busy machine nodes answer late
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for the actors
        cluster = Cluster()
        try:
            for name in ("first", "second"):
                cluster.add_node(
                    num_cpus=0, resources={name: 2, "gpu_like": 1}, object_store_memory=STORE, include_dashboard=False
                )
            ray.init(address=cluster.address, log_to_driver=False)
            process, engine = (cast(Any, ray.remote(role)) for role in (LearnerProcess, EngineProcess))
            learner = process.options(num_cpus=0, resources={"first": 1}).remote()
            engines = [engine.options(num_cpus=0, resources={name: 1}).remote() for name in ("first", "second")]
            yield learner, engines
        finally:
            ray.shutdown()
            cluster.shutdown()


def used_bytes() -> int:
    """Bytes in all stores."""
    import ray

    total = ray.cluster_resources()["object_store_memory"]
    return int(total - ray.available_resources().get("object_store_memory", 0))


def test_engines_on_both_nodes_get_every_version(roles: tuple[Any, list[Any]]) -> None:
    import ray

    learner, engines = roles
    first, second = ray.get([engine.node.remote() for engine in engines], timeout=300)
    assert first != second
    for version in range(1, 7):  # more than the stores hold at once
        (weights,) = ray.get(learner.publish.remote(version), timeout=120)
        assert len(weights.references) == 3
        results = ray.get([engine.load.remote(weights) for engine in engines], timeout=120)
        assert [loaded for loaded, _ in results] == [version, version]


def test_engines_on_both_nodes_receive_what_the_learner_sends(roles: tuple[Any, list[Any]]) -> None:
    import ray

    learner, engines = roles
    for version, receivers in ((1, engines), (2, engines), (3, engines[1:])):
        weights = ray.get(learner.announce.remote(version, len(receivers)), timeout=120)
        calls = [learner.send.remote(weights), *(engine.load.remote(weights) for engine in receivers)]
        sent, *loaded = ray.get(calls, timeout=240)
        assert sent == len(receivers)
        assert [of for of, _ in loaded] == [version] * len(receivers)


async def test_colocated_processes_are_on_one_node(roles: tuple[Any, list[Any]]) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from agentkit.trainers.cluster.ray_cluster import reserve_plans

    @ray.remote(num_cpus=0)
    def node() -> str:
        return ray.get_runtime_context().get_node_id()

    def where(slot: Slot) -> Any:
        strategy = PlacementGroupSchedulingStrategy(slot.group, slot.bundle)
        return node.options(resources=dict(slot.resources), scheduling_strategy=strategy).remote()

    half = ({"gpu_like": 0.5},) * 2
    plans = [RolePlan("learner", half, "learner.ranks"), RolePlan("engine", half, "engine.replicas", "learner")]
    async with reserve_plans(plans) as slots:
        places = {role: ray.get([where(slot) for slot in of_role], timeout=240) for role, of_role in slots.items()}
    assert places["learner"] == places["engine"]
    assert len(set(places["learner"])) == 2


def test_released_weights_free_the_store(roles: tuple[Any, list[Any]]) -> None:
    import ray

    learner, _ = roles
    (weights,) = ray.get(learner.publish.remote(9), timeout=120)
    deadline = time.monotonic() + 60
    while used_bytes() < MEGABYTES * 900_000:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    ray.get(learner.release.remote(), timeout=60)
    del weights
    while used_bytes() > MEGABYTES * 500_000:
        assert time.monotonic() < deadline, used_bytes()
        time.sleep(0.5)


def test_weights_of_a_dead_learner_are_an_error(roles: tuple[Any, list[Any]]) -> None:
    """Runs last, because it kills the learner."""
    import ray

    learner, engines = roles
    (weights,) = ray.get(learner.publish.remote(10), timeout=120)
    assert ray.get(engines[1].load.remote(weights), timeout=120)[0] == 10
    os.kill(ray.get(learner.pid.remote(), timeout=60), signal.SIGKILL)

    def load_until_it_fails() -> None:
        for _ in range(60):  # the death takes a moment to become known
            ray.get(engines[0].load.remote(weights), timeout=120)
            time.sleep(0.5)

    with pytest.raises(EngineError, match="publish them again"):
        load_until_it_fails()
