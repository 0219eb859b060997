"""Environments on sandbox servers: real servers in processes of their own, one of which may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from requiring import require

import agentkit
from agentkit.config_io import load_config
from agentkit.envs.code_contest import CodeContest
from agentkit.envs.isolation.placement import place
from agentkit.envs.sync import SyncTextEnv
from agentkit.errors import ConfigError
from agentkit.jsonl import read_jsonl
from agentkit.preflight import check

TOKEN = "a-token-of-the-tests-alone"
SMALL: dict[str, Any] = {
    "steps": 3,
    "env": {"id": "FrozenLake-v1", "kwargs": {"size": 3}, "max_turns": 4, "actions_per_turn": 1},
    "engine": {"max_context": 512, "max_batch": 8},
    "rollout": {"groups": 4, "group_size": 4, "max_tokens": 6},
    "learner": {"lr": 1e-3},
    "evaluation": {"episodes": 2},
}


class Server:
    """A process of ``agentkit sandbox serve``."""

    def __init__(self, directory: Path, backend: str) -> None:
        directory.mkdir(mode=0o700)
        (directory / "config.yaml").write_text("policy: {mounts: [/]}\n")
        command = ["sandbox", "serve", "--backend", backend, "--port", "0", "--config", str(directory / "config.yaml")]
        environment = {**os.environ, "AGENTKIT_RUNTIME_DIR": str(directory), "AGENTKIT_SANDBOX_TOKEN": TOKEN}
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "agentkit", *command], stdout=subprocess.PIPE, env=environment, text=True
        )

    @cached_property
    def url(self) -> str:
        """The address that it prints when it is ready."""
        assert self._popen.stdout is not None
        address = re.search(r"http://[\d.:]+\d", self._popen.stdout.readline())
        assert address is not None
        return address[0]

    def end(self, number: int = signal.SIGTERM) -> None:
        self._popen.send_signal(number)
        self._popen.wait(60)
        assert self._popen.stdout is not None
        self._popen.stdout.close()


@pytest.fixture
def servers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    """Two servers, and the token of their clients."""
    backend = getattr(request, "param", "local")
    if backend == "local":
        require(shutil.which("bwrap") is not None, "install bubblewrap")
    else:
        require("docker", "pip install 'agentkit-rl[docker]'")
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", TOKEN)
    started = [Server(tmp_path / f"server-{number}", backend) for number in range(2)]
    try:
        assert len({server.url for server in started}) == 2
        yield started
    finally:
        for server in started:
            server.end()


def named(servers: list[Server]) -> str:
    return f"remote:{','.join(server.url for server in servers)}"


def local_spec() -> dict[str, Any]:
    """Return a specification with which servers of the local back end see this interpreter and its packages."""
    mounts = [{"source": one.source, "target": one.target} for one in place("FrozenLake-v1", {}, "local").spec.mounts]
    return {"mounts": mounts, "env": {"PATH": f"{sys.prefix}/bin:/usr/bin:/bin"}}


def test_placement_on_servers_is_that_of_images() -> None:
    placed = place("FrozenLake-v1", {}, "remote:http://127.0.0.1:1")
    assert (placed.spec.image, placed.spec.mounts, placed.python) == ("agentkit/env", (), "python3")


def test_make_and_make_vec(servers: list[Server]) -> None:
    here, there = (
        agentkit.make("FrozenLake-v1"),
        agentkit.make("FrozenLake-v1", sandbox=named(servers), sandbox_spec=local_spec()),
    )
    try:
        assert there.reset(seed=3) == here.reset(seed=3)
        assert there.step("Right") == here.step("Right")
    finally:
        there.close()
    redundancy = agentkit.Redundancy(spares=1, share=2)
    vector = agentkit.make_vec(
        "FrozenLake-v1", 3, mode=named(servers), sandbox_spec=local_spec(), redundancy=redundancy
    )
    try:
        assert vector.reset(seed=3)[0][0] == here.reset(seed=3)[0]
    finally:
        vector.close()


def test_programs_run_on_servers(servers: list[Server]) -> None:
    env = agentkit.make("CodeContest-v0", sandbox=named(servers))
    assert isinstance(env, CodeContest)
    blocking = SyncTextEnv(env)
    try:
        blocking.reset(seed=0)
        assert blocking.step(next(blocking.expert()))[1] == 1.0
    finally:
        blocking.close()


def test_a_wrong_token_is_a_problem_before_a_run(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config({"env": {"id": "FrozenLake-v1", "sandbox": "remote", "servers": [servers[0].url]}})
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", "another-token-of-the-tests")
    with pytest.raises(ConfigError, match=rf"env\.servers={servers[0].url}: .*token"):
        check(config)
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", TOKEN)
    servers[1].end(signal.SIGKILL)
    both = {"id": "FrozenLake-v1", "sandbox": "remote", "servers": [server.url for server in servers]}
    check(load_config({"env": both}))  # one that answers is enough


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_the_loss_of_a_server(servers: list[Server], tmp_path: Path) -> None:
    urls = [server.url for server in servers]
    env = {**SMALL["env"], "sandbox": "remote", "servers": urls, "sandbox_spec": local_spec(), "reset_timeout": 120.0}
    episodes: list[agentkit.Trajectory] = []

    def on_step(step: int, metrics: object) -> None:
        if step == 1:
            servers[0].end(signal.SIGKILL)

    result = agentkit.train({**SMALL, "env": env, "dir": tmp_path / "run"}, on_step=on_step, on_episode=episodes.append)
    assert result.finished
    assert [episode.reason for episode in episodes if episode.outcome == "voided"] == []


@contextlib.contextmanager
def delayed(url: str, seconds: float) -> Iterator[str]:
    """Yield the address of a relay to a server, whose answers it delays."""
    ready: queue.Queue[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = queue.Queue()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(delay)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = url.removeprefix("http://").split(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, to_server, 0.0), pass_on(from_server, writer, seconds))

    async def serve() -> None:
        relay, end = await asyncio.start_server(connect, "127.0.0.1", 0), asyncio.Event()
        port = relay.sockets[0].getsockname()[1]
        ready.put((f"http://127.0.0.1:{port}", asyncio.get_running_loop(), end))
        await end.wait()
        relay.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    address, loop, end = ready.get(timeout=60)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_is_slower_than_the_other_is_an_alert(servers: list[Server], tmp_path: Path) -> None:
    with delayed(servers[1].url, 0.2) as slow:
        env = {**SMALL["env"], "parser": "plain", "sandbox": "remote", "servers": [servers[0].url, slow]}
        env |= {"sandbox_spec": local_spec(), "reset_timeout": 120.0}
        agentkit.train({**SMALL, "steps": 4, "env": env, "dir": tmp_path / "run"})
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    (alert,) = [event for event in events if event["event"] == "alert" and event["name"] == "slow_host"]
    assert alert["subject"] == slow.removeprefix("http://")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("servers", ["docker"], indirect=True)
def test_the_image_on_servers_with_docker(servers: list[Server]) -> None:
    here, there = agentkit.make("Sokoban-v0"), agentkit.make("Sokoban-v0", sandbox=named(servers))
    try:
        assert there.reset(seed=3) == here.reset(seed=3)
        assert there.step("Up") == here.step("Up")
    finally:
        there.close()
