"""`agentkit sandbox rm` and `agentkit sandbox gc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentkit.cli.sandbox.backends import BackendName, chosen_backends, find, run
from agentkit.cli.sandbox.listing import owner_of
from agentkit.errors import AgentkitError, ConfigError

if TYPE_CHECKING:
    from agentkit.sandboxes.reaper.sweep import Report


def remove(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of sandboxes, from `ls`.")],
    backend: BackendName = None,
) -> None:
    """Remove sandboxes of any owner."""
    problems = run(_remove(ids, backend))
    for problem in problems:
        typer.secho(f"error: {problem}", err=True, fg=typer.colors.RED)
    if problems:
        raise typer.Exit(1)


def gc(
    everything: Annotated[bool, typer.Option("--all", help="Also sandboxes of running owners.")] = False,
    owner: Annotated[str | None, typer.Option(help="All sandboxes of this owner: a process id or a run.")] = None,
    backend: BackendName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove sandboxes whose owner or time to live has ended; with --all or --owner, others too."""
    if everything and owner:
        raise ConfigError("--all and --owner exclude each other; choose one")
    report = run(_gc(everything, owner, backend, yes))
    for id, reason in sorted(report.removed.items()):
        typer.echo(f"removed {id}: {reason}")
    for id, problem in sorted(report.failed.items()):
        typer.secho(f"{id}: {problem}", err=True, fg=typer.colors.RED)
    typer.echo(f"{len(report.removed)} removed, {len(report.kept)} in use")
    if report.failed:
        raise typer.Exit(1)


async def _remove(ids: list[str], name: str | None) -> list[str]:
    """Remove sandboxes; return the problems."""
    from agentkit.sandboxes.reaper.sweep import remove_all

    problems: list[str] = []
    async with chosen_backends(name) as backends:
        for id in dict.fromkeys(ids):
            try:
                home = await find(id, backends)
            except AgentkitError as error:
                problems.append(str(error))
                continue
            report = await remove_all(home, {id: "requested"})
            problems += [f"{id}: {problem}" for problem in report.failed.values()]
            for removed in report.removed:
                typer.echo(removed)
    return problems


async def _gc(everything: bool, owner: str | None, name: str | None, yes: bool) -> Report:
    from agentkit.sandboxes.reaper.sweep import Report, owned, remove_all, sweep

    report = Report()
    async with chosen_backends(name) as backends:
        for backend in backends:
            if everything or owner:
                chosen = [
                    each for each in await owned(backend) if everything or owner in (each.run, str(each.owner.pid))
                ]
                if chosen and not yes:
                    for each in chosen:
                        typer.echo(f"{each.id}  {backend.name}  {each.observed.state}  {owner_of(each)}")
                    typer.confirm(f"Remove these {len(chosen)}?", abort=True)
                report.add(await remove_all(backend, {each.id: "requested" for each in chosen}))
            report.add(await sweep(backend))
    return report
