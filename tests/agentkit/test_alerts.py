"""Alerts from the metrics of training steps: each fault is found, and none is found in healthy steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from agentkit.alerts import (
    CALM_STEPS,
    EARLIER_STEPS,
    MOST_KL,
    PROGRESS_STEPS,
    SHARE_STEPS,
    WINDOW,
    Alert,
    Watch,
    find_alerts,
    recorded_alerts,
)
from agentkit.errors import LOSS_REASONS

HOSTS = ("one:8765", "two:8765", "three:8765")


def healthy(step: int, rng: random.Random, /, **changes: float | None) -> dict[str, Any]:
    """Return the metrics of a step of a run that learns, with some noise, and ``changes``."""
    wait, train, publish = (rng.uniform(0.7, 1.5) * seconds for seconds in (20.0, 40.0, 1.0))
    row: dict[str, Any] = {
        "step": step,
        "time": 1e9 + 60 * step,
        "rollout/episodes": 64.0,
        "rollout/turns_mean": 6.0,
        "rollout/success": 0.4 + rng.uniform(-0.1, 0.1),
        "rollout/zero_signal_share": rng.uniform(0.1, 0.4),
        "rollout/context_truncated": float(rng.randrange(3)),
        "rollout/cut_answers": rng.uniform(0, 0.05),
        "rollout/aborted_turns": float(rng.randrange(6)),
        "gate/voided": float(rng.randrange(2)),
        "gate/dropped": 0.0,
        "policy/kl_behaviour": rng.uniform(1e-4, 1e-2),
        "policy/ess": rng.uniform(0.9, 1.0),
        "staleness/mean": 1.0,
        "time/wait": wait,
        "time/train": train,
        "time/publish": publish,
        "time/step": wait + train + publish,
    }
    for host in HOSTS:
        row[f"sandbox/host/{host}/step_s"] = rng.uniform(0.1, 0.2)
    for engine in range(2):
        row[f"engine/{engine}/token_s"] = rng.uniform(0.01, 0.02)
    return row | changes


def steps(count: int, seed: int = 0, /, **changes: float | None) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [healthy(step, rng, **changes) for step in range(1, count + 1)]


def names(alerts: Sequence[Alert]) -> list[tuple[str, str]]:
    return [(alert.name, alert.subject) for alert in alerts]


@pytest.mark.parametrize("seed", range(20))
def test_healthy_steps_raise_no_alert(seed: int) -> None:
    watch = Watch()
    assert [watch.update(row) for row in steps(200, seed)] == [([], [])] * 200


def test_there_is_no_alert_without_metrics() -> None:
    assert find_alerts([]) == []
    assert find_alerts([{"step": step} for step in range(WINDOW)]) == []
    unknown = dict.fromkeys(healthy(1, random.Random(0)), None) | {"step": 1}
    assert find_alerts([unknown] * WINDOW) == []
    assert find_alerts([dict.fromkeys(unknown, math.nan) | {"step": 1}] * WINDOW) == []


@pytest.mark.parametrize(
    ("changes", "found", "words"),
    [
        ({"gate/voided": 8.0, "gate/voided/EnvTimeout": 8.0}, "aborts episodes", ["11 %", "EnvTimeout", "env check"]),
        ({"gate/dropped": 9.0, "gate/dropped/stale": 9.0}, "aborts episodes", ["13 %", "too old", "async_ratio"]),
        ({"rollout/aborted_turns": 48.0}, "aborts answers", ["11 %", "in_flight: continue"]),
        ({"rollout/zero_signal_share": 1.0, "rollout/success": 0.1}, "no_signal groups", ["100 %", "10 %", "easier"]),
        ({"rollout/zero_signal_share": 1.0, "rollout/success": 1.0}, "no_signal groups", ["100 %", "harder tasks"]),
        ({"rollout/context_truncated": 20.0}, "truncated episodes", ["31 %", "engine.max_context"]),
        ({"rollout/cut_answers": 0.3}, "truncated answers", ["30 %", "rollout.max_tokens"]),
        ({"policy/kl_behaviour": 0.05}, "off_policy policy/kl_behaviour", ["0.05", "1.0 updates old", "async_ratio"]),
        (
            {"policy/kl_behaviour": 0.05, "staleness/mean": 0.0},
            "off_policy policy/kl_behaviour",
            ["log-probabilities", "verify_weights"],
        ),
        ({"policy/ess": 0.4}, "off_policy policy/ess", ["0.4", "below 0.5"]),
        ({"rollout/env_replays/oom": 4.0}, "one_failure oom", ["20 of 20", LOSS_REASONS["oom"], "sandbox_spec"]),
        ({"sandbox/host/two:8765/step_s": 0.9}, "slow_host two:8765", ["900 ms", "of its peers", "sandbox top"]),
        ({"engine/1/token_s": 0.08}, "slow_host engine 1", ["80 ms", "nvidia-smi"]),
    ],
)
def test_a_fault_is_one_alert_with_numbers_cause_and_remedy(
    changes: dict[str, float], found: str, words: list[str]
) -> None:
    rows = [*steps(20), *(healthy(20 + step, random.Random(step), **changes) for step in range(1, 31))]
    watch, began = Watch(), []
    for row in rows:
        began += watch.update(row)[0]
    both = {("one_failure", "EnvTimeout")} if "gate/voided/EnvTimeout" in changes else set()
    assert sorted(names(began)) == sorted({tuple(found.split(" ", 1)), *both})
    assert all(20 < alert.step <= 20 + 2 * SHARE_STEPS for alert in began)
    (last,) = [alert for alert in find_alerts(rows) if f"{alert.name} {alert.subject}" == found]
    for word in words:
        assert word in last.sentence()


@pytest.mark.parametrize("phase", ["time/wait", "time/train", "time/publish"])
def test_a_phase_far_above_its_median_is_slow(phase: str) -> None:
    rows = steps(30)
    usual = sorted(row[phase] for row in rows[:-1])[14]
    rows[-1] |= {phase: 7 * usual + 20, "env/failures": 3.0}
    (alert,) = find_alerts(rows)
    assert (alert.name, alert.subject, alert.step) == ("slow_phase", phase, 30)
    assert f"{usual:.3g} s" in alert.text
    assert ("3 environments failed" in alert.cause) is (phase == "time/wait")
    rows[-1][phase] = 5.9 * usual
    assert find_alerts(rows) == []


def test_a_phase_is_compared_only_after_some_steps_and_only_if_it_delays_the_run() -> None:
    rows = steps(EARLIER_STEPS + 1)
    rows[-1]["time/train"] = 1000.0
    assert names(find_alerts(rows)) == [("slow_phase", "time/train")]
    assert find_alerts(rows[1:]) == []
    short = [{**row, "time/publish": 0.002} for row in rows[:-1]]
    assert find_alerts([*short, {**rows[0], "time/publish": 4.0}]) == [], "2000 times its median, but 4 s"
    assert find_alerts([*short, {**rows[0], "time/publish": 8.0}]) == [], "a small part of the step"
    assert names(find_alerts([*short, {**rows[0], "time/publish": 40.0}])) == [("slow_phase", "time/publish")]


def test_batches_that_are_mostly_ready_at_once_may_take_a_small_part_of_a_step() -> None:
    rows = steps(40)
    for row in rows:
        row["time/wait"] = 12.0 if row["step"] % 3 == 0 else 0.02
    assert Watch(rows).update(healthy(41, random.Random(1), **{"time/wait": 12.0})) == ([], [])


def test_groups_without_signal_are_no_fault_where_they_are_solved_tasks() -> None:
    learned = {"rollout/zero_signal_share": 0.9, "rollout/success": 0.93}
    assert find_alerts(steps(WINDOW, **learned)) == []


def test_groups_without_signal_are_no_fault_while_the_others_are_enough() -> None:
    def run(count: int, flat: float, rise: float, success: float | None = 0.2) -> list[dict[str, Any]]:
        changes = {"rollout/zero_signal_share": flat, "rollout/success": success}
        return [{**row, "rollout/return_mean": 0.2 + rise * row["step"]} for row in steps(count, **changes)]

    assert find_alerts(run(PROGRESS_STEPS - 1, 0.6, -0.001)) == []
    (alert,) = find_alerts(run(PROGRESS_STEPS, 0.6, -0.001))
    assert f"60 % of the groups of the last {PROGRESS_STEPS} steps" in alert.text
    assert "did not rise" in alert.text
    assert find_alerts(run(WINDOW, 0.6, 0.001)) == []
    assert find_alerts(run(WINDOW, 0.49, -0.001)) == []
    assert names(find_alerts(run(WINDOW, 0.6, 0.0, success=None))) == [("no_signal", "groups")]


def test_shares_need_steps_and_episodes() -> None:
    bad = {"rollout/zero_signal_share": 1.0, "rollout/success": 0.0, "rollout/cut_answers": 1.0}
    assert find_alerts(steps(SHARE_STEPS - 1, **bad)) == []
    assert len(find_alerts(steps(SHARE_STEPS, **bad))) == 2
    few = {**bad, "rollout/episodes": 4.0}
    assert find_alerts(steps(15, **few)) == []
    assert "last 16 steps" in find_alerts(steps(16, **few))[0].text


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"gate/voided/EnvCrashed": 1.0}, []),  # five failures
        ({"rollout/episodes": 1000.0, "gate/voided/EnvCrashed": 3.0}, []),  # in 5000 episodes
        ({"gate/voided/EnvCrashed": 2.0, "rollout/env_replays/oom": 2.0}, []),  # neither dominates
        ({"gate/voided/EnvCrashed": 1.0, "rollout/env_replays/oom": 2.0}, ["oom"]),
        ({"sandbox/recoveries/hung": 2.0, "rollout/env_replays/hung": 2.0, "gate/voided/EnvCrashed": 2.0}, []),
        ({"gate/voided/EnvCrashed": 2.0, "gate/cancelled/redundant_member": 50.0}, ["EnvCrashed"]),
        ({"gate/voided/SomethingElse": 2.0}, ["SomethingElse"]),
    ],
)
def test_a_type_of_failure_dominates(changes: dict[str, float], found: list[str]) -> None:
    alerts = [alert for alert in find_alerts(steps(20, **changes)) if alert.name == "one_failure"]
    assert [alert.subject for alert in alerts] == found
    assert all(alert.cause and alert.remedy for alert in alerts)


def test_a_host_is_compared_with_its_peers_for_some_steps() -> None:
    slow = {"sandbox/host/two:8765/step_s": 0.9}
    rows = steps(20)
    assert find_alerts([*rows, *steps(2, **slow)]) == []
    assert names(find_alerts([*rows, *steps(3, **slow)])) == [("slow_host", "two:8765")]
    quick = {f"sandbox/host/{host}/step_s": seconds for host, seconds in zip(HOSTS, (0.001, 0.02, 0.001), strict=True)}
    assert find_alerts(steps(20, **quick)) == [], "20 ms do not matter"
    alone = {f"sandbox/host/{host}/step_s": None for host in HOSTS[1:]} | {"sandbox/host/one:8765/step_s": 9.0}
    assert find_alerts(steps(20, **alone)) == []
    both = {"engine/0/token_s": 0.5, "engine/1/token_s": 0.5}
    assert find_alerts(steps(20, **both)) == []


def test_an_alert_ends_after_calm_steps_and_may_begin_again() -> None:
    watch, changed = Watch(), []
    rng = random.Random(0)
    for step in range(1, 61):
        kl = 0.2 if 10 <= step < 20 or 40 <= step < 50 else 1e-3
        for kind, alerts in zip(
            ("began", "ended"), watch.update(healthy(step, rng, **{"policy/kl_behaviour": kl})), strict=True
        ):
            changed += [(step, kind, alert.step) for alert in alerts]
    # Three steps count: one high value of 0.2 is above the limit in the mean, and so is the last one.
    assert MOST_KL < 0.2 / 3
    assert changed == [
        (10, "began", 10),
        (21 + CALM_STEPS, "ended", 10),
        (40, "began", 40),
        (51 + CALM_STEPS, "ended", 40),
    ]


@pytest.mark.parametrize("after", [8, 11, 18, 23, 30])
def test_a_resumed_run_continues_its_alerts(after: int) -> None:
    rng = random.Random(0)
    rows = [healthy(step, rng, **({"policy/ess": 0.1} if 10 <= step < 20 else {})) for step in range(1, 41)]
    events: list[dict[str, Any]] = []

    def follow(watch: Watch, some: Sequence[dict[str, Any]]) -> None:
        for row in some:
            began, ended = watch.update(row)
            events.extend({"event": "alert", "time": row["time"], **asdict(alert)} for alert in began)
            events.extend(_event("alert_ended", row["step"], name=one.name, subject=one.subject) for one in ended)

    follow(Watch(), rows[:after])
    follow(Watch(rows[:after], events), rows[after:])
    (alert,) = recorded_alerts(events)
    # The calm steps count again after the run was resumed.
    assert (alert["step"], alert["ended"]) == (11, max(20, after) + CALM_STEPS if after < 25 else 25)


def test_a_resumed_run_compares_its_phases_with_each_other() -> None:
    watch, rng = Watch(steps(20)), random.Random(0)
    assert watch.update(healthy(21, rng, **{"time/train": 1000.0})) == ([], []), "its engine has just started"
    for step in range(22, 21 + EARLIER_STEPS):
        watch.update(healthy(step, rng))
    assert names(watch.update(healthy(30, rng, **{"time/train": 1000.0}))[0]) == [("slow_phase", "time/train")]


def _event(kind: str, step: int, **more: Any) -> dict[str, Any]:
    return {"event": kind, "time": 1e9 + step, "name": "aborts", "subject": "answers", "step": step} | more


def _rollback(step: int) -> dict[str, Any]:
    return {"event": "rollback", "time": 2e9, "to_step": step}


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], []),
        ([_event("alert", 3)], [(3, None)]),
        ([_event("alert", 3), _event("alert_ended", 9, began=3), _event("alert", 12)], [(3, 9), (12, None)]),
        ([_event("alert", 3), _event("alert_ended", 9, began=3), _rollback(5)], [(3, None)]),
        ([_event("alert", 3), _rollback(2), _event("alert", 3)], [(3, None)]),
        ([_event("alert", 3), _rollback(3), _event("alert_ended", 9, began=3)], [(3, 9)]),
        ([_event("alert", 3), _rollback(-1)], []),
    ],
)
def test_alerts_are_read_from_events(events: list[dict[str, Any]], found: list[tuple[int, int | None]]) -> None:
    alerts = recorded_alerts([{"event": "start", "time": 0.0}, *events, {"event": "end", "time": 3e9}])
    assert [(alert["step"], alert["ended"]) for alert in alerts] == found
