"""`agentkit sandbox ls` and `agentkit sandbox stats`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkit.cli.sandbox.backends import BackendName, chosen_backends, find, run
from agentkit.cli.sandbox.output import print_table, size, span
from agentkit.errors import SandboxError

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Backend
    from agentkit.sandboxes.reaper.sweep import Owned
    from agentkit.sandboxes.types import Observed, Stats

_USER = "agentkit.user."
_STATS_SECONDS = 10.0


def stats(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Ids of sandboxes; default: all.")] = None,
    backend: BackendName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the memory, processor time, processes and disk space that sandboxes use."""
    rows = run(_stats(ids or [], backend))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    lines: list[tuple[str, ...]] = [
        ("sandbox", "backend", "state", "memory", "of", "cpu", "processes", "workspace", "of")
    ]
    for row in rows:
        sizes = [size(row[name]) for name in ("memory", "memory_limit", "workspace_used", "workspace_size")]
        cpu = "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.1f} s"
        processes = "" if row["processes"] is None else str(row["processes"])
        lines.append((row["id"], row["backend"], row["state"], sizes[0], sizes[1], cpu, processes, *sizes[2:]))
    print_table(lines)


def list_sandboxes(
    backend: BackendName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the sandboxes of all owners."""
    rows = run(_rows(backend))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    lines: list[tuple[str, ...]] = [("sandbox", "backend", "state", "owner", "age", "time left", "labels")]
    for row in rows:
        labels = " ".join(f"{key}={value}" for key, value in row["labels"].items())
        left = "" if row["time_left"] is None else span(row["time_left"])
        lines.append((row["id"], row["backend"], row["state"], row["owner"], span(row["age"]), left, labels))
    print_table(lines)


async def _stats(ids: list[str], name: str | None) -> list[dict[str, Any]]:
    from agentkit.sandboxes.reaper.sweep import owned

    async with chosen_backends(name) as backends:
        if ids:
            homes = [(await find(id, backends), id) for id in dict.fromkeys(ids)]
        else:
            homes = [(backend, each.id) for backend in backends for each in await owned(backend)]
        return list(await asyncio.gather(*[_row_of_stats(backend, id) for backend, id in homes]))


async def _row_of_stats(backend: Backend, id: str) -> dict[str, Any]:
    """Return the resources of one sandbox; None for each if it does not run or does not answer."""
    from agentkit.sandboxes.types import Stats

    used = Stats(None, None, None, None, None)
    state = (await backend.inspect(id)).state
    if state == "running":
        try:
            used = await asyncio.wait_for(_ask_for_stats(backend, id), _STATS_SECONDS)
        except (SandboxError, asyncio.TimeoutError):
            state = "silent"
    return {"id": id, "backend": backend.name, "state": state, **dataclasses.asdict(used)}


async def _ask_for_stats(backend: Backend, id: str) -> Stats:
    from agentkit.sandboxes import Sandbox

    async with Sandbox.connect(id, backend=backend) as box:
        return await box.stats()


async def _rows(name: str | None) -> list[dict[str, Any]]:
    from agentkit.sandboxes.reaper import heartbeat, records
    from agentkit.sandboxes.reaper.sweep import owned

    rows = []
    async with chosen_backends(name) as backends:
        for backend in backends:
            for each in await owned(backend):
                record = records.read(each.id)
                left = None if record is None or record.deadline is None else record.deadline - heartbeat.now()
                rows.append(
                    {
                        "id": each.id,
                        "backend": backend.name,
                        "state": each.observed.state,
                        "owner": owner_of(each),
                        "run": each.run,
                        "age": time.time() - (each.observed.created or time.time()),
                        "time_left": left,
                        "labels": labels_of(each.observed),
                    }
                )
    return rows


def labels_of(observed: Observed) -> dict[str, str]:
    """Return the labels that the user of a sandbox has given it."""
    return {key[len(_USER) :]: text for key, text in observed.labels.items() if key.startswith(_USER)}


def owner_of(each: Owned) -> str:
    alive = each.owner.alive()
    if alive is None:
        return "elsewhere"
    return f"pid {each.owner.pid}" if alive else f"pid {each.owner.pid}, ended"
