"""``agentkit serve``: serve a run or a model over OpenAI's chat-completions protocol."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from agentkit.text import printable


def serve(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_MODEL", help="Run directory, Hugging Face model, `quickstart` or `smollm2`."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to override, as `section.key=value`.", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; default: the name of the directory.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="File with the tokens of clients; default: $AGENTKIT_SERVE_TOKEN, or a new one."),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Key of the TLS certificate.")] = None,
) -> None:
    """Serve a model to clients of OpenAI's API until Ctrl-C: `agentkit serve runs/frozen_lake`."""
    from agentkit.cli.heartbeat import watched
    from agentkit.serving import serve as serve_model

    with contextlib.ExitStack() as stack:
        stack.enter_context(watched(f"starting {target}"))

        def announce(line: str) -> None:
            stack.close()  # the progress ends
            typer.echo(printable(line))

        serve_model(
            target,
            overrides or [],
            name=name,
            host=host,
            port=port,
            token_file=token_file,
            certificate=certificate,
            key=key,
            announce=announce,
        )
