"""The rollout loop: exact records, one ending per episode, attribution of failures, any setting."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollout_doubles import ScriptedEngine
from rollout_envs import Detour
from rollout_harness import GO, Harness, configure, renderer

from agentkit import registry
from agentkit.cli.evaluate import report
from agentkit.errors import ConfigError, EngineError, EnvFailureBudgetExceeded
from agentkit.trainers.rollout.evaluation import evaluate
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.types import Group, Trajectory
from benchmarks.rollout.virtual import run_virtual


def mixed(text: str, seed: int) -> str:
    """Script valid answers, invalid formats, unknown actions, several actions, and truncated texts."""
    return (GO, "Go!", "<answer>Bad</answer>", "<answer>Go || Go</answer>", "so " * 60, f"hmm {GO}")[seed % 6]


def sequence(trajectory: Trajectory, turns: int) -> list[int]:
    ids: list[int] = []
    for turn in trajectory.turns[:turns]:
        ids += [*turn.prompt_ids.tolist(), *turn.action_ids.tolist()]
    return ids


async def test_the_record_is_what_the_engine_saw_and_produced() -> None:
    config = configure({"length": 6}, rollout={"groups": 4, "group_size": 4})
    harness = Harness(config, mixed)
    batches = await harness.run(3)
    harness.check_book()
    seen = set()
    for group in (group for batch in batches for group in batch):
        for member in group.members:
            name = f"0.{member.group_id}.{member.member}.{member.attempt}"
            assert len(harness.engine.prompts[name]) == len(member.turns)
            for number, turn in enumerate(member.turns):
                before = sequence(member, number)
                assert harness.engine.prompts[name][number] == before + turn.prompt_ids.tolist()
                assert harness.engine.results[name][number] == turn.action_ids.tolist()
                assert sum(count for _, count in turn.versions) == len(turn.action_ids) == len(turn.action_logprobs)
                seen.add((turn.valid, turn.finish_reason, bool(turn.actions)))
                if number:
                    closed = member.turns[number - 1].finish_reason == "stop"
                    expected = renderer().next(turn.observation, closed=closed)
                    assert turn.prompt_ids.tolist() == expected.tolist()
    assert seen == {
        (True, "stop", True),
        (False, "stop", False),
        (False, "stop", True),
        (False, "length", False),
    }


async def test_a_bad_answer_costs_the_penalty_and_does_not_move_the_environment() -> None:
    harness = Harness(configure({"length": 2}, settings={"max_turns": 3, "format_penalty": -0.25}), "nonsense")
    ((group, _),) = await harness.run(1)
    for member in group.members:
        assert (member.outcome, member.reason, len(member.turns)) == ("truncated", "max_turns", 3)
        assert [turn.reward for turn in member.turns] == [-0.25] * 3
        assert all("count 0" in turn.observation for turn in member.turns)
        assert "no valid format" in member.turns[1].observation
        assert len(member.turns[2].observation) == len(member.turns[1].observation)
        assert len(member.final_ids) > 0
    harness = Harness(configure(settings={"max_turns": 3, "format_penalty": -0.25}), "<answer>Bad</answer>")
    ((group, _),) = await harness.run(1)
    assert [turn.valid for turn in group.members[0].turns] == [False] * 3
    assert "count 1" in group.members[0].turns[1].observation


async def test_ratio_zero_is_synchronous() -> None:
    harness = Harness(configure({"length": 3}))
    for step, batch in enumerate(await harness.run(4)):
        assert [group.group_id for group in batch] == [2 * step, 2 * step + 1]
        assert [group.seed for group in batch] == [2 * step, 2 * step + 1]
        assert {group.version_started for group in batch} == {step}
        assert [[member.member for member in group.members] for group in batch] == [[0, 1], [0, 1]]
        versions = {run for group in batch for m in group.members for turn in m.turns for run, _ in turn.versions}
        assert versions == {step}
    assert set(harness.endings) <= {("trained", ""), ("cancelled", "shutdown")}
    assert harness.endings["trained", ""] == 16
    harness.check_book()


async def test_tasks_start_again_after_the_last_one() -> None:
    config = configure({"length": 1}, settings={"first_seed": 40, "num_tasks": 3})
    batches = await Harness(config).run(3)
    assert [group.seed for batch in batches for group in batch] == [40, 41, 42, 40, 41, 42]


@pytest.mark.parametrize("how", ["crash", "nan", "none", "die", "hang"])
async def test_a_failed_environment_is_replaced_and_never_trained_on(how: str, tmp_path: Path) -> None:
    where = "process" if how in ("die", "hang") else "inline"
    env = {"how": how, "at": 2, "once": str(tmp_path / "failed")}
    config = configure(env, settings={"concurrency": where, "step_timeout": 0.5, "recovery": "retry"})
    harness = Harness(config)
    batches = await harness.run(2)
    harness.check_book()
    voided = [trajectory for trajectory, ending, _ in harness.ends if ending == "voided"]
    assert len(voided) >= 4  # the first member of each task
    for trajectory in voided:
        assert trajectory.outcome == "voided"
        assert not trajectory.success
        assert "Env" in trajectory.reason
    metrics = harness.loop.metrics()
    assert metrics["env/failures"] == metrics["env/retries"] == metrics["gate/voided"] == len(voided)
    retried = [m for batch in batches for group in batch for m in group.members if m.attempt == 1]
    assert len(retried) == 4
    assert all("resets 1 " in member.turns[0].observation for member in retried)  # a fresh one


async def test_a_group_that_is_out_of_retries_is_replaced() -> None:
    config = configure({"how": "crash", "share": 0.4}, rollout={"retries": 1, "max_failure_share": 0.9})
    harness = Harness(config)
    bad = {seed for seed in range(60) if np.random.default_rng(seed).random() < 0.4}
    batches = await harness.run(6)
    harness.check_book()
    trained = [group.seed for batch in batches for group in batch]
    assert trained == [seed for seed in range(60) if seed not in bad][:12]
    voided = [t for t, ending, _ in harness.ends if ending == "voided" and t.outcome == "voided"]
    assert {t.attempt for t in voided} == {0, 1}
    assert {t.seed for t in voided} <= bad


async def test_redundant_members_make_up_for_failed_ones(tmp_path: Path) -> None:
    env = {"how": "crash", "once": str(tmp_path / "failed")}
    config = configure(env, rollout={"retries": 0, "extra_members": 1})
    harness = Harness(config)
    batches = await harness.run(2)
    assert [group.seed for batch in batches for group in batch] == [0, 1, 2, 3]
    harness.check_book()


async def test_too_many_failures_stop_the_run_with_a_report() -> None:
    harness = Harness(configure({"how": "crash"}))
    with pytest.raises(EnvFailureBudgetExceeded, match=r"max_failure_share=0\.5.*EnvCrashed.*no such room.*env check"):
        await harness.run(1)
    harness.check_book()
    harness = Harness(configure({"how": "crash", "share": 0.3}, rollout={"retries": 0, "max_failure_share": 1.0}))
    await harness.run(3)


@pytest.mark.parametrize("where", ["inline", "process"])
async def test_an_unexplained_crash_is_the_policys_failure_the_second_time(where: str) -> None:
    """There are no retries, and any number of these failures does not stop the run."""
    config = configure({"how": "unexplained", "at": 2}, settings={"concurrency": where}, rollout={"retries": 0})
    harness = Harness(config)
    batches = await harness.run(12)
    harness.check_book()
    members = [member for batch in batches for group in batch for member in group.members]
    assert len(members) == 48
    for member in members:
        assert (member.attempt, member.outcome, member.success, member.reward) == (1, "terminated", False, 0.0)
        assert member.reason == "UnexplainedCrash: its sandbox died"
        assert len(member.turns) == 2
        assert len(member.turns[1].action_ids)
    metrics = harness.loop.metrics()
    voided = sum(ending == "voided" for _, ending, _ in harness.ends)
    assert metrics["gate/voided"] == metrics["gate/voided/UnexplainedCrash"] == metrics["env/retries"] == voided >= 48
    assert metrics["rollout/policy_crashes"] >= 48


async def test_a_single_unexplained_crash_is_retried(tmp_path: Path) -> None:
    env = {"how": "unexplained", "at": 2, "once": str(tmp_path / "crashed")}
    harness = Harness(configure(env, settings={"recovery": "void"}, rollout={"retries": 0}))
    batches = await harness.run(2)
    harness.check_book()
    members = [member for batch in batches for group in batch for member in group.members]
    assert sorted((member.attempt, len(member.turns)) for member in members) == [(0, 3)] * 4 + [(1, 3)] * 4
    assert harness.loop.metrics()["rollout/policy_crashes"] == 0


@pytest.mark.parametrize(("how", "crashes"), [("policy hangs", True), ("hang", False)])
async def test_a_step_that_takes_too_long(how: str, crashes: bool) -> None:
    """Under code of the policy it counts as an unexplained crash, else as the environment's failure."""
    config = configure(
        {"how": how},
        settings={"id": "AsyncPuppet-v0", "step_timeout": 0.05},
        rollout={"retries": 1, "groups": 1, "max_failure_share": 1.0},
    )
    harness = Harness(config)
    await harness.loop.start()
    try:
        (group,) = await asyncio.wait_for(harness.step(), 5 if crashes else 0.5)
        assert all(member.reason.startswith("UnexplainedCrash: step took longer") for member in group.members)
    except asyncio.TimeoutError:
        assert not crashes
        assert harness.endings["voided", "EnvTimeout"]
        assert harness.loop.metrics()["rollout/policy_crashes"] == 0
    finally:
        await harness.loop.close()


async def test_an_engines_failure_is_not_the_environments() -> None:
    harness = Harness(configure())
    harness.engine.fail = EngineError("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await harness.run(1)
    assert not [ending for _, ending, _ in harness.ends if ending == "voided"]


def test_redundancy_cancels_for_real() -> None:
    config = configure(rollout={"groups": 4, "group_size": 4, "extra_groups": 1, "extra_members": 1})
    harness = Harness(config, latency=lambda seed: 0.001 if seed % 4 else 1.0)
    run_virtual(harness.run(5))
    harness.check_book()
    assert harness.endings["trained", ""] == 5 * 16
    assert harness.endings["cancelled", "redundant_member"] > 0
    assert harness.endings["cancelled", "redundant_group"] > 0
    assert harness.engine.cancelled > 0
    assert harness.engine.running == 0
    started = {f"0.{t.group_id}.{t.member}.{t.attempt}" for t, _, _ in harness.ends}
    assert set(harness.engine.aborted) == started  # prefix caches are let go, too


@pytest.mark.parametrize("mode", ["retry", "continue"])
def test_a_weight_update_meets_turns_in_flight(mode: str) -> None:
    config = configure({"length": 5}, rollout={"groups": 2, "group_size": 2, "async_ratio": 2.0, "in_flight": mode})
    harness = Harness(config, latency=lambda seed: 0.01 + (seed % 100) / 1000)
    batches = run_virtual(harness.run(8))
    harness.check_book()
    turns = [turn for batch in batches for group in batch for m in group.members for turn in m.turns]
    split = sum(len(turn.versions) == 2 for turn in turns)
    aborted = sum(m.metrics.get("aborted_turns", 0) for batch in batches for group in batch for m in group.members)
    assert (split == 0, aborted > 0) == ((True, True) if mode == "retry" else (False, False))
    assert all(turn.finish_reason == "stop" for turn in turns)
    assert max(group.version_started for group in batches[-1]) > 0


def test_groups_that_are_too_old_are_dropped_or_waited_for() -> None:
    def latency(seed: int) -> float:
        return 0.3 if seed % 9 == 0 else 0.01

    for policy in ("wait", "drop"):
        config = configure(rollout={"groups": 2, "group_size": 2, "async_ratio": 1.0}, gate={"policy": policy})
        harness = Harness(config, latency=latency)
        run_virtual(harness.run(30))
        harness.check_book()
        metrics = harness.loop.metrics()
        assert metrics["staleness/max"] == 1
        dropped = harness.endings["dropped", "stale"]
        assert metrics["gate/dropped"] == metrics.get("gate/dropped/stale", 0) == dropped
        if policy == "drop":
            assert dropped > 0
            assert metrics["gate/dropped_tokens_mean"] >= 0
        else:
            assert dropped == 0
            trained = sorted({t.seed for t, ending, _ in harness.ends if ending == "trained"})
            assert trained[:50] == list(range(50))  # no group is skipped


async def test_an_episode_that_outgrows_the_context_is_truncated() -> None:
    config = configure({"length": 50}, settings={"max_turns": 50}, engine={"max_context": 256})
    harness = Harness(config)
    ((group, _),) = await harness.run(1)
    for member in group.members:
        assert (member.outcome, member.reason) == ("truncated", "context")
        assert 2 < len(member.turns) < 50
        assert member.num_tokens <= 256
        assert len(member.final_ids) == 0  # no state that a critic knows: it counts as ended
    metrics, turns = harness.loop.metrics(), [turn for member in group.members for turn in member.turns]
    assert metrics["rollout/context_truncated"] == 4
    assert metrics["rollout/cut_answers"] == sum(turn.finish_reason == "length" for turn in turns) / len(turns)
    harness = Harness(configure(engine={"max_context": 40}))
    with pytest.raises(ConfigError, match=r"engine\.max_context=40"):
        await harness.run(1)


@pytest.mark.parametrize("deterministic", [False, True])
async def test_groups_without_signal_are_replaced_up_to_the_budget(deterministic: bool) -> None:
    config = configure({"length": 1}, rollout={"dynamic_sampling": True}, deterministic=deterministic)
    harness = Harness(config)  # members of a task earn the same, always: the reward follows from the seed
    batches = await harness.run(2)
    harness.check_book()
    assert harness.endings["dropped", "zero_signal"] >= 2 * 2 * 2
    metrics = harness.loop.metrics()
    assert metrics["rollout/zero_signal_share"] == 1.0
    assert [len(batch) for batch in batches] == [2, 2]
    if deterministic:
        assert [group.group_id for group in batches[0]] == [4, 5]


@pytest.mark.parametrize(("advantage", "kept"), [("grpo", False), ("gigpo", True)])
async def test_the_advantage_decides_which_groups_are_replaced(advantage: str, kept: bool) -> None:
    """All episodes earn 1, some later than others: no signal for a group baseline, but for GiGPO."""
    registry.register("Detour-v0", Detour)
    config = configure(
        settings={"id": "Detour-v0", "format_penalty": 0.0},
        rollout={"dynamic_sampling": True, "max_refills": 1.0, "group_size": 8},
        algorithm={"advantage": advantage, "gamma": 0.9},
    )
    stay = "<answer>Stay</answer>"
    harness = Harness(config, lambda text, seed: (stay, "what?", GO)[seed % 3] if text.count("start") < 5 else GO)
    ((first, second),) = await harness.run(1)
    harness.check_book()
    assert {member.reward for group in (first, second) for member in group.members} == {1.0}
    assert len({len(member.turns) for member in first.members}) > 1
    assert (harness.endings["dropped", "zero_signal"] == 0) == kept
    assert harness.loop.metrics()["rollout/zero_signal_share"] == (0.0 if kept else 1.0)


def snapshot(batches: list[list[Group]]) -> list[Any]:
    """Return all fields of a batch that do not depend on time."""
    return [
        [
            (
                m.group_id,
                m.member,
                m.seed,
                m.outcome,
                m.success,
                m.final_ids.tolist(),
                [
                    [
                        value.tolist() if isinstance(value, np.ndarray) else value
                        for name, value in zip(turn.__slots__, dataclasses.astuple(turn), strict=True)
                        if not name.endswith("_s") and name != "observation"
                    ]
                    for turn in m.turns
                ],
            )
            for group in batch
            for m in group.members
        ]
        for batch in batches
    ]


@pytest.mark.parametrize("where", ["inline", "thread"])
async def test_the_same_seed_gives_the_same_batches(where: str) -> None:
    runs = []
    for latency in (0.0, lambda seed: (seed % 7) / 1000, lambda seed: (seed % 5) / 1000):
        config = configure({"length": 3}, settings={"concurrency": where}, seed=3, deterministic=True)
        runs.append(snapshot(await Harness(config, mixed, latency).run(3)))
    assert len(str(runs[0])) > 1000
    strip = [[[(*m[:6], [turn[1:] for turn in m[6]]) for m in batch] for batch in run] for run in runs]
    assert strip[0] == strip[1] == strip[2]
    other = configure({"length": 3}, seed=4, deterministic=True)
    assert snapshot(await Harness(other, mixed).run(3)) != runs[0]


async def test_every_request_has_a_seed_of_its_own() -> None:
    harness = Harness(configure({"length": 4}))
    await harness.run(3)
    seeds = [sampling.seed for sampling in harness.engine.samplings]
    assert len(seeds) == len(set(seeds)) > 30


@pytest.mark.parametrize("ratio", [0.0, 1.5])
def test_a_restored_loop_loses_and_repeats_nothing(ratio: float) -> None:
    config = configure(rollout={"groups": 3, "group_size": 2, "async_ratio": ratio, "extra_members": 1})
    harness = Harness(config, latency=lambda seed: (seed % 50) / 1000)

    async def interrupted() -> list[int]:
        seeds = []
        for _ in range(6):
            await harness.loop.start()
            for _ in range(2):
                seeds += [group.seed for group in await harness.step()]
            state = harness.loop.state()
            await harness.loop.close()
            harness.loop = harness.new_loop()
            harness.loop.restore(state)
            assert harness.loop.state() == state
        state = harness.loop.state()
        pending = [seed for _, seed in state["running"]] + [group.seed for group in state["groups"]]
        assert state["tasks"] == len(seeds) + len(pending)
        return sorted(seeds + pending)

    everything = run_virtual(interrupted())
    assert everything == list(range(len(everything)))
    trained = [t for t, ending, _ in harness.ends if ending == "trained"]
    assert len({(t.group_id, t.member) for t in trained}) == len(trained) == 6 * 2 * 3 * 2


async def test_evaluation_counts_failures_apart() -> None:
    config = configure({"how": "crash", "share": 0.3, "length": 2}, rollout={"retries": 0})
    engine = ScriptedEngine(renderer(), GO)
    parser = ActionParser("tagged", 3)
    result = await evaluate(config, engine, renderer(), parser, range(40), temperature=0.0, concurrency=7)
    bad = sum(np.random.default_rng(seed).random() < 0.3 for seed in range(40))
    assert (result.failures, result.episodes, len(result.trajectories)) == (bad, 40 - bad, 40)
    assert [trajectory.seed for trajectory in result.trajectories] == list(range(40))
    valid = [t for t in result.trajectories if t.outcome != "voided"]
    assert result.success == sum(t.success for t in valid) / len(valid)
    assert result.return_mean == pytest.approx(sum(t.reward for t in valid) / len(valid))
    assert result.turns_mean == 2
    assert {sampling.temperature for sampling in engine.samplings} == {0.0}
    with pytest.raises(EnvFailureBudgetExceeded, match="none of 3"):
        await evaluate(configure({"how": "crash"}), engine, renderer(), parser, range(3), temperature=1.0)


async def test_evaluation_scores_the_second_unexplained_crash() -> None:
    config = configure({"how": "unexplained", "share": 0.3, "length": 2, "at": 2}, rollout={"retries": 0})
    engine = ScriptedEngine(renderer(), GO)
    result = await evaluate(config, engine, renderer(), ActionParser("tagged", 3), range(40), temperature=0.0)
    bad = sum(np.random.default_rng(seed).random() < 0.3 for seed in range(40))
    assert (result.failures, result.episodes, result.policy_crashes) == (0, 40, bad)
    assert result.voided == {"UnexplainedCrash": bad}
    assert result.success == sum(t.success for t in result.trajectories) / 40
    lines = "\n".join(report(result, 1.0))
    assert f"voided    {bad} attempts: {bad} x UnexplainedCrash" in lines
    assert f"crashed   {bad} episodes" in lines


async def test_asynchronous_environments_play_too() -> None:
    harness = Harness(configure(settings={"id": "AsyncPuppet-v0"}))
    batches = await harness.run(2)
    assert all(m.success for batch in batches for group in batch for m in group.members)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.integers(1, 3),
    size=st.integers(2, 3),
    extra=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    ratio=st.sampled_from([0.0, 0.3, 1.0, 1.5, 2.0, 3.0]),
    policy=st.sampled_from(["wait", "drop"]),
    in_flight=st.sampled_from(["retry", "continue"]),
    share=st.sampled_from([0.0, 0.2]),
    retries=st.integers(0, 2),
    dynamic=st.booleans(),
    salt=st.integers(0, 1000),
)
def test_records_are_consistent_under_any_setting(
    groups, size, extra, ratio, policy, in_flight, share, retries, dynamic, salt
) -> None:
    config = configure(
        {"how": "crash", "share": share, "length": 3},
        seed=salt,
        gate={"policy": policy},
        rollout={
            "groups": groups,
            "group_size": size,
            "extra_groups": extra[0],
            "extra_members": extra[1],
            "async_ratio": ratio,
            "in_flight": in_flight,
            "retries": retries,
            "dynamic_sampling": dynamic,
            "max_failure_share": 1.0,
        },
    )
    harness = Harness(config, mixed, latency=lambda seed: 0.2 if seed % 13 == 0 else (seed % 11) / 100)
    batches = run_virtual(harness.run(5))
    harness.check_book()
    assert [len(batch) for batch in batches] == [groups] * 5
    assert harness.endings["trained", ""] == 5 * groups * size
    assert harness.engine.running == 0
