"""``agentkit run``: train what a configuration describes, or go on with a run."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentkit.config import RunConfig
    from agentkit.run_directory import RunDirectory
    from agentkit.trainers.controller import RunSummary


def run(
    config: Annotated[
        str | None, typer.Argument(help="YAML file; with --resume the run's own by default.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that differ, as `section.key=value`.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with this run directory.", show_default=False)
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Resume the run in `dir` if it is unfinished, else start one beside it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved settings, then stop.")
    ] = False,
) -> None:
    """Train an agent: `agentkit run examples/frozen_lake.yaml learner.lr=3e-4 rollout.async_ratio=1`."""
    from agentkit.cli.heartbeat import watched
    from agentkit.cli.preflight import check, notes
    from agentkit.config_io import dump_config
    from agentkit.run_directory import RunDirectory

    if again and resume is not None:
        raise typer.BadParameter("--again and --resume contradict: --again finds the run to resume by itself")
    settings = _settings(config, overrides or [], resume)
    if dry_run:
        with watched("checking the settings"):
            check(settings, thorough=True)
        for note in notes(settings):
            typer.echo(f"note: {note}", err=True)
        typer.echo(dump_config(settings), nl=False)
        return
    check(settings)
    resumed = resume is not None
    if again:
        settings, resumed = place_again(settings)
        typer.echo(f"{'resuming' if resumed else 'starting'} the run in {settings.dir}")
    directory = RunDirectory.resume(settings.dir, settings) if resumed else RunDirectory.create(settings)
    if directory.set_aside is not None:
        typer.echo(f"{directory.path} held a run without a checkpoint; its records are in {directory.set_aside}")
    try:
        summary = _train(settings, directory, resumed)
    finally:
        directory.release()
    for line in ending(summary, settings):
        typer.echo(line)


def _settings(config: str | None, overrides: list[str], resume: Path | None) -> RunConfig:
    from agentkit.config_io import load_config
    from agentkit.run_directory import RunDirectory

    if config is not None and "=" in config and not Path(config).exists():
        config, overrides = None, [config, *overrides]
    if resume is None:
        if config is None:
            raise typer.BadParameter("name a configuration file, such as examples/frozen_lake.yaml, or --resume RUN")
        return load_config(config, overrides)
    place = f"dir={json.dumps(str(resume))}"
    return load_config(config or RunDirectory.open(resume).config_file, [place, *overrides])


def place_again(settings: RunConfig) -> tuple[RunConfig, bool]:
    """Where to run settings that may have run before, and whether to resume what is there.

    The place is the first of ``dir``, ``dir-2``, ``dir-3``, … that holds an unfinished run of the same settings, or no
    run that could be resumed. Returns the settings with that ``dir``.
    """
    from agentkit.run_directory import RunDirectory

    first = settings.dir
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        settings = settings.model_copy(update={"dir": path})
        directory = RunDirectory(path)
        if not directory.has_checkpoint():
            return settings, False
        if _unfinished(directory) and _same_settings(directory, settings):
            return settings, True
    raise AssertionError("unreachable")


def _unfinished(directory: RunDirectory) -> bool:
    from agentkit.jsonl import read_jsonl

    events = list(read_jsonl(directory.events_file))
    return not (events and events[-1]["event"] == "end" and events[-1]["finished"])


def _same_settings(directory: RunDirectory, settings: RunConfig) -> bool:
    from agentkit.errors import ConfigError
    from agentkit.run_directory import changes

    try:
        return not changes(directory.config(), settings)
    except ConfigError:  # It was made by a version with other settings.
        return False


def _train(settings: RunConfig, directory: RunDirectory, resume: bool) -> RunSummary:
    from agentkit.cli.signals import STOPPED, obeying_signals
    from agentkit.cli.views import make_view

    view = make_view()
    view.start(settings.steps, settings)
    try:
        view.message("loading …")
        from transformers.utils.logging import disable_progress_bar

        from agentkit.trainers import controller

        disable_progress_bar()  # The view shows the progress of the run; bars for every file saved would garble it.
        return asyncio.run(
            obeying_signals(
                lambda stop: controller.run(settings, directory, resume=resume, view=view, stop=stop), view.message
            )
        )
    except (asyncio.CancelledError, KeyboardInterrupt):
        view.stop()
        if directory.has_checkpoint():
            after = f"`agentkit run --resume {directory.path}` goes on from the last checkpoint"
        else:
            after = "there is no checkpoint yet; the same command starts anew"
        typer.echo(f"stopped; {after}", err=True)
        raise typer.Exit(STOPPED) from None
    finally:
        view.stop()


def ending(summary: RunSummary, settings: RunConfig) -> list[str]:
    """The last words of a run: what it achieved, where it is, what to do next."""
    path = summary.directory
    lines = [""]
    if not summary.finished:
        lines.append(f"stopped after {summary.steps} of {settings.steps} steps, with a checkpoint")
    for label, rate in (
        ("demonstrations", summary.demonstrated_success),
        ("success before", summary.success_before),
        ("success after", summary.success_after),
    ):
        if rate is not None:
            lines.append(f"{label:<15} {rate:6.1%}")
    lines += [f"{'run directory':<15} {path}", "", "next:"]
    if not summary.finished:
        lines.append(f"  agentkit run --resume {path}")
    lines += [
        f"  agentkit show {path}                # its episodes; `--episode N` prints one",
        f"  agentkit eval {path} --episodes 256 # measure it again, on more tasks",
    ]
    if summary.finished:
        lines.append(f"  agentkit run --resume {path} steps={2 * max(settings.steps, 1)} # train on")
    return lines
