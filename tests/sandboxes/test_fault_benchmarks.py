"""The benchmarks of faults: their arithmetic, and a fault injector that attacks only the containers of its run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
from docker_boxes import SMALL, WatchedDocker

from agentkit.sandboxes import Sandbox
from benchmarks.faults.figures import page, problems, ratio, rows
from benchmarks.faults.nemesis import ATTACKS, Fault, Nemesis, choose
from benchmarks.faults.runs import Observed, Phase
from benchmarks.recovery.figures import NO_GOAL, Goal, Row, Sample
from benchmarks.recovery.figures import page as recovery_page


def observed() -> Observed:
    """A run of 1 s steps without faults, then of 2 s steps under faults; the first step of each phase is an outlier."""
    ends = [(10, 9), (11, 1), (12, 1), (20, 8), (22, 2), (24, 2)]
    steps: list[Mapping[str, Any]] = [
        {"time": float(end), "time/step": float(seconds), "gate/voided": 0.0} for end, seconds in ends
    ]
    phases = [Phase(0.0, 1.0, 12.0), Phase(0.02, 12.0, 24.0)]
    recovery = {"time": 13.5, "cause": "exited", "by": "spare", "seconds": 0.25, "episodes": 1}
    faults = [Fault(13.0, "killed", "a"), Fault(23.0, "frozen", "b")]
    return Observed(phases, steps, [recovery], faults, containers=8, left=0, exit_code=0)


def test_steps_count_in_the_phase_in_which_they_end_except_for_its_first():
    clean, faulty = rows("arm", [observed(), observed()])
    assert (clean.rate, clean.seconds, clean.faults) == (0.0, (1.0,) * 4, {})
    assert (faulty.rate, faulty.seconds, faulty.faults) == (0.02, (2.0,) * 4, {"killed": 2, "frozen": 2})
    assert ratio(faulty.seconds, clean.seconds) == (2.0, 2.0, 2.0)
    assert json.loads(json.dumps(asdict(faulty)))["faults"] == faulty.faults


def test_the_interval_of_a_ratio_contains_it():
    rng = random.Random(0)
    mean, low, high = ratio([rng.uniform(1, 3) for _ in range(50)], [rng.uniform(1, 2) for _ in range(50)])
    assert 1.1 < low < mean < high < 1.6


def test_the_page_shows_a_missed_goal_as_missed():
    rollout = {"groups": 2, "group_size": 4, "extra_groups": 1, "extra_members": 1}
    text = page(rows("without", [observed()]), "two CPUs", rollout, rollout)
    assert (
        "| without | 2% | 0.2 | 1, 0, 1, 0 | 2 | 2.00 | 2.00 | 2.00 | 2.00 (2.00 to 2.00) | 2.00 | ≤ 1.15 | **no** |"
        in text
    )
    assert "| exited | spare | 1 | 0.25 | 0.25 |" in text
    assert "2 steps with 2 faults took +2.0 s in total" in text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"exit_code": 1}, "the run ended with 1"),
        ({"left": 2}, "2 containers are left"),
        ({"faults": []}, "only 0 faults were injected"),
        ({"steps": [{"gate/voided": 3.0}]}, "3 episodes were voided"),
        ({"recoveries": []}, "no episode was recovered"),
    ],
)
def test_a_run_that_did_not_survive_is_a_problem(change, problem):
    run = observed()
    for name, value in change.items():
        setattr(run, name, value)
    assert problem in problems([run], faults=1)


def test_each_container_is_attacked_once_at_most():
    rng, attacked, kinds = random.Random(0), set(), set()
    running = [f"{number}" for number in range(40)]
    while (chosen := choose(running, attacked, rng)) is not None:
        assert chosen[1] not in attacked
        kinds.add(chosen[0])
        attacked.add(chosen[1])
    assert attacked == set(running)
    assert kinds == set(ATTACKS)


@pytest.mark.parametrize(
    ("goal", "samples", "met"),
    [
        (Goal(answered=1.0), [(0.1, 0.5), (0.1, 0.9)], "yes"),
        (Goal(answered=1.0), [(0.1, 0.5), (0.1, 0.9), (0.1, 1.0)], "median only"),
        (Goal(answered=1.0), [(0.1, 1.5), (0.1, 0.9), (0.1, 1.1)], "**no**"),
        (Goal(detected=5.0, answered=1.0), [(4.0, 4.9)], "yes"),
        (Goal(detected=5.0, answered=1.0), [(4.0, 5.1)], "**no**"),
        (Goal(detected=5.0, answered=1.0), [(5.0, 5.1)], "**no**"),
        (Goal(detected=5.0), [(None, 1.0)], "**no**"),
        (NO_GOAL, [(None, 1.0)], ""),
    ],
)
def test_a_recovery_meets_its_goal_only_if_every_case_does(goal, samples, met):
    row = Row("Sokoban-v0", "a fault", "a spare", goal, tuple(Sample(*sample) for sample in samples), voided=0)
    assert row.met == met


def test_the_recovery_page_shows_medians_and_says_what_was_not_measured():
    samples = (Sample(0.01, 0.2, "spare"), Sample(0.02, 0.3, "spare"), Sample(0.05, 1.5, "new"))
    measured = Row("Sokoban-v0", "container killed", "a spare", Goal(answered=1.0), samples, voided=0)
    text = recovery_page(
        [measured, Row("AlfWorld-v0", "all", "any", NO_GOAL, (), 0, "no image")], {"Sokoban-v0": "two CPUs"}, 4
    )
    assert "- Sokoban-v0: two CPUs." in text
    assert Row.of(json.loads(json.dumps(asdict(measured)))) == measured
    assert "| 3 | new, spare | 20 ms | 50 ms | 300 ms | 1.50 s | < 1 s | median only | 0 |" in text
    assert "- AlfWorld-v0, all, any: not measured. no image" in text


@pytest.mark.docker
async def test_only_containers_of_the_run_are_attacked_and_faults_are_undone(docker_backend: WatchedDocker):
    ours = SMALL.model_copy(update={"labels": {"faults": "ours"}})
    specs = [ours, ours, ours, SMALL.model_copy(update={"labels": {"faults": "theirs"}}), SMALL]
    boxes = await asyncio.gather(*(Sandbox.create(spec, backend=docker_backend) for spec in specs))
    nemesis, over = Nemesis("agentkit.user.faults=ours", random.Random(4)), asyncio.Event()
    try:
        attacking = asyncio.ensure_future(nemesis.attack(600.0, over))
        while len(nemesis.faults) < 3:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.05)
        over.set()
        await attacking
        await nemesis.heal()
        assert {fault.container for fault in nemesis.faults} == {box.id for box in boxes[:3]}
        killed = {fault.container for fault in nemesis.faults if fault.kind == "killed"}
        assert set(await nemesis.containers("running")) == {box.id for box in boxes[:3]} - killed
        for box in boxes[3:]:
            assert (await box.exec(["true"])).ok
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
