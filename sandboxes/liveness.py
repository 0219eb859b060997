"""Detect a dead connection with a ping.

Invariant: only silence counts. Every byte that arrives is a sign of life, so a large transfer never looks dead. A
period at whose end this process was late, or the host of the sandbox was silent, is not counted, so a busy host causes
no false result.
"""

from __future__ import annotations

import asyncio

from agentkit.sandboxes.backend import Channel
from agentkit.sandboxes.tasks import retrieve, stopped

PERIOD = 1.0
"""Seconds without a sign of life that count as one miss."""
MISSES = 3
"""Misses in a row after which the peer counts as hung."""
_LATE = 0.1
"""A period counts only if the event loop is at most this many seconds late."""
_LONGEST = 60.0
"""Seconds after which the peer counts as hung even if the event loop is late."""


async def probe_channel(channel: Channel, period: float = PERIOD, misses: int = MISSES) -> float | None:
    """Return the seconds until a sign of life, or None after ``misses`` silent periods. Raises ``SandboxLost``."""
    loop = asyncio.get_running_loop()
    start, missed = loop.time(), 0
    ping = asyncio.ensure_future(channel.ping(_LONGEST))
    ping.add_done_callback(retrieve)
    try:
        while missed < misses:
            due = loop.time() + period
            await asyncio.wait({ping}, timeout=period)
            if ping.done():
                return ping.result()
            if channel.heard > start:
                return loop.time() - start
            missed += loop.time() - due <= _LATE and not channel.host_silent
    except asyncio.TimeoutError:
        pass
    finally:
        await stopped({ping})
    return None
