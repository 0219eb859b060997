"""Agents play the episodes of a run: what they ask is trained on, and what they do is scored."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import endpoint_agents
import pytest
from rollout_harness import GO, Harness, configure

import agentkit
from agentkit.config import RunConfig
from agentkit.config_io import load_config
from agentkit.errors import ConfigError, EngineError, EnvFailureBudgetExceeded
from agentkit.preflight import check
from agentkit.trainers.batch import flatten
from agentkit.types import Trajectory

PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["text"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""


def configured(agent: str | dict[str, Any], env: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    given = {"python": f"endpoint_agents:{agent}"} if isinstance(agent, str) else agent
    return configure(env, agent=given, **sections)


def check_records(harness: Harness, members: list[Trajectory]) -> None:
    """The turns of each episode are what the engine saw and produced."""
    for member in members:
        name = f"0.{member.group_id}.{member.member}.{member.attempt}"
        seen: list[int] = []
        for number, turn in enumerate(member.turns):
            seen = turn.prompt_ids.tolist() if member.rerendered else [*seen, *turn.prompt_ids.tolist()]
            assert harness.engine.prompts[name][number] == seen
            assert harness.engine.results[name][number] == turn.action_ids.tolist()
            seen = [*seen, *turn.action_ids.tolist()]


async def test_an_agent_that_steps_plays_like_the_built_in_loop() -> None:
    """With an async ratio, redundant members and weight updates that interrupt answers."""
    rollout = {"groups": 2, "group_size": 3, "extra_members": 1, "extra_groups": 1, "async_ratio": 1}
    config = configured("stepping", {"length": 3}, rollout=rollout, settings={"format_penalty": -0.5})
    harness = Harness(config, lambda text, seed: (GO, "no")[seed % 2], latency=lambda seed: (seed % 5) / 100)
    batches = await harness.run(3)
    harness.check_book()
    members = [member for batch in batches for group in batch for member in group.members]
    check_records(harness, members)
    for member in members:
        assert (member.outcome, member.reason, member.rerendered) == ("terminated", "", False)
        assert len(member.turns) == 3
        for turn in member.turns:
            assert (turn.actions, turn.valid) == ((("Go",), True) if "Go" in turn.response else (("Bad",), False))
            assert turn.generate_s > 0
            assert turn.env_s > 0
        assert sum(turn.generate_s + turn.env_s for turn in member.turns) <= member.duration_s
        assert [turn.reward for turn in member.turns[:2]] == [0.0 if turn.valid else -0.5 for turn in member.turns[:2]]
    assert {ending for ending, _ in harness.endings} >= {"trained", "cancelled"}


async def test_an_agent_that_rewrites_its_history_has_a_sequence_per_request() -> None:
    harness = Harness(configured("forgetful", {"length": 3}))
    ((first, *_),) = await harness.run(1)
    check_records(harness, first.members)
    assert all(member.rerendered for member in first.members)
    assert flatten([first]).num_contexts == 3 * len(first.members)


@pytest.mark.parametrize(("said", "reward", "valid"), [(GO, None, True), ("nonsense", -0.5, False)])
async def test_the_answer_of_an_agent_is_scored(said: str, reward: float | None, valid: bool) -> None:
    config = configured("answering", {"length": 1}, settings={"format_penalty": -0.5})
    harness = Harness(config, said)
    ((group, *_),) = await harness.run(1)
    for member in group.members:
        (turn,) = member.turns
        assert turn.valid == valid
        assert member.outcome == ("terminated" if valid else "truncated")
        assert turn.reward == (reward if reward is not None else (turn.reward if turn.reward in (0, 1, 2) else None))


async def test_the_example_of_the_page_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    (tmp_path / "my_agent.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    harness = Harness(configured({"python": "my_agent:solve"}, {"length": 1}))
    ((group, *_),) = await harness.run(1)
    check_records(harness, group.members)
    for member in group.members:
        assert (member.outcome, len(member.turns), member.rerendered) == ("terminated", 2, False)
        assert [turn.actions for turn in member.turns] == [(), ("Go",)]


async def test_a_program_in_another_language_is_an_agent() -> None:
    harness = Harness(configured({"command": (sys.executable, "-c", PROGRAM)}, {"length": 1}))
    ((group, *_),) = await harness.run(1)
    check_records(harness, group.members)
    assert all(member.turns[0].actions == ("Go",) for member in group.members)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("broken", "KeyError: 'my bug'"),
        ("silent", "ended without an answer of the policy"),
        ("greedy", "refused: temperature=0.0 cannot be trained on"),
        ({"command": (sys.executable, "-c", "raise SystemExit(3)")}, "ended with status 3"),
        (
            {"command": ("sleep", "99"), "timeout": 0.3},
            "longer than agent.timeout",
        ),
    ],
)
async def test_an_agent_that_fails_without_the_policy_ends_the_run(agent: Any, reason: str) -> None:
    harness = Harness(configured(agent, rollout={"groups": 4, "group_size": 4, "retries": 0}))
    with pytest.raises(EnvFailureBudgetExceeded, match=reason):
        await harness.run(1)
    harness.check_book()


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("breaking", "IndexError"),
        ("slow", "longer than agent.timeout=5 s"),
        ("exiting", "SystemExit"),
        ("cancelled", "CancelledError"),
        ("hasty", "TimeoutError"),
        ("deaf", "longer than agent.timeout=5 s"),
    ],
)
async def test_a_failure_after_an_answer_is_the_policys(agent: str, reason: str) -> None:
    harness = Harness(configured({"python": f"endpoint_agents:{agent}", "timeout": 5.0}, {"length": 3}))
    ((group, *_),) = await harness.run(1)
    for member in group.members:
        assert member.outcome == "truncated"
        assert reason in member.reason
        assert member.reward == 0
    assert harness.endings == {("trained", ""): 4}


async def test_a_first_answer_that_is_too_long_for_the_agent_is_the_policys() -> None:
    harness = Harness(configured("impatient"), latency=1.0)
    ((group, *_),) = await harness.run(1)
    check_records(harness, group.members)
    assert all("APITimeoutError" in member.reason for member in group.members)
    assert harness.endings == {("trained", ""): 4}


async def test_work_that_an_agent_leaves_behind_ends_with_the_episode() -> None:
    endpoint_agents.LEFT.clear()
    harness = Harness(configured("leaving"), latency=lambda seed: 0.1)
    ((group, *_),) = await harness.run(1)
    await asyncio.wait(endpoint_agents.LEFT)
    check_records(harness, group.members)
    assert all(len(member.turns) == 1 for member in group.members)
    assert all(len(results) == 1 for results in harness.engine.results.values())
    assert harness.endings[("trained", "")] == 4


@pytest.mark.parametrize("script", ["setsid sleep 30 &", "sleep 30 &"])
async def test_processes_that_a_command_leaves_behind_do_not_delay_its_answer(script: str) -> None:
    command = ("sh", "-c", f'{script} exec "$0" -c "$1"', sys.executable, PROGRAM)
    harness = Harness(configured({"command": command, "timeout": 20.0}, {"length": 1}))
    ((group, *_),) = await harness.run(1)
    assert all(member.turns[0].actions == ("Go",) for member in group.members)


async def test_an_agent_steps_only_in_its_own_episode() -> None:
    """A late step does not reach the environment, and a wrong action does not void the episode."""
    endpoint_agents.LEFT.clear()
    harness = Harness(configured("lingering", {"length": 9}))
    ((group, *_),) = await harness.run(1)
    late = await asyncio.gather(*endpoint_agents.LEFT, return_exceptions=True)
    assert all(isinstance(error, RuntimeError) and "is over" in str(error) for error in late)
    for member in group.members:
        assert member.turns[0].actions == ("Go", "Go")
        assert "TypeError: step takes one or more actions" in member.reason
    assert not any(ending == "voided" for ending, _ in harness.endings)


def test_the_agent_of_a_run_does_not_play_at_an_endpoint() -> None:
    agent = "agent={python: 'endpoint_agents:answering'}"
    with pytest.raises(ConfigError, match="add agent=null"):
        agentkit.evaluate("m", env="Countdown-v0", endpoint="http://localhost:1/v1", overrides=[agent])


async def test_an_agent_cannot_hide_a_failing_environment(tmp_path: Path) -> None:
    once = {"how": "crash", "once": str(tmp_path / "x"), "length": 1}
    harness = Harness(configured("stubborn", once, settings={"recovery": "retry"}))
    await harness.run(1)
    assert harness.endings[("voided", "EnvCrashed")] > 0
    assert harness.endings[("trained", "")] == 4


async def test_a_failing_engine_ends_the_run() -> None:
    harness = Harness(configured("answering"))
    harness.engine.fail = EngineError("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await harness.run(1)


def test_a_run_trains_on_the_episodes_of_an_agent(tmp_path: Path) -> None:
    """With the real engine and learner, on Countdown; the evaluation plays with the agent too."""
    config = load_config(
        {
            "env": {"id": "Countdown-v0"},
            "agent": {"python": "endpoint_agents:answering"},
            "rollout": {"groups": 2, "group_size": 2, "max_tokens": 8},
            "engine": {"max_batch": 8},
            "steps": 2,
            "evaluation": {"episodes": 2},
            "dir": tmp_path / "run",
        }
    )
    episodes: list[Trajectory] = []
    result = agentkit.train(config, on_episode=episodes.append)
    assert result.steps == 2
    assert len(episodes) == 8
    assert all(len(episode.turns) == 1 and len(episode.turns[0].action_ids) for episode in episodes)
    assert result.success_after is not None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"agent": {}}, "set one of them"),
        ({"agent": {"python": "a:b", "command": ["c"]}}, "set one of them"),
        ({"agent": {"python": "no colon"}}, "agent.python"),
        ({"agent": {"python": "a:b"}, "imitation": {}}, "remove one"),
        ({"agent": {"python": "a:b"}, "model": {"history": "rerender"}}, "has no effect with an agent"),
    ],
)
def test_wrong_settings_are_errors(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config({"env": {"id": "Countdown-v0"}, **settings})


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"python": "no_such_module:agent"}, "does not load"),
        ({"python": "endpoint_agents:plain"}, "not a coroutine function"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
    ],
)
def test_agents_that_do_not_exist_are_reported_before_a_run(agent: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(load_config({"env": {"id": "Countdown-v0"}, "agent": agent}))
