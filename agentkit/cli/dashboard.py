"""``agentkit dashboard``: serve a page about runs, or write a static copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentkit.text import printable

_DEFAULT = Path("runs")


def dashboard(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_OR_FOLDER", help="Run directories, or folders that contain some.", show_default=str(_DEFAULT)
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on this machine; 0 chooses a free one.")] = 8686,
    token: Annotated[
        bool, typer.Option("--token/--no-token", help="Answer only requests with the token of the printed address.")
    ] = True,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a static copy to this new folder, which opens from a file, and end.",
            show_default=False,
        ),
    ] = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="With --export: complete episodes of each run and use, the newest.")
    ] = 100,
) -> None:
    """Serve a page about live and finished runs: `agentkit dashboard runs`."""
    from agentkit.cli.heartbeat import watched
    from agentkit.dashboard.export import export as write_copy
    from agentkit.dashboard.server import Dashboard

    if export is not None:
        with watched("exporting"):
            count = write_copy(places or [_DEFAULT], export, episodes=episodes)
        typer.echo(printable(f"{count} runs in {export / 'index.html'}"))
        return
    with Dashboard(places or [_DEFAULT], port=port, token=token) as server:
        typer.echo(f"{server.url}  (Ctrl-C ends it)")
        server.wait()
