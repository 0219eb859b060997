"""Which back ends and sandboxes a command concerns, and how its coroutine runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from agentkit.errors import AgentkitError, EngineUnavailable, InvalidTransition, SandboxLost

if TYPE_CHECKING:
    from agentkit.sandboxes.backend import Backend

T = TypeVar("T")

HERE = ("docker", "local")
"""Back ends of this machine; remote servers clean up themselves."""

Id = Annotated[str, typer.Argument(metavar="ID", help="Id of the sandbox, from `ls`.")]
BackendName = Annotated[
    str | None, typer.Option("--backend", help="docker, local or remote; default: docker and local.")
]


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
async def chosen_backends(name: str | None) -> AsyncIterator[list[Backend]]:
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
async def home_of(id: str, name: str | None, *, running: bool = False) -> AsyncIterator[Backend]:
    """Yield the back end of sandbox ``id``.

    Raises ``SandboxLost`` if there is none. With ``running``, also raises it if the sandbox has ended, and
    ``InvalidTransition`` if it is paused.
    """
    async with chosen_backends(name) as backends:
        home = await find(id, backends)
        if running and (state := (await home.inspect(id)).state) != "running":
            kind = InvalidTransition if state == "paused" else SandboxLost
            raise kind(f"sandbox {id} is {state} and cannot run commands")
        yield home


async def find(id: str, backends: list[Backend]) -> Backend:
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
