"""Rollouts whose history is rendered again: each turn's record is what the engine saw and produced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_envs import Plain
from rollout_harness import GO, Harness, configure, renderer

from agentkit import registry
from agentkit.codec import decode_group, encode_group
from agentkit.config import ModelConfig, RunConfig
from agentkit.errors import ConfigError
from agentkit.trainers.batch import flatten
from agentkit.trainers.imitation import expert_episodes
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.episode import system_message
from agentkit.trainers.rollout.evaluation import evaluate
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.trainers.rollout.renderer import make_renderer
from agentkit.trainers.rollout.source import EnvSource

HISTORIES: list[dict[str, Any]] = [
    {"history": "rerender"},
    {"history": "window", "window": 1},
    {"history": "window", "window": 1, "summary": "actions"},
]


def mixed(text: str, seed: int) -> str:
    """Script valid answers, invalid formats, and answers that are cut off."""
    return (GO, "Go!", "<answer>Bad</answer>", "so " * 60, f"hmm {GO}")[seed % 5]


@pytest.mark.parametrize("model", HISTORIES, ids=["rerender", "window", "summary"])
async def test_each_turn_records_what_the_engine_saw_and_produced(model: dict[str, Any]) -> None:
    config = configure(
        {"length": 6}, settings={"max_turns": 8}, rollout={"groups": 3, "group_size": 3, "async_ratio": 1}, model=model
    )
    harness = Harness(config, mixed, latency=lambda seed: (seed % 7) / 1000)
    batches = await harness.run(4)  # asserts the bound of staleness after each batch
    harness.check_book()
    seen = set()
    for member in (member for batch in batches for group in batch for member in group.members):
        name = f"0.{member.group_id}.{member.member}.{member.attempt}"
        assert member.rerendered
        for number, turn in enumerate(member.turns):
            assert harness.engine.prompts[name][number] == turn.prompt_ids.tolist()
            assert harness.engine.results[name][number] == turn.action_ids.tolist()
            assert turn.response == harness.renderer.decode(turn.action_ids)
            shown = harness.renderer.prompt(member.system, member.turns[:number], turn.observation)
            assert turn.prompt_ids.tolist() == shown.tolist()
            seen.add(turn.finish_reason)
        if member.outcome == "truncated":
            text = harness.renderer.decode(member.final_ids)
            assert text.startswith(harness.renderer.decode(member.turns[0].prompt_ids)[:60])
            seen.add("truncated")
    assert seen == {"stop", "length", "truncated"}
    late = [turn for batch in batches for group in batch for member in group.members for turn in member.turns[2:]]
    summarized = {"Summary:\nActions: " in harness.renderer.decode(turn.prompt_ids) for turn in late}
    assert summarized == {"summary" in model}
    for batch in batches:
        again = [decode_group(encode_group(group)) for group in batch]
        flat, read = flatten(batch), flatten(again)
        assert np.array_equal(flat.cu_contexts, read.cu_contexts)
        finals = int(flat.bootstraps.sum())
        assert flat.num_contexts == sum(len(m.turns) for group in batch for m in group.members) + finals
        assert flat.num_sequences == 9


async def test_appending_and_rendering_again_play_the_same_episodes() -> None:
    """The quickstart template leaves history alone, so the engine sees the same text."""
    texts = []
    for model in ({}, {"history": "rerender"}):
        config = configure({"length": 4}, deterministic=True, model=model)
        harness = Harness(config, lambda text, seed: GO)
        await harness.run(2)
        decode = harness.renderer.decode
        texts.append({name: [decode(np.array(ids)) for ids in seen] for name, seen in harness.engine.prompts.items()})
    assert texts[0] == texts[1]


async def test_a_window_bounds_the_context_of_long_episodes() -> None:
    settings, engine = {"max_turns": 60}, {"max_context": 300}
    for model, reason in (({}, "context"), ({"history": "window", "window": 2}, "max_turns")):
        harness = Harness(configure({"length": 100}, settings=settings, engine=engine, model=model))
        ((group, _),) = await harness.run(1)
        assert {member.reason for member in group.members} == {reason}
    assert {len(member.turns) for member in group.members} == {60}
    assert max(len(ids) for prompts in harness.engine.prompts.values() for ids in prompts) <= 300
    assert all(len(member.final_ids) for member in group.members)


async def test_a_prompt_that_outgrows_the_context_ends_the_episode() -> None:
    model = {"history": "rerender"}
    harness = Harness(configure({"length": 50}, settings={"max_turns": 50}, engine={"max_context": 256}, model=model))
    ((group, _),) = await harness.run(1)
    for member in group.members:
        assert (member.outcome, member.reason, len(member.final_ids)) == ("truncated", "context", 0)
        assert 2 < len(member.turns) < 50
        assert max(len(turn.prompt_ids) + len(turn.action_ids) for turn in member.turns) <= 256
    with pytest.raises(ConfigError, match=r"engine\.max_context=40"):
        await Harness(configure(engine={"max_context": 40}, model=model)).run(1)


async def test_an_episode_goes_on_in_another_environment_with_the_same_prompts(tmp_path: Path) -> None:
    registry.register("Plain-v0", Plain)
    settings = {"id": "Plain-v0", "recovery": "replay", "concurrency": "process"}
    records = []
    for kwargs in ({}, {"how": "die", "at": 2, "once": str(tmp_path / "died")}):
        config = configure(
            kwargs, settings=settings, rollout={"groups": 1, "retries": 5}, model={"history": "rerender"}
        )
        harness = Harness(config)
        ((group,),) = await harness.run(1)
        records.append([[turn.prompt_ids.tolist() for turn in member.turns] for member in group.members])
    assert harness.loop.metrics()["rollout/env_replays"] > 0
    assert records[0] == records[1]


async def test_evaluation_uses_the_history_of_the_configuration() -> None:
    config = configure({"length": 3}, model={"history": "rerender"})
    harness = Harness(config)
    result = await evaluate(
        config, harness.engine, harness.renderer, ActionParser("tagged", 3), range(4), temperature=0
    )
    assert all(episode.rerendered for episode in result.trajectories)


def test_experts_are_imitated_with_the_history_of_the_configuration() -> None:
    config = RunConfig.model_validate({"env": {"id": "FrozenLake-v1"}, "imitation": {"episodes": 4}})
    tok = load_tokenizer("quickstart")
    parser = ActionParser("tagged", 1)
    whole = make_renderer(ModelConfig(history="rerender"), tok, 10)
    system = system_message(EnvSource.of(config.env).instructions, parser)
    appended, apart = (expert_episodes(config, one, parser)[0] for one in (renderer(), whole))
    for one, other in zip(appended, apart, strict=True):
        assert other.rerendered
        assert [turn.action_ids.tolist() for turn in one.turns] == [turn.action_ids.tolist() for turn in other.turns]
        for number, turn in enumerate(other.turns):
            shown = whole.prompt(system, other.turns[:number], turn.observation)
            assert turn.prompt_ids.tolist() == shown.tolist()


def test_contradictions_are_refused() -> None:
    def model(**settings: Any) -> None:
        RunConfig.model_validate({"env": {"id": "FrozenLake-v1"}, "model": settings})

    model(history="window", window=2)
    with pytest.raises(ValueError, match=r"model\.window=2 has no effect with model\.history=auto"):
        model(window=2)
    model(history="window", summary="actions", summary_length=100)
    with pytest.raises(ValueError, match=r"model\.summary=actions has no effect with model\.history=rerender"):
        model(history="rerender", summary="actions")
    with pytest.raises(ValueError, match=r"model\.summary_length=100 has no effect without model\.summary"):
        model(history="window", summary_length=100)
    with pytest.raises(ValueError, match=r"there is no summary of this name; did you mean actions"):
        model(history="window", summary="action")
    with pytest.raises(ValueError, match=r"template_arguments\.tokenize is set by agentkit"):
        model(template_arguments={"tokenize": True})
