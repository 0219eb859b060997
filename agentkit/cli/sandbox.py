"""`agentkit sandbox`: list, logs, exec, gc, build, serve.

Invariant: nothing is removed but what nobody owns any more, unless it is asked for by name; what runs a command gives
its output and its exit status on as they are. A terminal never interprets what a sandbox wrote: there, control
characters are shown as escapes.
"""

from __future__ import annotations

import asyncio
import codecs
import concurrent.futures
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeVar

import typer

from agentkit.errors import AgentkitError, ConfigError, SandboxLost
from agentkit.text import printable

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Backend, Process
    from agentkit.sandboxes.sweep import Owned, Report

T = TypeVar("T")

app = typer.Typer(help="Sandboxes: see, enter and clear away; build their images; serve them.", no_args_is_help=True)

HERE = ("docker", "local")
"""Back ends whose sandboxes lie on this machine; a remote one clears away by itself."""
_USER = "agentkit.user."
TIMED_OUT = 124
"""Exit status of a command that ran out of time: that of timeout(1)."""

Id = Annotated[str, typer.Argument(metavar="ID", help="Name of the sandbox, as `ls` shows it.")]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="docker, local, remote, …; all of this machine by default.")
]


@app.command("ls")
def list_sandboxes(
    backend: BackendName = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the sandboxes that there are, whoever made them."""
    rows = run(_rows(backend))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("sandbox", "backend", "state", "owner", "age", "time left", "labels", box=None)
    for row in rows:
        labels = " ".join(f"{key}={value}" for key, value in row["labels"].items())
        left = "" if row["time_left"] is None else _span(row["time_left"])
        cells = (row["id"], row["backend"], row["state"], row["owner"], _span(row["age"]), left, labels)
        table.add_row(*(escape(cell) for cell in cells))
    Console(soft_wrap=True).print(table if rows else "no sandboxes")


@app.command()
def logs(
    id: Id,
    tail: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 100,
    backend: BackendName = None,
) -> None:
    """Print what a sandbox's main process wrote (commands' output goes to whoever ran them)."""

    async def main() -> bytes:
        async with _home_of(id, backend) as home:
            return await home.logs(id, tail)

    _writer(sys.stdout)(run(main()))


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(
    id: Id,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Program and arguments.")],
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until its whole tree is killed.")] = 3600.0,
    cwd: Annotated[str | None, typer.Option(help="Directory; the sandbox's working directory by default.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Give it standard input.")] = False,
    backend: BackendName = None,
) -> None:
    """Run a command in a sandbox that runs, and end with its exit status."""
    raise typer.Exit(run(_execute(id, command, timeout, cwd, stdin, backend)))


@app.command()
def gc(
    everything: Annotated[bool, typer.Option("--all", help="Also those of owners that still run.")] = False,
    owner: Annotated[str | None, typer.Option(help="All of this owner: its process number, or its lease.")] = None,
    backend: BackendName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove the sandboxes whose owners have ended, or whose time has; with --all or --owner, others too."""
    if everything and owner:
        raise ConfigError("--all and --owner contradict: choose one")
    report = run(_gc(everything, owner, backend, yes))
    for id, reason in sorted(report.removed.items()):
        typer.echo(f"removed {id}: {reason}")
    for id, problem in sorted(report.failed.items()):
        typer.secho(f"{id}: {problem}", err=True, fg=typer.colors.RED)
    typer.echo(f"{len(report.removed)} removed, {len(report.kept)} in use")
    if report.failed:
        raise typer.Exit(1)


@app.command()
def build(
    base: Annotated[str | None, typer.Option(help="Image to build on; see docs/sandboxes.md.")] = None,
    only_base: Annotated[bool, typer.Option("--only-base", help="Not the image for environments.")] = False,
    package: Annotated[
        list[str] | None, typer.Option(help="An installed distribution to add, with what it requires; may be repeated.")
    ] = None,
) -> None:
    """Build the images: agentkit/base for commands, agentkit/env for environments."""
    from agentkit.sandboxes import images

    typer.echo(f"{images.DEFAULT_IMAGE}  {images.build_base(base)}")
    if not only_base:
        typer.echo(f"{images.ENV_IMAGE}  {images.build_environments(packages=package or ())}")


@app.command()
def serve(
    backend: Annotated[str, typer.Option(help="Where the sandboxes are made: docker or local.")] = "docker",
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine only with TLS.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token; else the environment, else one is made.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    policy: Annotated[
        Path | None, typer.Option(help="YAML with `policy` (what clients may ask for) and `limits`.")
    ] = None,
) -> None:
    """Give sandboxes to other machines over HTTP, until SIGINT or SIGTERM."""
    from agentkit.sandboxes.server import serve as serve_sandboxes

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


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end; SIGTERM ends it like Ctrl-C, with its clean-up."""

    async def main() -> T:
        task = asyncio.ensure_future(work)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


@contextlib.asynccontextmanager
async def _backends(name: str | None) -> AsyncIterator[list[Backend]]:
    """The back end of this name (which must answer), or those of this machine that do."""
    from agentkit.sandboxes import backends

    found: list[Backend] = []
    async with contextlib.AsyncExitStack() as stack:
        for each in (name,) if name else HERE:
            try:
                backend, release = await backends.borrow(each)
            except AgentkitError as error:
                if name:
                    raise
                typer.secho(f"{each}: {error}", err=True, dim=True)
            else:
                stack.push_async_callback(release)
                found.append(backend)
        yield found


@contextlib.asynccontextmanager
async def _home_of(id: str, name: str | None) -> AsyncIterator[Backend]:
    """The back end that has sandbox ``id``. Raises ``SandboxLost`` if none does."""
    async with _backends(name) as backends:
        for backend in backends:
            if (await backend.inspect(id)).state != "absent":
                yield backend
                return
    raise SandboxLost(f"there is no sandbox {id} here; `agentkit sandbox ls` shows those that there are")


async def _rows(name: str | None) -> list[dict[str, Any]]:
    from agentkit.sandboxes import lease, records
    from agentkit.sandboxes.sweep import owned

    rows = []
    async with _backends(name) as backends:
        for backend in backends:
            for each in await owned(backend):
                record = records.read(each.id)
                left = None if record is None or record.deadline is None else record.deadline - lease.now()
                prefix = "agentkit.user."
                labels = {
                    key[len(prefix) :]: text for key, text in each.observed.labels.items() if key.startswith(prefix)
                }
                rows.append(
                    {
                        "id": each.id,
                        "backend": backend.name,
                        "state": each.observed.state,
                        "owner": _owner(each),
                        "lease": each.run,
                        "age": time.time() - (each.observed.created or time.time()),
                        "time_left": left,
                        "labels": {key[len(_USER) :]: text for key, text in labels if key.startswith(_USER)},
                    }
                )
    return rows


async def _execute(id: str, command: list[str], timeout: float, cwd: str | None, stdin: bool, name: str | None) -> int:
    from agentkit.sandboxes import Sandbox

    async with _home_of(id, name) as home, await Sandbox.connect(id, backend=home) as box:
        process = await box.spawn(command, timeout=timeout, cwd=cwd)
        write = {"stdout": _writer(sys.stdout), "stderr": _writer(sys.stderr)}
        feeding = asyncio.ensure_future(_feed(process, stdin))
        try:
            async for stream, data in process:
                write[stream](data)
            result = await process.wait()
        except BaseException:
            await asyncio.shield(process.kill())
            raise
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
    if result.timed_out:
        typer.secho(f"the command ran longer than {timeout:g} s and was killed", err=True, fg=typer.colors.RED)
        return TIMED_OUT
    return 1 if result.exit_code is None else result.exit_code


async def _feed(process: Process, stdin: bool) -> None:
    """Give standard input on as it comes."""
    with contextlib.suppress(BrokenPipeError, SandboxLost):
        if stdin:
            arrived: asyncio.Queue[bytes] = asyncio.Queue(4)
            # A thread, since a file cannot be waited for; none of the loop's, which would be waited for at the end.
            threading.Thread(target=_read_stdin, args=(asyncio.get_running_loop(), arrived), daemon=True).start()
            while data := await arrived.get():
                await process.write(data)
        await process.close_stdin()


def _read_stdin(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[bytes]) -> None:
    with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):  # the command has ended, and the loop
        data = b"more"
        while data:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            asyncio.run_coroutine_threadsafe(arrived.put(data), loop).result()


async def _gc(everything: bool, owner: str | None, name: str | None, yes: bool) -> Report:
    from agentkit.sandboxes.sweep import Report, owned, remove_all, sweep

    report = Report()
    async with _backends(name) as backends:
        for backend in backends:
            if everything or owner:
                chosen = [
                    each for each in await owned(backend) if everything or owner in (each.run, str(each.owner.pid))
                ]
                if chosen and not yes:
                    for each in chosen:
                        typer.echo(f"{each.id}  {backend.name}  {each.observed.state}  {_owner(each)}")
                    typer.confirm(f"Remove these {len(chosen)}?", abort=True)
                report.add(await remove_all(backend, {each.id: "asked for" for each in chosen}))
            report.add(await sweep(backend))
    return report


def _owner(each: Owned) -> str:
    alive = each.owner.alive()
    if alive is None:
        return "elsewhere"
    return f"pid {each.owner.pid}" if alive else f"pid {each.owner.pid}, ended"


def _policy(path: Path | None) -> dict[str, Any]:
    """The server's rules from a file. Raises ``ConfigError``."""
    if path is None:
        return {}
    import yaml
    from pydantic import ValidationError

    from agentkit.sandboxes.server_policy import Limits, Policy

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or not content.keys() <= {"policy", "limits"}:
        raise ConfigError(f"{path} must have the keys policy and limits, and no others")
    try:
        made = {"policy": Policy, "limits": Limits}
        return {name: made[name].model_validate_json(json.dumps(values)) for name, values in content.items()}
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{path}: {problems}") from None


def _span(seconds: float) -> str:
    """A length of time for people: the largest unit of which there are at least two, else seconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _writer(stream: TextIO) -> Callable[[bytes], None]:
    """Write a sandbox's output to ``stream``: as it is, or to a terminal with its control characters escaped."""
    if not stream.isatty():
        return lambda data: _write(stream, data)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda data: _write(stream, printable(decoder.decode(data)).encode())


def _write(stream: TextIO, data: bytes) -> None:
    """Bytes as they are, whatever the stream's encoding."""
    stream.flush()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream.fileno(), view) :]
        except BlockingIOError:  # another program that shares the terminal made it so
            select.select([], [stream], [])
