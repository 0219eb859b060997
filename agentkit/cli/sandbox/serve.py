"""`agentkit sandbox serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentkit.extras import require_server


def serve(
    backend: Annotated[str, typer.Option(help="Back end of the sandboxes: docker or local.")] = "docker",
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token; default: the environment, or a created one.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Key of the TLS certificate.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the policy, quotas, tenants and images.")] = None,
    name: Annotated[str, typer.Option(help="Name of this server; default: the back end and the port.")] = "",
    keep: Annotated[
        float, typer.Option(min=0, help="Seconds for which sandboxes wait for a restarted server; 0: they end with it.")
    ] = 120.0,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Record the sandboxes and what happens to them in this folder, for `agentkit dashboard DIR`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve sandboxes to other machines over HTTP until SIGINT, which removes them, or SIGTERM, which keeps them."""
    require_server()
    from agentkit.sandboxes.server.app import serve as serve_sandboxes

    serve_sandboxes(
        backend,
        host=host,
        port=port,
        token_file=token_file,
        certificate=certificate,
        key=key,
        config=config,
        name=name,
        keep=keep,
        records=records,
        announce=lambda url: typer.echo(f"serving {backend} sandboxes at {url}"),
    )
