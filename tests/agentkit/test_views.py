"""Views show the events of a run, and restore the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentkit import progress
from agentkit.cli.views import LiveView, PlainView, Progression
from agentkit.config_io import parse_config
from agentkit.results import wilson_interval

CONFIG = parse_config("env: {id: FrozenLake-v1}")
METRICS = {
    "rollout/success": 0.25,
    "rollout/return_mean": -0.5,
    "engine/tokens_per_s": 12345.6,
    "staleness/mean": 0.5,
    "staleness/max": 1.0,
    "gate/dropped": 2.0,
    "env/failures": 1.0,
    "policy/loss": float("nan"),
}


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView()
    view.start(CONFIG.model_copy(update={"steps": 3}))
    view.stage("training")
    view.stage("training")
    view.step(1, METRICS)
    view.step(2, METRICS)
    view.message("a [message] with brackets")
    view.stop()
    view.stop()
    output = capsys.readouterr().out
    assert output.count("— training") == 1
    assert "page: agentkit dashboard" in output
    assert "step 1/3  success 25.0%  return -0.500  tokens/s 12,346  staleness 0.50 (max 1)" in output
    assert "dropped 4" in output
    assert "failures 2" in output
    assert "left" in output.splitlines()[-2]
    assert "a [message] with brackets" in output


def test_the_live_view_restores_the_terminal() -> None:
    screen = io.StringIO()
    view = LiveView(Console(file=screen, force_terminal=True, width=100))
    view.start(CONFIG.model_copy(update={"steps": 10}))
    view.stage("training")
    view.step(4, METRICS)
    view.message("a [message] with brackets")
    view.stop()
    view.stop()
    output = screen.getvalue()
    for part in ("25.0%", "12,346", "a [message] with brackets", "4/10", "agentkit dashboard"):
        assert part in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")


HOSTILE = "[bold]x[/] [/] [Next >] :smile: \x1b]0;title\x07\x1b[31mred"
SHOWN = "[bold]x[/] [/] [Next >] :smile: \\x1b]0;title\\x07\\x1b[31mred"


def test_markup_in_texts_is_shown_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config("env: {id: FrozenLake-v1}", ["dir='runs/[bold]a[/]'", "model.path='[/]:smile:'", "steps=10"])
    screen = io.StringIO()
    for view in (LiveView(Console(file=screen, force_terminal=True, width=200)), PlainView()):
        view.start(config)
        view.message(HOSTILE)
        with progress.work(HOSTILE, 4):
            view.step(4, METRICS)
            if isinstance(view, LiveView):
                assert view._live is not None
                view._live.refresh()
        view.stop()
    for output in (screen.getvalue(), capsys.readouterr().out):
        assert "runs/[bold]a[/]" in output
        assert "[/]:smile:" in output
        assert SHOWN in output
        assert "\x1b]" not in output
        assert "\x1b[31m" not in output
        assert "[dim]" not in output
    assert f"{SHOWN} 0/4" in screen.getvalue()


def test_the_time_left_counts_from_the_first_step_seen() -> None:
    progression = Progression(100)
    assert progression.seconds_left() is None
    progression.reached(51, 1000.0)  # resumed: the fifty steps before cost this process nothing
    assert progression.seconds_left() is None
    progression.reached(61, 1020.0)
    assert progression.seconds_left() == pytest.approx(2.0 * 39)


def test_the_interval_of_a_success_rate() -> None:
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-4)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=5e-4)
