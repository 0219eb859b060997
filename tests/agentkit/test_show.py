"""What `agentkit show` prints of an episode, of this and of older versions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentkit.cli.show import episode_lines, list_lines
from agentkit.cli.show_rhythm import bar, lines_of, rhythm_lines
from agentkit.config import AlgorithmConfig
from agentkit.dashboard.readings import Drawing
from agentkit.errors import CheckpointError
from agentkit.records import EpisodeRow
from agentkit.run_directory import RunDirectory
from agentkit.types import Group, Trajectory, Turn

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


def test_the_rhythm_of_an_episode_is_drawn_with_its_marks() -> None:
    from agentkit.trainers.algorithms.rhythm import factors, rhythm
    from agentkit.trainers.batch import flatten
    from agentkit.trainers.learner.credit import Heads

    answer = np.array([5] * 16 + [6], np.int32)
    turn = Turn(np.array([0, 1, 4], np.int32), answer, np.zeros(17, np.float32), ((0, 17),))
    batch = flatten([Group(0, 0, 0, [Trajectory(0, 0, "FrozenLake-v1", 7, 3, [turn])])])
    waad, fai_sums = np.full((2, 20), 2.0, np.float32)
    waad[:5], fai_sums[6] = 5.0, 9.0
    marks = rhythm(batch, waad, fai_sums, 0.4)  # WAAD falls after token 4; token 6 is looked at
    algorithm = AlgorithmConfig(credit="coupled")
    row, heads = replace(played()[0], outcome="terminated"), Heads([1, 2], [(1, 0)], [(2, 3)])
    drawing = Drawing(batch, marks, factors(marks, "coupled", 1.5), algorithm, heads, False, Path("model"))
    lines = lines_of(row, drawing, text_of)
    assert "  local 1.0; global 2.3" in lines
    assert any("classified on this episode" in line for line in lines)
    drawn = {line.split()[0]: line.split()[1:] for line in lines if line.endswith(("'Left'", "'<end>'"))}
    assert list(drawn) == [str(position) for position in range(3, 20)]
    assert [drawn[at][-3:] for at in ("4", "6")] == [["LI", "1.20", "'Left'"], ["AD", "1.30", "'Left'"]]
    assert drawn["19"][-3:] == ["-", "1.00", "'<end>'"]  # no later token, so no FAI


def test_bars() -> None:
    assert bar(10, 10) == bar(99, 10) == "█" * 12
    assert bar(5, 10).rstrip() == "█" * 6
    assert bar(0, 10) == bar(1, 0) == bar(float("nan"), 10) == " " * 12


def test_a_rhythm_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        rhythm_lines(RunDirectory(tmp_path), *played(), None)
