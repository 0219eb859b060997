"""``agentkit dashboard``: serve a page about runs, or write a static copy of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
) -> None:
    """Serve a page about live and finished runs: `agentkit dashboard runs`."""
    from agentkit.dashboard.server import Dashboard

    with Dashboard(places or [_DEFAULT], port=port, token=token) as server:
        typer.echo(f"{server.url}  (Ctrl-C ends it)")
        server.wait()
