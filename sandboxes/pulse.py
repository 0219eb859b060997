"""Whether the other side of a connection lives: a ping, and patience.

Invariant: only silence counts. Every byte that arrives meanwhile is a sign of life, so that a large transfer condemns
nothing; and a period at whose end this process itself was late does not count, so a busy host causes no false verdict.
"""

from __future__ import annotations

import asyncio

from agentkit.sandboxes.backend import Channel

PERIOD = 1.0
"""Seconds without a sign of life that count as one miss."""
MISSES = 3
"""Misses in a row after which the other side counts as hung."""
_LATE = 0.1
"""Seconds by which the event loop may be late for a period to count."""
_LONGEST = 60.0
"""Seconds after which the other side counts as hung, however late the event loop is."""


async def pulse(channel: Channel, period: float = PERIOD, misses: int = MISSES) -> float | None:
    """Seconds until a sign of life; None if there was none for ``misses`` periods. Raises ``SandboxLost``."""
    loop = asyncio.get_running_loop()
    start, missed = loop.time(), 0
    ping = asyncio.ensure_future(channel.ping(_LONGEST))
    try:
        while missed < misses:
            due = loop.time() + period
            await asyncio.wait({ping}, timeout=period)
            if ping.done():
                return ping.result()
            if channel.heard > start:
                return loop.time() - start
            missed += loop.time() - due <= _LATE
    except asyncio.TimeoutError:
        pass
    finally:
        ping.cancel()
        await asyncio.wait({ping})
        if not ping.cancelled():
            ping.exception()  # seen: a caller that is cancelled does not look any more
    return None
