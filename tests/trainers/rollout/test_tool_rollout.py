"""Environments with tools in rollouts, imitation, training and with chat endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import Answer, chat_server, said
from rollout_doubles import ScriptedEngine
from test_chat_templates import FILES, model_tokenizer

import agentkit
from agentkit.config import EnvConfig, ModelConfig, RunConfig
from agentkit.errors import ConfigError
from agentkit.jsonl import read_jsonl
from agentkit.openai import ChatEndpoint
from agentkit.trainers.imitation import expert_episodes
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.rollout.evaluation import evaluate, evaluate_endpoint
from agentkit.trainers.rollout.plugin import make_parser
from agentkit.trainers.rollout.renderer import ChatRenderer, make_renderer
from agentkit.trainers.rollout.source import EnvSource
from agentkit.trainers.rollout.tools import for_endpoint

ENV: dict[str, Any] = {"id": "Invoice-v0", "kwargs": {"lines": 1}}
PRICE = '{"name": "price", "arguments": {"item": "lamp"}}'
SUBMIT = '{"name": "submit", "arguments": {"total": -1}}'


def tokenizer_of(name: str) -> Any:
    if name == "quickstart":
        return load_tokenizer("quickstart")
    return model_tokenizer(next(file for file in FILES if file.stem == name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("history", ["auto", "rerender", "window"])
@pytest.mark.parametrize("name", ["quickstart", "qwen2_5", "llama3_1", "gptoss", "glm4moe", "qwen3_6"])
async def test_an_episode_records_what_the_engine_saw(name: str, history: Any) -> None:
    config = RunConfig.model_validate(
        {
            "env": {**ENV, "format_penalty": -0.25},
            "model": {"history": history, **({"window": 1} if history == "window" else {})},
            "engine": {"max_context": 8192},
            "rollout": {"max_tokens": 512},
        }
    )
    source = EnvSource.of(config.env)
    renderer = make_renderer(config.model, tokenizer_of(name), source.max_turns, source.tools)
    parser = make_parser(config, source.actions_per_turn, renderer.tools)
    answers = iter([parser.format([PRICE]), "I do not know.", parser.format([PRICE]), parser.format([SUBMIT])])
    engine = ScriptedEngine(renderer, lambda text, seed: next(answers))
    result = await evaluate(config, engine, renderer, parser, [5], temperature=1.0)
    (episode,) = result.trajectories
    assert [turn.actions for turn in episode.turns] == [(PRICE,), (), (PRICE,), (SUBMIT,)]
    assert [turn.valid for turn in episode.turns] == [True, False, True, True]
    assert [turn.reward for turn in episode.turns] == [0, -0.25, 0, 0]
    assert episode.outcome == "terminated"
    assert episode.turns[2].observation.startswith("Your answer has no valid tool call: it has none.")
    assert episode.turns[1].observation == episode.turns[3].observation
    ((_, prompts),) = engine.prompts.items()
    seen: list[int] = []
    for number, turn in enumerate(episode.turns):
        seen = (seen if not renderer.rerenders else []) + turn.prompt_ids.tolist()
        assert prompts[number] == seen
        seen = seen + turn.action_ids.tolist()
        assert int(turn.action_ids[-1]) in engine.samplings[number].stop_ids
        again = renderer.prompt(episode.system, episode.turns[:number], turn.observation)
        assert again.tolist() == turn.prompt_ids.tolist()


@pytest.mark.parametrize("name", ["quickstart", "qwen2_5", "gptoss", "qwen3_6"])
def test_the_expert_answers_as_the_policy_would(name: str) -> None:
    config = RunConfig.model_validate({"env": ENV, "imitation": {"episodes": 3}, "engine": {"max_context": 8192}})
    source = EnvSource.of(config.env)
    renderer = make_renderer(ModelConfig(), tokenizer_of(name), source.max_turns, source.tools)
    parser = make_parser(config, source.actions_per_turn, renderer.tools)
    episodes, _ = expert_episodes(config, renderer, parser)
    for episode in episodes:
        assert episode.success
        assert len(episode.turns) == 3
        for turn in episode.turns:
            assert parser.parse(renderer.decode(turn.action_ids)).actions == turn.actions


def test_training_with_tools(tmp_path: Path) -> None:
    config = {
        "dir": tmp_path / "run",
        "steps": 1,
        "env": {**ENV, "max_turns": 2},
        "engine": {"max_context": 1536, "max_batch": 4},
        "rollout": {"groups": 1, "group_size": 2, "max_tokens": 8},
        "imitation": {"episodes": 2, "batch_episodes": 2, "epochs": 1},
        "learner": {"lr": 1e-3},
        "evaluation": {"episodes": 1},
    }
    episodes: list[agentkit.Trajectory] = []
    result = agentkit.train(config, on_episode=episodes.append)
    assert result.ending == "finished"
    assert len(episodes) >= 2
    assert "Return the price of one piece" in episodes[0].system
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert any("imitation/updates" in row for row in rows)


def called(name: str, arguments: str, content: str | None = None) -> Answer:
    function = {"name": name, "arguments": arguments}
    message = {"content": content, "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}, {}


async def test_a_chat_endpoint_gets_the_tools_and_returns_calls() -> None:
    replies = [
        called("price", '{"item": "lamp"}', "I look it up."),
        said("It is cheap."),
        called("price", '{"item": }'),
        called("submit", '{"total": -1}'),
    ]
    config = RunConfig.model_validate({"env": ENV})
    source = EnvSource.of(config.env)
    parser = make_parser(config, 1, for_endpoint(source.tools))
    with chat_server(lambda number, body: replies[number]) as server:
        async with ChatEndpoint(server.url, "some-model") as client:
            result = await evaluate_endpoint(config, client, parser, [5], temperature=0.0)
    (episode,) = result.trajectories
    assert [turn.actions for turn in episode.turns] == [(PRICE,), (), (), (SUBMIT,)]
    bodies = [body for body, _ in server.requests]
    assert all(body["tools"] == list(source.tools) for body in bodies)
    messages = bodies[-1]["messages"]
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "assistant", "user", "assistant", "user"
    ]  # fmt: skip
    (sent,) = messages[2]["tool_calls"]
    assert messages[2]["content"] == "I look it up."
    assert sent["function"]["name"] == "price"
    assert json.loads(sent["function"]["arguments"]) == {"item": "lamp"}
    assert messages[3]["tool_call_id"] == sent["id"]
    assert "not valid JSON" in messages[7]["content"]


def test_settings_that_do_not_fit_tools_are_refused() -> None:
    use = ChatRenderer(load_tokenizer("quickstart"), tools=EnvSource.of(EnvConfig(**ENV)).tools).tools
    with pytest.raises(ConfigError, match=r"env\.parser=plain has no effect: Invoice-v0 has tools"):
        make_parser(RunConfig.model_validate({"env": {**ENV, "parser": "plain"}}), 1, use)
    with pytest.raises(ConfigError, match="actions_per_turn=2 must be 1"):
        make_parser(RunConfig.model_validate({"env": ENV}), 2, use)
    with pytest.raises(ConfigError, match="Invoice-v0 has tools"):
        agentkit.make("Mixture-v0", domains=[ENV])
