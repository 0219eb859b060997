"""``agentkit plan``: where the roles of a run are placed, how much memory each needs, and how to split GPUs.

Invariant: nothing is started, and no weights are loaded or downloaded; the sizes come from the model's ``config.json``.
Rates that are not given are assumptions, and are printed as such.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from agentkit.errors import ConfigError

if TYPE_CHECKING:
    from agentkit.config import RunConfig
    from agentkit.trainers.planning.memory import Memory
    from agentkit.trainers.planning.throughput import Rates

_GENERATED = 5_000 * 7e9
"""Assumed tokens per second of one GPU with a full batch, times parameters of the model."""
_TRAINED = 400e12 / 6
"""The same for training: 400 TFLOP/s, and 6 floating-point operations per parameter and token."""
_ALONE = 1 / 100
"""Assumed seconds per token of a request that an engine computes alone."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan(
    config: Annotated[str, typer.Argument(help="YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to override, as `section.key=value`.", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=2, help="Recommend a split of this many GPUs.", show_default=False)
    ] = None,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Turns per episode; by default `env.max_turns`.", show_default=False)
    ] = None,
    answer: Annotated[
        int | None, typer.Option(min=1, help="Tokens per answer; by default `rollout.max_tokens`.", show_default=False)
    ] = None,
    env_seconds: Annotated[float, typer.Option(min=0, help="Seconds per environment step.")] = 0.0,
    longest: Annotated[
        float, typer.Option(min=1, help="Length of the longest episode, as a multiple of the mean.")
    ] = 1.0,
    engine_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Tokens per second that a GPU generates.", show_default=False)
    ] = None,
    learner_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Tokens per second that a GPU trains on.", show_default=False)
    ] = None,
) -> None:
    """Show placement and memory of a run: `agentkit plan examples/frozen_lake.yaml learner.max_tokens=8192`.

    `--gpus 40` also recommends how many of 40 GPUs engines and learner should get, and the async ratio.
    """
    from agentkit.config_io import load_config
    from agentkit.trainers.planning import memory
    from agentkit.trainers.planning.architecture import count, critic_architecture, read_architecture
    from agentkit.trainers.planning.throughput import Rates

    settings = load_config(config, overrides or [])
    policy = read_architecture(settings.model.path)
    critic = critic_architecture(settings, policy)
    trained = count(memory.adapters(policy, settings)) or count(policy.tensors)
    typer.echo(f"model: {count(policy.tensors):,} parameters, {trained:,} trained, {settings.model.dtype}\n")
    for line in placement(settings):
        typer.echo(line)
    learner, engine = memory.learner(settings, policy, critic), memory.engine(settings, policy)
    for name, need in (("learner rank", learner), ("engine process", engine)):
        typer.echo(f"\nmemory of one {name}")
        for line in amounts(need):
            typer.echo(line)
    typer.echo("\nThe allocator, the libraries and, per process on a GPU, 0.5 to 1 GiB of CUDA come on top.")
    if gpus is None:
        return
    turns = turns or settings.env.max_turns
    if turns is None:
        raise ConfigError("the number of turns per episode is not known: give --turns, or set env.max_turns")
    answer = answer or settings.rollout.max_tokens
    engine_rate = engine_rate or _GENERATED / count(policy.tensors)
    extra = 1 if settings.algorithm.credit == "none" else 4 / 3  # credit adds a forward pass, a third of the work
    learner_rate = learner_rate or _TRAINED / extra / count(policy.tensors)
    episodes = settings.rollout.groups * settings.rollout.group_size
    rates = Rates(
        generation=episodes * turns * answer / engine_rate,
        training=episodes * turns * answer / learner_rate,
        longest=longest * turns * (answer * _ALONE + env_seconds),
        turns=episodes * turns,
    )
    typer.echo(f"\nsplit of {gpus} GPUs for {episodes:,} episodes of {turns} turns of {answer} tokens")
    typer.echo(f"  per GPU: {engine_rate:,.0f} tokens/s generated, {learner_rate:,.0f} tokens/s trained on")
    typer.echo(f"  longest episode alone: {rates.longest:,.1f} s, at {1 / _ALONE:.0f} tokens/s")
    for line in recommendation(rates, gpus, engine_rate / answer):
        typer.echo(line)


def recommendation(rates: Rates, gpus: int, turns_per_gpu: float) -> Iterator[str]:
    """Yield the recommended split, the alternatives, and the load of the controller.

    Args:
        rates: what a training step needs.
        gpus: number of GPUs.
        turns_per_gpu: turns per second of one engine GPU.
    """
    from agentkit.trainers.planning import throughput

    chosen = throughput.recommend(rates, gpus)
    yield f"  {'all GPUs in turn, synchronous':<42} {throughput.colocated_s(rates, gpus):>10,.1f} s per step"
    for ratio in throughput.RATIOS:
        split = throughput.best(rates, gpus, ratio)
        name = f"engines {split.engines}, learner {split.learners}, async_ratio {ratio:g}"
        mark = "  recommended" if split == chosen else ""
        yield f"  {name:<42} {split.step_s:>10,.1f} s per step{mark}"
    load, limit = chosen.turns_per_s(rates) * throughput.CONTROLLER_S, 1 / throughput.CONTROLLER_S
    yield f"  controller: {chosen.turns_per_s(rates):,.0f} turns/s use {load:.0%} of one core"
    if load > 1:
        yield f"  The controller is the limit: one core handles {limit:,.0f} turns/s."
    yield f"  It would be the limit from {math.ceil(limit / turns_per_gpu):,} busy engine GPUs on."


def placement(settings: RunConfig) -> Iterator[str]:
    """Yield one line per role: number, place, threads."""
    yield f"{'role':<10} {'number':>6}  {'place':<28} {'threads':>7}"
    learner, engine = settings.learner, settings.engine
    cluster = settings.cluster
    place = "the process of the run" if cluster is None else f"actors, cluster {cluster.address}"
    engines = engine.replicas * engine.tensor_parallel
    unset = "all" if cluster is None else "1"  # Ray allows an actor as many threads as it has reserved CPUs
    for name, number, role in (("learner", learner.ranks, learner), ("engine", engines, engine)):
        yield f"{name:<10} {number:>6}  {place:<28} {role.threads or unset:>7}"


def amounts(need: Memory) -> Iterator[str]:
    """Yield one line per purpose, and the total."""
    for purpose, size in need.held.items():
        yield f"  {purpose:<30} {shown(size):>12}"
    for purpose, size in sorted(need.moments.items(), key=lambda item: -item[1]):
        yield f"  {purpose:<30} {shown(size):>12}  for a moment"
    yield f"  {'total, with the largest moment':<30} {shown(need.total):>12}"
    if need.host:
        yield f"  {'of it in host memory':<30} {shown(need.host):>12}"


def shown(size: float) -> str:
    """Return a size with its unit."""
    unit = 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:,.0f} {_UNITS[unit]}" if unit == 0 else f"{size:,.1f} {_UNITS[unit]}"
