"""`agentkit sandbox build`."""

from __future__ import annotations

from typing import Annotated

import typer


def build(
    base: Annotated[str | None, typer.Option(help="Image to build on (python:3.11-slim).")] = None,
    only_base: Annotated[bool, typer.Option("--only-base", help="Build agentkit/base only.")] = False,
    package: Annotated[
        list[str] | None, typer.Option(help="Installed distribution to add, with its requirements; may be repeated.")
    ] = None,
) -> None:
    """Build the images agentkit/base (for commands) and agentkit/env (for environments)."""
    from agentkit.cli.heartbeat import watched
    from agentkit.envs.isolation.image import ENV_IMAGE, build_env_image
    from agentkit.sandboxes.images.build import DEFAULT_IMAGE, build_base

    with watched(f"building {DEFAULT_IMAGE}"):
        built = build_base(base)
    typer.echo(f"{DEFAULT_IMAGE}  {built}")
    if not only_base:
        with watched(f"building {ENV_IMAGE}"):
            built = build_env_image(packages=package or ())
        typer.echo(f"{ENV_IMAGE}  {built}")
