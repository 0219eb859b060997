"""`agentkit sandbox top`: hosts and sandboxes, live.

Invariant: names and labels, which programs choose, have their control characters escaped. The terminal is restored.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentkit.cli.sandbox.backends import BackendName, chosen_backends, run
from agentkit.cli.sandbox.output import print_table, size, span
from agentkit.errors import ConfigError
from agentkit.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from agentkit.cli.sandbox.sampling import HostRow, Sample, SandboxRow, TenantRow
    from agentkit.sandboxes.backend import Backend

_HOST_COLUMNS = ("host", "backend", "state", "cpu", "memory", "disk", "sandboxes")
_TENANT_COLUMNS = ("server", "tenant", "sandboxes", "snapshots", "cpus", "memory")
_SANDBOX_COLUMNS = ("sandbox", "host", "state", "owner", "age", "cpu", "memory", "processes", "labels")
_LEFT = frozenset({"host", "server", "tenant", "backend", "state", "sandbox", "owner", "labels"})


class Order(str, Enum):
    """What the sandboxes are sorted by: the largest first."""

    cpu = "cpu"
    memory = "memory"
    age = "age"


def top(
    backend: BackendName = None,
    server: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Sandbox server to show; may be repeated.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    sort: Annotated[Order, typer.Option(help="What to sort by, the largest first.")] = Order.cpu,
    once: Annotated[bool, typer.Option("--once", help="Print one table and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line for each refresh.")] = False,
) -> None:
    """Show hosts and sandboxes with the resources that they use, live. Keys: c, m, a to sort; q to quit."""
    if server and backend not in (None, "remote"):
        raise ConfigError(f"--server shows remote servers; drop --backend {backend}")
    run(_top(backend, server or [], interval, sort, once, as_json))


async def _top(
    backend: str | None, servers: list[str], interval: float, order: Order, once: bool, as_json: bool
) -> None:
    from agentkit.cli.sandbox.sampling import Sampler

    live = sys.stdout.isatty() and not once and not as_json
    async with _watched(backend, servers) as backends:
        sampler = Sampler(backends)
        try:
            await sampler.sample(interval)  # processors in use are known from the second sample on
            if live:
                await _show_live(sampler, interval, order)
                return
            while True:
                await asyncio.sleep(interval)
                sample = await sampler.sample(interval)
                _print_json(sample, order) if as_json else _print_plain(sample, order)
                if once:
                    return
        finally:
            await sampler.close()


@contextlib.asynccontextmanager
async def _watched(name: str | None, servers: list[str]) -> AsyncIterator[list[Backend]]:
    if not servers:
        async with chosen_backends(name) as backends:
            yield backends
        return
    from agentkit.sandboxes.backends.remote.backend import RemoteBackend

    remote = RemoteBackend(servers)
    await remote.start()
    try:
        yield [remote]
    finally:
        await remote.close()


async def _show_live(sampler: Any, interval: float, order: Order) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    state = {"order": order}
    pressed = asyncio.Event()
    quit = asyncio.Event()

    def on_key(key: str) -> None:
        for one in Order:
            if key == one.value[0]:
                state["order"] = one
        if key == "q":
            quit.set()
        pressed.set()

    with _keys(on_key), Live(console=console, screen=True, auto_refresh=False) as live:
        sampling = asyncio.ensure_future(sampler.sample(interval))
        sample = None
        try:
            while not quit.is_set():
                if sampling.done():
                    sample = sampling.result()
                    sampling = asyncio.ensure_future(_later(sampler, interval))
                if sample is not None:
                    live.update(screen(sample, state["order"], console.height), refresh=True)
                waiting = asyncio.ensure_future(pressed.wait())
                await asyncio.wait({sampling, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                pressed.clear()
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})


async def _later(sampler: Any, interval: float) -> Sample:
    await asyncio.sleep(interval)
    return await sampler.sample(interval)


@contextlib.contextmanager
def _keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_key`` for each key, if standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    loop.add_reader(number, lambda: on_key(sys.stdin.read(1)))
    try:
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def ordered(rows: Sequence[SandboxRow], order: Order) -> list[SandboxRow]:
    """Return the rows with the largest value first, unknown values last."""

    def key(row: SandboxRow) -> tuple[bool, float]:
        value = getattr(row, order.value)
        return value is None, -(value or 0)

    return sorted(rows, key=key)


def screen(sample: Sample, order: Order, height: int) -> RenderableType:
    """Return what a terminal of ``height`` lines shows of a sample."""
    from rich.console import Group
    from rich.text import Text

    problems = [Text(printable(text), style="red") for text in sample.problems]
    tenants = (
        [Text(), _table(_TENANT_COLUMNS, [_tenant_cells(row) for row in sample.tenants])] if sample.tenants else []
    )
    lines_of_tenants = len(sample.tenants) + 2 if sample.tenants else 0
    room = max(1, height - len(sample.hosts) - lines_of_tenants - len(problems) - 6)
    rows = ordered(sample.sandboxes, order)
    more = [Text(f"… and {len(rows) - room} more", style="dim")] if len(rows) > room else []
    title = f"{len(rows)} sandboxes, sorted by {order.value} (c: cpu, m: memory, a: age, q: quit)"
    return Group(
        _table(_HOST_COLUMNS, [_host_cells(row) for row in sample.hosts]),
        *tenants,
        *problems,
        Text(),
        Text(title, style="dim"),
        _table(_SANDBOX_COLUMNS, [_sandbox_cells(row) for row in rows[: room - len(more)]]),
        *more,
    )


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    for name in columns:
        # Labels are cut first if the terminal is narrow; ids and numbers stay complete.
        table.add_column(
            name,
            justify="left" if name in _LEFT else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if name == "labels" else max(len(cells[columns.index(name)]) for cells in (columns, *lines)),
        )
    for cells in lines:
        table.add_row(*(Text(printable(cell).replace("\n", " ")) for cell in cells))
    return table


def _print_plain(sample: Sample, order: Order) -> None:
    print_table([_HOST_COLUMNS, *(_host_cells(row) for row in sample.hosts)])
    if sample.tenants:
        typer.echo()
        print_table([_TENANT_COLUMNS, *(_tenant_cells(row) for row in sample.tenants)])
    for text in sample.problems:
        typer.echo(printable(text))
    typer.echo()
    print_table([_SANDBOX_COLUMNS, *(_sandbox_cells(row) for row in ordered(sample.sandboxes, order))])


def _print_json(sample: Sample, order: Order) -> None:
    content = dataclasses.asdict(sample) | {
        "sandboxes": [dataclasses.asdict(row) for row in ordered(sample.sandboxes, order)]
    }
    typer.echo(json.dumps(content))


def _host_cells(row: HostRow) -> tuple[str, ...]:
    number = str(row.sandboxes) if row.limit is None else f"{row.sandboxes}/{row.limit}"
    return (row.host, row.backend, row.state, *(_percent(share) for share in (row.cpu, row.memory, row.disk)), number)


def _tenant_cells(row: TenantRow) -> tuple[str, ...]:
    return (row.host, row.tenant, str(row.sandboxes), str(row.snapshots), f"{row.cpus:g}", size(row.memory))


def _sandbox_cells(row: SandboxRow) -> tuple[str, ...]:
    memory = size(row.memory) if row.memory_limit is None else f"{size(row.memory)} of {size(row.memory_limit)}"
    processes = "" if row.processes is None else str(row.processes)
    labels = " ".join(f"{key}={value}" for key, value in row.labels.items())
    return (
        row.id,
        row.host,
        row.state,
        row.owner,
        span(row.age),
        _percent(row.cpu),
        memory if row.memory is not None else "",
        processes,
        labels,
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
