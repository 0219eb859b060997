"""The documentation page of the benchmark (pure, except for the plot), from results that are saved as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.peers.games import HUNG, TIMEOUT_S, TURNS
from benchmarks.peers.settings import ASYNC, FLOOR, MULTI, SINGLE, SYNC, TRL, Setting

Rounds = Sequence[Mapping[str, Sequence[Mapping[str, float]]]]
"""For each round and arm: the counted steps."""
FASTER = {SINGLE.name: 2.0, MULTI.name: 5.0}
"""Goals: how much shorter a step of agentkit is than one of TRL."""
NEAR_FLOOR = 1.2
"""Alternative goal for single turns: time of a step relative to the floor."""
TOKENS = 0.05
"""Largest relative difference of the tokens per episode between arms."""
CURVES = {"none": "in the trainer's process", "docker": "in Docker sandboxes"}
"""Values of ``env.sandbox`` with which the curve is measured, and their descriptions."""


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def typical(rounds: Rounds, arm: str, figure: str) -> float:
    """Return the median over all counted steps of an arm."""
    return median(step[figure] for results in rounds for step in results[arm])


def ratios(rounds: Rounds, arm: str, base: str, figure: str) -> list[float]:
    """Return for each round: the median of ``base``, divided by that of ``arm``."""
    return [
        median(step[figure] for step in results[base]) / median(step[figure] for step in results[arm])
        for results in rounds
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def per_episode(rounds: Rounds, arm: str) -> float:
    """Return the mean number of generated tokens per episode of an arm."""
    steps = [step for results in rounds for step in results[arm]]
    return sum(step["tokens"] for step in steps) / sum(step["episodes"] for step in steps)


def table(rounds: Rounds) -> str:
    """Return the times of all arms, relative to TRL's."""
    cells = [
        [
            arm,
            f"{typical(rounds, arm, 'seconds'):.2f}",
            "1" if arm == TRL else _spread(ratios(rounds, arm, TRL, "seconds")),
            f"{typical(rounds, arm, 'cpu'):.2f}",
            "1" if arm == TRL else _spread(ratios(rounds, arm, TRL, "cpu")),
            f"{per_episode(rounds, arm):.1f}",
        ]
        for arm in rounds[0]
    ]
    return _table(["arm", "step s", "TRL ÷ arm", "CPU s", "TRL ÷ arm (CPU)", "tokens per episode"], cells)


def parts(rounds: Rounds) -> str:
    """Return where the time of a step goes: means over the counted steps."""
    cells = []
    for arm in rounds[0]:
        steps = [step for results in rounds for step in results[arm]]
        of = {name: mean(step[name] for step in steps) for name in steps[0]}
        rest = of["seconds"] - of["waiting"] - of["training"] - of["update"]
        names = ("seconds", "generation", "waiting", "training", "update")
        cells.append([arm, *(f"{of[name]:.3f}" for name in names), f"{rest:.3f}"])
    return _table(["arm", "step s", "generation", "wait", "training", "update", "rest"], cells)


def verdict(setting: Setting, rounds: Rounds) -> str:
    """Return whether the goals are met."""
    wanted, sentences = FASTER[setting.name], []
    for arm in (SYNC, ASYNC):
        of_rounds = ratios(rounds, arm, TRL, "seconds")
        found = median(of_rounds)
        if min(of_rounds) < 1 < max(of_rounds):
            cpu = median(ratios(rounds, arm, TRL, "cpu"))
            sentences.append(
                f"- {arm}: **no verdict**, because the rounds disagree on what is faster ({_spread(of_rounds)}): other "
                f"work disturbed them. TRL needs {cpu:.2f} times the CPU seconds; the goal is {wanted:g} times.\n"
            )
            continue
        sentence, goal, met = f"{arm}: {found:.2f} times as fast as TRL", f"{wanted:g} times", found >= wanted
        if FLOOR in rounds[0]:
            floor = 1 / median(ratios(rounds, arm, FLOOR, "seconds"))
            sentence += f", and {floor:.2f} times the time of the floor"
            goal += f", or at most {NEAR_FLOOR:g} times the floor"
            met |= floor <= NEAR_FLOOR
        sentence += f". The goal ({goal}) is {'met' if met else '**missed**'}"
        sentences.append(f"- {sentence}.\n")
    return "".join(sentences)


def problems(setting: Setting, rounds: Rounds) -> list[str]:
    """Return what makes the arms incomparable."""
    expected = per_episode(rounds, TRL)
    return [
        f"{setting.name}: {arm} generated {found:.1f} tokens per episode, and {TRL} {expected:.1f}"
        for arm in rounds[0]
        if abs((found := per_episode(rounds, arm)) / expected - 1) > TOKENS
    ]


def _setting(setting: Setting, results: Mapping[str, Any]) -> str:
    if setting.name not in results:
        return "Not measured yet.\n"
    found = results[setting.name]
    rounds: Rounds = found["rounds"]
    counted = sum(len(steps) for steps in rounds[0].values()) // len(rounds[0])
    head = f"{found['machine']} {len(rounds)} rounds with {counted} counted steps of each arm.\n\n"
    return f"{head}{table(rounds)}\n{verdict(setting, rounds)}\n{parts(rounds)}"


def _curves(results: Mapping[str, Any]) -> str:
    if "curves" not in results:
        return "Not measured yet.\n"
    curves: Mapping[str, Sequence[float]] = results["curves"]
    steps = min(map(len, curves.values()))
    tenth = max(1, steps // 10)
    cells = [
        [CURVES[sandbox], f"{mean(success[:tenth]):.0%}", f"{mean(success[-tenth:]):.0%}"]
        for sandbox, success in curves.items()
    ]
    return (
        "![Success of TRL in FrozenLake](peers_trl_frozen_lake.svg)\n\n"
        "Success in training, in steps of 32 episodes:\n\n"
        + _table(["environments", f"first {tenth} steps", f"last {tenth} of {steps} steps"], cells)
    )


def plot(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the success of each step, and its mean over ten steps.

    Args:
        curves: success by step, for each name of ``CURVES``.
        path: of the SVG file.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.4))
    for (sandbox, success), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        smooth = [mean(success[max(0, k - 9) : k + 1]) for k in range(len(success))]
        axis.plot(success, color=color, alpha=0.2)
        axis.plot(smooth, color=color, label=f"{CURVES[sandbox]}, mean of ten steps")
    axis.set(title="FrozenLake, TRL with RolloutFunc", xlabel="training step", ylabel="success", ylim=(0, 1.02))
    axis.legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def page(results: Mapping[str, Any]) -> str:
    """Return the documentation page.

    Args:
        results: for each setting that was measured, ``machine`` (a sentence) and ``rounds``; ``curves`` with
            the success of each step, for each name of ``CURVES``.
    """
    return PAGE.format(
        single=_setting(SINGLE, results),
        multi=_setting(MULTI, results),
        curves=_curves(results),
        single_episodes=SINGLE.episodes,
        single_tokens=SINGLE.max_tokens,
        multi_episodes=MULTI.episodes,
        group=SINGLE.group_size,
        turns=TURNS,
        hung=HUNG,
        timeout=TIMEOUT_S,
    )


PAGE = """# TRL side by side

`python -m benchmarks.peers` writes this page; `--only PART` measures one part of it again. The arms take turns in one
process and one run:

- **TRL**: `GRPOTrainer` of TRL 1.16 as its users write it, with `generate` of transformers and a reward function or
  an `environment_factory`.
- **TRL with RolloutFunc**: the same trainer with the [episodes of agentkit](../integrations/trl.md).
- **agentkit**: `agentkit.train` with the built-in engine, synchronous and with async ratio 1.
- **floor**: `generate` of transformers, then one forward and backward pass over the same tokens, without anything
  else.

All arms begin with the same weights of a model of 0.4 to 0.5 M parameters, in float32, and use AdamW with the same
settings, temperature 1, no KL term, groups of {group} episodes, one optimiser step per batch, and no gradient
checkpointing. torch computes with one thread for generating and one for training; only async ratio 1 uses both at the
same time. The ratios within a round count, not the seconds, because other work may run on the machine. CPU seconds, of
all threads of the process, depend less on other work. They do not show what overlaps.

The length of an answer follows from the weights: the single-turn model cannot end an answer, and the multi-turn model
knows its calls by heart. The table shows the tokens that were generated per episode.

In the second table of a setting, *wait* is the time until the episodes of a step are complete, of which *generation*
is the time in which answers are computed. *Training* is the forward and backward pass and the optimiser (with TRL
without clipping and the optimiser, which are in *rest*), *update* the transfer of the weights to the engine. With async
ratio 1, *generation* overlaps with *training* and is no part of *wait*. The floor has no optimiser.

## Single turn

Countdown: {single_episodes} episodes per step, answers of {single_tokens} tokens after prompts of about 105 tokens. In
training, agentkit computes the prompt of a group once (`learner.share_prefixes`), TRL and the floor once for each
episode, so agentkit can be faster than the floor.

{single}
## Several turns with slow steps

A game of {turns} turns with one tool: {multi_episodes} episodes per step. A step of the environment takes
50 ± 50 ms (normally distributed, at least 0), and {hung:.0%} of the steps never answer. Every arm gives up a step after
{timeout:g} s:

- **TRL** has no timeout: a tool that hangs stops its training for ever. The tool of this benchmark therefore waits
  {timeout:g} s in a thread of its own, ends the episode and gives it the reward None, which TRL leaves out. TRL calls
  the tools of a batch one after the other, also those that are coroutines (`GRPOTrainer._tool_call_loop`), and only
  then generates the next answers of the batch.
- **agentkit** has `env.step_timeout`. The episode is voided and repeated in a fresh environment, at most twice, while
  the others go on. So it trains on full groups, and generates more than it trains on.

{multi}
## A training with TRL

`examples/trl_rollout.py`: FrozenLake, from a model that imitated the expert; agentkit plays the episodes.

{curves}"""
