"""`agentkit data`: list, fetch, verify, path, swe-from-releases.

Invariant: only `fetch` downloads. Standard output contains only the result.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentkit import data
from agentkit.cli.heartbeat import watched
from agentkit.errors import AgentkitError, ConfigError

app = typer.Typer(help="List, download, verify and locate the data sets of environments.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of a data set (`agentkit data list`).")]


@app.command("list")
def list_sets(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show all data sets: licence, content, and whether they are on this machine."""
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
    table = Table("data set", "download", "content", "licence", "location", box=None)
    table.columns[0].no_wrap = True
    for row in rows:
        holds = ", ".join(f"{count:,} {what}" for what, count in row["counts"].items())
        own = data.DATASETS[row["name"]].generate is not None
        here = row["folder"] or ("generated on use" if own else "not fetched")
        cells = (row["name"], row["download"], holds or row["title"], row["licence"], here)
        table.add_row(*(escape(cell) for cell in cells))
    Console(soft_wrap=True).print(table)


@app.command()
def fetch(
    name: Name,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Use this archive, folder or file instead of a download."),
    ] = None,
) -> None:
    """Download a data set (continuing an earlier download), verify it and unpack it."""
    with watched(f"fetching {name}"):
        folder = data.fetch(name, source)
    unknown = [remote.path for remote in data.dataset(name).files if remote.sha256 is None]
    if source is None and unknown:
        typer.echo(f"{', '.join(unknown)}: no official checksum is known; checked by content", err=True)
    typer.echo(folder)


@app.command()
def verify(name: Name) -> None:
    """Check a data set on this machine: checksums of all files, and counts."""
    with watched(f"verifying {name}"):
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


@app.command("swe-from-releases")
def swe_from_releases(
    package: Annotated[str | None, typer.Argument(help="A package in the index that pip uses.")] = None,
    old: Annotated[str | None, typer.Argument(help="The earlier version.")] = None,
    new: Annotated[str | None, typer.Argument(help="The next version.")] = None,
    packages: Annotated[
        list[str] | None,
        typer.Option("--with", help="A requirement of the package's tests besides pytest, as for pip. Repeatable."),
    ] = None,
    statement: Annotated[
        Path | None, typer.Option(help="A file with the text of the issue, instead of the change log.")
    ] = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Make the tasks that ship with agentkit.")] = False,
) -> None:
    """Make a SWE task and its image from two consecutive releases. Their code runs only in sandboxes."""
    import asyncio

    from agentkit.envs.swebench.releases.build_task import Pair, build
    from agentkit.envs.swebench.releases.release_list import SHIPPED

    if shipped == (package is not None):
        raise ConfigError("give a package and two of its versions, or --shipped")
    if package is None:
        pairs = SHIPPED
    elif old is None or new is None:
        raise ConfigError(f"{package}: two versions are needed; agentkit data swe-from-releases {package} OLD NEW")
    else:
        text = None if statement is None else statement.read_text(encoding="utf-8")
        known = next((pair for pair in SHIPPED if (pair.package, pair.old, pair.new) == (package, old, new)), None)
        pairs = (
            known
            if known and not packages and not text
            else Pair(package, old, new, tuple(packages or ()), statement=text),
        )
    failed = 0
    for pair in pairs:
        try:
            with watched(f"making {pair.id}"):
                task = asyncio.run(build(pair, lambda what, pair=pair: typer.echo(f"{pair.id}: {what}", err=True)))
        except AgentkitError as error:
            if len(pairs) == 1:
                raise
            failed += 1
            typer.echo(f"{pair.id}: {error}", err=True)
            continue
        row = task.row
        counts = f"{len(row['FAIL_TO_PASS'])} tests to fix, {len(row['PASS_TO_PASS'])} to keep"
        typer.echo(f"{task.id}  {task.image}  {counts}")
    if failed:
        raise typer.Exit(1)
