"""The resources of each process follow from the configuration, and a shortage is named with its remedy."""

from __future__ import annotations

from typing import Any

import pytest

from agentkit.config import RunConfig
from agentkit.trainers.cluster.placement import plan, reservations, shortage, total


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"env": {"id": "FrozenLake-v1"}, "cluster": {}, **changes})


def bundles(settings: RunConfig, *, gpus: bool = False) -> dict[str, list[dict[str, float]]]:
    return {role.role: [dict(bundle) for bundle in role.bundles] for role in plan(settings, gpus=gpus)}


def test_every_process_reserves_a_cpu_and_its_share_of_gpus() -> None:
    two = config(learner={"ranks": 2, "threads": 4})
    assert bundles(two) == {"learner": [{"CPU": 4}, {"CPU": 4}], "engine": [{"CPU": 1}]}
    assert bundles(two, gpus=True) == {"learner": [{"CPU": 4, "GPU": 1}] * 2, "engine": [{"CPU": 1, "GPU": 1}]}


def test_every_replica_of_the_engine_has_a_place() -> None:
    tensor_parallel = {"kind": "vllm", "replicas": 3, "tensor_parallel": 2}
    assert bundles(config(engine=tensor_parallel), gpus=True)["engine"] == [{"CPU": 1, "GPU": 2}] * 3


def test_the_device_decides_about_gpus_and_resources_override_amounts() -> None:
    assert bundles(config(model={"device": "cpu"}), gpus=True)["engine"] == [{"CPU": 1}]
    assert bundles(config(model={"device": "cuda"}))["engine"] == [{"CPU": 1, "GPU": 1}]
    shared = config(engine={"resources": {"GPU": 0.4}}, learner={"resources": {"GPU": 0.6, "CPU": 8.0, "big": 1.0}})
    assert bundles(shared, gpus=True) == {
        "learner": [{"CPU": 8, "GPU": 0.6, "big": 1}],
        "engine": [{"CPU": 1, "GPU": 0.4}],
    }
    assert total(plan(shared, gpus=True)) == {"CPU": 9, "GPU": 1, "big": 1}


def test_colocated_roles_share_places() -> None:
    halves = config(
        cluster={"colocate": True},
        engine={"replicas": 2, "threads": 2, "resources": {"gpu_like": 0.25}},
        learner={"ranks": 2, "resources": {"gpu_like": 0.75}},
    )
    plans = plan(halves, gpus=True)
    assert bundles(halves, gpus=True)["engine"] == [{"CPU": 2, "GPU": 0.5, "gpu_like": 0.25}] * 2
    assert reservations(plans) == {"learner": [{"CPU": 3, "GPU": 1, "gpu_like": 1}] * 2}
    assert shortage(plans, [{"CPU": 6.0, "GPU": 2.0, "gpu_like": 2.0}]) is None
    assert "needs 3 CPU" in str(shortage(plans, [{"CPU": 2.0, "GPU": 1.0, "gpu_like": 1.0}] * 3))


@pytest.mark.parametrize(
    ("changes", "nodes", "message"),
    [
        ({}, [{"CPU": 2.0}], None),
        ({"learner": {"ranks": 3}}, [{"CPU": 3.0}, {"CPU": 1.0}], None),
        (
            {"learner": {"ranks": 4, "resources": {"gpu_like": 1.0}}, "engine": {"resources": {"gpu_like": 2.0}}},
            [{"CPU": 8.0, "gpu_like": 4.0}, {"CPU": 8.0}],
            "needs 6 gpu_like (learner 4 × 1, engine 1 × 2), and the cluster has 4 on 2 node(s): add nodes, or lower "
            "learner.resources or engine.resources or learner.ranks",
        ),
        (
            {"model": {"device": "cuda"}},
            [{"CPU": 8.0}],
            "needs 2 GPU (learner 1 × 1, engine 1 × 1), and the cluster has 0",
        ),
        (
            {"engine": {"threads": 6}},
            [{"CPU": 4.0}, {"CPU": 4.0}],
            "one process of the engine needs 6 CPU on one node, and no node of the cluster has that",
        ),
    ],
)
def test_a_shortage_names_the_resource_the_roles_and_the_remedy(
    changes: dict[str, Any], nodes: list[dict[str, float]], message: str | None
) -> None:
    found = shortage(plan(config(**changes), gpus=False), nodes)
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert message in found
