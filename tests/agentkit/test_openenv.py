"""OpenEnv's protocol: agentkit's server with hostile and with plain clients, agentkit's client with failing servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from socket import SHUT_RDWR
from typing import Any

import httpx
import pytest
from openenv_threads import answering, serving
from processes import gone
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import agentkit
from agentkit import extras, registry
from agentkit.config import EnvConfig
from agentkit.envs.check import check
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import (
    ConfigError,
    EnvContractError,
    EnvCrashed,
    EnvError,
    EnvTimeout,
    MissingExtra,
    RegistryError,
)
from agentkit.integrations.openenv_client import server_of
from agentkit.integrations.openenv_server import OpenEnvServer
from agentkit.trainers.rollout.hosts import EnvPool
from agentkit.trainers.rollout.source import EnvSource

TEXT = {"properties": {"message": {"type": "string"}}, "required": ["message"]}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_explicit", {})
    registry.register("Faulty-v0", "faulty_envs:Faulty")
    registry.register("Alone-v0", "faulty_envs:Alone")


def socket(url: str, **options: Any) -> ClientConnection:
    return connect(f"{url.replace('http', 'ws', 1)}/ws", proxy=None, **options)


def ask(connection: ClientConnection, kind: Any, **data: Any) -> dict[str, Any]:
    connection.send(json.dumps({"type": kind, "data": data}))
    return answer(connection)


def answer(connection: ClientConnection) -> dict[str, Any]:
    return json.loads(connection.recv(timeout=30))


def play(url: str, **kwargs: Any) -> SyncTextEnv:
    return SyncTextEnv(agentkit.make(f"openenv:{url}", **kwargs))


# --- agentkit's server ------------------------------------------------------------------------------------------------


def test_a_plain_client_plays_an_episode() -> None:
    here = agentkit.make("FrozenLake-v1")
    first, _ = here.reset(seed=3)
    with serving("FrozenLake-v1") as url, socket(url) as connection:
        begun = ask(connection, "reset", seed=3, episode_id="e1")
        assert begun["type"] == "observation"
        shown = begun["data"]["observation"]
        assert (shown["text"], shown["instructions"]) == (first, here.instructions)
        assert (begun["data"]["done"], begun["data"]["reward"]) == (False, None)
        taken = begun["data"]
        for action in here.expert():
            assert action in shown["admissible_actions"]
            taken = ask(connection, "step", text=action)["data"]
            observation, reward, terminated, _, info = here.step(action)
            shown = taken["observation"]
            assert (shown["text"], taken["reward"], taken["done"]) == (observation, reward, terminated)
            assert taken["metadata"] == shown["metadata"]
            assert (taken["metadata"]["success"], taken["metadata"]["truncated"]) == (info["success"], False)
        assert taken["metadata"]["success"] is True
        assert ask(connection, "state")["data"] == {"episode_id": "e1", "step_count": 6}
        refused = ask(connection, "step", text="Up")
        assert refused["data"]["code"] == "VALIDATION_ERROR"
        assert "send a reset first" in refused["data"]["message"]


def test_episodes_are_truncated() -> None:
    with serving("FrozenLake-v1", max_steps=2) as url, socket(url) as connection:
        ask(connection, "reset", seed=0)
        assert ask(connection, "step", text="Up")["data"]["done"] is False
        last = ask(connection, "step", text="Up")["data"]
        assert (last["done"], last["metadata"]["truncated"], last["metadata"]["success"]) == (True, True, False)


HOSTILE = [
    ("{", "INVALID_JSON"),
    ("", "INVALID_JSON"),
    (b"\x00\xff", "INVALID_JSON"),
    ("[" * 100_000, "INVALID_JSON"),
    ('{"type": "step", "data": {"text": ' + "9" * 5_000 + "}}", "INVALID_JSON"),
    ("[]", "VALIDATION_ERROR"),
    ("null", "VALIDATION_ERROR"),
    ('{"type": "step", "data": []}', "VALIDATION_ERROR"),
    ("{}", "UNKNOWN_TYPE"),
    ('{"type": "mcp", "data": {}}', "UNKNOWN_TYPE"),
    ('{"type": ["reset"]}', "UNKNOWN_TYPE"),
    ('{"type": "step"}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": {"text": 7}}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": {"text": "Up", "more": 1}}', "VALIDATION_ERROR"),
    ('{"type": "step", "data": {"text": "\\ud800"}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": 1e999}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": true}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"seed": 99999999999999999999}}', "VALIDATION_ERROR"),
    ('{"type": "reset", "data": {"episode_id": "' + "x" * 300 + '"}}', "VALIDATION_ERROR"),
]


def test_hostile_frames_leave_the_episode_as_it_is() -> None:
    with serving("FrozenLake-v1") as url, socket(url) as connection:
        ask(connection, "reset", seed=0)
        for frame, code in HOSTILE:
            connection.send(frame)
            refused = answer(connection)
            assert (refused["type"], refused["data"]["code"]) == ("error", code), frame[:80]
        nasty = ask(connection, "step", text="\x00\x1b[31m \u202e\U0001f642")["data"]
        assert nasty["metadata"]["action_valid"] is False
        assert ask(connection, "step", text="Right", metadata={"note": 1})["data"]["metadata"]["action_valid"] is True
        assert ask(connection, "state")["data"]["step_count"] == 2


def test_a_huge_frame_ends_only_its_session() -> None:
    with serving("FrozenLake-v1") as url, socket(url) as other, socket(url) as connection:
        ask(other, "reset", seed=0)
        ask(connection, "reset", seed=0)
        with suppress(ConnectionClosed):
            connection.send("x" * (5 << 20))
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)
        assert ask(other, "step", text="Right")["type"] == "observation"


def test_a_full_server_says_so_and_takes_the_next_client_when_one_has_gone() -> None:
    with serving("FrozenLake-v1", max_sessions=1) as url:
        with socket(url) as connection:
            assert ask(connection, "reset", seed=0)["type"] == "observation"
            with socket(url) as second:
                refused = answer(second)["data"]
                assert refused["code"] == "CAPACITY_REACHED"
                assert (refused["active_sessions"], refused["max_sessions"]) == (1, 1)
            assert httpx.post(f"{url}/reset").status_code == 503
            connection.send('{"type": "close"}')
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=30)
        with socket(url) as third:
            assert ask(third, "reset", seed=0)["type"] == "observation"


@pytest.mark.parametrize(("id", "action"), [("Faulty-v0", "raise"), ("Faulty-v0", "nan"), ("Alone-v0", "die")])
def test_a_failure_ends_only_its_session(id: str, action: str) -> None:
    with serving(id) as url, socket(url) as other, socket(url) as connection:
        ask(other, "reset", seed=0)
        ask(connection, "reset", seed=0)
        failed = ask(connection, "step", text=action)
        assert failed["data"]["code"] == "EXECUTION_ERROR"
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)
        assert ask(other, "step", text="go")["data"]["observation"]["text"] == "count 1"


def test_a_hanging_environment_is_killed_after_its_time() -> None:
    with serving("Alone-v0", step_timeout=1.0) as url, socket(url) as connection:
        ask(connection, "reset", seed=0)
        pid = int(ask(connection, "step", text="pid")["data"]["observation"]["text"])
        assert ask(connection, "step", text="hang")["data"]["code"] == "EXECUTION_ERROR"
        assert gone(pid)


def test_a_client_that_vanishes_ends_its_environment() -> None:
    with serving("Alone-v0") as url, socket(url) as connection:
        ask(connection, "reset", seed=0)
        pid = int(ask(connection, "step", text="pid")["data"]["observation"]["text"])
        connection.socket.shutdown(SHUT_RDWR)
        assert gone(pid)


def test_silent_sessions_end() -> None:
    with serving("FrozenLake-v1", idle_timeout=0.3) as url, socket(url) as connection:
        ask(connection, "reset", seed=0)
        ended = answer(connection)
        assert ended["data"]["code"] == "SESSION_ERROR"
        assert "idle" in ended["data"]["message"]
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)


def test_the_end_of_the_server_ends_sessions() -> None:
    with ExitStack() as stack:
        with serving("Alone-v0") as url:
            connection = stack.enter_context(socket(url))
            ask(connection, "reset", seed=0)
            pid = int(ask(connection, "step", text="pid")["data"]["observation"]["text"])
        assert gone(pid)
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)


def test_an_environment_that_cannot_be_made_is_not_served() -> None:
    with pytest.raises(RegistryError, match="no environment 'Frozen-v1'"), serving("Frozen-v1"):
        pass
    with pytest.raises(RegistryError, match="takes no argument 'sizes'"), serving("FrozenLake-v1", {"sizes": 3}):
        pass
    with pytest.raises(EnvError), serving("Faulty-v0", {"render_mode": "none"}):
        pass


def test_sessions_are_concurrent() -> None:
    def episode(seed: int) -> list[str]:
        with socket(url) as connection:
            texts = [ask(connection, "reset", seed=seed)["data"]["observation"]["text"]]
            for action in ("Right", "Down", "Left"):
                texts.append(ask(connection, "step", text=action)["data"]["observation"]["text"])
                if not texts[-1] or "X" in texts[-1]:
                    break
        return texts

    with serving("FrozenLake-v1") as url:
        alone = [episode(seed) for seed in range(16)]
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(episode, range(16))) == alone


def test_routes() -> None:
    with serving("FrozenLake-v1") as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.get("/metadata").json()["name"] == "FrozenLake-v1"
        schema = client.get("/schema").json()
        assert schema["action"]["required"] == ["text"]
        assert schema["action"]["properties"]["text"]["examples"]
        assert {"text", "done", "reward", "metadata"} < set(schema["observation"]["properties"])
        assert client.get("/state").json()["active_sessions"] == 0
        first = client.post("/reset", json={"seed": 3}).json()["observation"]["text"]
        assert first == agentkit.make("FrozenLake-v1").reset(seed=3)[0]
        step = client.post("/step", json={"action": {"text": "Right"}, "seed": 3})
        assert step.json()["done"] is False
        assert client.post("/step", json={"action": {"words": "Right"}}).status_code == 422
        assert client.post("/step", json={}).status_code == 422
        assert client.post("/reset", content=b"{").status_code == 422
        assert client.post("/reset", content=b"x" * (5 << 20)).status_code == 422
        assert client.post("/mcp", json={}).json()["error"]["code"] == -32601
        assert client.get("/secrets").status_code == 404
        assert set(client.get("/openapi.json").json()["paths"]) >= {"/reset", "/step", "/state"}


def test_web_pages_are_no_clients() -> None:
    with serving("FrozenLake-v1") as url:
        assert httpx.get(f"{url}/schema", headers={"Origin": "https://example.org"}).status_code == 403
        with pytest.raises(InvalidStatus):
            socket(url, origin="https://example.org")


def test_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-these-tests"
    with serving("FrozenLake-v1", tokens=(token,)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/schema").status_code == 401
        with pytest.raises(InvalidStatus):
            socket(url, additional_headers={"Authorization": "Bearer another"})
        with pytest.raises(ConfigError, match="refuses the token"):
            play(url)
        monkeypatch.setenv("AGENTKIT_OPENENV_TOKEN", token)
        env = play(f"{url}/")
        assert env.reset(seed=0)[0]
        env.close()
    with pytest.raises(ConfigError, match="unprotected"):
        play("http://example.org:8000")


def test_other_machines_need_a_token_and_a_certificate() -> None:
    for tokens in ((), ("a-token-of-these-tests",)):
        with pytest.raises(ConfigError, match=r"0\.0\.0\.0 can be reached from other machines"):
            OpenEnvServer("FrozenLake-v1", host="0.0.0.0", port=0, tokens=tokens)
    with pytest.raises(ConfigError, match="cannot be used"):
        OpenEnvServer("FrozenLake-v1", port=0, certificate="/no/cert.pem", key="/no/key.pem")


def test_the_command_serves_until_ctrl_c() -> None:
    command = [sys.executable, "-u", "-m", "agentkit", "env", "serve", "FrozenLake-v1", "size=5", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            found = re.search(r"serving FrozenLake-v1 at (http://127\.0\.0\.1:\d+)", process.stdout.readline())
            assert found is not None
            with socket(found[1]) as connection:
                assert len(ask(connection, "reset", seed=0)["data"]["observation"]["text"].splitlines()) == 5
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
                with pytest.raises(ConnectionClosed):
                    connection.recv(timeout=30)
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "OPENENV", ("uvicorn", "no_such_module"))
    with pytest.raises(MissingExtra, match=r"pip install 'agentkit-rl\[openenv\]'"):
        agentkit.make("openenv:http://127.0.0.1:1")


# --- agentkit's client ------------------------------------------------------------------------------------------------


def test_an_episode_through_a_server_is_the_same() -> None:
    here = agentkit.make("Sokoban-v0")
    with serving("Sokoban-v0") as url:
        there = play(url)
        assert there.instructions == here.instructions
        assert there.max_turns == here.max_turns * here.actions_per_turn
        assert there.action_space == here.action_space
        for seed in (0, 1):
            assert there.reset(seed=seed) == here.reset(seed=seed)
            steps = [(there.step(action), here.step(action)) for action in ("nonsense", *here.expert())]
            assert all(one == other for one, other in steps)
            assert steps[-1][1][4]["success"]
        there.close()


def test_truncations_arrive() -> None:
    with serving("FrozenLake-v1", max_steps=1) as url:
        env = play(url)
        env.reset(seed=0)
        _, _, terminated, truncated, info = env.step("Up")
        assert (terminated, truncated, info["success"]) == (False, True, False)
        with pytest.raises(EnvCrashed, match="call reset first"):
            env.step("Up")
        env.close()


def test_a_failed_environment_voids_the_episode_and_the_next_one_begins() -> None:
    with serving("Alone-v0") as url:
        env = play(url)
        env.reset(seed=0)
        with pytest.raises(EnvCrashed, match="EXECUTION_ERROR"):
            env.step("die")
        assert env.reset(seed=1)[0].startswith("count 0")
        env.close()


def test_environments_wait_for_a_session() -> None:
    """Twelve episodes with one session, by four environments that play at the same time."""
    with serving("FrozenLake-v1", max_sessions=1) as url:

        async def episodes(env: Any, seeds: range) -> int:
            for seed in seeds:
                _, info = await env.reset(seed=seed)
                for _ in range(200):
                    *_, terminated, truncated, info = await env.step(info["admissible_actions"][seed % 4])
                    if terminated or truncated:
                        break
            await env.close()
            return len(seeds)

        async def all_of_them() -> list[int]:
            envs = [agentkit.make(f"openenv:{url}") for _ in range(4)]
            return await asyncio.gather(*(episodes(env, range(3 * k, 3 * k + 3)) for k, env in enumerate(envs)))

        assert asyncio.run(all_of_them()) == [3, 3, 3, 3]


def test_the_wait_for_a_session_is_bounded() -> None:
    with serving("FrozenLake-v1", max_sessions=1) as url, socket(url) as connection:
        ask(connection, "reset")
        env, began = play(url, capacity_timeout=0.5), time.monotonic()
        with pytest.raises(EnvTimeout, match=r"no free session within 0\.5 s"):
            env.reset(seed=0)
        assert time.monotonic() - began < 10
        connection.send('{"type": "close"}')
        assert env.reset(seed=0)[0]
        env.close()


def test_vectors_runs_and_checks_use_servers() -> None:
    with serving("FrozenLake-v1") as url:
        vector = agentkit.make_vec(f"openenv:{url}", 3)
        observations, _ = vector.reset(seed=0)
        assert observations[1] == agentkit.make("FrozenLake-v1").reset(seed=1)[0]
        assert vector.step(["Right"] * 3)[1].tolist() == [0.0, 0.0, 0.0]
        vector.close()
        source = EnvSource.of(EnvConfig(id=f"openenv:{url}"))
        assert (source.where, source.recovery) == ("async", "retry")
        assert "frozen lake" in source.instructions

        async def turn() -> str:
            pool = EnvPool(source)
            env = pool.acquire()
            await env.reset(5)
            result = await env.act(["Right"])
            pool.release(env)
            await pool.close()
            return result.observation

        here = agentkit.make("FrozenLake-v1")
        here.reset(seed=5)
        assert asyncio.run(turn()) == here.step("Right")[0]
        results = {result.name: result for result in check(f"openenv:{url}")}
        assert all(result.passed for result in results.values()), results
        with pytest.raises(ConfigError, match="runs in its server"):
            agentkit.make(f"openenv:{url}", sandbox="local")


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "ftp://host", "http://", "http://h:x", "http://u:p@host"])
def test_wrong_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of an OpenEnv server"):
        agentkit.make(f"openenv:{address}")


def test_an_address_is_required() -> None:
    with pytest.raises(RegistryError, match="lacks the name after the colon, as in 'openenv:http://127"):
        agentkit.make("openenv:")


def test_nobody_answers() -> None:
    with pytest.raises(EnvCrashed, match="no OpenEnv server answers at http://127"):
        agentkit.make("openenv:ws://127.0.0.1:1")


OBSERVATION = {"type": "observation", "data": {"observation": {"message": "hello", "metadata": {}}, "reward": 0.0}}


def after_reset(*frames: Any) -> Any:
    """Return a server that answers a reset, and then each message with the next frame; None drops the connection."""

    async def talk(connection: Any) -> None:
        waiting = [OBSERVATION, *frames]
        async for _ in connection:
            frame = waiting.pop(0)
            if frame is None:
                connection.transport.abort()
                return
            await connection.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))

    return talk


def failed(code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "Invalid message", "code": code, **more}}


def observed(**data: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"message": "ok"}, **data}}


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (failed("EXECUTION_ERROR"), EnvCrashed, "EXECUTION_ERROR"),
        (failed("SESSION_ERROR"), EnvCrashed, "SESSION_ERROR"),
        (None, EnvCrashed, "the connection to .* failed"),
        ("{", EnvContractError, "is not an OpenEnv server"),
        (b"\xff", EnvContractError, "is not an OpenEnv server"),
        ({"type": "other"}, EnvContractError, "it sent a message 'other'"),
        ({"type": "observation", "data": {"observation": "text"}}, EnvContractError, "not an object"),
        (observed(reward=float("nan")), EnvContractError, "not a finite number"),
        (observed(reward="much"), EnvContractError, "not a finite number"),
        (observed(metadata=[1]), EnvContractError, "not an object"),
        ("x" * (17 << 20), EnvCrashed, "the connection to .* failed"),
    ],
)
def test_failures_of_a_server_void_the_episode(frame: Any, error: type[Exception], message: str) -> None:
    with answering(after_reset(frame), TEXT) as url:
        env = play(url)
        assert env.reset(seed=0)[0] == "hello"
        with pytest.raises(error, match=message):
            env.step("x")
        env.close()


def test_a_silent_server_is_a_timeout() -> None:
    async def talk(connection: Any) -> None:
        async for _ in connection:
            pass

    with answering(talk, TEXT) as url:
        env = play(url, timeout=0.3)
        with pytest.raises(EnvTimeout, match="did not answer reset within"):
            env.reset(seed=0)
        env.close()


def test_a_refused_action_is_the_policys() -> None:
    refused = failed("VALIDATION_ERROR", errors=[{"loc": ["message"], "msg": "Field required"}])
    with answering(after_reset(refused, observed(reward=0.5)), TEXT) as url:
        env = play(url)
        env.reset(seed=0)
        text, reward, terminated, truncated, info = env.step("x")
        assert text == "The action is not valid: message: Field required\n\nhello"
        assert (reward, terminated, truncated, info["action_valid"]) == (0.0, False, False, False)
        assert env.step("x")[1] == 0.5
        env.close()


def test_success_and_truncation_of_other_servers() -> None:
    frames = [observed(reward=0.4), observed(reward=0.7, done=True)]
    for success_reward, success in ((1.0, True), (1.2, False)):
        with answering(after_reset(*frames), TEXT) as url:
            env = play(url, success_reward=success_reward)
            env.reset(seed=0)
            assert env.step("a")[4]["success"] is False
            _, _, terminated, _, info = env.step("b")
            assert (terminated, info["success"]) == (True, success)
            env.close()
    with answering(after_reset(observed(reward=2, done=True, metadata={"truncated": True})), TEXT) as url:
        env = play(url)
        env.reset(seed=0)
        _, _, terminated, truncated, info = env.step("a")
        assert (terminated, truncated, info["success"]) == (False, True, False)
        env.close()


def test_actions_with_several_fields_are_json() -> None:
    action = {
        "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {"type": "object"}},
        "required": ["x"],
    }
    echoed: list[Any] = []

    async def talk(connection: Any) -> None:
        async for message in connection:
            echoed.append(json.loads(message)["data"])
            await connection.send(json.dumps({"type": "observation", "data": {"observation": {"x": 1, "y": "é"}}}))

    with answering(talk, action) as url:
        env = play(url)
        assert '"x": {"type": "integer"}' in env.instructions
        assert "metadata" not in env.instructions
        assert env.reset(seed=4)[0] == '{"x": 1, "y": "é"}'
        for wrong in ("left", "[1]", "7"):
            text, *_, info = env.step(wrong)
            assert text.startswith("The action is not valid: it is not")
            assert info["action_valid"] is False
        assert env.step('{"x": 1}')[4]["action_valid"] is True
        env.close()
    assert echoed == [{"seed": 4}, {"x": 1}]


def test_what_a_schema_says() -> None:
    choice = {"type": "string", "enum": ["a", "b"], "description": "a or b"}
    server = server_of({"properties": {"move": choice, "note": {"type": "string"}}, "required": ["move"]}, "Rules.")
    assert (server.field, server.actions.examples) == ("move", ("a", "b"))
    assert server.instructions == "Rules.\n\nAn action is a text: a or b"
    assert server_of({"properties": {"n": {"type": "integer"}}, "required": ["n"]}, "").field is None
    assert server_of({"properties": {"a": choice}}, "").field is None
    assert server_of({}, "").field is None
