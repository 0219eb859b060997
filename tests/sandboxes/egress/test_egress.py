"""Egress of a sandbox: listed destinations are reachable, others are not, in any notation."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import shutil
from collections.abc import AsyncIterator

import pytest
from agent_harness import eventually, local_agent, sh
from hypothesis import given
from hypothesis import strategies as st

from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.egress import requests as proxy_request
from agentkit.sandboxes.egress.allowlist import (
    AllowList,
    host_name,
    is_public,
    parse_domain,
    parse_host,
    parse_range,
    plain,
)
from agentkit.sandboxes.egress.proxy import EgressProxy, ProxyLimits, environment, start
from agentkit.sandboxes.egress.requests import Refused
from agentkit.sandboxes.paths import new_id
from agentkit.sandboxes.spec import Network, SandboxSpec

LABELS = st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)


# What the list says


@given(NAMES, NAMES, st.sampled_from([80, 443, 22, 8080]))
def test_a_name_is_listed_exactly(listed: str, asked: str, port: int) -> None:
    allow = AllowList([listed], [])
    assert allow.names(asked, port) == (listed == asked and port in (80, 443))
    assert AllowList([f"{listed}:22"], []).names(asked, port) == (listed == asked and port == 22)


@given(NAMES, NAMES)
def test_a_star_matches_whole_labels(suffix: str, name: str) -> None:
    allow = AllowList([f"*.{suffix}"], [])
    assert allow.names(f"{name}.{suffix}", 443)
    assert not allow.names(suffix, 443)
    assert not allow.names(f"{name}{suffix}", 443) or f"{name}{suffix}".endswith(f".{suffix}")
    assert not allow.names(f"{suffix}.{name}", 443) or f"{suffix}.{name}".endswith(f".{suffix}")


@given(NAMES)
def test_case_and_a_trailing_dot_are_ignored(name: str) -> None:
    assert host_name(name.upper() + ".") == parse_host(name.title()) == name
    assert str(parse_domain(name.upper() + ".")) == name


def test_names_are_compared_in_their_ascii_form() -> None:
    assert str(parse_domain("*.Bücher.example:8080")) == "*.xn--bcher-kva.example:8080"
    assert host_name("bücher。example") == "xn--bcher-kva.example"


BAD = ["", "*", "a.*.b", "*.", "a b", "10.0.0.1", "a:0", "a:65536", "a:", "http://a", "a/b", "-a", "127.1"]


@pytest.mark.parametrize("entry", BAD)
def test_an_invalid_entry_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="domain"):
        Network.allow(domains=(entry,))


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "10.0.0.0/33", "a/8", "[::1", "[::1]8", "10.0.0.1:x"])
def test_an_invalid_range_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match="range"):
        Network.allow(cidrs=(entry,))


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:0", "127.1:80", "a b:80", "http://a:80"])
def test_an_invalid_address_to_forward_to_is_an_error(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Network.forward(address)
    assert Network.forward("[::1]:80").address == "[::1]:80"


@given(st.one_of(st.ip_addresses(), st.sampled_from([ipaddress.ip_address("::1"), ipaddress.ip_address("fe80::1")])))
def test_only_public_addresses_are_open_to_names(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    address = plain(address)
    assert AllowList(["a"], []).opens(address, 443) == is_public(address)
    if is_public(address) and address not in ipaddress.ip_network("64:ff9b::/96"):
        assert address.is_global
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast:
        assert not is_public(address)
    everything = AllowList([], ["0.0.0.0/0", "::/0"])
    assert everything.lists(address, 443) == is_public(address)
    assert AllowList([], [str(address)]).lists(address, 443)


DISGUISED = (
    "169.254.169.254 100.100.100.200 168.63.129.16 fd00:ec2::254 64:ff9b::a9fe:a9fe 2002:7f00:1:: :: 0.0.0.0 ::7f00:1"
)


@pytest.mark.parametrize("text", DISGUISED.split())
def test_metadata_and_disguises_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


def test_a_range_may_include_private_addresses() -> None:
    allow = AllowList([], ["169.254.0.0/16:80", "10.1.0.0/16", "[::1]:99", "::ffff:192.168.0.0/112"])
    assert allow.lists(ipaddress.ip_address("169.254.169.254"), 80)
    assert not allow.lists(ipaddress.ip_address("169.254.169.254"), 443)
    assert allow.lists(ipaddress.ip_address("10.1.2.3"), 443)
    assert not allow.lists(ipaddress.ip_address("10.2.2.3"), 443)
    assert allow.lists(ipaddress.ip_address("::1"), 99)
    assert allow.lists(ipaddress.ip_address("192.168.0.9"), 443)
    assert str(parse_range("[fd00::/8]:5")) == "[fd00::/8]:5"


@given(st.binary(max_size=200))
def test_the_parser_accepts_or_refuses_any_head(data: bytes) -> None:
    with contextlib.suppress(Refused):
        proxy_request.parse(data.replace(b"\r\n\r\n", b"") + b"\r\n\r\n")


def test_the_forwarded_head_is_rebuilt() -> None:
    request = proxy_request.parse(
        b"GET HTTP://A.example:80?q HTTP/1.0\r\nHost: a.EXAMPLE\r\nConnection: X-Secret\r\nX-Secret: 1\r\n"
        b"Proxy-Connection: keep-alive\r\nAccept: */*\r\n\r\n"
    )
    assert request.head == b"GET /?q HTTP/1.1\r\nHost: a.example\r\nAccept: */*\r\nConnection: close\r\n\r\n"


# The proxy with real sockets


class Loopback:
    """Connections of a loopback port that stand for connections from a sandbox."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[SocketStream] = asyncio.Queue()

    async def relays(self) -> AsyncIterator[SocketStream]:
        while True:
            yield await self.queue.get()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.queue.put_nowait(SocketStream(reader, writer))


class SocketStream:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self) -> bytes:
        return await self.reader.read(1 << 16)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def end(self) -> None:
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()


class World:
    """A server that records the bytes of each request, and a proxy in front of it."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.looked_up: list[str] = []
        self.addresses = ["127.0.0.1"]
        self.port = self.proxy_port = 0
        self.egress: EgressProxy

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                data += piece
                if data.startswith((b"GET", b"POST")) and (b"POST" not in data or data.endswith(b"END")):
                    break
                if data.startswith(b"POST") and data.endswith(b"0\r\n\r\n"):
                    break
            self.seen.append(data)
            body = b"you said " + data[-20:]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        writer.close()

    async def resolve(self, host: str, port: int) -> list:
        self.looked_up.append(host)
        return [ipaddress.ip_address(address) for address in self.addresses]

    async def ask(self, data: bytes, *, end: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy_port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(-1), 60)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def world(limits: ProxyLimits | None = None, cidrs: tuple[str, ...] | None = None) -> AsyncIterator[World]:
    made = World()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    network = Network.allow(
        (f"good.test:{made.port}", "good.test", "other.test"),
        (f"127.0.0.1:{made.port}",) if cidrs is None else cidrs,
    )
    made.egress = EgressProxy(network, limits=limits or ProxyLimits(linger=5), resolve=made.resolve)
    source = Loopback()
    front = await asyncio.start_server(source.accept, "127.0.0.1", 0)
    made.proxy_port = front.sockets[0].getsockname()[1]
    task = asyncio.ensure_future(made.egress.serve(source))
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        front.close()
        server.close()


async def test_a_listed_name_is_reached() -> None:
    async with world() as w:
        answer = await w.ask(f"GET http://good.test:{w.port}/x HTTP/1.1\r\nHost: good.test:{w.port}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 200")
        assert w.seen[0].startswith(f"GET /x HTTP/1.1\r\nHost: good.test:{w.port}\r\n".encode())
        assert w.looked_up == ["good.test"]
        assert w.egress.served == 1
        assert not w.egress.refused


async def test_bodies_are_forwarded_exactly() -> None:
    async with world() as w:
        target = f"http://127.0.0.1:{w.port}/".encode()
        body = b"x" * 300_000 + b"END"
        await w.ask(b"POST " + target + b" HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert w.seen[0].endswith(body)
        assert len(w.seen[0].partition(b"\r\n\r\n")[2]) == len(body)
        chunked = b"5;ext=1\r\nhello\r\n3\r\nabc\r\n0\r\nTrailer: 1\r\n\r\n"
        await w.ask(b"POST " + target + b" HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked)
        assert w.seen[1].partition(b"\r\n\r\n")[2] == b"5\r\nhello\r\n3\r\nabc\r\n0\r\n\r\n"


async def test_each_direction_of_a_tunnel_ends_separately() -> None:
    async with world() as w:
        answer = await w.ask(f"CONNECT good.test:{w.port} HTTP/1.1\r\n\r\n".encode() + b"raw" * 100_000, end=True)
        assert answer.startswith(b"HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
        assert w.seen == [b"raw" * 100_000]


REFUSED = {
    "another name": ("GET http://evil.test/ HTTP/1.1", "unlisted"),
    "another port": ("CONNECT good.test:22 HTTP/1.1", "unlisted"),
    "a name below": ("CONNECT a.good.test:443 HTTP/1.1", "unlisted"),
    "an address": ("CONNECT 127.0.0.2:443 HTTP/1.1", "unlisted"),
    "metadata": ("GET http://169.254.169.254/latest HTTP/1.1", "unlisted"),
    "mapped": ("CONNECT [::ffff:169.254.169.254]:80 HTTP/1.1", "unlisted"),
    "loopback of IPv6": ("CONNECT [::1]:80 HTTP/1.1", "unlisted"),
    "a zone": ("CONNECT [fe80::1%25lo]:80 HTTP/1.1", "address"),
    "decimal": ("CONNECT 2130706433:80 HTTP/1.1", "address"),
    "octal": ("CONNECT 0177.0.0.1:80 HTTP/1.1", "address"),
    "hex": ("CONNECT 0x7f.1:80 HTTP/1.1", "address"),
    "hex whole": ("CONNECT 0x7f000001:80 HTTP/1.1", "address"),
    "short": ("CONNECT 127.1:80 HTTP/1.1", "address"),
    "bare IPv6": ("CONNECT ::1:80 HTTP/1.1", "address"),
    "escaped": ("GET http://good%2etest/ HTTP/1.1", "address"),
    "user": ("GET http://good.test@evil.test/ HTTP/1.1", "userinfo"),
    "user of a tunnel": ("CONNECT good.test@evil.test:443 HTTP/1.1", "userinfo"),
    "backslash": ("GET http://good.test\\@evil.test/ HTTP/1.1", "userinfo"),
    "another scheme": ("GET ftp://good.test/ HTTP/1.1", "malformed"),
    "https without a tunnel": ("GET https://good.test/ HTTP/1.1", "malformed"),
    "origin form": ("GET / HTTP/1.1\r\nHost: good.test", "malformed"),
    "HTTP/2": ("PRI * HTTP/2.0", "malformed"),
    "another host": ("GET http://good.test/ HTTP/1.1\r\nHost: evil.test", "host"),
    "two hosts": ("GET http://good.test/ HTTP/1.1\r\nHost: good.test\r\nHost: evil.test", "malformed"),
    "a folded line": ("GET http://good.test/ HTTP/1.1\r\nA: 1\r\n Host: evil.test", "malformed"),
    "a bare line end": ("GET http://good.test/ HTTP/1.1\r\nA: 1\nHost: evil.test", "malformed"),
    "a bare return": ("GET http://good.test/\rX HTTP/1.1", "malformed"),
    "a space": ("GET http://good.test/ HTTP/1.1\r\nHost : evil.test", "malformed"),
    "two lengths": ("POST http://good.test/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", "malformed"),
    "length and chunks": (
        "POST http://good.test/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", "malformed"),
    "unknown coding": ("POST http://good.test/ HTTP/1.1\r\nTransfer-Encoding: gzip, chunked", "malformed"),
    "a huge header": ("GET http://good.test/ HTTP/1.1\r\nA: " + "x" * 20_000, "oversized"),
    "many headers": ("GET http://good.test/ HTTP/1.1" + "\r\nA: 1" * 200, "oversized"),
    "pipelining": ("GET http://good.test/ HTTP/1.1\r\n\r\nGET http://evil.test/ HTTP/1.1", "pipelined"),
}  # fmt: skip


@pytest.mark.parametrize(("head", "kind"), REFUSED.values(), ids=REFUSED)
async def test_unlisted_and_ambiguous_requests_are_refused(head: str, kind: str) -> None:
    async with world() as w:
        answer = await w.ask(f"{head}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert answer.partition(b"\r\n\r\n")[2].count(b"\n") == 1
        assert w.egress.refused == {kind: 1}
        assert w.seen == w.looked_up == []


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"], ["::1"]]
)
async def test_a_listed_name_gives_no_way_into_the_host(addresses: list[str]) -> None:
    async with world(cidrs=()) as w:
        w.addresses = addresses
        answer = await w.ask(f"CONNECT good.test:{w.port} HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403")
        assert w.egress.refused == {"private": 1}
        assert w.seen == []


async def test_dns_rebinding_is_prevented_by_one_lookup_per_connection() -> None:
    async with world() as w:
        answers = iter([["127.0.0.1"], ["169.254.169.254"]])
        plain = w.resolve

        async def rebinding(host: str, port: int) -> list:
            w.addresses = next(answers)
            return await plain(host, port)

        w.egress._resolve = rebinding
        request = f"GET http://good.test:{w.port}/ HTTP/1.1\r\n\r\n".encode()
        assert b" 200 " in await w.ask(request)
        assert b" 403 " in await w.ask(request)
        assert len(w.seen) == 1
        assert len(w.looked_up) == 2


async def test_every_wait_has_a_timeout() -> None:
    async with world(ProxyLimits(head_timeout=0.3, idle_timeout=0.5, connect_timeout=0.5, linger=1)) as w:
        assert (await w.ask(b"GET http://good.test/ HTTP/1.1\r\nA:")).startswith(b"HTTP/1.1 403")
        assert w.egress.refused == {"slow": 1}
        assert (await w.ask(f"CONNECT 127.0.0.1:{w.port} HTTP/1.1\r\n\r\n".encode())).endswith(b"established\r\n\r\n")

        async def hang(host: str, port: int) -> list:
            await asyncio.sleep(3600)
            return []

        w.egress._resolve = hang
        assert b" 502 " in await w.ask(b"CONNECT good.test:443 HTTP/1.1\r\n\r\n")


async def test_connections_and_bytes_are_counted() -> None:
    async with world(ProxyLimits(connections=1, total=1000, linger=1)) as w:
        tunnel = f"CONNECT 127.0.0.1:{w.port} HTTP/1.1\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", w.proxy_port)
        writer.write(tunnel)
        await reader.readuntil(b"\r\n\r\n")
        assert b"more than 1 connections" in await w.ask(tunnel)
        writer.write(b"x" * 5000)
        assert await asyncio.wait_for(reader.read(-1), 60) == b""
        writer.close()
        assert b"transferred" in await w.ask(tunnel)
        assert w.egress.refused == {"connections": 1, "total": 2}


async def test_an_unreachable_server_is_not_a_refusal() -> None:
    async with world(cidrs=("127.0.0.1:1",)) as w:
        assert b" 502 " in await w.ask(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n")
        assert w.egress.failed == 1


# Out of a sandbox

ASK = """
import os, socket, sys, urllib.error, urllib.request
# Programs ask loopback addresses directly unless told otherwise.
os.environ.update(no_proxy="", NO_PROXY="")
proxies = {"http": "http://127.0.0.1:PROXY"}
opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
print(opener.open("http://127.0.0.1:%s/" % sys.argv[1], timeout=60).read().decode()[:8])
try:
    opener.open("http://evil.test/", timeout=60)
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode().strip())
connection = socket.create_connection(("127.0.0.1", PROXY), 60)
connection.sendall(b"CONNECT 127.0.0.1:%s HTTP/1.1\\r\\n\\r\\n" % sys.argv[1].encode() + b"raw" * 200000)
connection.shutdown(socket.SHUT_WR)
answer = b""
while data := connection.recv(65536):
    answer += data
print(answer.endswith(b"rawraw"), len(answer))
"""


async def test_an_agent_carries_connections_out_and_closing_ends_them(tmp_path, unused_tcp_port: int) -> None:
    async with world() as w, local_agent(tmp_path, relay_port=unused_tcp_port) as agent:
        start(agent.channel, Network.allow(cidrs=(f"127.0.0.1:{w.port}",)))
        script = ASK.replace("PROXY", str(unused_tcp_port))
        (tmp_path / "ask.py").write_text(script)
        result = await agent.channel.exec(sh(f"python3 {tmp_path}/ask.py {w.port}"))
        assert result.exit_code == 0, result.stderr
        assert result.stdout.splitlines()[:2] == [
            "you said", "403 agentkit: evil.test:80 is not on the allow-list of this sandbox",
        ]  # fmt: skip
        assert result.stdout.splitlines()[2].startswith("True")
        assert w.seen[1] == b"raw" * 200_000
        egress = agent.channel.egress
        assert egress is not None
        assert egress.refused == {"unlisted": 1}
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(f"CONNECT 127.0.0.1:{w.port} HTTP/1.1\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        await agent.channel.close()
        await eventually(lambda: egress._open == 0)
        writer.close()


def test_programs_find_the_proxy_by_their_environment() -> None:
    spec = SandboxSpec(network=Network.allow(("a.test",)), env={"NO_PROXY": "b.test"})
    found = environment(spec)
    assert found["HTTPS_PROXY"] == found["http_proxy"] == "http://127.0.0.1:3128"
    assert found["NO_PROXY"] == "b.test"
    assert environment(SandboxSpec(env={"A": "1"})) == {"A": "1"}


@contextlib.asynccontextmanager
async def sandbox_with_a_way_out(backend: Backend, server: World) -> AsyncIterator[Channel]:
    id = new_id()
    spec = SandboxSpec(network=Network.allow(cidrs=(f"127.0.0.1:{server.port}",)))
    try:
        yield await backend.create(id, spec, {})
    finally:
        await backend.remove(id)


async def check_way_out(backend: Backend) -> None:
    async with world() as w, sandbox_with_a_way_out(backend, w) as channel:
        await channel.write("/tmp/ask.py", ASK.replace("PROXY", "3128").encode(), 0o644)
        result = await channel.exec(sh(f"python3 /tmp/ask.py {w.port} && echo $https_proxy"))
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[:2] == ["you said", "403 agentkit: evil.test:80 is not on the allow-list of this sandbox"]
        assert lines[2].startswith("True")
        assert lines[3] == "http://127.0.0.1:3128"
        direct = "import socket; socket.create_connection(('{}', {}), 5)"
        for host in ("127.0.0.1", "1.1.1.1"):
            refused = await channel.exec(sh(f'python3 -c "{direct.format(host, w.port)}"'))
            assert refused.exit_code == 1
            assert "refused" in refused.stderr or "unreachable" in refused.stderr
        assert len(w.seen) == 2


@pytest.mark.docker
async def test_the_way_out_of_a_container(docker_backend: Backend) -> None:
    await check_way_out(docker_backend)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")
async def test_the_way_out_of_a_local_sandbox() -> None:
    backend = LocalBackend()
    await backend.start()
    try:
        await check_way_out(backend)
    finally:
        await backend.close()
