"""Agents behind an address: a real HTTP server plays the episodes, answers slowly, fails, and dies."""

from __future__ import annotations

import contextlib
import json
import shutil
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from requiring import require
from rollout_harness import Harness, configure

from agentkit.config_io import load_config
from agentkit.errors import ConfigError, EnvFailureBudgetExceeded
from agentkit.preflight import check

Play = Callable[[dict[str, Any], int], "tuple[int, Any]"]
"""Plays the task of a request with a number; returns the status and the JSON value of the response."""


def ask(task: dict[str, Any], context: ssl.SSLContext | None = None) -> str:
    messages = [{"role": "system", "content": task["instructions"]}, {"role": "user", "content": task["text"]}]
    request = urllib.request.Request(
        task["base_url"] + "/chat/completions",
        json.dumps({"model": task["model"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {task['api_key']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, context=context) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


@contextlib.contextmanager
def service(play: Play) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that plays episodes; the address, and the tasks that it got."""
    tasks: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            task = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tasks.append(task)
            status, value = play(task, len(tasks))
            if not status:
                self.connection.close()  # as a service that dies
                return
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has gone
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/play", tasks
    finally:
        server.shutdown()
        server.server_close()


def configured(url: str, *, rollout: dict[str, Any] | None = None, **agent: Any) -> Any:
    return configure({"length": 1}, agent={"url": url, **agent}, rollout=rollout or {})


async def test_a_service_plays_with_an_async_ratio_and_redundancy() -> None:
    rollout = {"groups": 2, "group_size": 2, "extra_members": 1, "extra_groups": 1, "async_ratio": 1}
    with service(lambda task, number: (200, {"answer": ask(task)})) as (url, tasks):
        harness = Harness(configured(url, rollout=rollout), latency=lambda seed: (seed % 5) / 100)
        batches = await harness.run(3)
    harness.check_book()
    assert all(member.turns[0].actions == ("Go",) for batch in batches for group in batch for member in group.members)
    assert {ending for ending, _ in harness.endings} >= {"trained", "cancelled"}
    assert set(tasks[0]) == {"base_url", "api_key", "model", "text", "instructions", "tools"}
    assert len({task["api_key"] for task in tasks}) == len(tasks)


@pytest.mark.parametrize("status", [0, 500, 503])
async def test_a_service_that_fails_once_voids_its_episode(status: int) -> None:
    """Also after an answer of the policy; the second attempt counts."""

    def play(task: dict[str, Any], number: int) -> tuple[int, Any]:
        answer = ask(task)
        return (status, "down") if number == 1 else (200, {"answer": answer})

    with service(play) as (url, _):
        harness = Harness(configured(url))
        batch = (await harness.run(1))[0]
    harness.check_book()
    assert harness.endings == {("voided", "UnexplainedCrash"): 1, ("trained", ""): 4}
    assert all(member.turns[0].actions == ("Go",) for group in batch for member in group.members)


async def test_a_policy_cannot_void_its_episodes_by_breaking_the_service() -> None:
    """The service fails on what the policy says, each time."""
    with service(lambda task, number: (500 if "END" in ask(task) else 200, {"answer": "x"})) as (url, _):
        harness = Harness(configured(url), "END")
        batch = (await harness.run(1))[0]
    assert harness.endings == {("voided", "UnexplainedCrash"): 4, ("trained", ""): 4}
    for group in batch:
        for member in group.members:
            assert (member.outcome, member.reward, member.success) == ("terminated", 0.0, False)
            assert "failed with status 500" in (member.reason or "")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, b"no such agent"), "refused the task with status 404: no such agent"),
        ((200, b"not JSON"), "did not answer"),
        ((200, ["x"]), "did not answer"),
        ((200, {"answer": 7}), "neither a text nor None"),
    ],
)
async def test_a_wrong_response_after_an_answer_is_the_agents_failure(answer: Any, reason: str) -> None:
    def play(task: dict[str, Any], number: int) -> tuple[int, Any]:
        ask(task)
        return answer

    with service(play) as (url, _):
        harness = Harness(configured(url, rollout={"groups": 1}))
        ((group,),) = await harness.run(1)
    for member in group.members:
        assert (member.outcome, member.reward) == ("truncated", 0.0)
        assert reason in (member.reason or "")


async def test_a_service_that_is_too_slow_is_like_a_slow_agent() -> None:
    def play(task: dict[str, Any], number: int) -> tuple[int, Any]:
        ask(task)
        time.sleep(3)
        return 200, {"answer": "late"}

    with service(play) as (url, _):
        harness = Harness(configured(url, timeout=1.5, rollout={"groups": 1}))
        ((group,),) = await harness.run(1)
    assert all("longer than agent.timeout=1.5 s" in (member.reason or "") for member in group.members)
    assert harness.endings == {("trained", ""): 2}


async def test_a_service_that_is_not_there_ends_the_run() -> None:
    with service(lambda task, number: (200, {})) as (url, _):
        pass
    harness = Harness(configured(url, rollout={"groups": 4, "group_size": 4, "retries": 0}))
    with pytest.raises(EnvFailureBudgetExceeded, match="cannot be reached"):
        await harness.run(1)


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Path, Path]:
    require(shutil.which("openssl") is not None, "apt-get install openssl")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return certificate, key


async def test_the_endpoint_of_agents_on_other_machines_speaks_tls(tls: tuple[Path, Path]) -> None:
    certificate, key = tls
    context = ssl.create_default_context(cafile=str(certificate))
    found: list[str] = []

    def play(task: dict[str, Any], number: int) -> tuple[int, Any]:
        found.append(task["base_url"])
        return 200, {"answer": ask(task, context)}

    with service(play) as (url, _):
        harness = Harness(configured(url, host="127.0.0.1", certificate=str(certificate), key=str(key)))
        batch = (await harness.run(1))[0]
    assert found[0].startswith("https://127.0.0.1:")
    assert all(member.turns[0].actions == ("Go",) for group in batch for member in group.members)


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"url": "localhost:8000"}, "agent.url"),
        ({"url": "http://a", "command": ["b"]}, "set one of them"),
        ({"url": "http://a", "sandbox": "docker"}, "is for agent.command"),
        ({"url": "http://a", "host": "10.0.0.1"}, "give a TLS certificate"),
        ({"url": "http://a", "certificate": "/x"}, "belong together"),
    ],
)
def test_wrong_settings_are_errors(agent: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(load_config({"env": {"id": "Countdown-v0"}, "agent": agent}))
