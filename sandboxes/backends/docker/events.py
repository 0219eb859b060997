"""Event stream of a container engine, read by the event loop.

The SDK's own stream blocks a thread without a timeout; this one can be cancelled at any time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from agentkit.errors import EngineUnavailable, SandboxError
from agentkit.sandboxes.tasks import bounded


async def events(
    socket: str, api: str, filters: dict[str, Any], timeout: float
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of the engine from now on.

    Args:
        socket: path of the engine's socket.
        api: version of the engine's API, such as ``1.41``.
        filters: filters of the engine's API.
        timeout: seconds in which the engine must accept the request.

    Raises:
        EngineUnavailable: the engine does not answer, or the stream ended.
        SandboxError: the engine refuses the request.
    """
    transport = httpx.AsyncHTTPTransport(uds=socket)
    async with httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=None) as client:
        request = client.build_request("GET", f"/v{api}/events", params={"filters": json.dumps(filters)})
        try:
            response = await bounded(client.send(request, stream=True), timeout)
            if response.status_code != 200:
                text = (await bounded(response.aread(), timeout)).decode("utf-8", "replace")
                raise SandboxError(f"the engine refuses: {text[:1000]}", status=response.status_code)
            async for line in response.aiter_lines():
                yield json.loads(line)
        except asyncio.TimeoutError:
            raise EngineUnavailable(f"the engine at {socket} did not answer in {timeout:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise EngineUnavailable(f"the event stream of the engine at {socket} broke: {error}") from error
    raise EngineUnavailable(f"the event stream of the engine at {socket} ended")
