"""`agentkit data`: list, fetch, verify, path.

Invariant: nothing is downloaded but by `fetch`, and what is printed on standard output is the answer alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from agentkit import data

app = typer.Typer(help="Data sets of environments: list, fetch, verify, and where they lie.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A data set, as `agentkit data list` names it.")]


@app.command("list")
def list_sets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show every data set, its licence, what it holds, and whether it is here."""
    rows = []
    for known in data.DATASETS.values():
        folder = data.find(known.name)
        rows.append(
            {
                "name": known.name,
                "title": known.title,
                "download": known.size,
                "licence": known.licence,
                "homepage": known.homepage,
                "counts": dict(known.counts),
                "splits": dict(known.splits),
                "addresses": [remote.url for remote in known.files],
                "checksums": {remote.path: remote.sha256 for remote in known.files},
                "folder": None if folder is None else str(folder),
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("data set", "download", "holds", "licence", "here", box=None)
    table.columns[0].no_wrap = True
    for row in rows:
        holds = ", ".join(f"{count:,} {what}" for what, count in row["counts"].items())
        own = data.DATASETS[row["name"]].generate is not None
        here = row["folder"] or ("made when needed" if own else "no")
        cells = (row["name"], row["download"], holds or row["title"], row["licence"], here)
        table.add_row(*(escape(cell) for cell in cells))
    Console(soft_wrap=True).print(table)


@app.command()
def fetch(
    name: Name,
    source: Annotated[
        Path | None, typer.Option("--from", help="An archive or a folder that holds it, instead of a download.")
    ] = None,
) -> None:
    """Bring a data set here: download (going on where an earlier attempt stopped), verify, unpack."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks = {}

        def show(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label)
            bars.update(tasks[label], completed=done, total=total)

        folder = data.fetch(name, source, show)
    unknown = [remote.path for remote in data.dataset(name).files if remote.sha256 is None]
    if source is None and unknown:
        typer.echo(f"no official checksum is known of {', '.join(unknown)}: checked by content", err=True)
    typer.echo(folder)


@app.command()
def verify(name: Name) -> None:
    """Check a data set that is here: every file as it came, and as many of everything as there must be."""
    problems = data.verify(name)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    counts = ", ".join(f"{count:,} {what}" for what, count in data.dataset(name).counts.items())
    typer.echo(f"{name} is complete{f': {counts}' if counts else ''}")


@app.command()
def path(name: Name) -> None:
    """Print the folder of a data set."""
    typer.echo(data.locate(name))
