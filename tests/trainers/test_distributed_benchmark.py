"""The benchmark of distribution: its page from given figures, and its short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from requiring import require

from benchmarks.distributed.__main__ import problems
from benchmarks.distributed.page import page

ROOT = Path(__file__).parents[2]


def steps(*seconds: float) -> dict[str, list[float]]:
    """One run whose steps wait and train half the time each."""
    halves = [second / 2 for second in seconds]
    return {"step": list(seconds), "wait": halves, "train": halves, "publish": [0.004] * len(seconds)}


def update(**changes: Any) -> dict[str, Any]:
    row = {"transport": "object store", "engines": 2, "megabytes": 50.4, "tokens": 800, "versions": 3}
    times = {
        "stage_s": [0.1, 0.2, 0.3],
        "pause_s": [0.02, 0.06, 0.04],
        "copy_s": [0.02, 0.02, 0.02],
        "again_s": [0.2, 0.1, 0.3],
    }
    return {**row, **times, "in_flight": [8, 7, 4], "worst": 2e-5, "other": 0.1, **changes}


def load(episodes: int, cpu_us: list[float], memory_kb: float, longest_ms: float) -> dict[str, Any]:
    delays = [[0.1, 1.0, longest_ms]] * len(cpu_us)
    rates = [990.0, 1010.0] * len(cpu_us)
    figures = {"turns_per_s": rates, "cpu_us": cpu_us, "memory_kb": [memory_kb], "delay_ms": delays}
    return {"episodes": episodes, **figures}


RESULTS: dict[str, Any] = {
    "training": {
        "machine": "Two CPUs.",
        "rows": [
            {"arm": "one", "ray": False, "async_ratio": 0, "runs": [steps(1, 2, 3), steps(2, 2)], "tokens": [50, 50]},
            {"arm": "two", "ray": True, "async_ratio": 0, "runs": [steps(3, 3, 3), steps(5, 5)], "tokens": [50, 52]},
        ],
    },
    "learning": {
        "machine": "Two CPUs.",
        "rows": [
            {"arm": arm, "seed": seed, "before": 0.5, "after": after, "step_s": 2.0}
            for seed, inline, cluster in ((0, 0.8, 0.9), (1, 0.6, 0.7))
            for arm, after in (("inline", inline), ("cluster", cluster))
        ],
    },
    "weights": {"machine": "Two CPUs.", "rows": [update()]},
    "throughput": {
        "machine": "Two CPUs.",
        "rows": [
            {"arm": "loop", "controller_us": [120, 100, 110], "engine_us": []},
            {"arm": "all", "controller_us": [180, 160, 150], "engine_us": [50, 60, 70]},
        ],
    },
    "growth": {"machine": "Two CPUs.", "rows": [load(104, [200, 200], 60, 5), load(5000, [300], 50, 9)]},
}


def test_the_page_shows_medians_ratios_and_missed_goals() -> None:
    text = page(RESULTS)
    assert "| one | 2, 5 | 2.00 | 1.00 | 1.00 | 0.004 | 1 |  | 50.0 |" in text
    assert "| two | 2, 5 | 3.00 | 1.50 | 1.50 | 0.004 | 2.00 | 1.50 to 2.50 | 51.0 |" in text
    assert "| 1 | cluster | 50.0% | 70.0% | 2.00 |" in text
    assert "| mean | inline | 50.0% | 70.0% |  |" in text
    assert "| 50 | 2 | object store | 3 | 200.0 | 40.0 | 20.0 | 2.0 | 200.0 | 4 to 8 |" in text
    assert "every token has the right version" in text
    assert "| all | 3 | 160 | 150 to 180 | +50 | 6,250 | 60 |" in text
    assert "5,000 turns/s per core with all parts is met" in text
    assert "| 5,000 | 1 | 1,000 | 300 | 1.50 | 50 | 0.1 | 1.0 | 9.0 |" in text
    assert "at most 1.25 times is **missed**" in text
    slow = [{**RESULTS["throughput"]["rows"][0], "controller_us": [400.0]}]
    assert "**missed**: 50% of it" in page({"throughput": {"machine": "", "rows": slow}})
    assert page({}).count("Not measured yet.") == 5


def test_tokens_of_a_wrong_version_fail_the_benchmark() -> None:
    assert problems("weights", [update()]) == []
    assert len(problems("weights", [update(worst=0.01), update(in_flight=[4, 0]), update(other=1e-4)])) == 3
    assert "**some tokens have a wrong version**" in page({"weights": {"machine": "", "rows": [update(worst=0.01)]}})


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_short_form_measures_turns() -> None:
    require("ray", "pip install 'agentkit-rl[ray]'")
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.distributed", "--short", "--only", "throughput"],
        cwd=ROOT, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    assert "loop, router, channel" in result.stdout
