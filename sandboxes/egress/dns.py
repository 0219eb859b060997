"""Resolve host names in at most eight threads: the system's resolver blocks, and may hang for minutes."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

from agentkit.sandboxes.egress.allowlist import Address
from agentkit.sandboxes.threads import DaemonThreadPool

_threads = DaemonThreadPool("agentkit-dns", 8, lambda: None, lambda _: None)


async def look_up(host: str, port: int) -> list[Address]:
    """Return the addresses of a name in the resolver's order, without duplicates. Raises ``OSError``."""
    found = await asyncio.wrap_future(
        _threads.submit(lambda _: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP))
    )
    return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))
