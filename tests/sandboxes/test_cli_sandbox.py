"""`agentkit sandbox` as a person at a terminal, or a script, uses it: real processes, real sandboxes."""

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

import pytest
from local_harness import left_of, runtime_directory
from owner_harness import PATIENCE, OwnerProcess, owner, until

from agentkit.cli import sandbox
from agentkit.errors import ConfigError
from agentkit.sandboxes.backends.local_state import log_path

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


@pytest.mark.parametrize("words", [["logs", "ak-0000000000000000"], ["exec", "ak-0000000000000000", "true"]])
def test_a_sandbox_that_there_is_not(words: list[str]) -> None:
    result = agentkit(words[0], "--backend", "local", *words[1:])
    assert result.returncode == 1
    assert b"agentkit sandbox ls" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.slow
def test_clearing_away(owner: Owner) -> None:
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
        ("limits: {sandboxes: none}", "sandboxes"),
        ("what: 1", "policy and limits"),
        ("1", "policy and limits"),
        ("[", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_rules_of_a_server_are_checked(tmp_path: Path, text: str | None, complaint: str) -> None:
    rules = tmp_path / "rules.yaml"
    if text is not None:
        rules.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        sandbox._policy(rules)


@pytest.mark.slow
def test_serving(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("limits: {sandboxes: 3}\npolicy: {memory: 1g, networks: [none]}\n")
    command = [sys.executable, "-m", "agentkit", "sandbox", "serve", "--backend", "local", "--port", "0", "--policy"]
    process = subprocess.Popen([*command, str(rules)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    assert line.startswith("serving local sandboxes at http://127.0.0.1:")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    process.communicate()


def test_a_terminal_does_not_obey_a_sandbox(owner: Owner) -> None:
    """Escapes in logs and in a command's output are shown; what is no terminal gets the bytes as they are."""
    id = owner("local", 1).ids[0]
    with log_path(id).open("ab") as log:
        log.write(b"\x1b]0;hostile\x07\x9b2J\n")
    hostile = ["sh", "-c", r"printf 'ok\rno \033[2J\302\2332K'; printf '\033c' >&2"]
    assert agentkit("exec", *HERE, id, *hostile).stdout == b"ok\rno \x1b[2J\xc2\x9b2K"
    assert b"\x1b]0;hostile\x07" in agentkit("logs", *HERE, id).stdout
    assert on_a_terminal("exec", *HERE, id, *hostile) == rb"ok\x0dno \x1b[2J\x9b2K" + rb"\x1bc"
    assert rb"\x1b]0;hostile\x07" in on_a_terminal("logs", *HERE, id)


def on_a_terminal(*words: str) -> bytes:
    """What a terminal is sent by `agentkit sandbox`."""
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "agentkit", "sandbox", *words], stdin=subprocess.DEVNULL, stdout=end, stderr=end
    ) as process:
        os.close(end)
        sent = b""
        with contextlib.suppress(OSError):  # a terminal that nobody writes to any more raises EIO
            while data := os.read(terminal, 1 << 16):
                sent += data
        os.close(terminal)
        assert process.wait(PATIENCE) == 0
    return sent
