"""``agentkit run``: train what a configuration describes, or continue a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentkit.config import RunConfig
    from agentkit.results import RunResult


def run(
    config: Annotated[
        str | None, typer.Argument(help="YAML file; with --resume, the run's own is the default.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to override, as `section.key=value`.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Continue the run in this directory.", show_default=False)
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Continue the run in `dir` if it is unfinished; otherwise start a new one beside it."
        ),
    ] = False,
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve a page about the run until it ends, and print its address.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the resolved settings, and do not train.")
    ] = False,
) -> None:
    """Train an agent: `agentkit run examples/frozen_lake.yaml learner.lr=3e-4 rollout.async_ratio=1`."""
    import agentkit
    from agentkit.cli.views import make_view
    from agentkit.signals import STOPPED

    if again and resume is not None:
        raise typer.BadParameter("--again and --resume contradict: --again chooses the run itself")
    settings = _settings(config, overrides or [], resume)
    if dry_run:
        _print_checked(settings)
        return
    try:
        result = agentkit.train(
            settings, resume="auto" if again else resume is not None, view=make_view(), dashboard=dashboard
        )
    except KeyboardInterrupt as stopped:
        typer.echo(stopped, err=True)
        raise typer.Exit(STOPPED) from None
    for line in ending(result, settings):
        typer.echo(line)


def _settings(config: str | None, overrides: list[str], resume: Path | None) -> RunConfig:
    from agentkit.config_io import load_config
    from agentkit.run_directory import RunDirectory

    if config is not None and "=" in config and not Path(config).exists():
        config, overrides = None, [config, *overrides]
    if resume is None:
        if config is None:
            raise typer.BadParameter("give a configuration file, such as examples/frozen_lake.yaml, or --resume RUN")
        return load_config(config, overrides)
    place = f"dir={json.dumps(str(resume))}"
    return load_config(config or RunDirectory.open(resume).config_file, [place, *overrides])


def _print_checked(settings: RunConfig) -> None:
    from agentkit.cli.heartbeat import watched
    from agentkit.config_io import dump_config
    from agentkit.preflight import check, notes

    with watched("checking the settings"):
        check(settings, thorough=True)
    for note in notes(settings):
        typer.echo(f"note: {note}", err=True)
    typer.echo(dump_config(settings), nl=False)


def ending(result: RunResult, settings: RunConfig) -> list[str]:
    """Return the lines printed after a run: success rates, its directory, and the next commands."""
    path, here = result.directory, Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    lines = [""]
    if not result.finished:
        lines.append(f"stopped after {result.steps} of {settings.steps} steps, with a checkpoint")
    for label, rate in (
        ("demonstrations", result.demonstrated_success),
        ("success before", result.success_before),
        ("success after", result.success_after),
    ):
        if rate is not None:
            lines.append(f"{label:<15} {rate:6.1%}")
    lines += [f"{'run directory':<15} {path}", "", "next:"]
    if not result.finished:
        lines.append(f"  agentkit run --resume {path}")
    lines += [
        f"  agentkit dashboard {path}           # a page with its curves and episodes",
        f"  agentkit show {path}                # list its episodes; `--episode N` prints one",
        f"  agentkit eval {path} --episodes 256 # evaluate it on more tasks",
    ]
    if result.finished:
        lines.append(f"  agentkit run --resume {path} steps={2 * max(settings.steps, 1)} # continue training")
    return lines
