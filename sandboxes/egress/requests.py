"""Strict parser of the proxy's requests. Pure functions.

Invariant: an accepted request names exactly one server, and its head is rebuilt from the parsed parts, so that the
server cannot read it differently. Ambiguous requests are refused: two hosts, two lengths, folded lines, bare line ends,
user names in an address.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from agentkit.sandboxes.egress.allowlist import Address, parse_host, parse_port

MAX_HEAD = 16 << 10
MAX_HEADERS = 100

_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]{1,8192}) HTTP/1\.[01]")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_ABSOLUTE = re.compile(r"(?i:http)://([^/?]*)(/[^#]*|\?[^#]*|)")
_AUTHORITY = re.compile(r"(\[[^\[\]]*\]|[^\[\]:@]*)(?::([^:]*))?")
_HOP_BY_HOP = {
    "connection", "expect", "host", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "http2-settings",
}  # fmt: skip


class Refused(Exception):
    """A request is refused; the message is one line for the client."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """Reason in the statistics."""


@dataclass(frozen=True)
class Request:
    """One request to one server."""

    host: str | Address
    port: int
    head: bytes | None
    """Sent to the server; None: a tunnel (CONNECT)."""
    length: int | None = 0
    """Bytes of the body; None: chunked."""

    @property
    def target(self) -> str:
        return authority(self.host, self.port)


def authority(host: str | Address, port: int) -> str:
    return f"[{host}]:{port}" if not isinstance(host, str) and host.version == 6 else f"{host}:{port}"


def parse(head: bytes) -> Request:
    """Parse the head of a request, including the empty line. Raises ``Refused``."""
    lines = head.decode("latin-1").split("\r\n")[:-2]
    line = _LINE.fullmatch(lines[0]) if lines else None
    if line is None:
        raise _malformed("the request line is malformed")
    if len(lines) > MAX_HEADERS:
        raise Refused("oversized", f"more than {MAX_HEADERS} headers")
    headers: list[tuple[str, str]] = []
    for text in lines[1:]:
        header = _HEADER.fullmatch(text)
        if header is None:
            raise _malformed("a header is malformed")
        headers.append((header[1], header[2]))
    method, target = line[1], line[2]
    if method == "CONNECT":
        host, port = _authority(target, None)
        return Request(host, port, None)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise _malformed("only CONNECT and http:// addresses without a fragment are allowed")
    host, port = _authority(absolute[1], 80)
    named = _single(headers, "host")
    if named is not None and _authority(named, 80) != (host, port):
        raise Refused("host", "the Host header and the address name different hosts")
    path = absolute[2] if absolute[2].startswith("/") else f"/{absolute[2]}"
    return _forwarded(method, path, host, port, headers)


def _forwarded(method: str, path: str, host: str | Address, port: int, headers: list[tuple[str, str]]) -> Request:
    coding, length = _single(headers, "transfer-encoding"), _single(headers, "content-length")
    if coding is not None and (coding.lower() != "chunked" or length is not None):
        raise _malformed("the body's length is ambiguous")
    if length is not None and re.fullmatch(r"[0-9]{1,18}", length) is None:
        raise _malformed("Content-Length is not a number")
    named = authority(host, port)
    dropped = _HOP_BY_HOP | {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    } - {"content-length"}
    lines = [f"{method} {path} HTTP/1.1", f"Host: {named.removesuffix(':80') if port == 80 else named}"]
    lines += [f"{name}: {value}" for name, value in headers if name.lower() not in dropped]
    if coding is not None:
        lines.append("Transfer-Encoding: chunked")
    lines += ["Connection: close", "", ""]
    body = None if coding is not None else int(length or 0)
    return Request(host, port, "\r\n".join(lines).encode("latin-1"), body)


def _single(headers: list[tuple[str, str]], wanted: str) -> str | None:
    found = [value for name, value in headers if name.lower() == wanted]
    if len(found) > 1:
        raise _malformed(f"more than one {wanted} header")
    return found[0] if found else None


def _authority(text: str, default_port: int | None) -> tuple[str | Address, int]:
    if "@" in text:
        raise Refused("userinfo", "user names in addresses are not allowed")
    match = _AUTHORITY.fullmatch(text)
    try:
        if match is None:
            raise ValueError("host missing")
        port = default_port if match[2] is None or (match[2] == "" and default_port) else parse_port(match[2])
        if port is None:
            raise ValueError("port missing")
        return parse_host(match[1]), port
    except ValueError:
        raise Refused("address", "the host must be a name or a plain address, as host:port") from None


def _malformed(message: str) -> Refused:
    return Refused("malformed", message)
