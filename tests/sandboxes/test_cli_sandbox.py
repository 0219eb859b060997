"""`agentkit sandbox` at a terminal and in scripts, with real processes and sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from local_harness import left_of, runtime_directory
from owner_harness import PATIENCE, OwnerProcess, owner, until

from agentkit.errors import ConfigError
from agentkit.sandboxes.backends.local.state import log_path
from agentkit.sandboxes.server.config import read_config

__all__ = ["owner", "runtime_directory"]

pytestmark = pytest.mark.usefixtures("runtime_directory")

Owner = Callable[..., OwnerProcess]
HERE = ("--backend", "local")


def agentkit(*words: str, stdin: bytes = b"", timeout: float = PATIENCE) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "agentkit", "sandbox", *words]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=timeout, check=False)


@pytest.mark.slow
def test_listing(owner: Owner) -> None:
    assert b"no sandboxes" in agentkit("ls", "--backend", "local").stdout
    mine = owner("local", 2)
    rows = {row["id"]: row for row in json.loads(agentkit("ls", "--json", "--backend", "local").stdout)}
    assert rows.keys() == set(mine.ids)
    row = rows[mine.ids[0]]
    assert (row["backend"], row["state"], row["owner"]) == ("local", "running", f"pid {mine.process.pid}")
    assert 3000 < row["time_left"] < 3600
    assert rows[mine.ids[1]]["state"] == "paused"
    shown = agentkit("ls", "--backend", "local").stdout.decode()
    assert mine.ids[0] in shown
    assert "60 min" in shown or "59 min" in shown
    sample = json.loads(agentkit("top", "--once", "--json", "--interval", "0.5", *HERE).stdout)
    assert {row["id"]: row["state"] for row in sample["sandboxes"]} == {mine.ids[0]: "running", mine.ids[1]: "paused"}
    (running,) = [row for row in sample["sandboxes"] if row["state"] == "running"]
    assert running["processes"] >= 1
    assert running["cpu"] >= 0
    (host,) = sample["hosts"]
    assert (host["sandboxes"], 0 < host["memory"] < 1) == (2, True)
    assert mine.ids[0].encode() in agentkit("top", "--once", "--interval", "0.1", *HERE).stdout


def test_commands(owner: Owner) -> None:
    id = owner("local", 1).ids[0]
    result = agentkit("exec", *HERE, id, "sh", "-c", "echo out; echo err >&2; printf '\\377'; pwd; exit 7")
    assert (result.returncode, result.stdout, result.stderr) == (7, b"out\n\xff/workspace\n", b"err\n")
    assert agentkit("exec", *HERE, "--cwd", "/tmp", id, "pwd").stdout == b"/tmp\n"
    assert agentkit("exec", *HERE, id, "sh", "-c", "cat; echo end", stdin=b"not given").stdout == b"end\n"
    data = os.urandom(300_000)
    assert agentkit("exec", *HERE, "-i", id, "cat", stdin=data).stdout == data
    begin = time.monotonic()
    result = agentkit("exec", *HERE, "--timeout", "0.5", id, "sleep", "600")
    assert (result.returncode, time.monotonic() - begin < PATIENCE) == (124, True)
    assert b"longer than 0.5 s" in result.stderr
    result = agentkit("exec", *HERE, id, "no-such-program")
    assert result.returncode == 1
    assert b"no-such-program" in result.stderr
    assert agentkit("logs", *HERE, id).returncode == 0


@pytest.mark.slow
def test_interrupting_a_command_ends_it_inside(owner: Owner) -> None:
    id = owner("local", 1).ids[0]
    command = [
        sys.executable,
        "-m",
        "agentkit",
        "sandbox",
        "exec",
        *HERE,
        id,
        "sh",
        "-c",
        "echo begun; exec sleep 12345",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    process.communicate()
    until(lambda: agentkit("exec", *HERE, id, "pgrep", "-f", "sleep 12345").returncode == 1, "the command has ended")


@pytest.mark.parametrize(
    ("words", "id"),
    [
        (["logs"], "ak-0000000000000000"),
        (["logs"], "nonsense"),
        (["exec", "true"], "ak-0000000000000000"),
        (["exec", "true"], "../../etc"),
        (["stats"], "ak-1"),
        (["rm"], ""),
    ],
)
def test_an_unknown_sandbox_is_an_error(words: list[str], id: str) -> None:
    result = agentkit(words[0], "--backend", "local", id, *words[1:])
    assert result.returncode == 1
    assert b"agentkit sandbox ls" in result.stderr
    assert result.stderr.count(b"\n") == 1


def made(*options: str, backend: str = "local") -> str:
    result = agentkit("create", "--backend", backend, "--ttl", "600", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"ak-")
    return result.stdout.decode().strip()


def runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_sandbox_from_its_making_to_its_removal(tmp_path: Path) -> None:
    rules = tmp_path / "spec.yaml"
    rules.write_text("resources: {tmp: 8m, shm: 1m, workspace: 16m, memory: 1g}\nlabels: {run: x, team: y}\n")
    words = ["--spec", str(rules), "--memory", "256m", "--label", "run=7", "--env", "GREETING=hi"]
    id = made(*words)
    try:
        (row,) = [row for row in json.loads(agentkit("ls", "--json", *HERE).stdout) if row["id"] == id]
        assert row["labels"] == {"run": "7", "team": "y"}
        assert 500 < row["time_left"] < 600
        shown = agentkit("ls", *HERE).stdout.decode()
        assert id in shown
        assert "run=7" in shown
        result = agentkit("exec", *HERE, id, "--", "sh", "-c", 'echo $GREETING "$@"; exit 5', "sh", "-x", "--", "a b")
        assert (result.returncode, result.stdout, result.stderr) == (5, b"hi -x -- a b\n", b"")
        assert agentkit("exec", *HERE, id, "--").returncode == 2
        (used,) = json.loads(agentkit("stats", "--json", *HERE, id).stdout)
        assert (used["id"], used["state"]) == (id, "running")
        assert used["workspace_size"] == 16 << 20
        assert "16.0 MiB" in agentkit("stats", *HERE).stdout.decode()
        # Told of both, in one line each; what there is goes all the same.
        result = agentkit("rm", *HERE, id, "ak-0000000000000000")
        assert (result.returncode, result.stdout) == (1, f"{id}\n".encode())
        assert result.stderr.count(b"\n") == 1
        assert not left_of(id)
        until(lambda: not runs(int(row["owner"].removeprefix("pid "))), "the process that owned it has ended")
        assert agentkit("exec", *HERE, id, "true").returncode == 1
    finally:
        agentkit("rm", *HERE, id)


def test_a_failed_creation_is_an_error_in_one_line() -> None:
    for status, words in [
        (2, ["--backend", "nonsense"]),
        (2, [*HERE, "--memory", "much"]),
        (2, [*HERE, "--memory", "1m"]),
        (2, [*HERE, "--env", "NAME"]),
        (2, [*HERE, "--spec", "/nowhere"]),
        (1, [*HERE, "--network", "bridge"]),
    ]:
        result = agentkit("create", *words)
        assert (result.returncode, result.stdout) == (status, b""), words
        assert result.stderr.count(b"\n") == 1, result.stderr
        assert result.stderr.startswith(b"error: ")


@pytest.mark.docker
def test_a_docker_sandbox_by_the_same_commands() -> None:
    id = made("--label", "run=8", backend="docker")
    try:
        rows = {row["id"]: row for row in json.loads(agentkit("ls", "--json", "--backend", "docker").stdout)}
        assert rows[id]["labels"] == {"run": "8"}
        # Without --backend it is found wherever it is on this machine.
        assert agentkit("exec", id, "--", "sh", "-c", "exit 3").returncode == 3
        assert agentkit("exec", "--timeout", "0.5", id, "--", "sleep", "100").returncode == 124
        assert json.loads(agentkit("stats", "--json", id).stdout)[0]["processes"] >= 1
        assert agentkit("logs", id).returncode == 0
    finally:
        assert agentkit("rm", id).returncode == 0
    assert id not in agentkit("ls", "--backend", "docker").stdout.decode()


@pytest.mark.slow
def test_a_remote_sandbox_by_the_same_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "agentkit", "sandbox", "serve", "--backend", "local", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert server.stdout is not None
    try:
        monkeypatch.setenv("AGENTKIT_SANDBOX_URL", server.stdout.readline().decode().split()[-1])
        id = made("--label", "run=9", backend="remote")
        there = ("--backend", "remote")
        assert b"the server is draining" in agentkit("drain").stdout
        assert agentkit("create", *there).returncode != 0
        state = json.loads(agentkit("drain", "--off").stdout and agentkit("status", "--json").stdout)
        (server_state,) = state.values()
        assert (server_state["host"]["accepting"], server_state["load"][0]) == (True, 1)
        assert server_state["tenants"]["operator"]["sandboxes"] == 1
        (row,) = json.loads(agentkit("ls", "--json", *there).stdout)
        assert (row["id"], row["labels"]) == (id, {"run": "9"})
        result = agentkit("exec", *there, id, "--", "sh", "-c", "echo far; exit 4")
        assert (result.returncode, result.stdout) == (4, b"far\n")
        assert json.loads(agentkit("stats", "--json", *there, id).stdout)[0]["state"] == "running"
        sample = json.loads(agentkit("top", "--once", "--json", "--server", os.environ["AGENTKIT_SANDBOX_URL"]).stdout)
        (host,), (row,) = sample["hosts"], sample["sandboxes"]
        assert (row["id"], row["host"], row["labels"], row["memory"] > 0) == (id, host["host"], {"run": "9"}, True)
        assert (host["state"], host["sandboxes"], host["limit"]) == ("up", 1, 256)
        result = agentkit("exec", *there, "nonsense", "true")
        assert (result.returncode, result.stderr.count(b"\n")) == (1, 1)
        assert agentkit("rm", *there, id).returncode == 0
        assert json.loads(agentkit("ls", "--json", *there).stdout) == []
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(PATIENCE)
        server.communicate()


@pytest.mark.slow
def test_gc(owner: Owner) -> None:
    def gc(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return agentkit("gc", "--backend", "local", *words, stdin=stdin)

    first, second = owner("local", 2), owner("local", 1)
    result = gc()
    assert result.returncode == 0, result.stderr
    assert b"0 removed, 3 in use" in result.stdout
    refused = gc("--owner", str(first.process.pid), stdin=b"n\n")
    assert refused.returncode == 1
    assert left_of(first.ids[0])
    assert b"2 removed, 1 in use" in gc("--owner", str(first.process.pid), "--yes").stdout
    assert not any(left_of(id) for id in first.ids)
    assert left_of(second.ids[0])
    assert b"1 removed, 0 in use" in gc("--all", stdin=b"y\n").stdout
    assert not left_of(second.ids[0])
    assert gc("--all", "--owner", "1").returncode == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("policy: {imagse: []}", "policy.imagse|imagse"),
        ("quota: {sandboxes: none}", "sandboxes"),
        ("what: 1", "what"),
        ("watermarks: {disk: 1.5}", "watermarks.disk"),
        ("1", "should be an object"),
        ("[", "cannot read"),
        (None, "cannot read"),
    ],
)
def test_rules_of_a_server_are_checked(tmp_path: Path, text: str | None, complaint: str) -> None:
    rules = tmp_path / "rules.yaml"
    if text is not None:
        rules.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        read_config(rules)


@pytest.mark.slow
def test_serving(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("quota: {sandboxes: 3}\npolicy: {memory: 1g, networks: [none]}\n")
    command = [sys.executable, "-m", "agentkit", "sandbox", "serve", "--backend", "local", "--port", "0", "--config"]
    process = subprocess.Popen([*command, str(rules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert line.startswith("serving local sandboxes at http://127.0.0.1:")
    rules.write_text(f"tenants: {{team: {{token_sha256: [{'a' * 64}]}}}}")
    process.send_signal(signal.SIGHUP)
    until(lambda: b"team" in agentkit("status", "--server", line.split()[-1]).stdout, "the new tenant")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    process.communicate()


def test_control_characters_are_escaped_on_a_terminal(owner: Owner) -> None:
    """Escape sequences in logs and output are shown as text; without a terminal the bytes are unchanged."""
    id = owner("local", 1).ids[0]
    with log_path(id).open("ab") as log:
        log.write(b"\x1b]0;hostile\x07\x9b2J\n")
    hostile = ["sh", "-c", r"printf 'ok\rno \033[2J\302\2332K'; printf '\033c' >&2"]
    assert agentkit("exec", *HERE, id, *hostile).stdout == b"ok\rno \x1b[2J\xc2\x9b2K"
    assert b"\x1b]0;hostile\x07" in agentkit("logs", *HERE, id).stdout
    assert on_a_terminal("exec", *HERE, id, *hostile) == rb"ok\x0dno \x1b[2J\x9b2K" + rb"\x1bc"
    assert rb"\x1b]0;hostile\x07" in on_a_terminal("logs", *HERE, id)


def on_a_terminal(*words: str) -> bytes:
    """Return the output of `agentkit sandbox` on a terminal."""
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "agentkit", "sandbox", *words], stdin=subprocess.DEVNULL, stdout=end, stderr=end
    ) as process:
        os.close(end)
        sent = b""
        with contextlib.suppress(OSError):  # a terminal without a writer raises EIO
            while data := os.read(terminal, 1 << 16):
                sent += data
        os.close(terminal)
        assert process.wait(PATIENCE) == 0
    return sent
