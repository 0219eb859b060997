"""`agentkit sandbox serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentkit.cli.sandbox.settings import read_yaml, validated
from agentkit.errors import ConfigError


def serve(
    backend: Annotated[str, typer.Option(help="Back end of the sandboxes: docker or local.")] = "docker",
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token; default: the environment, or a created one.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Key of the TLS certificate.")] = None,
    policy: Annotated[Path | None, typer.Option(help="YAML file with `policy` and `quota`.")] = None,
) -> None:
    """Serve sandboxes to other machines over HTTP until SIGINT or SIGTERM."""
    from agentkit.sandboxes.server.app import serve as serve_sandboxes

    rules = _policy(policy)
    serve_sandboxes(
        backend,
        host=host,
        port=port,
        token_file=token_file,
        certificate=certificate,
        key=key,
        announce=lambda url: typer.echo(f"serving {backend} sandboxes at {url}"),
        **rules,
    )


def _policy(path: Path | None) -> dict[str, Any]:
    """Read the policy and the quota of the server from a file. Raises ``ConfigError``."""
    if path is None:
        return {}
    content = read_yaml(path)
    if not content.keys() <= {"policy", "quota"}:
        raise ConfigError(f"{path} may have the keys policy and quota only")
    kinds = {"policy": "Policy", "quota": "Quota"}
    return {name: validated(kinds[name], values, path) for name, values in content.items()}
