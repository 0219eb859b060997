"""The documentation page of the benchmark of distribution (pure), from results that are saved as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.distributed.goals import LARGEST_GROWTH, TOLERANCE, TURNS_PER_S

Row = Mapping[str, Any]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def training(rows: Sequence[Row]) -> str:
    """Return the step times of all arms (``training.Measured``), relative to one process with the same async ratio."""
    return table(
        ["run", "runs, steps", "step s", "wait", "train", "publish", "÷ one process", "range", "tokens per episode"],
        [_step(row, rows) for row in rows],
    )


def _step(row: Row, rows: Sequence[Row]) -> list[str]:
    parts = [median(value for run in row["runs"] for value in run[part]) for part in ("step", "wait", "train")]
    publish = median(value for run in row["runs"] for value in run["publish"])
    steps = sum(len(run["step"]) for run in row["runs"])
    cells = [row["arm"], f"{len(row['runs'])}, {steps}", *(f"{value:.2f}" for value in parts), f"{publish:.3f}"]
    base = next(other for other in rows if not other["ray"] and other["async_ratio"] == row["async_ratio"])
    ratios = [
        median(run["step"]) / median(against["step"]) for run, against in zip(row["runs"], base["runs"], strict=True)
    ]
    if row is base:
        cells += ["1", ""]
    else:
        cells += [f"{median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    return [*cells, f"{median(row['tokens']):.1f}"]


def weights(rows: Sequence[Row]) -> str:
    """Return the pauses of all updates (``weights.Updates``), and what the check of the tokens found."""
    columns = [
        "MB",
        "engines",
        "transport",
        "updates",
        "stage ms",
        "pause ms",
        "copy ms",
        "pause ÷ copy",
        "again ms",
        "in flight",
    ]
    cells = [
        [
            f"{row['megabytes']:.0f}",
            row["engines"],
            row["transport"],
            len(row["pause_s"]),
            *(f"{1e3 * median(row[name]):,.1f}" for name in ("stage_s", "pause_s", "copy_s")),
            f"{median(p / c for p, c in zip(row['pause_s'], row['copy_s'], strict=True)):,.1f}",
            f"{1e3 * median(row['again_s']):,.1f}",
            f"{min(row['in_flight'])} to {max(row['in_flight'])}",
        ]
        for row in rows
    ]
    tokens, worst = sum(row["tokens"] for row in rows), max(row["worst"] for row in rows)
    verdict = "every token has the right version" if worst < TOLERANCE else "**some tokens have a wrong version**"
    return (
        table(columns, cells)
        + f"\n{tokens:,} tokens were sampled during the updates, in answers of up to "
        + f"{max(row['versions'] for row in rows)} versions. The log-probability of each differs by at most "
        + f"{worst:.1e} from that of a forward pass under the weights of its version; under those of the next "
        + f"version, the median difference is {min(row['other'] for row in rows):.1e} or more: {verdict}.\n"
    )


def throughput(rows: Sequence[Row]) -> str:
    """Return the CPU per turn of each arm (``controller.Throughput``), and whether the goal is met."""
    cells, before = [], 0.0
    for row in rows:
        cost = median(row["controller_us"])
        actor = f"{median(row['engine_us']):.0f}" if row["engine_us"] else ""
        spread = f"{min(row['controller_us']):.0f} to {max(row['controller_us']):.0f}"
        added = f"{cost - before:+.0f}"
        cells.append([row["arm"], len(row["controller_us"]), f"{cost:.0f}", spread, added, f"{1e6 / cost:,.0f}", actor])
        before = cost
    columns = ["parts", "repetitions", "µs per turn", "range", "part adds", "turns/s per core", "µs in the actors"]
    rate = 1e6 / before
    verdict = "met" if rate >= TURNS_PER_S else f"**missed**: {rate / TURNS_PER_S:.0%} of it"
    return table(columns, cells) + f"\nThe goal of {TURNS_PER_S:,} turns/s per core with all parts is {verdict}.\n"


def growth(rows: Sequence[Row]) -> str:
    """Return the figures for each number of episodes in flight (``controller.Growth``)."""
    first = median(rows[0]["cpu_us"])
    cells = [
        [
            f"{row['episodes']:,}",
            len(row["cpu_us"]),
            f"{median(row['turns_per_s']):,.0f}",
            f"{median(row['cpu_us']):.0f}",
            f"{median(row['cpu_us']) / first:.2f}",
            f"{median(row['memory_kb']):,.0f}",
            *(f"{median(delay[index] for delay in row['delay_ms']):.1f}" for index in range(3)),
        ]
        for row in rows
    ]
    columns = [
        "episodes in flight", "repetitions", "turns/s", "CPU µs per turn", "÷ fewest", "memory kB per episode",
        "delay p50 ms", "p99", "max",
    ]  # fmt: skip
    largest = max(median(row["cpu_us"]) for row in rows) / first
    verdict = "met" if largest <= LARGEST_GROWTH else "**missed**"
    return (
        table(columns, cells)
        + f"\nA turn costs up to {largest:.2f} times as much as with the fewest episodes; the goal of at most "
        + f"{LARGEST_GROWTH} times is {verdict}.\n"
    )


def learning(rows: Sequence[Row]) -> str:
    """Return success before and after training for each seed and placement (``learning.Learned``), and their means."""
    cells = [
        [row["seed"], row["arm"], f"{row['before']:.1%}", f"{row['after']:.1%}", f"{row['step_s']:.2f}"]
        for row in sorted(rows, key=lambda row: (row["seed"], row["arm"]))
    ]
    for arm in ("cluster", "inline"):
        before, after = ([row[when] for row in rows if row["arm"] == arm] for when in ("before", "after"))
        cells.append(["mean", arm, f"{mean(before):.1%}", f"{mean(after):.1%}", ""])
    return table(["seed", "placement", "success before", "success after", "median step s"], cells)


PARTS = {
    "training": training,
    "learning": learning,
    "weights": weights,
    "throughput": throughput,
    "growth": growth,
}


def page(results: Mapping[str, Any]) -> str:
    """Return the documentation page.

    Args:
        results: for each part that was measured, ``machine`` (a sentence) and ``rows``.
    """
    shown = {
        name: f"{results[name]['machine']}\n\n{show(results[name]['rows'])}"
        if name in results
        else "Not measured yet.\n"
        for name, show in PARTS.items()
    }
    return PAGE.format(**shown)


PAGE = """# Distribution

`python -m benchmarks.distributed` writes this page; `--only PART` measures one part of it again. All processes run on
one machine without a GPU, on a Ray cluster that the benchmark starts. What these figures cannot show:

- Processes on one machine share its cores, its memory bandwidth and its caches. More engines and ranks than cores do
  not compute faster here; the comparison shows what distribution costs, not what it gains.
- There is no network and no GPU. Transfers between machines, NCCL and CUDA IPC are not measured.
- The models are small. Steps of large models take longer, so that the fixed costs of a step weigh less.
- Wall times depend on other programs. The load is stated for each part; the processor's clock is not controlled.

## Engines and ranks

FrozenLake (4 × 4), a small model that imitates the expert, the same episodes per step, one thread per engine and rank.
A step lasts from the request of a batch until its weights are served: *wait* for its episodes, *train* until the
weights are staged, *publish* to the engines. With async ratio 0 nothing overlaps; with 1, the next episodes run while
the learner trains. The figures are medians over all counted steps; the first step of each run is not counted. Runs of
all kinds take turns; a ratio compares the medians of two runs of one turn, and is the median over the turns, with its
range. Equal tokens per episode mean equal work.

{training}
## Learning

`examples/cluster.yaml` on a cluster of two simulated nodes, each with one engine and one learner rank, and the same
configuration in one process (inline). Both placements of a seed start from the same imitated model and train for 32
steps on the same tasks. Success is the share of solved evaluation tasks, which are not trained on.

{learning}
## Weight updates

Engines as actors behind the router; each computes four requests, and two wait. *Stage* is the time in which the
learner's process makes the weights available while the engines go on. *Pause* is the time from the router's `pause`
to the end of its `resume`, without the time of *copy*: copying the same bytes once, on one thread, while the engines
are paused. *Again* is the time from the end of the pause until all engines have sampled a token: before, they compute
the keys and values of unfinished answers under the new weights. Medians are over all updates of a row.

{weights}
## Throughput of the controller

1,000 episodes of 10 turns, no observation appears twice, and two engines that answer at once with prepared tokens. The
controller's CPU time includes the threads of Ray in its process, but not Ray's own processes. Each part adds to the
one before: the loop (with the gate, the environments, rendering, tokenisation and records), the router, and the channel
to two actors.

{throughput}
## Growth with the number of episodes

The same parts, with engines that answer after random times, so that all episodes together ask for about 1,000 turns/s
whatever their number. The delay is that of a timer of 10 ms in the controller's event loop. The memory is the growth of
the process, in the first repetition, since a warm-up with the fewest episodes.

{growth}"""
