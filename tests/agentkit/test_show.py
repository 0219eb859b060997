"""What `agentkit show` prints of an episode, of this and of older versions."""

from __future__ import annotations

import numpy as np

from agentkit.cli.show import episode_lines, list_lines
from agentkit.records import EpisodeRow
from agentkit.types import Trajectory, Turn

PIECES = ["<sys>", "Be good.", "<user>", "a map", "<assistant>", "Left", "<end>"]


def text_of(ids: list[int]) -> str:
    return "".join(PIECES[id] for id in ids)


def played(system: str = "", reason: str = "") -> tuple[EpisodeRow, Trajectory]:
    turn = Turn(
        np.array([0, 1, 2, 3, 4], np.int32),
        np.array([5, 6], np.int32),
        np.full(2, -0.5, np.float32),
        ((3, 2),),
        observation="a map",
        response="Left",
        actions=("Left",),
    )
    trajectory = Trajectory(0, 0, "FrozenLake-v1", 7, 3, turns=[turn], reason=reason, system=system)
    row = EpisodeRow(1, 4, "eval", "", 0, 0, 0, "FrozenLake-v1", 7, 3, "voided", reason, False, 0.0, 1, 7, 0.1)
    return row, trajectory


def test_the_system_message_is_printed() -> None:
    lines = episode_lines(*played(system="Be good.\n[bold]\x1b[2J"), None)
    start = lines.index("system message:")
    assert lines[start + 1 : start + 3] == ["  Be good.", r"  [bold]\x1b[2J"]


def test_records_without_a_system_message_show_the_start_of_the_prompt() -> None:
    lines = episode_lines(*played(), text_of)
    start = next(number for number, line in enumerate(lines) if line.startswith("start of the prompt"))
    assert lines[start + 1] == "  <sys>Be good.<user>"
    assert not any("system message" in line for line in episode_lines(*played(), None))


def test_a_list_shows_long_errors_in_one_short_line() -> None:
    reason = "EnvCrashed: first\nsecond \x1b[31m" + "x" * 500
    line = list_lines([played(reason=reason)[0]])[1]
    assert "EnvCrashed: first second \\x1b[31mxxx" in line
    assert line.endswith("x…")
    assert len(line) < 300
    assert reason.splitlines()[0] in "\n".join(episode_lines(*played(reason=reason), None))
