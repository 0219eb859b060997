"""Evaluations from Python: ``agentkit.evaluate``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentkit import progress
from agentkit.config import RunConfig
from agentkit.config_io import load_config
from agentkit.errors import ConfigError
from agentkit.extras import require_training
from agentkit.preflight import check
from agentkit.records import EVALUATION
from agentkit.results import EvalResult
from agentkit.run_directory import RunDirectory
from agentkit.signals import run_blocking
from agentkit.store import Recorder
from agentkit.types import Trajectory

if TYPE_CHECKING:
    from agentkit.trainers.rollout.evaluation import OnEpisode
    from agentkit.trainers.rollout.parser import AnswerParser
    from agentkit.trainers.rollout.source import EnvSource


def evaluate(
    target: str | Path,
    *,
    env: str | None = None,
    episodes: int = 128,
    endpoint: str | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    on_episode: Callable[[Trajectory], object] | None = None,
) -> EvalResult:
    """Play evaluation tasks with a model, and return its success rate.

    It can be called from a script or a notebook. The seeds of the tasks begin at ``evaluation.first_seed``;
    training does not use them.

    Example:
        >>> agentkit.evaluate("runs/frozen_lake", episodes=256).success
        >>> agentkit.evaluate("Qwen/Qwen3-4B", env="Sokoban-v0")
        >>> agentkit.evaluate("my-model", env="Sokoban-v0", endpoint="http://localhost:8000/v1")

    Args:
        target: a run directory, a model directory, a model of the Hugging Face hub, ``"quickstart"``, ``"smollm2"``, or
            the model's name at ``endpoint``.
        env: the environment; by default that of the run.
        episodes: number of episodes.
        endpoint: URL of an OpenAI-compatible server that runs the model; None runs it here.
        overrides: settings that replace those of the run or the defaults, as ``"section.key=value"``.
        out: a new directory that records every episode, for ``agentkit show``; None records nothing.
        on_episode: called for each episode that ends. A voided one (its environment failed) may be tried again. If it
            raises, the evaluation is stopped and the exception is raised here.

    Returns:
        The success rate, means over the episodes, counts of failures, and the trajectories.

    Raises:
        MissingExtra: there is no ``endpoint``, and the extra ``train`` is not installed.
        ConfigError: a setting is wrong, or ``target`` is not a run directory and ``env`` is not given.
        EnvError: the environment failed in all episodes.
        AgentkitError: the engine or the endpoint failed.
    """
    if episodes < 1:
        raise ConfigError(f"episodes={episodes} must be at least 1")
    config = evaluation_config(target, env, overrides)
    if endpoint is None:
        require_training()
    elif config.agent is not None:
        raise ConfigError(
            "the run's agent asks the policy that runs here: leave --endpoint out (in Python: endpoint=), or add "
            "agent=null to play with the built-in loop"
        )
    check(config, model=endpoint is None)
    first = config.evaluation.first_seed
    seeds = range(first, first + episodes)
    with _recording(None if out is None else Path(out), config) as recorder:

        def ended(trajectory: Trajectory, reason: str) -> None:
            if recorder is not None:
                recorder.episode(0, trajectory, EVALUATION, reason)
            if on_episode is not None:
                on_episode(trajectory)

        result = run_blocking(lambda: _play(config, str(target), seeds, endpoint, out, ended))
        if recorder is not None:
            from agentkit.trainers.rollout.evaluation import evaluation_metrics

            recorder.metrics(0, evaluation_metrics(result))
    return result


def evaluation_config(target: str | Path, env: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the settings of an evaluation: those of the run ``target``, or the defaults for a model.

    Args:
        target: as in ``evaluate``.
        env: the environment; by default that of the run.
        overrides: settings that replace these, as ``"section.key=value"``.

    Raises:
        ConfigError: a setting is wrong, or ``target`` is not a run directory and ``env`` is not given.
    """
    path = Path(target)
    model = f"model.path={json.dumps(str(target))}"
    if (path / "config.yaml").is_file():
        directory = RunDirectory.open(path)
        if env is not None and env != directory.config().env.id:
            # The arguments of the run are for the environment of the run.
            overrides = [f"env={{id: {json.dumps(env)}}}", "evaluation.kwargs={}", *overrides]
        return load_config(directory.config_file, [model, *overrides])
    if env is None:
        raise ConfigError(
            f"{target} is not a run directory; add --env (in Python: env=), for example FrozenLake-v1 "
            "(`agentkit env list` shows all)"
        )
    return load_config({"env": {"id": env}}, [model, *overrides])


@contextlib.contextmanager
def _recording(out: Path | None, config: RunConfig) -> Iterator[Recorder | None]:
    if out is None:
        yield None
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out: {out} exists already; name a new directory")
    directory = RunDirectory.create(config.model_copy(update={"dir": out}))
    try:
        with Recorder(directory) as recorder:
            yield recorder
    finally:
        directory.release()


async def _play(
    config: RunConfig, model: str, seeds: range, endpoint: str | None, out: str | Path | None, on_episode: OnEpisode
) -> EvalResult:
    from agentkit.trainers.rollout.plugin import make_parser
    from agentkit.trainers.rollout.source import EnvSource
    from agentkit.trainers.rollout.tools import for_endpoint

    env = config.env.model_copy(update={"kwargs": {**config.env.kwargs, **config.evaluation.kwargs}})
    config = config.model_copy(update={"env": env})
    source = EnvSource.of(config.env)
    if endpoint is not None:
        parser = make_parser(config, source.actions_per_turn, for_endpoint(source.tools))
        return await _ask(config, parser, seeds, endpoint, model, on_episode)
    return await _generate(config, source, seeds, out, on_episode)


async def _ask(
    config: RunConfig, parser: AnswerParser, seeds: range, endpoint: str, model: str, on_episode: OnEpisode
) -> EvalResult:
    from agentkit.openai import ChatEndpoint
    from agentkit.trainers.rollout.evaluation import evaluate_endpoint

    async with ChatEndpoint(endpoint, model, connections=config.engine.max_batch) as client:
        temperature = config.evaluation.temperature
        return await evaluate_endpoint(config, client, parser, seeds, temperature=temperature, on_episode=on_episode)


async def _generate(
    config: RunConfig, source: EnvSource, seeds: range, out: str | Path | None, on_episode: OnEpisode
) -> EvalResult:
    from transformers.utils.logging import disable_progress_bar

    from agentkit.trainers.models.load import load_tokenizer
    from agentkit.trainers.roles import start_engine
    from agentkit.trainers.rollout.evaluation import evaluate
    from agentkit.trainers.rollout.plugin import make_parser
    from agentkit.trainers.rollout.renderer import make_renderer

    disable_progress_bar()
    with progress.work("loading the tokenizer"):
        tokenizer = load_tokenizer(config.model.path, config.model.chat_template)
        renderer = make_renderer(config.model, tokenizer, source.max_turns, source.tools)
    parser = make_parser(config, source.actions_per_turn, renderer.tools)
    if out is not None:
        tokenizer.save_pretrained(str(Path(out) / "tokenizer"))  # `agentkit show` decodes ids with it
    temperature = config.evaluation.temperature
    async with contextlib.AsyncExitStack() as stack:
        with progress.work("starting the engine"):
            engine = await stack.enter_async_context(start_engine(config))
        return await evaluate(config, engine, renderer, parser, seeds, temperature=temperature, on_episode=on_episode)
