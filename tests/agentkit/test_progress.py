"""Long operations report their progress regularly, with and without a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentkit import progress
from agentkit.cli import heartbeat
from agentkit.cli.heartbeat import Heartbeat, watched

GAP_S = 6.0
"""Longest silence that is allowed; the interval is shorter, and a loaded machine is late."""

SLOW = """
import time
from agentkit.envs.frozen_lake import FrozenLake

class SlowLake(FrozenLake):
    concurrency = "thread"

    def reset(self, **options):
        time.sleep(2.5)
        return super().reset(**options)

class SlowStep(FrozenLake):
    concurrency = "inline"  # stops the event loop

    def step(self, action):
        time.sleep(11)
        return super().step(action)
"""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (42, "42 s"), (187, "3:07"), (7387, "2:03:07")])
def test_durations(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def test_work_shows_progress_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.work("games", 8, detail=lambda: "2 won") as games, progress.work("file", unit="B") as file:
        now += 10
        assert progress.describe() == "games 0/8 · 2 won · 10 s; file · 10 s"
        games.advance(2)
        file.reached(3 << 20, 4 << 20)
        assert progress.describe() == "games 2/8 · 2 won · 10 s · 30 s left; file 3.0/4.0 MiB · 10 s · 3 s left"
    assert progress.describe() == ""


def test_work_that_fails_is_over() -> None:
    with pytest.raises(ValueError, match="no"), progress.work("outer"), progress.work("inner"):
        raise ValueError("no")
    assert progress.describe() == ""


def test_a_heartbeat_is_printed_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.2)
    lines: list[str] = []
    beat = Heartbeat(lines.append, fallback="training")
    beat.start()
    for _ in range(12):
        time.sleep(0.05)
        beat.spoke()
    assert lines == []
    with progress.work("a \x1b[31mred one"):
        deadline = time.monotonic() + 10
        while len(lines) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    beat.stop()
    beat.stop()
    count = len(lines)
    assert lines[0].startswith(r"… a \x1b[31mred one · ")
    time.sleep(0.5)
    assert len(lines) == count
    assert not [thread for thread in threading.enumerate() if thread.name == "agentkit-heartbeat"]


def test_watched_work_is_shown_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.1)
    with watched("fetching"), progress.work("file", 10, unit="B") as work:
        work.reached(5, 10)
        time.sleep(0.6)
    output = capsys.readouterr()
    assert output.out == ""
    assert "… fetching · " in output.err
    assert "; file 5/10 B · " in output.err


@pytest.fixture
def slow_environments(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a process in which ``SlowLake-v0`` and ``SlowStep-v0`` are registered."""
    site = tmp_path / "site"
    info = site / "slow-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "slow.py").write_text(SLOW)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentkit.envs]\nSlowLake-v0 = slow:SlowLake\nSlowStep-v0 = slow:SlowStep\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


def lines_of(arguments: list[str], environment: dict[str, str], place: Path) -> tuple[list[str], float]:
    """Return the lines of a command without a terminal, and the longest time between two of them."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentkit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=place,
    )
    lines, gap, last = [], 0.0, None
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            now = time.monotonic()
            gap, last = max(gap, now - (last or now)), now
            lines.append(line)
    assert process.returncode == 0, "".join(lines)
    return lines, gap


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("env", "episodes", "expected"), [("SlowLake-v0", 10, r"[1-9]/10"), ("SlowStep-v0", 1, "0/1")])
def test_an_evaluation_is_never_silent_for_long(
    slow_environments: dict[str, str], tmp_path: Path, env: str, episodes: int, expected: str
) -> None:
    settings = ["env.max_turns=1", "rollout.max_tokens=4", "engine.max_batch=1", "env.parser=plain"]
    lines, gap = lines_of(
        ["eval", "quickstart", "--env", env, "--episodes", str(episodes), *settings], slow_environments, tmp_path
    )
    assert gap < GAP_S, lines
    assert any(re.search(f"evaluation {expected}", line) for line in lines), lines


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_is_never_silent_for_long(slow_environments: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "env: {id: SlowLake-v0, max_turns: 1}\n"
        "steps: 1\n"
        "rollout: {groups: 2, group_size: 4, max_tokens: 4}\n"
        "engine: {max_batch: 1}\n"
        "imitation: {episodes: 5, batch_episodes: 5}\n"
        "evaluation: {episodes: 4}\n"
    )
    lines, gap = lines_of(["run", "run.yaml", "dir=out"], slow_environments, tmp_path)
    assert gap < GAP_S, lines
    for expected in ("… episodes of the expert ", "… evaluation ", "step 1/1"):
        assert any(line.startswith(expected) for line in lines), lines


def test_a_terminal_shows_one_line_that_goes_away() -> None:
    script = (
        "import time; from agentkit.cli.heartbeat import watched\n"
        "with watched('fetching [bold]x[/]'): time.sleep(0.8)\n"
        "print('done')"
    )
    shown = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 1024)
        shown.extend(data)
        return data

    pty.spawn([sys.executable, "-c", script], read)
    text = shown.decode()
    assert "fetching [bold]x[/] · " in text
    assert text.rstrip().endswith("done")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")
