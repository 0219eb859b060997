"""`agentkit sandbox drain`, `status` and `pull`: operate sandbox servers, and fetch images ahead."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from agentkit.cli.sandbox.backends import run
from agentkit.cli.sandbox.output import print_table, size
from agentkit.errors import AgentkitError

Servers = Annotated[
    list[str] | None,
    typer.Option("--server", metavar="URL", help="A sandbox server; may be repeated. Default: $AGENTKIT_SANDBOX_URL."),
]


def drain(
    server: Servers = None,
    off: Annotated[bool, typer.Option("--off", help="Accept new sandboxes again.")] = False,
) -> None:
    """Stop servers from creating sandboxes; running sandboxes continue. Needs the operator's token."""
    _report(run(_drain(server, not off)))


def status(
    server: Servers = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show whether sandbox servers accept sandboxes and how many they have; with the operator's token, per tenant."""
    states = run(_status(server))
    if as_json:
        typer.echo(json.dumps({url: _plain(state) for url, state in states.items()}, indent=2))
    _report(states, table=not as_json)


def pull(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Name of the image.")],
    backend: Annotated[str, typer.Option(help="docker, or remote for all sandbox servers.")] = "docker",
    server: Servers = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that it may take.")] = 600.0,
) -> None:
    """Fetch an image, or its newest version, into the engine of this machine or on all sandbox servers."""
    run(_pull(image, backend, server, timeout))
    typer.echo(image)


async def _pull(image: str, name: str, servers: list[str] | None, timeout: float) -> None:
    from agentkit.sandboxes import backends
    from agentkit.sandboxes.backends.remote.backend import RemoteBackend

    backend, release = await backends.borrow(RemoteBackend(servers) if servers else name)
    try:
        if servers:
            await backend.start()
        await backend.pull(image, timeout=timeout, refresh=True)
    finally:
        await release()
        if servers:
            await backend.close()


async def _drain(servers: list[str] | None, on: bool) -> dict[str, Any]:
    """Return the state of each server afterwards, or its error."""
    answers = await _ask(servers, "POST", "/v1/drain", json.dumps(on).encode())
    refused = {url: answer for url, answer in answers.items() if isinstance(answer, AgentkitError)}
    return await _status(servers) | refused


async def _status(servers: list[str] | None) -> dict[str, Any]:
    """Return the state of each server, or its error."""
    answers = await _ask(servers, "GET", "/v1/status")
    return {url: answer if isinstance(answer, AgentkitError) else json.loads(answer) for url, answer in answers.items()}


async def _ask(servers: list[str] | None, method: str, path: str, content: bytes = b"") -> dict[str, Any]:
    """Return the response of each server, or its error."""
    from agentkit.sandboxes.backends.remote.backend import RemoteBackend

    backend = RemoteBackend(servers)
    try:
        return dict(await backend.ask_all(method, path, content))
    finally:
        await backend.close()


def _report(states: dict[str, Any], *, table: bool = True) -> None:
    """Print the states of servers; exit with status 1 if one of them failed."""
    failed = {url: state for url, state in states.items() if isinstance(state, AgentkitError)}
    lines: list[tuple[str, ...]] = [("server", "state", "sandboxes", "of", "cpu", "memory", "disk")]
    tenants: list[tuple[str, ...]] = [("server", "tenant", "sandboxes", "snapshots", "cpus", "memory", "requests")]
    for url, state in states.items():
        if url in failed:
            continue
        host, (used, limit) = state["host"], state["load"]
        shares = [f"{host[name]:.0%}" for name in ("cpu", "memory", "disk")]
        lines.append((url, host["reason"] or "accepting", f"{used:g}", f"{limit:g}", *shares))
        for name, each in state.get("tenants", {}).items():
            counts = [f"{each[amount]:g}" for amount in ("sandboxes", "snapshots", "cpus")]
            tenants.append((url, name, *counts, size(int(each["memory"])), f"{each['requests']:g}"))
    if table and len(lines) > 1:
        print_table(lines)
    if table and len(tenants) > 1:
        typer.echo()
        print_table(tenants)
    for error in failed.values():
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
    if failed:
        raise typer.Exit(1)


def _plain(state: Any) -> Any:
    return {"error": str(state)} if isinstance(state, AgentkitError) else state
