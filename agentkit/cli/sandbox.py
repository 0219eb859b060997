"""`agentkit sandbox`: create, list, run commands in, remove and serve sandboxes, and build their images.

Invariant: without an explicit id, owner or ``--all``, only sandboxes without a living owner are removed. ``exec``
passes on the output and the exit status of the command. Output to a terminal has its control characters escaped.
"""

from __future__ import annotations

import asyncio
import codecs
import concurrent.futures
import contextlib
import dataclasses
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

from agentkit.errors import (
    AgentkitError,
    ConfigError,
    EngineUnavailable,
    InvalidTransition,
    SandboxError,
    SandboxLost,
)
from agentkit.text import printable

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Backend, Process
    from agentkit.sandboxes.reaper.sweep import Owned, Report
    from agentkit.sandboxes.types import Stats

T = TypeVar("T")

app = typer.Typer(help="Create, list, use, remove and serve sandboxes, and build their images.", no_args_is_help=True)

HERE = ("docker", "local")
"""Back ends of this machine; remote servers clean up themselves."""
_USER = "agentkit.user."
_STATS_SECONDS = 10.0
TIMED_OUT = 124
"""Exit status of a command that exceeded its timeout, as in timeout(1)."""

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the sandbox, from `ls`.")]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="docker, local or remote; default: docker and local.")
]


@app.command()
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
    from agentkit.cli import sandbox_owner
    from agentkit.sandboxes import backends

    fields = _yaml(spec) if spec is not None else {}
    resources = {"cpus": cpus, "memory": memory}
    options = {"image": image, "ttl": ttl, "network": None if network is None else {"mode": network}}
    fields |= {name: value for name, value in options.items() if value is not None}
    for name, more in (
        ("resources", {key: value for key, value in resources.items() if value is not None}),
        ("env", _pairs("--env", env)),
        ("labels", _pairs("--label", label)),
    ):
        if more:
            known = fields.get(name) or {}
            fields[name] = {**known, **more} if isinstance(known, dict) else known
    made = _checked("SandboxSpec", fields, spec or "the options")
    backends.backend(backend)  # raises ConfigError before a process is started
    typer.echo(sandbox_owner.start(made, backend))


@app.command("rm")
def remove(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of sandboxes, from `ls`.")],
    backend: BackendName = None,
) -> None:
    """Remove sandboxes of any owner."""
    problems = run(_remove(ids, backend))
    for problem in problems:
        typer.secho(f"error: {problem}", err=True, fg=typer.colors.RED)
    if problems:
        raise typer.Exit(1)


@app.command()
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
        sizes = [_size(row[name]) for name in ("memory", "memory_limit", "workspace_used", "workspace_size")]
        cpu = "" if row["cpu_seconds"] is None else f"{row['cpu_seconds']:.1f} s"
        processes = "" if row["processes"] is None else str(row["processes"])
        lines.append((row["id"], row["backend"], row["state"], sizes[0], sizes[1], cpu, processes, *sizes[2:]))
    _print_table(lines)


@app.command("ls")
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
        left = "" if row["time_left"] is None else _span(row["time_left"])
        lines.append((row["id"], row["backend"], row["state"], row["owner"], _span(row["age"]), left, labels))
    _print_table(lines)


@app.command()
def logs(
    id: Id,
    tail: Annotated[int, typer.Option(min=1, help="Number of lines.")] = 100,
    backend: BackendName = None,
) -> None:
    """Print the last output of a sandbox's main process. Output of commands is not included."""

    async def main() -> bytes:
        async with _home_of(id, backend) as home:
            return await home.logs(id, tail)

    _writer(sys.stdout)(run(main()))


@app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def execute(
    id: Id,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Program and arguments.")],
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds until the command and its children are killed.")
    ] = 3600.0,
    cwd: Annotated[str | None, typer.Option(help="Working directory; default: that of the sandbox.")] = None,
    stdin: Annotated[bool, typer.Option("--stdin", "-i", help="Pass on standard input.")] = False,
    backend: BackendName = None,
) -> None:
    """Run a command in a sandbox and exit with its status. A `--` before the command is optional."""
    if command[0] == "--":
        command = command[1:]
    if not command:
        raise ConfigError("the command is missing: agentkit sandbox exec ID COMMAND...")
    raise typer.Exit(run(_execute(id, command, timeout, cwd, stdin, backend)))


@app.command()
def gc(
    everything: Annotated[bool, typer.Option("--all", help="Also sandboxes of running owners.")] = False,
    owner: Annotated[str | None, typer.Option(help="All sandboxes of this owner: a process id or a run.")] = None,
    backend: BackendName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove sandboxes whose owner or time to live has ended; with --all or --owner, others too."""
    if everything and owner:
        raise ConfigError("--all and --owner exclude each other; choose one")
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


@app.command()
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


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end; SIGTERM cancels it, like Ctrl-C."""

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
    """Yield the back end with this name, which must answer, or those of this machine that answer."""
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
async def _home_of(id: str, name: str | None, *, running: bool = False) -> AsyncIterator[Backend]:
    """Yield the back end of sandbox ``id``.

    Raises ``SandboxLost`` if there is none. With ``running``, also raises it if the sandbox has ended, and
    ``InvalidTransition`` if it is paused.
    """
    async with _backends(name) as backends:
        home = await _find(id, backends)
        if running and (state := (await home.inspect(id)).state) != "running":
            kind = InvalidTransition if state == "paused" else SandboxLost
            raise kind(f"sandbox {id} is {state} and cannot run commands")
        yield home


async def _find(id: str, backends: list[Backend]) -> Backend:
    """Return the back end of sandbox ``id``. Raises ``SandboxLost``, ``EngineUnavailable``."""
    from agentkit.sandboxes import paths

    problem: AgentkitError | None = None
    for backend in backends if paths.is_id(id) else ():
        try:
            if (await backend.inspect(id)).state != "absent":
                return backend
        except EngineUnavailable as error:
            problem = error
    raise problem or SandboxLost(f"there is no sandbox {id} on this machine; list them with `agentkit sandbox ls`")


async def _remove(ids: list[str], name: str | None) -> list[str]:
    """Remove sandboxes; return the problems."""
    from agentkit.sandboxes.reaper.sweep import remove_all

    problems: list[str] = []
    async with _backends(name) as backends:
        for id in dict.fromkeys(ids):
            try:
                home = await _find(id, backends)
            except AgentkitError as error:
                problems.append(str(error))
                continue
            report = await remove_all(home, {id: "requested"})
            problems += [f"{id}: {problem}" for problem in report.failed.values()]
            for removed in report.removed:
                typer.echo(removed)
    return problems


async def _stats(ids: list[str], name: str | None) -> list[dict[str, Any]]:
    from agentkit.sandboxes.reaper.sweep import owned

    async with _backends(name) as backends:
        if ids:
            homes = [(await _find(id, backends), id) for id in dict.fromkeys(ids)]
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
    async with _backends(name) as backends:
        for backend in backends:
            for each in await owned(backend):
                record = records.read(each.id)
                left = None if record is None or record.deadline is None else record.deadline - heartbeat.now()
                labels = each.observed.labels
                rows.append(
                    {
                        "id": each.id,
                        "backend": backend.name,
                        "state": each.observed.state,
                        "owner": _owner(each),
                        "run": each.run,
                        "age": time.time() - (each.observed.created or time.time()),
                        "time_left": left,
                        "labels": {key[len(_USER) :]: text for key, text in labels.items() if key.startswith(_USER)},
                    }
                )
    return rows


async def _execute(id: str, command: list[str], timeout: float, cwd: str | None, stdin: bool, name: str | None) -> int:
    from agentkit.sandboxes import Sandbox

    async with _home_of(id, name, running=True) as home, await Sandbox.connect(id, backend=home) as box:
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
    """Pass on standard input."""
    with contextlib.suppress(BrokenPipeError, SandboxLost):
        if stdin:
            arrived: asyncio.Queue[bytes] = asyncio.Queue(4)
            # A daemon thread: reading blocks, and the executor of the event loop would be waited for at the end.
            threading.Thread(target=_read_stdin, args=(asyncio.get_running_loop(), arrived), daemon=True).start()
            while data := await arrived.get():
                await process.write(data)
        await process.close_stdin()


def _read_stdin(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[bytes]) -> None:
    with contextlib.suppress(
        RuntimeError, concurrent.futures.CancelledError
    ):  # the command and the event loop have ended
        data = b"more"
        while data:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            asyncio.run_coroutine_threadsafe(arrived.put(data), loop).result()


async def _gc(everything: bool, owner: str | None, name: str | None, yes: bool) -> Report:
    from agentkit.sandboxes.reaper.sweep import Report, owned, remove_all, sweep

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
                report.add(await remove_all(backend, {each.id: "requested" for each in chosen}))
            report.add(await sweep(backend))
    return report


def _owner(each: Owned) -> str:
    alive = each.owner.alive()
    if alive is None:
        return "elsewhere"
    return f"pid {each.owner.pid}" if alive else f"pid {each.owner.pid}, ended"


def _policy(path: Path | None) -> dict[str, Any]:
    """Read the policy and the quota of the server from a file. Raises ``ConfigError``."""
    if path is None:
        return {}
    content = _yaml(path)
    if not content.keys() <= {"policy", "quota"}:
        raise ConfigError(f"{path} may have the keys policy and quota only")
    kinds = {"policy": "Policy", "quota": "Quota"}
    return {name: _checked(kinds[name], values, path) for name, values in content.items()}


def _yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a file. Raises ``ConfigError``."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a mapping")
    return content


def _checked(kind: str, values: object, origin: object) -> Any:
    """Validate ``values`` as a ``SandboxSpec``, ``Policy`` or ``Quota``. Raises ``ConfigError``."""
    from pydantic import ValidationError

    from agentkit.sandboxes.server.policy import Policy, Quota
    from agentkit.sandboxes.spec import SandboxSpec

    kinds = {"SandboxSpec": SandboxSpec, "Policy": Policy, "Quota": Quota}
    try:
        return kinds[kind].model_validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ConfigError(f"{origin}: {problems}") from None


def _pairs(option: str, words: list[str] | None) -> dict[str, str]:
    """Parse ``NAME=VALUE`` arguments. Raises ``ConfigError``."""
    pairs = [word.partition("=") for word in words or ()]
    for name, sign, _ in pairs:
        if not name or not sign:
            raise ConfigError(f"{option} needs NAME=VALUE, not {name!r}")
    return {name: value for name, _, value in pairs}


def _print_table(lines: list[tuple[str, ...]]) -> None:
    """Print lines below their header in columns, at full width."""
    cells = [[printable(cell).replace("\n", " ") for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells if len(lines) > 1 else [["no sandboxes"]]:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip())


def _size(count: int | None) -> str:
    """Format a number of bytes."""
    if count is None:
        return ""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _span(seconds: float) -> str:
    """Format a duration in the largest unit of which there are at least two, else in seconds."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _writer(stream: TextIO) -> Callable[[bytes], None]:
    """Return a function that writes output to ``stream``; a terminal gets control characters escaped."""
    if not stream.isatty():
        return lambda data: _write(stream, data)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return lambda data: _write(stream, printable(decoder.decode(data)).encode())


def _write(stream: TextIO, data: bytes) -> None:
    """Write bytes, independent of the encoding of the stream."""
    stream.flush()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(stream.fileno(), view) :]
        except BlockingIOError:  # another program made the shared terminal non-blocking
            select.select([], [stream], [])
