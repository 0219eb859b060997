"""Machine-independent results of the rollout benchmark, on the virtual clock with a smaller workload."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.rollout.bound import list_schedule
from benchmarks.rollout.schedulers import Plan, lock_step, ours, trajectory_level
from benchmarks.rollout.virtual import run_virtual
from benchmarks.rollout.workload import Workload

SMALL = Plan(Workload(turns=5), groups=16, size=6, train_s=0.2)


@pytest.mark.parametrize("latency", ["gaussian", "heavy"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("extra", [0, 2])
def test_ours_is_within_five_percent_of_the_bound(latency, ratio: float, extra: int) -> None:
    plan = replace(SMALL, load=Workload(latency, turns=5), async_ratio=ratio, extra_groups=extra, extra_members=extra)
    assert run_virtual(ours(plan)) <= 1.05 * list_schedule(plan)


@pytest.mark.parametrize("fault", ["slow", "hung"])
def test_redundancy_hides_faulty_environments(fault) -> None:
    plan = replace(SMALL, train_s=0.0)
    clean = run_virtual(ours(plan))
    faulty = replace(plan, load=Workload(fault=fault, turns=5))
    assert run_virtual(ours(faulty)) > 2 * clean
    assert run_virtual(ours(replace(faulty, extra_groups=2, extra_members=1))) <= 1.15 * clean


def test_the_bound_of_waves_without_overlap_is_trajectory_level_scheduling() -> None:
    level = run_virtual(trajectory_level(SMALL))
    assert list_schedule(SMALL) == pytest.approx(level, rel=1e-6)
    assert run_virtual(lock_step(SMALL)) > 1.5 * level


def test_the_bound_in_closed_form() -> None:
    quick = Plan(Workload(turns=3), groups=1, size=1, waves=2, train_s=1.0)
    waits = [sum(quick.load.env_seconds(task, 0)) for task in range(2)]
    assert list_schedule(quick) == pytest.approx(2 * (3 * 0.010 + 1.0) + sum(waits))
