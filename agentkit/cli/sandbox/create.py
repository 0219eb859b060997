"""`agentkit sandbox create`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentkit.cli.sandbox.settings import pairs, read_yaml, validated_spec


def create(
    image: Annotated[str | None, typer.Option(help="Container image (agentkit/base).")] = None,
    ttl: Annotated[float | None, typer.Option(min=0.001, help="Seconds until it is removed (3600).")] = None,
    cpus: Annotated[float | None, typer.Option(help="Processors (1).")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory, such as 2g (1g).")] = None,
    network: Annotated[str | None, typer.Option(help="none or bridge (none).")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable; may be repeated.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label; may be repeated.")] = None,
    spec: Annotated[Path | None, typer.Option(help="YAML file of a SandboxSpec; options override it.")] = None,
    backend: Annotated[str, typer.Option(help="docker, local or remote.")] = "docker",
) -> None:
    """Create a sandbox and print its id. It runs until it is removed or its time to live ends."""
    from agentkit.cli.sandbox import owner
    from agentkit.sandboxes import backends

    fields = read_yaml(spec) if spec is not None else {}
    resources = {"cpus": cpus, "memory": memory}
    options = {"image": image, "ttl": ttl, "network": None if network is None else {"mode": network}}
    fields |= {name: value for name, value in options.items() if value is not None}
    for name, more in (
        ("resources", {key: value for key, value in resources.items() if value is not None}),
        ("env", pairs("--env", env)),
        ("labels", pairs("--label", label)),
    ):
        if more:
            known = fields.get(name) or {}
            fields[name] = {**known, **more} if isinstance(known, dict) else known
    made = validated_spec(fields, spec or "the options")
    backends.backend(backend)  # raises ConfigError before a process is started
    typer.echo(owner.start(made, backend))
