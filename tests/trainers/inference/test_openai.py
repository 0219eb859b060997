"""Chat endpoints, against a real HTTP server."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from chat_server import Answer, ChatServer, chat_server, refused, said

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.errors import ConfigError, EngineError
from agentkit.openai import ChatEndpoint, ContextExceeded, base_url
from agentkit.results import EvalResult
from agentkit.trainers.rollout.evaluation import evaluate_endpoint
from agentkit.trainers.rollout.parser import ActionParser
from agentkit.types import Message

HELLO = [Message("system", "rules"), Message("user", "Grüße ✓")]


def endpoint(url: str, **kwargs: Any) -> ChatEndpoint:
    return ChatEndpoint(url, "some-model", **{"first_pause_s": 0.01, "retries": 3, "timeout_s": 5.0, **kwargs})


async def test_requests_follow_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with chat_server(lambda number, body: said("hällo", "length")) as server:
        async with endpoint(server.url) as client:
            reply = await client.chat(HELLO, max_tokens=9, temperature=0.5, seed=4)
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("hällo", "length", 7, 3)
    body, headers = server.requests[0]
    assert body == {
        "model": "some-model",
        "messages": [{"role": "system", "content": "rules"}, {"role": "user", "content": "Grüße ✓"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 4,
    }
    assert headers["authorization"] == "Bearer secret"


async def test_no_key_is_sent_unless_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server(lambda number, body: said("")) as server:
        async with endpoint(server.url) as client:
            await client.chat(HELLO, max_tokens=1, temperature=0)
    assert "authorization" not in server.requests[0][1]


@pytest.mark.parametrize("trouble", [refused(429, "slow down"), refused(500, "oops"), refused(503, "loading"), None])
async def test_temporary_failures_are_retried(trouble: Answer | None) -> None:
    with chat_server(lambda number, body: trouble if number < 3 else said("at last")) as server:
        async with endpoint(server.url) as client:
            assert (await client.chat(HELLO, max_tokens=1, temperature=0)).text == "at last"
    assert len(server.requests) == 4


async def test_waits_as_long_as_the_server_asks() -> None:
    first = refused(429, "slow down", Retry_After="1")
    with chat_server(lambda number, body: first if number == 0 else said("ok")) as server:
        async with endpoint(server.url) as client:
            begun = time.monotonic()
            await client.chat(HELLO, max_tokens=1, temperature=0)
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize(
    ("status", "words"),
    [(500, "server's own log"), (401, "OPENAI_API_KEY"), (404, "/v1"), (429, "engine.max_batch"), (400, "the reason")],
)
async def test_persistent_failures_are_reported(status: int, words: str) -> None:
    with chat_server(lambda number, body: refused(status, "this is the reason")) as server:
        async with endpoint(server.url) as client:
            with pytest.raises(EngineError, match=words) as caught:
                await client.chat(HELLO, max_tokens=1, temperature=0)
    assert "this is the reason" in str(caught.value)
    assert len(server.requests) == (4 if status in (500, 429) else 1)


@pytest.mark.parametrize("body", ["<html>hello</html>", {"choices": []}, {"object": "list"}, "[]"])
async def test_a_server_of_another_protocol_is_reported(body: Any) -> None:
    with chat_server(lambda number, _: (200, body, {})) as server:
        async with endpoint(server.url) as client:
            with pytest.raises(EngineError, match="chat-completions"):
                await client.chat(HELLO, max_tokens=1, temperature=0)


async def test_unreachable_and_silent_servers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with endpoint(f"http://127.0.0.1:{port}", retries=1, timeout_s=0.2) as client:
            with pytest.raises(EngineError, match="2 times"):
                await client.chat(HELLO, max_tokens=1, temperature=0)
    async with endpoint(f"http://127.0.0.1:{port}", retries=1) as client:
        with pytest.raises(EngineError, match="2 times"):
            await client.chat(HELLO, max_tokens=1, temperature=0)


async def test_the_limit_has_two_names() -> None:
    def newer(number: int, body: dict[str, Any]) -> Answer:
        if "max_tokens" in body:
            return refused(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return said(str(body["max_completion_tokens"]))

    with chat_server(newer) as server:
        async with endpoint(server.url) as client:
            for _ in range(2):
                assert (await client.chat(HELLO, max_tokens=5, temperature=0)).text == "5"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 1024 tokens. However, you requested 1100 tokens.",
        "the request exceeds the available context size, try increasing it",
    ],
)
async def test_an_outgrown_context_is_an_error_of_its_own(message: str) -> None:
    with chat_server(lambda number, body: refused(400, message)) as server:
        async with endpoint(server.url) as client:
            with pytest.raises(ContextExceeded, match="context"):
                await client.chat(HELLO, max_tokens=1, temperature=0)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        (" https://api.example.com/v1/ ", "https://api.example.com/v1"),
        ("http://host/openai/v1/chat/completions", "http://host/openai/v1"),
    ],
)
def test_urls_are_read_generously(written: str, read: str) -> None:
    assert base_url(written) == read


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/v1", "", "http://"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(EngineError, match="the endpoint"):
        base_url(url)


# Evaluation

LAKE = RunConfig.model_validate({"env": {"id": "FrozenLake-v1", "actions_per_turn": 1, "max_turns": 6}})
SEEDS = range(40)


async def measure(server: ChatServer, seeds: range = SEEDS, config: RunConfig = LAKE) -> EvalResult:
    async with endpoint(server.url) as client:
        return await evaluate_endpoint(config, client, ActionParser("tagged", 1), seeds, temperature=0.0)


def walk(seed: int, moves: list[str]) -> tuple[float, bool]:
    """Play ``moves`` on the task of ``seed`` directly in the environment; return its total reward and success."""
    env = registry.make("FrozenLake-v1")
    env.reset(seed=seed)
    total, success = 0.0, False
    for move in moves:
        _, reward, terminated, truncated, info = env.step(move)
        total, success = total + float(reward), bool(info["success"])
        if terminated or truncated:
            break
    env.close()
    return total, success


MOVES = ["Right", "Down", "Down", "Right", "Down", "Right"]


async def test_an_endpoint_is_measured_like_any_policy() -> None:
    def turn_of(body: dict[str, Any]) -> int:
        return sum(message["role"] == "assistant" for message in body["messages"])

    with chat_server(lambda number, body: said(f"so: <answer>{MOVES[turn_of(body)]}</answer>")) as server:
        result = await measure(server)
    expected = [walk(seed, MOVES) for seed in SEEDS]
    assert [t.success for t in result.trajectories] == [success for _, success in expected]
    assert [t.reward for t in result.trajectories] == pytest.approx([total for total, _ in expected])
    assert result.failures == 0
    assert sum(len(t.turns) for t in result.trajectories) == len(server.requests)
    body = max((body for body, _ in server.requests), key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system"] + ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]


async def test_invalid_answers_cost_and_change_nothing() -> None:
    with chat_server(lambda number, body: said("I do not know")) as server:
        result = await measure(server, range(3))
    assert result.success == 0
    for trajectory in result.trajectories:
        assert (trajectory.outcome, trajectory.reason, len(trajectory.turns)) == ("truncated", "max_turns", 6)
        assert trajectory.reward == pytest.approx(6 * LAKE.env.format_penalty)
        assert not any(turn.valid for turn in trajectory.turns)
    assert "no valid format" in server.requests[-1][0]["messages"][-1]["content"]


async def test_a_window_limits_the_turns_that_the_server_gets() -> None:
    config = RunConfig.model_validate(LAKE.model_dump() | {"model": {"history": "window", "window": 2}})
    with chat_server(lambda number, body: said(f"no answer {number}")) as server:
        result = await measure(server, range(1), config)
    assert len(result.trajectories[0].turns) == 6
    assert [len(body["messages"]) for body, _ in server.requests] == [2, 4, 6, 6, 6, 6]
    first, last = result.trajectories[0].turns[0].observation, server.requests[-1][0]["messages"]
    assert last[1]["content"].startswith(f"{first}\n\n[3 turns are left out here.]\n\n")
    assert [message["content"] for message in last[2::2]] == ["no answer 3", "no answer 4"]


async def test_the_server_gets_the_summary_of_the_turns_that_are_left_out() -> None:
    model = {"history": "window", "window": 1, "summary": "actions"}
    config = RunConfig.model_validate(LAKE.model_dump() | {"model": model})
    moves = ["Left", "Left", "Up", "Left", "Up", "Up"]  # against the walls around the start
    with chat_server(lambda number, body: said(f"<answer>{moves[number]}</answer>")) as server:
        result = await measure(server, range(1), config)
    (trajectory,) = result.trajectories
    assert [turn.actions for turn in trajectory.turns] == [(move,) for move in moves]
    first, last = trajectory.turns[0].observation, server.requests[-1][0]["messages"]
    note = "[4 turns are left out here. Summary:\nActions: Left (2 times); Up; Left]"
    assert last[1]["content"] == f"{first}\n\n{note}\n\n{trajectory.turns[4].observation}"
    assert len(last) == 4


async def test_an_episode_that_outgrows_the_endpoint_is_truncated() -> None:
    def short(number: int, body: dict[str, Any]) -> Answer:
        return said("what?") if len(body["messages"]) < 6 else refused(400, "maximum context length is 64 tokens")

    with chat_server(short) as server:
        result = await measure(server, range(2))
    assert [(t.outcome, t.reason, len(t.turns)) for t in result.trajectories] == [("truncated", "context", 2)] * 2


async def test_a_first_prompt_that_never_fits_is_an_error() -> None:
    with (
        chat_server(lambda number, body: refused(400, "maximum context length is 8 tokens")) as server,
        pytest.raises(ConfigError, match=r"rollout\.max_tokens"),
    ):
        await measure(server, range(2))
