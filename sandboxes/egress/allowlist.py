"""Decide which names, addresses and ports a sandbox may reach. Pure functions; nothing is resolved here.

Invariant: unlisted hosts are refused, and unlisted names are not resolved, since a lookup itself sends data out. A
listed name does not open the host's networks: a non-public address is reachable only through a listed range inside the
same special range (``0.0.0.0/0`` opens neither loopback nor the metadata service; ``127.0.0.0/8`` and ``10.1.0.0/16``
open what they name).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Range = ipaddress.IPv4Network | ipaddress.IPv6Network

DEFAULT_PORTS = frozenset({80, 443})

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMERIC = re.compile(r"\d+|0x[0-9a-f]*")
_SPECIAL: tuple[Range, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
        "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "::1/128", "fc00::/7", "fe80::/10", "ff00::/8", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20",
    )
)  # fmt: skip
"""Ranges outside the public internet (IANA); 168.63.129.16 is a cloud's metadata service."""
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 addresses in IPv6-only networks (NAT64)."""


@dataclass(frozen=True)
class Domain:
    """One entry of ``Network.domains``: a name, or with ``below`` every name below it; ``port`` None: 80 and 443."""

    name: str
    below: bool
    port: int | None

    def __str__(self) -> str:
        return f"{'*.' if self.below else ''}{self.name}{'' if self.port is None else f':{self.port}'}"

    def matches(self, name: str, port: int) -> bool:
        """Return whether the entry allows ``name`` (a result of ``host_name``) and ``port``."""
        named = name.endswith(f".{self.name}") if self.below else name == self.name
        return named and _port_matches(self.port, port)


@dataclass(frozen=True)
class AddressRange:
    """One entry of ``Network.cidrs``; ``port`` None: 80 and 443."""

    range: Range
    port: int | None

    def __str__(self) -> str:
        if self.port is None:
            return str(self.range)
        return f"{self.range}:{self.port}" if self.range.version == 4 else f"[{self.range}]:{self.port}"


def _port_matches(listed: int | None, port: int) -> bool:
    return port in DEFAULT_PORTS if listed is None else port == listed


class AllowList:
    """The allow-list of one ``Network``. Raises ``ValueError`` for a malformed entry."""

    def __init__(self, domains: Iterable[str], cidrs: Iterable[str]) -> None:
        self._domains = tuple(parse_domain(entry) for entry in domains)
        self._ranges = tuple(parse_range(entry) for entry in cidrs)

    def names(self, name: str, port: int) -> bool:
        """Return whether ``name`` may be resolved, and connected to at public addresses."""
        return any(domain.matches(name, port) for domain in self._domains)

    def lists(self, address: Address, port: int) -> bool:
        """Return whether a range contains this address: it may then be connected to by address."""
        return any(_contains(entry.range, address) and _port_matches(entry.port, port) for entry in self._ranges)

    def opens(self, address: Address, port: int) -> bool:
        """Return whether a listed name may resolve to this address: it is public, or a range contains it."""
        return is_public(address) or self.lists(address, port)


def _contains(range: Range, address: Address) -> bool:
    if address.version != range.version or address not in range:
        return False
    if is_public(address):
        return True
    around = [special for special in _SPECIAL if special.version == address.version and address in special]
    # IPv6 addresses that are neither public nor listed above belong to no special range.
    return any(range.subnet_of(special) for special in around) or (  # pyright: ignore[reportArgumentType]
        not around and address.version == 6 and range.prefixlen >= 8
    )


def is_public(address: Address) -> bool:
    """Return whether an address (a result of ``plain``) belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _TRANSLATED:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _PUBLIC_V6:
            return False
    return not any(address.version == special.version and address in special for special in _SPECIAL)


def plain(address: Address) -> Address:
    """Convert IPv4 in IPv6 form (``::ffff:127.0.0.1``) to IPv4, which the kernel connects to."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_host(text: str) -> str | Address:
    """Parse the host of a request: an address (IPv6 in brackets) or a name, returned in canonical form.

    Raises ``ValueError`` for anything else, such as other numeric forms of an address.
    """
    if text.startswith("["):
        if not text.endswith("]") or "%" in text:
            raise ValueError("not an IPv6 address")
        return plain(ipaddress.IPv6Address(text[1:-1]))
    if _NUMERIC.fullmatch(text.removesuffix(".").rpartition(".")[2].lower()):
        return ipaddress.IPv4Address(text)
    if not text.isascii():
        raise ValueError("the name is not in ASCII form")
    return host_name(text)


def _in_ascii(text: str) -> str:
    import idna  # imported here: images of environments do not include it

    return idna.encode(text, uts46=True).decode("ascii")


def host_name(text: str) -> str:
    """Return the canonical form of a name: ASCII (IDNA), lower case, without a final dot.

    Raises ``ValueError`` for an invalid name.
    """
    try:
        name = text if text.isascii() else _in_ascii(text)
    except UnicodeError as error:
        raise ValueError(f"{text!r} is not a host name: {error}") from None
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or _NUMERIC.fullmatch(labels[-1]):
        raise ValueError(f"{text!r} is not a host name")
    return name


def parse_domain(entry: str) -> Domain:
    """Parse ``name`` or ``*.name``, optionally with ``:port``. Raises ``ValueError``."""
    host, colon, port = entry.strip().partition(":")
    below = host.startswith("*.")
    try:
        return Domain(host_name(host[2:] if below else host), below, parse_port(port) if colon else None)
    except ValueError as error:
        raise ValueError(
            f"domain {entry!r}: {error}; write name, *.name, or either with :port (addresses belong into cidrs)"
        ) from None


def parse_range(entry: str) -> AddressRange:
    """Parse ``10.0.0.0/8``, ``10.0.0.1:8080``, ``fd00::/8`` or ``[fd00::/8]:8080``. Raises ``ValueError``."""
    text = entry.strip()
    port: int | None = None
    try:
        if text.startswith("["):
            text, bracket, tail = text[1:].partition("]")
            if tail or not bracket:
                port = parse_port(tail[1:] if tail.startswith(":") else "")
        elif text.count(":") == 1:
            text, _, tail = text.partition(":")
            port = parse_port(tail)
        range = ipaddress.ip_network(text)
        mapped = range.network_address
        if isinstance(mapped, ipaddress.IPv6Address) and mapped.ipv4_mapped is not None and range.prefixlen >= 96:
            range = ipaddress.ip_network((mapped.ipv4_mapped, range.prefixlen - 96))
        return AddressRange(range, port)
    except ValueError as error:
        raise ValueError(
            f"range {entry!r}: {error}; write 10.0.0.0/8 or fd00::/8, with a port 10.0.0.0/8:8080 or [fd00::/8]:8080"
        ) from None


def parse_port(text: str) -> int:
    """Parse a port in decimal digits. Raises ``ValueError``."""
    if re.fullmatch(r"[0-9]{1,5}", text) is None or not 0 < int(text) < 65536:
        raise ValueError("not a port (1 to 65535)")
    return int(text)
