"""Records of a real sandbox server with injected failures, and the dashboard's view of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser
from dashboard_runs import make_sandbox_run
from local_harness import runtime_directory as runtime_directory
from local_sandboxes import local_sandboxes

from agentkit.dashboard import queries
from agentkit.dashboard.export import export
from agentkit.dashboard.sandboxes import sandboxes, with_present
from agentkit.dashboard.server import Dashboard
from agentkit.errors import ConfigError, SandboxError, SandboxLost
from agentkit.jsonl import read_jsonl
from agentkit.run_directory import RunDirectory
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.backends.local.state import load
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.server import records as server_records
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.server.records import ServerRecords
from agentkit.sandboxes.testing.fake import FakeBackend

pytestmark = pytest.mark.usefixtures("runtime_directory")
TOKEN = "a-token-of-the-tests-alone"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run ``agentkit sandbox serve --records``; yield its address."""
    command = [sys.executable, "-u", "-m", "agentkit", "sandbox", "serve", "--backend", "local", "--port", "0"]
    environment = {**os.environ, "AGENTKIT_SANDBOX_TOKEN": TOKEN}
    with subprocess.Popen(
        [*command, "--records", str(folder)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


async def use(url: str, folder: Path) -> list[str]:
    """Let commands fail, kill a sandbox and restart it; return the ids of the sandboxes, the killed one first."""
    backend = RemoteBackend(url, TOKEN)
    await backend.start()
    try:
        async with Sandbox.create(backend=backend) as killed, Sandbox.create(backend=backend) as other:
            assert (await other.exec("sleep 60", timeout=0.3)).timed_out
            state = load(killed.id)
            assert state is not None
            for process in state.processes:
                os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(SandboxLost):
                await killed.exec("sleep 60")
            await killed.restart()
            assert (await killed.exec("true")).ok
            seen = queries.summary(folder)
            assert (seen["status"], seen["server"]) == ("running", url)
            found = sandboxes(folder)
            for _ in range(200):  # until the next look
                measured = {box["sandbox"] for box in found["boxes"] if box["memory"]}
                if measured == {killed.id, other.id} and found["totals"]["recoveries"]:
                    break
                await asyncio.sleep(0.1)
                found = sandboxes(folder)
            assert found["state"]["states"] == {"running": 2}
            assert {box["state"] for box in found["boxes"]} == {"running"}
            assert (found["totals"]["created"], found["totals"]["recoveries"]) == (2, 1)
            assert [(host["sandboxes"], host["failed"]) for host in found["hosts"]] == [(2, 1)]
            assert all(box["cpu"] is None or box["cpu"] >= 0 for box in found["boxes"])
            assert all(box["tenant"] == "operator" and box["memory"] > 1e5 for box in found["boxes"])
            with pytest.raises(SandboxError):
                await Sandbox.create(backend=backend, image="forbidden")
            return [killed.id, other.id]
    finally:
        await backend.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The records of a server that has ended, and the ids of its sandboxes."""
    asyncio.run(local_sandboxes())
    folder = tmp_path_factory.mktemp("server") / "host"
    with serving(folder) as url:
        return folder, asyncio.run(use(url, folder))


def test_a_server_records_failures_and_recoveries(recorded: tuple[Path, list[str]]) -> None:
    folder, (killed, other) = recorded
    summary = queries.summary(folder)
    assert (summary["status"], summary["counts"]) == ("finished", {})
    found = sandboxes(folder)
    assert found["server"]
    assert found["state"]["states"] == {}
    (box,) = found["boxes"]  # the others have ended as intended
    assert (box["sandbox"], box["state"], box["recovered_by"]) == (killed, "failed", {"restart": 1})
    assert box["kind"] == "kill"
    assert box["recovery_s"] > 0
    history = [(row["what"], row["sandbox"], row["kind"]) for row in found["history"]]
    assert history.count(("created", killed, "other")) == history.count(("created", other, "other")) == 1
    assert ("timeout", other, "timeout") in history
    lost = history.index(("failed", killed, "kill"))
    assert history[lost + 1 :].index(("recovered", killed, "kill")) < history[lost + 1 :].index(
        ("removed", killed, "other")
    )
    assert ("not created", "", "host") in history
    totals = found["totals"]
    wanted = {"created": 2, "create_failures": 1, "removed": 2, "recoveries": 1, "timeout": 1}
    assert {name: totals[name] for name in wanted} == wanted
    (host,) = found["hosts"]
    assert (host["state"], host["failed"], host["kinds"]) == ("up", 1, {"kill": 1})
    assert 0 < host["memory"] < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_of_a_server(browser: Browser, recorded: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder, (killed, other) = recorded
    rows = "[...document.querySelectorAll('.rows tbody tr')].map(e => e.innerText)"
    with Dashboard([folder], port=0) as server:
        browser.visit(server.url, "", f"{rows}.length == 1")
        assert browser.evaluate("location.hash").startswith("#/sandboxes")
        assert browser.evaluate("[...document.querySelectorAll('#top nav a')].map(e => e.innerText)") == ["Sandboxes"]
        assert killed in browser.evaluate(rows)[0]
        assert "timeout 1" in browser.text(".facts")
        browser.press("2")
        browser.wait(f"{rows}.length > 6")
        assert any(other in row and "timeout" in row for row in browser.evaluate(rows))
        browser.press("3")
        browser.wait("document.querySelectorAll('.chart:not([hidden]) canvas').length > 2")
    make_sandbox_run(tmp_path / "runs" / "run").release()
    with Dashboard([tmp_path / "runs", folder], port=0) as server:
        browser.visit(server.url, "overview", "document.querySelectorAll('.runs tbody tr').length == 1")
        browser.visit(server.url, "sandboxes", "document.querySelectorAll('[aria-label=Run] option').length == 2")
    export([folder], tmp_path / "copy")
    browser.visit((tmp_path / "copy" / "index.html").as_uri(), "", f"{rows}.length == 1")


async def test_records_are_bounded_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_records, "MOST", 20)
    folder = tmp_path / "records"
    for _ in range(2):
        server = SandboxServer(FakeBackend(), token=TOKEN)
        async with ServerRecords(folder, server.url, FakeBackend(), server.tenants, sample_s=0.05), server:
            with pytest.raises(ConfigError, match="another server records"):
                ServerRecords(folder, server.url, FakeBackend(), server.tenants)
            backend = RemoteBackend(server.url, TOKEN)
            await backend.start()
            for _ in range(6):
                async with Sandbox.create(backend=backend):
                    pass
            server.tenants.host.draining = True
            await asyncio.sleep(0.2)
            await backend.close()
    events = list(read_jsonl(folder / "events.jsonl"))
    assert 10 <= len(events) <= 20
    assert [event["event"] for event in events][-2:] == ["sandbox_host", "end"]
    times = [event["time"] for event in events]
    assert times == sorted(times)
    assert "unschedulable" in {host["state"] for host in sandboxes(folder)["hosts"]}
    assert [line["sandbox/created"] for line in read_jsonl(folder / "metrics.jsonl")] == [0, 6, 0, 6]


async def test_other_folders_are_refused(tmp_path: Path) -> None:
    make_sandbox_run(tmp_path / "run").release()
    server = SandboxServer(FakeBackend(), token=TOKEN)
    with pytest.raises(ConfigError, match="contains other files"):
        ServerRecords(tmp_path / "run", server.url, FakeBackend(), server.tenants)
    assert RunDirectory.open(tmp_path / "run").config().env.id == "FrozenLake-v1"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        ServerRecords(tmp_path / "file", server.url, FakeBackend(), server.tenants)
    server._socket.close()


def test_damaged_records_are_one_error(tmp_path: Path) -> None:
    make_sandbox_run(tmp_path / "run").release()
    (tmp_path / "run" / "sandboxes.json").write_text(json.dumps({"time": time.time(), "sandboxes": [1]}))
    with pytest.raises(Exception, match=r"sandboxes\.json cannot be read"):
        sandboxes(tmp_path / "run")


def test_a_sandbox_that_failed_again_is_not_shown_as_running() -> None:
    def box(name: str, **fields: Any) -> dict[str, Any]:
        return {"sandbox": name, "state": "failed", "recovered": 0, "cause": "oom", **fields}

    present = [{"sandbox": name, "state": "running", "created": 1.0 + ord(name)} for name in "abc"]
    shown = with_present([box("a"), box("b", recovered=1), box("z")], present)
    assert [(one["sandbox"], one["state"]) for one in shown] == [
        ("c", "running"),
        ("b", "running"),
        ("a", "failed"),
        ("z", "failed"),
    ]
