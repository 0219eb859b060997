"""Rewards, filters, parsers and summaries of plug-ins in the rollout loop."""

from __future__ import annotations

from typing import Any

import pytest
from plugin_packages import Install
from rollout_harness import GO, Harness, configure

from agentkit.config import RunConfig
from agentkit.errors import ConfigError, PluginError
from agentkit.preflight import plugin_problems
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.plugin import make_parser

SOURCE = """
    from agentkit.trainers.rollout.parser import ParsedAnswer

    def short(episode, *, cost: float = 0.5):
        return [turn.reward - cost * len(turn.action_ids) for turn in episode.turns]

    def wrong(episode):
        return [1.0]

    def nan(episode):
        return [float("nan") for turn in episode.turns]

    def raising(episode):
        raise KeyError("no such word")

    def even(group, *, remainder: int = 0):
        return group.seed % 2 == remainder

    def undecided(group):
        return None

    def counted(turns, *, word: str = "turns"):
        assert all(type(observation) is str and type(actions) is tuple for observation, actions in turns)
        return f"{len(turns)} {word}, last {turns[-1][1]} at {turns[-1][0]}"

    def visited(turns, *, last: int = 5):
        places = [observation.splitlines()[0] for observation, actions in turns if actions]
        return f"Seen: {', '.join(places[-last:])}"

    def endless(turns):
        return "<|im_end|>" * 100

    def forgetful(turns):
        return None

    def lost(turns):
        return turns[99]

    class Last:
        instructions = "End with your action in capitals."

        def __init__(self, actions_per_turn, *, word: str = "GO"):
            self.word, self.actions_per_turn = word, actions_per_turn

        def parse(self, text):
            words = [one for one in text.split() if one == self.word]
            return ParsedAnswer(tuple(one.capitalize() for one in words), valid=bool(words))

    class Writing(Last):
        def format(self, actions):
            return " ".join(action.upper() for action in actions)

    class Mute:
        def __init__(self, actions_per_turn):
            pass

    class Untidy(Last):
        def parse(self, text):
            return ["Go"]
"""


POINTS = {
    "agentkit.rewards": {"short": "rollout_parts:short"},
    "agentkit.summaries": {"counted": "rollout_parts:counted"},
}


@pytest.fixture(autouse=True)
def _plugins(install: Install) -> None:
    install("rollout-parts", POINTS, {"rollout_parts": SOURCE})


async def test_a_reward_replaces_those_of_the_environment() -> None:
    plain = Harness(configure({"length": 2}))
    await plain.run(1)
    shaped = Harness(configure({"length": 2}, rollout={"reward": "short", "reward_options": {"cost": 0.25}}))
    batches = await shaped.run(1)
    shaped.check_book()
    before = {(t.group_id, t.member): [turn.reward for turn in t.turns] for t, *_ in plain.ends}
    for member in (member for group in batches[0] for member in group.members):
        rewards = before[member.group_id, member.member]
        costs = [0.25 * len(turn.action_ids) for turn in member.turns]
        assert [turn.reward for turn in member.turns] == pytest.approx(
            [reward - cost for reward, cost in zip(rewards, costs, strict=True)]
        )
        assert member.metrics["task/env_return"] == pytest.approx(sum(rewards))
    metrics = shaped.loop.metrics()
    assert metrics["rollout/return_mean"] < metrics["task/env_return"]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_a_filter_replaces_groups_within_the_budget(deterministic: bool) -> None:
    rollout = {"groups": 4, "filter": "rollout_parts:even", "filter_options": {"remainder": 1}, "max_refills": 3.0}
    harness = Harness(configure({"length": 1}, rollout=rollout, deterministic=deterministic))
    batches = await harness.run(2)
    harness.check_book()
    assert [len(batch) for batch in batches] == [4, 4]
    assert all(group.seed % 2 == 1 for batch in batches for group in batch)
    assert harness.endings["dropped", "filtered"] >= 2 * 3
    metrics = harness.loop.metrics()
    assert metrics["rollout/refills"] >= 3
    assert metrics["rollout/episodes"] == 2 * 4 * 2 + harness.endings["dropped", "filtered"]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"reward": "rollout_parts:wrong"},
            r"reward 'rollout_parts:wrong' returned \[1.0\], not a finite number for each",
        ),
        ({"reward": "rollout_parts:nan"}, r"returned \[nan, .*\], not a finite number for each of 2 turns"),
        ({"reward": "rollout_parts:raising"}, r"raised KeyError: 'no such word' \(in raising, .*rollout_parts.py:"),
        ({"filter": "rollout_parts:undecided"}, "returned None, not True"),
    ],
)
async def test_an_error_of_a_plugin_ends_the_loop_and_every_episode(rollout: dict[str, Any], message: str) -> None:
    harness = Harness(configure({"length": 2}, rollout=rollout))
    with pytest.raises(PluginError, match=message):
        await harness.run(1)
    harness.check_book()
    assert {ending for _, ending, _ in harness.ends} == {"cancelled"}


async def test_a_summary_is_in_the_prompts() -> None:
    model = {"history": "window", "window": 1, "summary": "counted", "summary_options": {"word": "moves"}}
    harness = Harness(configure({"length": 4}, model=model))
    ((group, _),) = await harness.run(1)
    for member in group.members:
        text = harness.renderer.decode(member.turns[3].prompt_ids)
        summary = f"2 moves, last ('Go',) at {member.turns[1].observation}"
        assert f"[2 turns are left out here. Summary:\n{summary}]" in text
        assert (
            harness.engine.prompts[f"0.{member.group_id}.{member.member}.0"][3] == member.turns[3].prompt_ids.tolist()
        )


async def test_the_summary_of_the_documentation() -> None:
    model = {"history": "window", "window": 0, "summary": "rollout_parts:visited"}
    harness = Harness(configure({"length": 4}, model=model))
    ((group, _),) = await harness.run(1)
    member = group.members[0]
    seen = ", ".join(turn.observation for turn in member.turns[:3])
    assert f"Summary:\nSeen: {seen}]" in harness.renderer.decode(member.turns[3].prompt_ids)


async def test_the_summary_of_a_plugin_is_cut_and_holds_no_control_tokens() -> None:
    model = {"history": "window", "window": 0, "summary": "rollout_parts:endless", "summary_length": 45}
    harness = Harness(configure({"length": 3}, model=model))
    ((group, _),) = await harness.run(1)
    special = harness.renderer.end_of_turn
    for turn in group.members[0].turns:
        assert turn.prompt_ids.tolist().count(special) == 2  # after the rules and after the observation
    ids = group.members[0].turns[2].prompt_ids
    assert f"Summary:\n{'<|im_end|>' * 4}<|im…]" in load_tokenizer("quickstart").decode(ids)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lost", r"summary 'rollout_parts:lost' raised IndexError: .* \(in lost, .*rollout_parts.py:"),
        ("forgetful", "summary 'rollout_parts:forgetful' returned None, not a text"),
    ],
)
async def test_an_error_of_a_summary_ends_the_run(name: str, message: str) -> None:
    model = {"history": "window", "window": 0, "summary": f"rollout_parts:{name}"}
    harness = Harness(configure({"length": 2}, model=model))
    with pytest.raises(PluginError, match=message):
        await harness.run(1)
    harness.check_book()


def test_options_of_a_summary_are_checked() -> None:
    def problems(**model: Any) -> list[str]:
        settings = {"history": "window", "summary": "counted"} | model
        return list(plugin_problems(RunConfig.model_validate({"env": {"id": "FrozenLake-v1"}, "model": settings})))

    assert problems(summary_options={"word": "moves"}) == []
    (problem,) = problems(summary_options={"word": 3})
    assert problem.startswith("model.summary_options.word: input should be a valid string, not 3")
    (problem,) = problems(summary="actions", summary_options={"word": "moves"})
    assert problem.startswith("model.summary_options.word: only plug-ins have options")
    (problem,) = problems(summary="rollout_parts:missing")
    assert problem.startswith("model.summary: summary 'rollout_parts:missing' does not load: AttributeError")


async def test_a_parser_reads_the_answers() -> None:
    settings = {"parser": "rollout_parts:Last", "parser_options": {"word": "RUN"}, "actions_per_turn": 1}
    harness = Harness(configure({"length": 2}, settings=settings), lambda text, seed: ("RUN", GO, "RUN RUN")[seed % 3])
    await harness.run(2)
    harness.check_book()
    turns = [turn for trajectory, ending, _ in harness.ends for turn in trajectory.turns]
    assert {turn.response.strip(): turn.actions for turn in turns} == {"RUN": ("Run",), GO: (), "RUN RUN": ()}
    assert "End with your action in capitals." in harness.ends[0][0].system


async def test_an_error_of_a_parser_ends_the_run() -> None:
    harness = Harness(configure({"length": 2}, settings={"parser": "rollout_parts:Untidy"}))
    with pytest.raises(PluginError, match=r"parser 'rollout_parts:Untidy' read \['Go'\], not a ParsedAnswer"):
        await harness.run(1)
    harness.check_book()


def test_imitation_needs_a_parser_that_writes() -> None:
    def config(parser: str) -> RunConfig:
        return RunConfig.model_validate({"env": {"id": "Sokoban-v0", "parser": parser}, "imitation": {}})

    with pytest.raises(ConfigError, match="has no method `format`"):
        make_parser(config("rollout_parts:Last"), 2)
    parser = make_parser(config("rollout_parts:Writing"), 2)
    assert parser.format(("Go", "Go")) == "GO GO"
    with pytest.raises(ValueError, match="reads it differently"):
        parser.format(("Up",))
    with pytest.raises(PluginError, match="has no method `parse`"):
        make_parser(config("rollout_parts:Mute"), 2)
