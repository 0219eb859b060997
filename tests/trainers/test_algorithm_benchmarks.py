"""The benchmarks of algorithms: their cases, and their pages from given results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from requiring import require

from agentkit import plugins
from agentkit.config_io import load_config
from benchmarks.algorithms.methods import COMPARISONS, METHODS, TASKS
from benchmarks.algorithms.report import T_QUANTILES, Result, interval, tables, write_report
from benchmarks.algorithms.training import HERE
from benchmarks.offpolicy.__main__ import CONFIG, LOSSES

GRPO = Result("frozen_lake", "grpo", 0, 0.5, 0.8, 2.0, 1.0, 100, 10, None, [0.5, 0.7])
PPO = Result("frozen_lake", "ppo", 0, 0.5, 0.85, 4.0, 2.0, 200, 40, 0.5, [0.5, 0.8])


def runs(result: Result, *after: float) -> list[Result]:
    return [replace(result, seed=seed, after=success) for seed, success in enumerate(after)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_a_valid_configuration_of_every_task(task: str, method: str) -> None:
    load_config(HERE / f"{task}.yaml", METHODS[method])


@pytest.mark.parametrize("loss", plugins.LOSS.built_in)
def test_every_loss_is_trained_on_stale_data(loss: str) -> None:
    assert loss in LOSSES
    load_config(CONFIG, [f"algorithm.loss={loss}", "rollout.async_ratio=2.0"])


def test_each_method_is_in_a_comparison_that_contains_its_baseline() -> None:
    assert {method for comparison in COMPARISONS for method in comparison.methods} == set(METHODS)
    assert all(comparison.baseline in comparison.methods for comparison in COMPARISONS)


def test_differences_are_between_runs_of_one_seed() -> None:
    rows = tables([*runs(GRPO, 0.7, 0.8, 0.9), *runs(PPO, 0.75, 0.85, 0.95)]).splitlines()
    (grpo,) = [row for row in rows if row.startswith("| grpo |") and "-5.0 (-5.0 to -5.0)" in row]
    assert "80.0% (70.0% to 90.0%, n=3)" in grpo
    assert grpo.endswith("| – | 0.50 | 0.50 | 0.50 | 0.25 |")


def test_seeds_without_a_run_of_the_baseline_are_not_compared() -> None:
    table = tables([*runs(GRPO, 0.7, 0.8), *runs(PPO, 0.9)])
    assert "| -20.0 |" in table


def test_the_interval_is_that_of_student() -> None:
    """The example of Student (1908), table of additional hours of sleep: mean 1.58, sd 1.23, t = 4.06, n = 10."""
    gained = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert interval(gained) == "+1.6 (+0.7 to +2.5)"
    assert interval([1.0]) == "+1.0"
    assert interval([]) == "–"
    assert list(T_QUANTILES) == list(range(2, 11))


@pytest.mark.slow
def test_the_page_shows_every_table_with_its_plot(tmp_path: Path) -> None:
    require("matplotlib", "pip install 'agentkit-rl[benchmarks]'")
    coupled = replace(GRPO, task="countdown", method="coupled_credit")
    write_report([*runs(GRPO, 0.7), *runs(PPO, 0.9), *runs(replace(GRPO, task="countdown"), 0.2), coupled], tmp_path)
    page = (tmp_path / "algorithms.md").read_text()
    plots = {path.name for path in tmp_path.glob("*.svg")}
    assert plots
    assert all(f"({name})" in page for name in plots)
    assert page.index(TASKS["frozen_lake"]) < page.index(TASKS["countdown"])
