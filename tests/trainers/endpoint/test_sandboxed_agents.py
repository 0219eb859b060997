"""Agents in real containers reach nothing but the endpoint, and a policy gains nothing by the end of a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from requiring import require
from rollout_harness import Harness, configure

from agentkit.config_io import load_config
from agentkit.errors import ConfigError, EnvFailureBudgetExceeded
from agentkit.preflight import check
from agentkit.sandboxes.reaper import labels as label
from agentkit.sandboxes.reaper.owner import Owner

docker = pytest.importorskip("docker")

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(600)]

REMEDY = "run `PYTHON=.venv/bin/python .ci/docker`: it installs and starts an engine, and builds the base image"

ASK = """
import json, os, sys, time, urllib.error, urllib.request
task = json.load(sys.stdin)
def ask(said, key=os.environ["OPENAI_API_KEY"]):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": said}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""

EXPLORER = """
import pathlib, socket
def attempt(work):
    try:
        return str(work())
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except OSError as error:
        return f"{type(error).__name__}"
def connect(host, port):
    with socket.create_connection((host, port), timeout=3):
        return "connected"
def through(request):
    with socket.create_connection(("127.0.0.1", 3128), timeout=3) as link:
        link.sendall(request.encode())
        return link.recv(100).split(b"\\r\\n")[0].decode()
own = os.environ["OPENAI_API_KEY"]
report = {name: attempt(lambda: connect(*place)) for name, place in PLACES.items()}
report["name"] = attempt(lambda: socket.getaddrinfo("example.org", 80))
target = "{}:{}".format(*PLACES["other port"])
report["tunnel"] = attempt(lambda: through(f"CONNECT {target} HTTP/1.1\\r\\n\\r\\n"))
report["absolute"] = attempt(lambda: through("GET http://example.org/ HTTP/1.1\\r\\nHost: example.org\\r\\n\\r\\n"))
report["wrong key"] = attempt(lambda: ask("hello", "sk-" + "a" * 43))
report["changed key"] = attempt(lambda: ask("hello", own[:-1] + ("A" if own[-1] != "A" else "B")))
report["ended key"] = attempt(lambda: ask("hello", ENDED))
report["interfaces"] = sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line)
marks = [pathlib.Path(place, "mark") for place in ("/tmp", "/workspace", "/dev/shm")]
report["used before"] = [str(mark) for mark in marks if mark.exists()]
for mark in marks:
    mark.write_text("x")
report["names"] = sorted(name for name in os.environ if "KEY" in name or "TOKEN" in name)
print(ask(json.dumps(report)))
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    client, problem = None, ""
    try:
        client = docker.from_env()
        client.images.get("agentkit/base")
    except docker.errors.DockerException as error:
        problem = str(error)
    require(client is not None and not problem, f"{REMEDY} ({problem})")
    assert client is not None
    yield client
    try:
        deadline = time.monotonic() + 30
        while (left := mine(client)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == [], "the test left sandboxes behind"
    finally:
        client.close()


def mine(client: Any) -> list[Any]:
    """The sandboxes of this process."""
    return containers(client, f"{label.OWNER}={Owner.of(os.getpid())}")


def containers(client: Any, wanted: str) -> list[Any]:
    """Containers with a label; they may be removed while they are listed."""
    return client.containers.list(all=True, ignore_removed=True, filters={"label": wanted})


def configured(program: str, *, env: dict[str, Any] | None = None, spec: Any = None, **sections: Any) -> Any:
    agent = {"command": ("python3", "-c", program), "sandbox": "docker", "timeout": sections.pop("timeout", 60.0)}
    return configure(env or {"length": 1}, agent={**agent, "sandbox_spec": spec or {}}, **sections)


@contextlib.asynccontextmanager
async def listener(host: str) -> AsyncIterator[tuple[str, int, list[Any]]]:
    """A server that records who connects."""
    seen: list[Any] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(accept, host, 0)
    try:
        yield host, server.sockets[0].getsockname()[1], seen
    finally:
        server.close()


async def test_an_agent_reaches_only_the_endpoint_with_its_own_key(engine: Any) -> None:
    ended: dict[str, str] = {}
    first = Harness(configured(ASK + "print(ask(os.environ['OPENAI_API_KEY']))"))
    ((group, *_),) = await first.run(1)
    ended["key"] = group.members[0].turns[0].observation
    assert ended["key"].startswith("sk-")
    gateway = engine.networks.get("bridge").attrs["IPAM"]["Config"][0].get("Gateway", "172.17.0.1")
    serve = "import http.server as s; s.ThreadingHTTPServer(('', 8000), s.SimpleHTTPRequestHandler).serve_forever()"
    neighbour = engine.containers.run(
        "agentkit/base", ["-c", serve], entrypoint="python3", detach=True, network_mode="bridge", remove=True
    )
    try:
        neighbour.reload()
        address = neighbour.attrs["NetworkSettings"]["Networks"]["bridge"]["IPAddress"]
        for _ in range(100):  # the places can be reached from here, so only the sandbox refuses them
            with contextlib.suppress(OSError), socket.create_connection((address, 8000), timeout=3):
                break
            await asyncio.sleep(0.1)
        else:
            pytest.fail("the other container does not answer")
        async with listener("127.0.0.1") as (_, loopback, seen), listener(gateway) as (_, bridge, seen_too):
            places = {
                "other port": ("127.0.0.1", loopback),
                "gateway": (gateway, bridge),
                "another container": (address, 8000),
                "internet": ("1.1.1.1", 443),
                "metadata": ("169.254.169.254", 80),
            }
            program = f"PLACES, ENDED = {places!r}, {ended['key']!r}\n{ASK}{EXPLORER}"
            harness = Harness(configured(program))
            ((group, other),) = await harness.run(1)
            assert seen == seen_too == []
    finally:
        neighbour.kill()
    for member in [*group.members, *other.members]:
        (turn,) = member.turns
        report = json.loads(turn.observation)
        assert (member.outcome, turn.actions, member.reason) == ("terminated", ("Go",), "")
        unreachable = {name: report.pop(name) for name in places}
        assert all(answer in ("OSError", "ConnectionRefusedError") for answer in unreachable.values()), unreachable
        assert report.pop("name") == "gaierror"
        assert report.pop("tunnel").split()[1] in ("400", "404")
        assert report.pop("absolute").split()[1] in ("401", "404")
        assert report == {
            "wrong key": "status 401",
            "changed key": "status 401",
            "ended key": "status 401",
            "interfaces": ["lo"],
            "used before": [],
            "names": ["OPENAI_API_KEY"],
        }
    assert harness.endings == {("trained", ""): 4}


async def test_a_sandbox_that_is_killed_in_an_episode_voids_it_once(engine: Any) -> None:
    """All sandboxes are killed after the policy's first answer; the episodes are played again."""
    kills = iter([True])

    def script(text: str, seed: int) -> str:
        if next(kills, False):
            for container in mine(engine):
                with contextlib.suppress(docker.errors.APIError):  # it is not running yet
                    container.kill()
        return "<answer>Go</answer>"

    harness = Harness(configured(ASK + "answer = ask(task['text'])\ntime.sleep(2)\nprint(answer)"), script)
    batch = await harness.run(1)
    members = [member for group in batch[0] for member in group.members]
    harness.check_book()
    voided = [one for one, ending, _ in harness.ends if ending == "voided"]
    assert 0 < len(voided) <= 4
    assert len({(one.group_id, one.member) for one in voided}) == len(voided)
    assert all((one.reason or "").startswith("AgentUnavailable: ") for one in voided)
    assert len(members) == 4
    assert all((one.outcome, one.turns[-1].actions) == ("terminated", ("Go",)) for one in members)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("ask(task['text']); raise SystemExit('my bug')", "ended with status 1: my bug"),
        ("ask(task['text']); time.sleep(600)", "longer than agent.timeout=15 s"),
        ("ask(task['text']); os.kill(os.getpid(), 9)", "ended with status 137"),
        ("ask(task['text']); print('x' * (3 << 20))", "wrote more than 1048576 bytes"),
    ],
)
async def test_a_failure_of_the_agent_after_an_answer_is_the_policys(engine: Any, program: str, reason: str) -> None:
    harness = Harness(configured(ASK + program, timeout=15.0, rollout={"groups": 1}))
    ((group,),) = await harness.run(1)
    for member in group.members:
        assert member.outcome == "truncated"
        assert reason in (member.reason or "")
        assert member.reward == 0
    assert harness.endings == {("trained", ""): 2}


async def test_a_sandbox_that_runs_out_of_memory_is_the_policys_failure(engine: Any) -> None:
    spec = {"resources": {"memory": "64m", "tmp": "8m", "workspace": "8m", "shm": "4m"}}
    program = ASK + "ask(task['text']); hog = [bytearray(1 << 20) for _ in range(4096)]; print(len(hog))"
    harness = Harness(configured(program, spec=spec, rollout={"groups": 1}))
    ((group,),) = await harness.run(1)
    for member in group.members:
        assert member.outcome in ("truncated", "terminated")
        assert member.reason
        assert member.reward == 0
    assert harness.endings == {("trained", ""): 2}


@pytest.mark.parametrize(
    ("command", "reason"),
    [(("python3", "-c", "raise SystemExit(3)"), "ended with status 3"), (("no-such-program",), "no-such-program")],
)
async def test_an_agent_that_fails_without_the_policy_ends_the_run(engine: Any, command: Any, reason: str) -> None:
    agent = {"command": command, "sandbox": "docker"}
    harness = Harness(configure({}, agent=agent, rollout={"groups": 5, "group_size": 4, "retries": 0}))
    with pytest.raises(EnvFailureBudgetExceeded, match=reason):
        await harness.run(1)


def test_the_sandboxes_of_a_killed_run_are_removed(engine: Any, tmp_path: Path) -> None:
    """The real run, with its engine and learner, and agents that wait."""
    (tmp_path / "agent.py").write_text(f"{ASK}\nask(task['text'])\ntime.sleep(600)\n", encoding="utf-8")
    mount = {"source": str(tmp_path), "target": "/agent"}
    settings = {
        "env.id": "Countdown-v0",
        "agent": json.dumps({"command": ["python3", "/agent/agent.py"], "sandbox": "docker",
                             "sandbox_spec": {"mounts": [mount], "labels": {"test": tmp_path.name}}}),
        "rollout": "{groups: 1, group_size: 2, max_tokens: 4}",
        "evaluation": "{episodes: 2}",
        "dir": str(tmp_path / "run"),
    }  # fmt: skip
    config = tmp_path / "run.yaml"
    config.write_text("env: {id: Countdown-v0}\n", encoding="utf-8")
    tmp_path.chmod(0o755)
    command = [str(Path(sys.executable).with_name("agentkit")), "run", str(config)]
    run = subprocess.Popen(
        [*command, *(f"{key}={value}" for key, value in settings.items() if key != "env.id")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    started = f"agentkit.user.test={tmp_path.name}"
    try:
        until(lambda: len(containers(engine, started)) >= 2 or run.poll() is not None, 240)
        assert run.poll() is None, run.communicate()[0]
        time.sleep(2)
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate()
    until(lambda: not containers(engine, started), 120)


def until(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"python": "a:b", "sandbox": "docker"}, "is for agent.command"),
        ({"command": ["a"], "sandbox_spec": {"image": "x"}}, "agent.sandbox is none"),
        ({"command": ["a"], "sandbox": "docker", "sandbox_spec": {"network": {"mode": "bridge"}}}, "set by agentkit"),
        ({"command": ["a"], "sandbox": "docker", "host": "10.0.0.1"}, "no effect on a command"),
        ({"command": ["a"], "sandbox": "docker", "sandbox_spec": {"imgae": "x"}}, "agent.sandbox_spec: imgae"),
    ],
)
def test_wrong_settings_are_errors(agent: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(load_config({"env": {"id": "Countdown-v0"}, "agent": agent}))
