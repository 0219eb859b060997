"""OpenEnv servers in threads of this process: agentkit's, and one that answers what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as serve_websockets
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from agentkit.integrations.openenv_server import OpenEnvServer


@contextlib.contextmanager
def _threaded(served: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Run a server in a thread with its own event loop, and yield its address."""
    started, ended = threading.Event(), asyncio.Event()
    address: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []
    failures: list[BaseException] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        async with served() as url:
            address.append(url)
            started.set()
            await ended.wait()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="openenv-server")
    thread.start()
    try:
        assert started.wait(60)
        if address:
            yield address[0]
    finally:
        if thread.is_alive():
            loops[0].call_soon_threadsafe(ended.set)
        thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@contextlib.contextmanager
def serving(id: str, kwargs: dict[str, Any] | None = None, **options: Any) -> Iterator[str]:
    """Serve an environment with agentkit's server on a free port."""

    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[str]:
        async with OpenEnvServer(id, kwargs, port=0, **options) as server:
            yield server.url

    with _threaded(served) as url:
        yield url


@contextlib.contextmanager
def answering(talk: Callable[[ServerConnection], Awaitable[None]], action: dict[str, Any]) -> Iterator[str]:
    """Serve ``action`` as the schema of actions; ``talk`` handles each WebSocket."""

    def describe(connection: ServerConnection, request: Request) -> Response | None:
        pages = {"/schema": {"action": action, "observation": {}, "state": {}}, "/metadata": {"description": "Echo."}}
        if request.path not in pages:
            return None
        return Response(
            200, "OK", Headers({"Content-Type": "application/json"}), json.dumps(pages[request.path]).encode()
        )

    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[str]:
        async with serve_websockets(talk, "127.0.0.1", 0, process_request=describe) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    with _threaded(served) as url:
        yield url
