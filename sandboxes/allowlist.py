"""Which names, addresses and ports a sandbox may reach through the proxy of its host. Pure: nothing here resolves.

Invariant: what is not listed is refused, and a name that is not listed is not even looked up, since a lookup tells its
name server something. A listed name gives no way into the networks of the host: an address that is not of the public
internet is reachable only if a listed range names it on purpose, that is, lies within the same special range
(``0.0.0.0/0`` opens neither loopback nor the metadata service; ``127.0.0.0/8`` and ``10.1.0.0/16`` do what they say).
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
"""Not of the public internet, as IANA's registries say; 168.63.129.16 is where a cloud answers its own machines."""
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")
"""IPv4 addresses as networks of IPv6 alone see them."""


@dataclass(frozen=True)
class Domain:
    """One entry of ``Network.domains``: a name, or with ``below`` every name below it; ``port`` None: 80 and 443."""

    name: str
    below: bool
    port: int | None

    def __str__(self) -> str:
        return f"{'*.' if self.below else ''}{self.name}{'' if self.port is None else f':{self.port}'}"

    def matches(self, name: str, port: int) -> bool:
        """``name`` as ``host_name`` gives it."""
        named = name.endswith(f".{self.name}") if self.below else name == self.name
        return named and _port_fits(self.port, port)


@dataclass(frozen=True)
class Addresses:
    """One entry of ``Network.cidrs``; ``port`` None: 80 and 443."""

    range: Range
    port: int | None

    def __str__(self) -> str:
        if self.port is None:
            return str(self.range)
        return f"{self.range}:{self.port}" if self.range.version == 4 else f"[{self.range}]:{self.port}"


def _port_fits(listed: int | None, port: int) -> bool:
    return port in DEFAULT_PORTS if listed is None else port == listed


class AllowList:
    """The entries of one ``Network``. Raises ``ValueError`` for one that means nothing."""

    def __init__(self, domains: Iterable[str], cidrs: Iterable[str]) -> None:
        self._domains = tuple(parse_domain(entry) for entry in domains)
        self._ranges = tuple(parse_range(entry) for entry in cidrs)

    def names(self, name: str, port: int) -> bool:
        """Whether this name may be looked up and, where it leads to public addresses, be connected to."""
        return any(domain.matches(name, port) for domain in self._domains)

    def lists(self, address: Address, port: int) -> bool:
        """Whether a range holds this address: enough to connect to it without any name."""
        return any(_holds(entry.range, address) and _port_fits(entry.port, port) for entry in self._ranges)

    def opens(self, address: Address, port: int) -> bool:
        """Whether this address is safe as the address of a name that is listed: public, or opened by a range."""
        return is_public(address) or self.lists(address, port)


def _holds(range: Range, address: Address) -> bool:
    if address.version != range.version or address not in range:
        return False
    if is_public(address):
        return True
    around = [special for special in _SPECIAL if special.version == address.version and address in special]
    # What of IPv6 is neither public nor listed above has no range of its own to lie in.
    return any(range.subnet_of(special) for special in around) or (  # pyright: ignore[reportArgumentType]
        not around and address.version == 6 and range.prefixlen >= 8
    )


def is_public(address: Address) -> bool:
    """Whether an address (as ``plain`` gives it) belongs to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _TRANSLATED:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _PUBLIC_V6:
            return False
    return not any(address.version == special.version and address in special for special in _SPECIAL)


def plain(address: Address) -> Address:
    """IPv4 written as IPv6 (``::ffff:127.0.0.1``) as what it is; the kernel connects to that."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def parse_host(text: str) -> str | Address:
    """A host of a request: an address (IPv6 in brackets), or a canonical name.

    Raises ``ValueError`` for anything else, above all for the many other ways to write an address as a number.
    """
    if text.startswith("["):
        if not text.endswith("]") or "%" in text:
            raise ValueError("no IPv6 address")
        return plain(ipaddress.IPv6Address(text[1:-1]))
    if _NUMERIC.fullmatch(text.removesuffix(".").rpartition(".")[2].lower()):
        return ipaddress.IPv4Address(text)
    if not text.isascii():
        raise ValueError("a name that is not in its ASCII form")
    return host_name(text)


def _in_ascii(text: str) -> str:
    import idna  # images of environments, which describe sandboxes and have none, do without it

    return idna.encode(text, uts46=True).decode("ascii")


def host_name(text: str) -> str:
    """A name in the one form in which names are compared: ASCII (IDNA), lower case, no dot at its end.

    Raises ``ValueError`` if it is none.
    """
    try:
        name = text if text.isascii() else _in_ascii(text)
    except UnicodeError as error:
        raise ValueError(f"{text!r} is no host name: {error}") from None
    name = name.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or _NUMERIC.fullmatch(labels[-1]):
        raise ValueError(f"{text!r} is no host name")
    return name


def parse_domain(entry: str) -> Domain:
    """``name``, ``*.name``, either with ``:port``. Raises ``ValueError`` with the remedy."""
    host, colon, port = entry.strip().partition(":")
    below = host.startswith("*.")
    try:
        return Domain(host_name(host[2:] if below else host), below, parse_port(port) if colon else None)
    except ValueError as error:
        raise ValueError(
            f"domain {entry!r}: {error}; write name, *.name, or either with :port (addresses belong into cidrs)"
        ) from None


def parse_range(entry: str) -> Addresses:
    """``10.0.0.0/8``, ``10.0.0.1:8080``, ``fd00::/8``, ``[fd00::/8]:8080``. Raises ``ValueError`` with the remedy."""
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
        return Addresses(range, port)
    except ValueError as error:
        raise ValueError(
            f"range {entry!r}: {error}; write 10.0.0.0/8 or fd00::/8, with a port 10.0.0.0/8:8080 or [fd00::/8]:8080"
        ) from None


def parse_port(text: str) -> int:
    """A port in decimal digits, nothing else. Raises ``ValueError``."""
    if re.fullmatch(r"[0-9]{1,5}", text) is None or not 0 < int(text) < 65536:
        raise ValueError("no port (1 to 65535)")
    return int(text)
