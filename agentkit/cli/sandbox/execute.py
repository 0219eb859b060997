"""`agentkit sandbox exec` and `agentkit sandbox logs`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from agentkit.cli.sandbox.backends import BackendName, Id, home_of, run
from agentkit.cli.sandbox.output import writer
from agentkit.errors import ConfigError, SandboxLost

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Process

TIMED_OUT = 124
"""Exit status of a command that exceeded its timeout, as in timeout(1)."""


def logs(
    id: Id,
    tail: Annotated[int, typer.Option(min=1, help="Number of lines.")] = 100,
    backend: BackendName = None,
) -> None:
    """Print the last output of a sandbox's main process. Output of commands is not included."""

    async def main() -> bytes:
        async with home_of(id, backend) as home:
            return await home.logs(id, tail)

    writer(sys.stdout)(run(main()))


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


async def _execute(id: str, command: list[str], timeout: float, cwd: str | None, stdin: bool, name: str | None) -> int:
    from agentkit.sandboxes import Sandbox

    async with home_of(id, name, running=True) as home, await Sandbox.connect(id, backend=home) as box:
        process = await box.spawn(command, timeout=timeout, cwd=cwd)
        write = {"stdout": writer(sys.stdout), "stderr": writer(sys.stderr)}
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
