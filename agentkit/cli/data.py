"""`agentkit data`: list, fetch, verify, path, swe-from-releases.

Invariant: nothing is downloaded but by `fetch`, and what is printed on standard output is the answer alone.
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
        Path | None,
        typer.Option("--from", help="An archive, folder or file that holds it, instead of a download."),
    ] = None,
) -> None:
    """Bring a data set here: download (going on where an earlier attempt stopped), verify, unpack."""
    with watched(f"fetching {name}"):
        folder = data.fetch(name, source)
    unknown = [remote.path for remote in data.dataset(name).files if remote.sha256 is None]
    if source is None and unknown:
        typer.echo(f"no official checksum is known of {', '.join(unknown)}: checked by content", err=True)
    typer.echo(folder)


@app.command()
def verify(name: Name) -> None:
    """Check a data set that is here: every file as it came, and as many of everything as there must be."""
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
    package: Annotated[str | None, typer.Argument(help="A package of the index that pip is configured with.")] = None,
    old: Annotated[str | None, typer.Argument(help="A version of it.")] = None,
    new: Annotated[str | None, typer.Argument(help="The version after that.")] = None,
    packages: Annotated[
        list[str] | None, typer.Option("--with", help="What it and its tests need besides pytest, as for pip.")
    ] = None,
    statement: Annotated[
        Path | None, typer.Option(help="A file with the issue's text, instead of what the change log says.")
    ] = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Make the tasks that agentkit knows to work.")] = False,
) -> None:
    """Make a SWE task of two consecutive releases, and its image. The release's own code runs in sandboxes only."""
    import asyncio

    from agentkit.envs.swebench.releases.build import Pair, build
    from agentkit.envs.swebench.releases.shipped import SHIPPED

    if shipped == (package is not None):
        raise ConfigError("name a package and two of its versions, or give --shipped")
    if package is None:
        pairs = SHIPPED
    elif old is None or new is None:
        raise ConfigError(f"which versions of {package}? agentkit data swe-from-releases {package} OLD NEW")
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
