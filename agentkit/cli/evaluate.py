"""``agentkit eval``: measure a run, a model or an endpoint on tasks that are not trained on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentkit import progress
from agentkit.text import printable

if TYPE_CHECKING:
    from agentkit.config import RunConfig
    from agentkit.store import Recorder
    from agentkit.trainers.rollout.evaluation import EvalResult, OnEpisode
    from agentkit.trainers.rollout.parser import ActionParser
    from agentkit.types import Trajectory


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="Run directory, Hugging Face model, `quickstart`, or an endpoint's model name."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, as `section.key=value`.", show_default=False)
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment; a run's own by default.", show_default=False)] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 128,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this OpenAI-compatible server, such as http://localhost:8000/v1.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Record every episode in this new folder, for `agentkit show DIR`.", show_default=False
        ),
    ] = None,
) -> None:
    """Play evaluation tasks and report the success rate: `agentkit eval runs/frozen_lake --episodes 256`."""
    from agentkit.cli.heartbeat import watched
    from agentkit.cli.preflight import check
    from agentkit.cli.signals import STOPPED

    settings = evaluation_settings(target, env, overrides or [])
    seeds = range(settings.evaluation.first_seed, settings.evaluation.first_seed + episodes)
    check(settings, model=endpoint is None)
    typer.echo(printable(f"{settings.env.id}, {target}, {episodes} episodes from seed {seeds.start} …"))
    began = time.monotonic()
    try:
        with recording(out, settings) as records, watched(f"measuring {target}"):
            result = asyncio.run(_play(settings, target, seeds, endpoint, out, records))
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    for line in report(result, time.monotonic() - began):
        typer.echo(line)
    if out is not None:
        typer.echo(printable(f"records   {out}  (agentkit show {out})"))


@contextlib.contextmanager
def recording(out: Path | None, settings: RunConfig) -> Iterator[Recorder | None]:
    """A recorder that writes to ``out``, a new folder; None where nothing is to be recorded. Raises ``ConfigError``."""
    if out is None:
        yield None
        return
    from agentkit.errors import ConfigError
    from agentkit.run_directory import RunDirectory
    from agentkit.store import Recorder

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists already: name a new folder, since records are never mixed")
    directory = RunDirectory.create(settings.model_copy(update={"dir": out}))
    try:
        with Recorder(directory) as recorder:
            yield recorder
    finally:
        directory.release()


def evaluation_settings(target: str, env: str | None, overrides: list[str]) -> RunConfig:
    """The run's own settings, or the defaults for a bare model; ``env`` and ``overrides`` on top."""
    from agentkit.config_io import load_config, parse_config
    from agentkit.errors import ConfigError
    from agentkit.run_directory import RunDirectory

    path = Path(target)
    model = f"model.path={json.dumps(target)}"
    if (path / "config.yaml").is_file():
        directory = RunDirectory.open(path)
        if env is not None and env != directory.config().env.id:
            # Arguments of the one environment mean nothing to the other.
            overrides = [f"env={{id: {json.dumps(env)}}}", "evaluation.kwargs={}", *overrides]
        return load_config(directory.config_file, [model, *overrides])
    if env is None:
        raise ConfigError(
            f"{target} is no run directory, so that it names no environment; add --env, as in --env FrozenLake-v1 "
            "(`agentkit env list` shows all)"
        )
    return parse_config(f"env: {{id: {json.dumps(env)}}}", [model, *overrides], source="agentkit eval")


async def _play(
    settings: RunConfig, target: str, seeds: range, endpoint: str | None, out: Path | None, records: Recorder | None
) -> EvalResult:
    from agentkit import registry
    from agentkit.records import EVALUATION
    from agentkit.trainers.rollout.evaluation import evaluation_metrics
    from agentkit.trainers.rollout.parser import ActionParser

    measured = settings.evaluation
    env = settings.env.model_copy(update={"kwargs": {**settings.env.kwargs, **measured.kwargs}})
    settings = settings.model_copy(update={"env": env})
    parser = ActionParser(env.parser, env.actions_per_turn or registry.env_class(env.id).actions_per_turn)

    def on_episode(trajectory: Trajectory, reason: str) -> None:
        if records is not None:
            records.episode(0, trajectory, EVALUATION, reason)

    if endpoint is not None:
        result = await _ask(settings, parser, seeds, endpoint, target, on_episode)
    else:
        result = await _generate(settings, parser, seeds, on_episode, out)
    if records is not None:
        records.metrics(0, evaluation_metrics(result))
    return result


async def _ask(
    settings: RunConfig, parser: ActionParser, seeds: range, endpoint: str, model: str, on_episode: OnEpisode
) -> EvalResult:
    from agentkit.openai import ChatEndpoint
    from agentkit.trainers.rollout.evaluation import evaluate_endpoint

    async with ChatEndpoint(endpoint, model, connections=settings.engine.max_batch) as client:
        temperature = settings.evaluation.temperature
        return await evaluate_endpoint(settings, client, parser, seeds, temperature=temperature, on_episode=on_episode)


async def _generate(
    settings: RunConfig, parser: ActionParser, seeds: range, on_episode: OnEpisode, out: Path | None
) -> EvalResult:
    from transformers.utils.logging import disable_progress_bar

    from agentkit.trainers.models.load import load_tokenizer
    from agentkit.trainers.roles import place_engine
    from agentkit.trainers.rollout.evaluation import evaluate
    from agentkit.trainers.rollout.renderer import ChatRenderer

    disable_progress_bar()
    with progress.work("loading the tokenizer"):
        tokenizer = load_tokenizer(settings.model.path)
        renderer = ChatRenderer(tokenizer)
    if out is not None:
        tokenizer.save_pretrained(str(out / "tokenizer"))  # `agentkit show` decodes ids with it
    engine = await place_engine(settings)
    try:
        with progress.work("starting the engine"):
            await engine.start()
        temperature = settings.evaluation.temperature
        return await evaluate(settings, engine, renderer, parser, seeds, temperature=temperature, on_episode=on_episode)
    finally:
        await engine.close()


def report(result: EvalResult, seconds: float) -> list[str]:
    """The figures of an evaluation, the success rate with its 95 % interval."""
    low, high = wilson_interval(result.success, result.episodes)
    lines = [
        f"success   {result.success:.1%}  (95 % interval {low:.1%} to {high:.1%})",
        f"return    {result.return_mean:.3f}",
        f"turns     {result.turns_mean:.2f}",
        f"episodes  {result.episodes} in {seconds:.1f} s",
    ]
    if result.failures:
        lines.append(f"failures  {result.failures} episodes without a result: their environment failed")
    if result.voided:
        causes = ", ".join(f"{count} x {cause}" for cause, count in sorted(result.voided.items()))
        lines.append(f"voided    {sum(result.voided.values())} tries: {causes}")
    if result.policy_crashes:
        lines.append(f"crashed   {result.policy_crashes} episodes failed: the policy's code crashed its sandbox twice")
    return lines


def wilson_interval(rate: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927): it stays within [0, 1] and is right at rates near 0 and 1."""
    centre = rate + z * z / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
