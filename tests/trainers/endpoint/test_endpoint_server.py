"""The server with OpenAI's own client, and with clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from rollout_doubles import Latency, Script, ScriptedEngine
from rollout_harness import renderer

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import ConfigError, EngineError
from agentkit.openai import ChatEndpoint, ContextExceeded
from agentkit.trainers.endpoint import server as server_module
from agentkit.trainers.endpoint.dialogue import Dialogues
from agentkit.trainers.endpoint.recorder import sequences
from agentkit.trainers.endpoint.server import ChatServer
from agentkit.trainers.endpoint.service import ChatService, Session
from agentkit.trainers.inference.base import TokenGenerator
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.models.load import load_policy, load_tokenizer
from agentkit.trainers.weights.base import WeightsInPlace
from agentkit.types import Message

TOKEN = "test-token-test-token"
HELLO: Any = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Return a price.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]
DIALOGUES = Dialogues(load_tokenizer("quickstart"), ModelConfig())


@contextlib.asynccontextmanager
async def serving(engine: TokenGenerator, **options: Any) -> AsyncIterator[ChatServer]:
    service = ChatService(engine, DIALOGUES, "tiny", 512)
    async with ChatServer(service, **{"port": 0, "tokens": [TOKEN], **options}) as server:
        yield server


async def until_asked(engine: ScriptedEngine) -> None:
    for _ in range(1000):
        if engine.running:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no request has reached the engine")


def connected(server: ChatServer, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url, api_key=key, max_retries=0)


@contextlib.asynccontextmanager
async def scripted(script: Script | str, latency: Latency = 0.0) -> AsyncIterator[tuple[ScriptedEngine, Any]]:
    """An engine that is served, and OpenAI's client of the server."""
    engine = ScriptedEngine(renderer(), script, latency)
    async with (
        serving(engine) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key=TOKEN, max_retries=0) as client,
    ):
        yield engine, client


def session(**fields: Any) -> Session:
    return Session(**{"name": "s", "temperature": 1.0, "max_tokens": 64, "seeds": lambda number: number, **fields})


async def test_the_openai_client_gets_models_and_answers() -> None:
    async with scripted("I am fine.") as (engine, client):
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "agentkit"
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0.25, top_p=0.5, max_tokens=40, seed=7, stop=["END"]
        )
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == ("I am fine.", "stop")
        (prompt,) = (prompt for prompts in engine.prompts.values() for prompt in prompts)
        assert answer.usage.prompt_tokens == len(prompt)
        (sampling,) = engine.samplings
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 40)
        assert (sampling.seed, sampling.stop_strings) == (7, ("END",))
        cut = await client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=2)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage.completion_tokens == 2


async def test_token_ids_are_those_of_the_engine() -> None:
    async with (
        scripted("I am fine.") as (engine, client),
        ChatEndpoint(str(client.base_url), "tiny", api_key=TOKEN) as ours,
    ):
        reply = await ours.chat([Message("user", "Hello")], max_tokens=40, temperature=1.0, token_ids=True)
        assert reply.tokens is not None
        (prompt,) = (prompt for prompts in engine.prompts.values() for prompt in prompts)
        assert list(reply.tokens.prompt) == list(prompt)
        assert len(reply.tokens.answer) == len(reply.tokens.logprobs) == reply.completion_tokens
        text = load_tokenizer("quickstart").decode(list(reply.tokens.answer), skip_special_tokens=True)
        assert text == reply.text == "I am fine."
        body: Any = {"model": "tiny", "messages": HELLO, "logprobs": True}
        extra = {"return_token_ids": True}
        whole = await client.chat.completions.create(**body, extra_body=extra)
        assert whole.model_extra["prompt_token_ids"] == list(prompt)
        assert whole.choices[0].model_extra["token_ids"] == list(reply.tokens.answer)
        events = [event async for event in await client.chat.completions.create(**body, stream=True, extra_body=extra)]
        assert events[0].model_extra["prompt_token_ids"] == list(prompt)
        assert events[1].choices[0].model_extra["token_ids"] == list(reply.tokens.answer)
        plain = await client.chat.completions.create(**body)
        assert "token_ids" not in plain.choices[0].model_extra
        assert len(plain.choices[0].logprobs.content) == reply.completion_tokens - 1


async def test_the_openai_client_gets_a_stream() -> None:
    async with scripted(lambda text, seed: f"Sure.\n{CALL}" if "price" in text else "I am fine.") as (_, client):
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "I am fine."
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens > 0
        async with client.chat.completions.stream(model="tiny", messages=HELLO, tools=TOOLS) as events:
            final = await events.get_final_completion()
        (call,) = final.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("price", {"item": "lamp"})
        assert final.choices[0].finish_reason == "tool_calls"


async def test_a_loop_over_tools_with_the_openai_client() -> None:
    async with scripted(lambda text, seed: "It costs 12." if "\n12" in text else CALL) as (_, client):
        messages = list(HELLO)
        first = (await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)).choices[0]
        assert first.message.content is None
        messages += [first.message, {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "12"}]
        second = (await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)).choices[0]
        assert (second.message.content, second.finish_reason) == ("It costs 12.", "stop")


async def test_refusals_have_the_form_of_the_protocol() -> None:
    async with scripted("x") as (_, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=HELLO, n=2)
        assert (refused.value.param, refused.value.code) == ("n", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError, match="the model here is 'tiny'"):
            await client.chat.completions.create(model="gpt-5", messages=HELLO)
        with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings"):
            await client.embeddings.create(model="tiny", input="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length of 512"):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * 600}])
        async with ChatEndpoint(str(client.base_url), "tiny", api_key=TOKEN) as ours:
            with pytest.raises(ContextExceeded):
                await ours.chat([Message("user", "x " * 600)], max_tokens=5, temperature=1.0)
            assert (await ours.chat([Message("user", "Hi")], max_tokens=5, temperature=1.0)).text == "x"


async def test_only_clients_with_a_token_are_served() -> None:
    async with serving(ScriptedEngine(renderer(), "x")) as server, httpx.AsyncClient() as client:
        body = {"model": "tiny", "messages": HELLO}

        async def status(**headers: str) -> int:
            answer = await client.post(f"{server.url}/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200 or answer.json()["error"]["message"]
            return answer.status_code

        assert await status() == 401
        assert await status(authorization="Bearer wrong") == 401
        assert await status(authorization=f"Basic {TOKEN}") == 401
        assert await status(authorization=f"Bearer {TOKEN}", origin="http://127.0.0.1") == 403
        assert await status(authorization=f"Bearer {TOKEN}") == 200
        assert (await client.get(server.url.replace("/v1", "/health"))).json() == {"status": "ok"}
        assert (await client.get(f"{server.url}/models")).status_code == 401
    with pytest.raises(ConfigError, match="give a TLS certificate"):
        ChatServer(ChatService(ScriptedEngine(renderer(), "x"), DIALOGUES, "tiny", 512), host="0.0.0.0", tokens=[TOKEN])


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b" " * 5_000, 413)]
)
async def test_bodies_that_cannot_be_read(body: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if status == 413:
        monkeypatch.setattr(server_module, "_LIMIT", 4_999)
    async with serving(ScriptedEngine(renderer(), "x")) as server, httpx.AsyncClient() as client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = await client.post(f"{server.url}/chat/completions", content=body, headers=headers)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answered", [None, 0, 1])
async def test_a_client_that_goes_frees_the_engine(stream: bool, answered: int | None) -> None:
    """Only the first answer of a recorded session is completed: an agent that left it ends an episode of the policy."""
    latencies = iter([0.0] * (answered or 0) + [2.0 if answered == 0 else 30.0])
    engine, recorded = ScriptedEngine(renderer(), "x", latency=lambda seed: next(latencies)), session()
    async with serving(engine) as server, httpx.AsyncClient() as client:
        with server.recording(recorded) as key:
            key = TOKEN if answered is None else key
            body = {"model": "tiny", "messages": HELLO, "stream": stream}
            request = {"json": body, "headers": {"authorization": f"Bearer {key}"}}
            for _ in range(answered or 0):
                await client.post(f"{server.url}/chat/completions", **request, timeout=30)
            with pytest.raises(httpx.ReadTimeout):
                await client.post(f"{server.url}/chat/completions", **request, timeout=0.5)
            for _ in range(500):
                await asyncio.sleep(0.01)
                if not engine.running:
                    break
    assert engine.cancelled == (answered != 0)
    assert len(recorded.recorder.exchanges) == (answered is not None)


async def test_the_answers_of_a_session_end_with_it() -> None:
    engine, recorded = ScriptedEngine(renderer(), "x", latency=30.0), session()
    async with serving(engine) as server:
        with server.recording(recorded) as key:
            asking = asyncio.ensure_future(connected(server, key).chat.completions.create(model="tiny", messages=HELLO))
            await until_asked(engine)
        with pytest.raises(openai.BadRequestError, match="the session has ended"):
            await asking
    assert engine.cancelled == 1


async def test_a_stream_says_that_the_server_ends() -> None:
    engine = ScriptedEngine(renderer(), "x", latency=30.0)
    async with httpx.AsyncClient() as client:
        async with serving(engine) as server:
            body = {"model": "tiny", "messages": HELLO, "stream": True}
            headers = {"authorization": f"Bearer {TOKEN}"}
            asking = asyncio.ensure_future(
                client.post(f"{server.url}/chat/completions", json=body, headers=headers, timeout=30)
            )
            await until_asked(engine)
        assert "the server ends" in (await asking).text


async def test_a_failing_engine_is_reported() -> None:
    async with scripted("x") as (engine, client):
        engine.fail = EngineError("out of memory")
        with pytest.raises(openai.InternalServerError, match="out of memory"):
            await client.chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(openai.APIError, match="out of memory"):
            async for _ in await client.chat.completions.create(model="tiny", messages=HELLO, stream=True):
                pass


async def test_a_stream_has_comments_while_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEARTBEAT_SECONDS", 0.01)
    engine = ScriptedEngine(renderer(), "Late.", latency=0.3)
    async with serving(engine) as server, httpx.AsyncClient() as client:
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        headers = {"authorization": f"Bearer {TOKEN}"}
        text = (await client.post(f"{server.url}/chat/completions", json=body, headers=headers)).text
    assert text.startswith(": the model computes\n\n")
    assert "Late." in text
    assert text.endswith("data: [DONE]\n\n")


# -- recorded sessions ------------------------------------------------------------------------------------------------


async def test_a_recorded_session_is_token_exact_across_weight_updates() -> None:
    """Requests wait for an update, and are generated again if it interrupts them."""
    engine, recorded = ScriptedEngine(renderer(), lambda text, seed: f"Answer {seed}", latency=0.2), session()
    async with serving(engine) as server:
        with server.recording(recorded) as key:
            async with connected(server, key) as client:
                messages = list(HELLO)
                for number in range(3):
                    asking = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=messages))
                    await asyncio.sleep(0.1)
                    await engine.pause("abort")
                    await engine.update_weights(WeightsInPlace(number + 1))
                    engine.latency = 0.0
                    await engine.resume()
                    answer = await asking
                    assert answer.system_fingerprint == f"weights-{number + 1}"
                    messages += [answer.choices[0].message, {"role": "user", "content": f"Next {number}"}]
                    engine.latency = 0.2
        with pytest.raises(openai.AuthenticationError):
            async with connected(server, key) as late:
                await late.models.list()
    (sequence,) = sequences(recorded.recorder.exchanges)
    assert sequence.ids.tolist() == engine.prompts["s"][-1] + engine.results["s"][-1]
    assert sequence.ids[sequence.mask].tolist() == list(itertools.chain(*engine.results["s"]))
    assert sorted(set(sequence.versions.tolist())) == [-1, 1, 2, 3]
    assert [sampling.seed for sampling in engine.samplings] == [0, 1, 2]


async def test_what_cannot_be_trained_on_is_refused_with_the_reason() -> None:
    recorded = session(temperature=0.7)
    async with serving(ScriptedEngine(renderer(), "x")) as server:
        with server.recording(recorded) as key:
            async with connected(server, key) as client:
                for param, value in {"temperature": 0.0, "top_p": 0.9, "seed": 3}.items():
                    with pytest.raises(openai.BadRequestError) as refused:
                        await client.chat.completions.create(model="tiny", messages=HELLO, **{param: value})
                    assert (refused.value.param, refused.value.code) == (param, "not_trainable")
                await client.chat.completions.create(model="tiny", messages=HELLO, temperature=0.7, top_p=1)
    assert len(recorded.refusals) == 3
    assert "the run samples at temperature 0.7" in recorded.refusals[0]
    assert len(recorded.recorder.exchanges) == 1


async def test_sessions_do_not_mix() -> None:
    engine = ScriptedEngine(renderer(), lambda text, seed: f"Answer {seed}", latency=lambda seed: seed % 3 / 50)
    sessions = [session(name=str(n), seeds=lambda number, n=n: 10 * n + number) for n in range(8)]
    async with serving(engine) as server:

        async def agent(recorded: Session) -> None:
            with server.recording(recorded) as key:
                async with connected(server, key) as client:
                    messages = list(HELLO)
                    for _ in range(3):
                        answer = await client.chat.completions.create(model="tiny", messages=messages)
                        messages += [answer.choices[0].message, {"role": "user", "content": "More"}]

        await asyncio.wait_for(asyncio.gather(*map(agent, sessions)), 60)
    for number, recorded in enumerate(sessions):
        (sequence,) = sequences(recorded.recorder.exchanges)
        assert sequence.ids.tolist() == engine.prompts[str(number)][-1] + engine.results[str(number)][-1]
        assert [e.answer.content for e in recorded.recorder.exchanges] == [
            f"Answer {10 * number + k}" for k in range(3)
        ]


async def test_recorded_log_probs_are_those_of_the_model() -> None:
    """Re-scoring the sequence of a session under the same weights gives the recorded log-probabilities."""
    model = ModelConfig()
    engine = HFEngine(model, EngineConfig(max_batch=4), seed=3)
    await engine.start()
    try:
        recorded = session(max_tokens=12)
        async with serving(engine) as server:
            with server.recording(recorded) as key:
                async with connected(server, key) as client:
                    messages = list(HELLO)
                    for _ in range(3):
                        answer = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
                        (choice,) = answer.choices
                        assert answer.usage is not None
                        assert choice.logprobs is not None
                        assert len(choice.logprobs.content or ()) in (12, answer.usage.completion_tokens - 1)
                        messages += [choice.message, {"role": "user", "content": "More"}]
    finally:
        await engine.close()
    (sequence,) = sequences(recorded.recorder.exchanges)
    assert sequence.mask.sum() == sum(len(e.generation.ids) for e in recorded.recorder.exchanges)
    ids = torch.from_numpy(sequence.ids.astype(np.int64))
    with torch.no_grad():
        scores = torch.log_softmax(load_policy(model, 3)(input_ids=ids[None]).logits[0].float(), -1)
    again = scores[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    assert np.allclose(again[sequence.mask[1:]], sequence.logprobs[sequence.mask], atol=1e-4)
