"""Looking names up, in few threads: the system's resolver blocks, and may hang for as long as its settings say.

Invariant: at most eight lookups run at once in this process, whoever asks; none keeps the process from ending.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket

from agentkit.sandboxes.allowlist import Address
from agentkit.sandboxes.lane import Lane


def _new_lane() -> Lane[None]:
    return Lane("agentkit-lookup", 8, lambda: None, lambda _: None)


_lane = _new_lane()


def _after_fork() -> None:
    global _lane
    _lane = _new_lane()  # A forked child has none of its parent's threads.


os.register_at_fork(after_in_child=_after_fork)


async def look_up(host: str, port: int) -> list[Address]:
    """The addresses that this machine's resolver gives for a name, best first, each once. Raises ``OSError``."""
    found = await asyncio.wrap_future(
        _lane.submit(lambda _: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP))
    )
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))
