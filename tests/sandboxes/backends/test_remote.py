"""A sandbox server and its clients over real sockets: admission, policy, wire format and failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import simulation
from requiring import require
from server_process import TOKEN, ServerProcess

from agentkit.errors import (
    AccessDenied,
    AgentkitError,
    ConfigError,
    EngineUnavailable,
    FileTooLarge,
    ProtocolError,
    QuotaExceeded,
    SandboxError,
    SandboxLost,
)
from agentkit.sandboxes import Mount, Network, Resources, Sandbox, SandboxSpec
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.server.auth import find_token
from agentkit.sandboxes.server.config import ServerConfig
from agentkit.sandboxes.server.policy import Policy, Quota, permitted
from agentkit.sandboxes.server.protocol import ERRORS, pack_arguments, pack_error, unpack_error
from agentkit.sandboxes.testing.fake import Command, FakeBackend
from agentkit.sandboxes.testing.faults import Fault

PATIENCE = 1.0
SLACK = 20.0
SMALL = SandboxSpec(resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20))


async def append_twice(command: Command) -> None:
    """Append a line to the file ``log`` before and after a second."""
    await simulation.append(command, "log", "x", "1")
    await simulation.append(command, "log", "y")


async def append_and_say(command: Command, word: str) -> None:
    """Append a line to the file ``log``, and print a word after a second."""
    await simulation.append(command, "log", "x", "1")
    await command.write(f"{word}\n")


COMMANDS = {**simulation.COMMANDS, "append-twice": append_twice, "append-and-say": append_and_say}


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[FakeBackend, SandboxServer]]:
    fake = FakeBackend(create_seconds=0.02, call_seconds=0.0, commands=COMMANDS)
    fields = {name: options.pop(name) for name in ("policy", "quota") if name in options}
    async with SandboxServer(fake, token=TOKEN, config=ServerConfig(**fields), **options) as server:
        yield fake, server


@contextlib.asynccontextmanager
async def connected(*urls: str, token: str = TOKEN) -> AsyncIterator[RemoteBackend]:
    backend = RemoteBackend(list(urls), token, patience=PATIENCE)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def until(condition: Any) -> None:
    end = time.monotonic() + SLACK
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.02)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path)
    yield process
    process.end()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path, "'local'")
    yield process
    process.end(signal.SIGTERM)


# Admission


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), f"{TOKEN}\x7f", "é"])
async def test_requests_without_the_token_are_refused(token: str) -> None:
    async with served() as (fake, server), httpx.AsyncClient(trust_env=False) as client:
        headers = [(b"authorization", f"Bearer {token}".encode("latin-1"))] if token else []
        for method, path in (("GET", "/v1/boot"), ("POST", "/v1/list"), ("GET", "/docs"), ("GET", "/nowhere")):
            answer = await client.request(method, server.url + path, headers=headers)
            assert answer.status_code == 401
            assert answer.headers.get("access-control-allow-origin") is None
            assert isinstance(unpack_error(answer.content), AccessDenied)
        assert fake.calls == []


async def test_a_client_with_another_token_is_refused() -> None:
    async with served() as (_, server):
        with pytest.raises(AccessDenied, match="token"):
            async with connected(server.url, token="another-token-of-the-tests"):
                pass


async def test_requests_of_web_pages_are_refused() -> None:
    async with served() as (_, server), httpx.AsyncClient(trust_env=False) as client:
        good = {"authorization": f"Bearer {TOKEN}"}
        assert (await client.get(f"{server.url}/v1/boot", headers=good)).status_code == 200
        answer = await client.get(f"{server.url}/v1/boot", headers={**good, "origin": "http://127.0.0.1"})
        assert answer.status_code == 403
        answer = await client.options(f"{server.url}/v1/boot", headers={"origin": "http://127.0.0.1"})
        assert answer.status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost.example.org"])
def test_other_addresses_than_loopback_need_tls(host: str) -> None:
    with pytest.raises(ConfigError, match="certificate"):
        SandboxServer(FakeBackend(), token=TOKEN, host=host)
    with pytest.raises(ConfigError, match="certificate"):
        SandboxServer(FakeBackend(), token=TOKEN, host=host, certificate="/a/certificate")
    shown = f"[{host}]" if ":" in host else host
    with pytest.raises(ConfigError, match="unencrypted"):
        RemoteBackend(f"http://{shown}:1", TOKEN)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    require(shutil.which("openssl") is not None, "apt-get install openssl")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = str(directory / "cert.pem"), str(directory / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *names], check=True, capture_output=True, timeout=60)
    return cert, key


async def test_tls_with_a_trusted_and_an_untrusted_certificate(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    async with served(host="0.0.0.0", certificate=cert, key=key) as (_, server):
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert url.startswith("https://")
        backend = RemoteBackend(url, TOKEN, ca=cert)
        await backend.start()
        async with Sandbox.create(SMALL, backend=backend) as box:
            assert (await box.exec("echo safe")).stdout == "safe\n"
        await backend.close()
        stranger = RemoteBackend(url, TOKEN)
        with pytest.raises(EngineUnavailable, match="certificate"):
            await stranger.start()


def test_sources_of_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("AGENTKIT_SANDBOX_TOKEN", raising=False)
    monkeypatch.delenv("AGENTKIT_SANDBOX_TOKEN_FILE", raising=False)
    with pytest.raises(ConfigError, match="no token"):
        find_token()
    made = find_token(make=True)
    assert len(made) >= 40
    assert find_token() == find_token(make=True) == made
    file = tmp_path / "token"
    file.write_text("a-token-from-a-file-it-is\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod"):
        find_token(file)
    file.chmod(0o600)
    assert find_token(file) == "a-token-from-a-file-it-is"
    file.write_text("short")
    with pytest.raises(ConfigError, match="20"):
        find_token(file)
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", "a-token-from-the-environment")
    assert find_token() == "a-token-from-the-environment"


# Quota


async def _raw(server: SandboxServer, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send these bytes one after the other; return the answer of the server until it closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), SLACK)
    finally:
        writer.close()


HEAD = f"POST /v1/list HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n".encode()


async def test_a_body_that_is_too_long() -> None:
    async with served(quota=Quota(body=1000)) as (_, server):
        answer = await _raw(server, HEAD + b"content-length: 1001\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413")
        answer = await _raw(server, HEAD + b"transfer-encoding: chunked\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 411")
        async with connected(server.url) as backend, await Sandbox.create(SMALL, backend=backend) as box:
            with pytest.raises(QuotaExceeded) as caught:
                await box.files.write("x", b"x" * 1001)
            assert not caught.value.retryable


async def test_slow_clients_are_disconnected() -> None:
    quota = Quota(header_seconds=0.5, body_seconds=0.5)
    async with served(quota=quota) as (_, server):
        assert (await _raw(server)).startswith(b"HTTP/1.1 408")
        slow = [bytes([byte]) for byte in HEAD]
        with contextlib.suppress(ConnectionError):
            assert (await _raw(server, *slow, pause=0.05)).startswith(b"HTTP/1.1 408")
        assert (await _raw(server, HEAD + b"content-length: 10\r\n\r\n", b"{")).startswith(b"HTTP/1.1 408")
        whole = HEAD + b"content-length: 2\r\n\r\n{}"
        answer = await _raw(server, whole, HEAD, pause=0.2)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"HTTP/1.1 408" in answer
        async with connected(server.url) as backend:
            assert await backend.list({}) == []


async def test_too_many_requests_are_refused() -> None:
    async with served(quota=Quota(requests=3)) as (_, server), connected(server.url) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        tasks = [asyncio.ensure_future(box.exec("sleep 1")) for _ in range(6)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result).__name__ for result in results} == {"ExecResult", "QuotaExceeded"}
        assert (await box.exec("true")).ok
        await box.close()


async def test_too_many_sandboxes_are_refused() -> None:
    async with served(quota=Quota(sandboxes=2)) as (fake, server), connected(server.url) as backend:
        made = await asyncio.gather(*[Sandbox.create(SMALL, backend=backend) for _ in range(5)], return_exceptions=True)
        boxes: list[Sandbox] = [box for box in made if isinstance(box, Sandbox)]
        assert (len(boxes), fake.most) == (2, 2)
        assert sum(isinstance(refusal, QuotaExceeded) for refusal in made) == 3
        await boxes[0].close()
        boxes[0] = await Sandbox.create(SMALL, backend=backend)
        for box in boxes:
            await box.close()


async def test_malformed_requests_are_refused() -> None:
    async with served() as (_, server), connected(server.url) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        channel: Any = box._channel
        connection = channel._server
        for path in (
            f"{channel._path}/exec",
            f"{channel._path}/spawn",
            f"{channel._path}/read",
            "/v1/stream",
            "/v1/list",
        ):
            for garbage in (b"", b"\0", b"[" * 100_000, b'{"a":1}', b"b\xff\xff\xff\xff", os.urandom(1000)):
                with pytest.raises(ProtocolError):
                    await connection.call("POST", path, garbage)
        for path in ("/v1/sandboxes/..%2f..%2fetc", "/v1/sandboxes/ak-1/pause", "/v1/channels/x/stats"):
            with pytest.raises(SandboxError):
                await connection.call("POST", path, b"null")
        with pytest.raises(SandboxError):
            await backend.create("ak-../../../../etc", SMALL, {})
        assert (await box.exec("echo fine")).stdout == "fine\n"
        await box.close()


async def _seconds_of_exec(box: Sandbox) -> float:
    start = time.perf_counter()
    assert (await box.exec(["true"])).ok
    return time.perf_counter() - start


async def test_small_answers_do_not_wait_for_acknowledgements() -> None:
    async with served() as (_, server), connected(server.url) as backend:
        async with Sandbox.create(SMALL, backend=backend) as box:
            times = [await _seconds_of_exec(box) for _ in range(60)]
            here = [connection._writer for connection in backend._servers[0]._http._all]
            there: list[Any] = [connection.transport for connection in server._uvicorn.server_state.connections]
        for end in here + there:
            assert end.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        # Without it on both ends nearly all calls take 40 ms more.
        assert sorted(times)[10] < 0.035


async def test_a_large_file_passes_through_the_server_in_pieces(local: ServerProcess) -> None:
    size = 300 << 20
    resources = Resources(memory=1 << 30, tmp=8 << 20, workspace=400 << 20, shm=1 << 20)
    async with connected(local.url) as one, connected(local.url) as two:
        box = await Sandbox.create(resources=resources, backend=one)
        other = await Sandbox.create(SMALL, backend=two)
        await box.exec(f"head -c {size} /dev/zero > large", check=True)
        before, most, slowest = local.memory, 0, 0.0
        reading = asyncio.ensure_future(box.files.read("large", limit=1 << 30))
        calls = 0
        while not reading.done():
            slowest = max(slowest, await _seconds_of_exec(other))
            most = max(most, local.memory)
            calls += 1
        assert len(await reading) == size
        assert most - before < 32 << 20
        assert calls >= 3
        assert slowest < 5.0
        assert (box.loss, other.loss) == (None, None)
        with pytest.raises(QuotaExceeded, match="file=") as caught:
            await box.files.read("large", limit=2 << 30)
        assert not caught.value.retryable
        await box.close()
        await other.close()


async def test_a_slow_reader_delays_only_itself(local: ServerProcess) -> None:
    resources = Resources(memory=512 << 20, tmp=8 << 20, workspace=200 << 20, shm=1 << 20)
    async with connected(local.url) as backend:
        box = await Sandbox.create(resources=resources, backend=backend)
        await box.exec("head -c 150000000 /dev/zero > large", check=True)
        before = local.memory
        channel: Any = box._channel
        content = pack_arguments("/workspace/large", 1 << 30)
        async with channel._server.exchange("POST", f"{channel._path}/read", content, timeout=60) as answer:
            async for _ in answer:
                break
            await asyncio.sleep(1)
            assert local.memory - before < 16 << 20
            assert await _seconds_of_exec(box) < 5
        assert (await box.exec("rm large")).ok
        await box.close()


async def test_unread_responses_are_bounded() -> None:
    async with served(quota=Quota(responses=3 << 20)) as (_, server), connected(server.url) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        await box.files.write("data", b"x" * (2 << 20))
        with server.sessions.buffered(2 << 20), pytest.raises(QuotaExceeded, match="not read yet") as caught:
            await box.exec("cat data")
        assert caught.value.side_effects == "maybe"
        assert len((await box.exec("cat data")).stdout_bytes) == 2 << 20
        await box.close()


# Policy


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"image": "evil/image"}, "image"),
        ({"image": "agentkit/base-not"}, "image"),
        ({"mounts": (Mount(source="/etc", target="/mnt"),)}, "mounts"),
        ({"mounts": (Mount(source="/", target="/mnt"),)}, "mounts"),
        ({"cap_add": ("SYS_ADMIN",)}, "cap_add"),
        ({"runtime": "runc"}, "runtime"),
        ({"network": Network.bridge()}, "network"),
        ({"network": Network.allow(domains=("example.org",))}, "network"),
        ({"user": "0:0"}, "user"),
        ({"user": "00:5"}, "user"),
        ({"user": "5:0"}, "user"),
        ({"readonly_root": False}, "readonly_root"),
        ({"resources": Resources(gpus=1)}, "gpus"),
        ({"resources": Resources(cpus=64)}, "cpus"),
        ({"resources": Resources(memory=1 << 40)}, "memory"),
        ({"output_limit": 1 << 40}, "output"),
    ],
)
async def test_a_token_is_not_root(fields: dict[str, Any], named: str) -> None:
    async with served() as (fake, server), connected(server.url) as backend:
        with pytest.raises((AccessDenied, QuotaExceeded), match=named) as caught:
            await Sandbox.create(SandboxSpec(**fields), backend=backend)
        assert not caught.value.retryable
        assert fake.most == 0


def test_mounts_are_checked_by_their_real_paths(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "allowed", tmp_path / "allowed-not"
    (allowed / "data").mkdir(parents=True)
    secret.mkdir()
    (allowed / "link").symlink_to(secret)
    policy = Policy(mounts=(str(allowed),))

    def ask(source: object, read_only: bool = True) -> SandboxSpec:
        return permitted(policy, SandboxSpec(mounts=(Mount(source=str(source), target="/m", read_only=read_only),)))

    assert ask(allowed / "data").mounts[0].source == str(allowed / "data")
    assert ask(f"{allowed}/x/../data").mounts[0].source == str(allowed / "data")
    for source in (secret, tmp_path, "/", allowed / "link", f"{allowed}/../allowed-not", f"{allowed}/link/x"):
        with pytest.raises(AccessDenied):
            ask(source)
    with pytest.raises(AccessDenied):
        ask(allowed / "data", read_only=False)


async def test_clients_reach_only_sandboxes_of_their_server() -> None:
    async with served() as (fake, server), connected(server.url) as backend:
        other = await Sandbox.create(SMALL, backend=fake)
        assert await backend.list({"agentkit.managed": "1"}) == []
        assert (await backend.inspect(other.id)).state == "absent"
        await backend.remove(other.id)
        with pytest.raises(SandboxLost):
            await Sandbox.connect(other.id, backend=backend)
        with pytest.raises(SandboxError):
            await backend.create(other.id, SMALL, {})
        assert (await other.exec("echo here")).ok
        await other.close()


async def test_the_server_sets_the_labels_of_agentkit() -> None:
    async with served() as (fake, server), connected(server.url) as backend:
        await backend.create("ak-0123456789abcdef", SMALL, {"agentkit.id": "ak-other", "mine": "1"})
        labels = fake.boxes["ak-0123456789abcdef"].labels
        assert (labels["agentkit.id"], labels["mine"]) == ("ak-0123456789abcdef", "1")


# Wire format


@pytest.mark.parametrize("code", list(ERRORS))
def test_errors_keep_their_kind(code: str) -> None:
    kind = ERRORS[code]
    error = kind("why", reason="oom", out=b"\xff") if issubclass(kind, SandboxError) else kind("why")
    back = unpack_error(pack_error(error))
    assert (type(back), str(back)) == (kind, "why")
    if isinstance(back, SandboxError):
        assert back.details == {"reason": "oom", "out": b"\xff"}


def test_unexpected_errors_reveal_nothing() -> None:
    back = unpack_error(pack_error(RuntimeError("a secret of the server")))
    assert type(back) is SandboxError
    assert "secret" not in str(back)
    assert back.side_effects == "maybe"


@pytest.mark.parametrize(
    "told",
    [
        *(b"", b"[]", b"null", b"{}", b"[" * 9999, b'{"code":"os.system","message":"x"}'),
        b'{"code":["lost"],"message":"x"}',
        b'{"code":"lost","message":"x","details":[1]}',
        b'{"code":"lost","message":"x","details":{"message":1}}',
    ],
)
def test_malformed_errors_are_protocol_errors(told: bytes) -> None:
    assert type(unpack_error(told)) is ProtocolError


async def test_errors_and_files_of_all_kinds() -> None:
    async with served() as (_, server), connected(server.url) as backend:  # noqa: SIM117
        async with Sandbox.create(SMALL, backend=backend) as box:
            await box.files.write("odd \udcff", b"\0\xff" * 100)
            assert [info.path for info in await box.files.list()] == ["/workspace/odd \udcff"]
            assert await box.files.read("odd \udcff") == b"\0\xff" * 100
            with pytest.raises(FileTooLarge):
                await box.files.read("odd \udcff", limit=10)


# Failures


async def test_a_call_is_not_repeated_after_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (fake, server), connected(server.url) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        task = asyncio.ensure_future(box.exec("append-twice", timeout=20))
        await until(lambda: "/workspace/log" in fake.boxes[box.id].files)
        for connection in list(server._uvicorn.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.scope["path"].endswith("/exec"):
                connection.transport.abort()
        with pytest.raises((EngineUnavailable, SandboxLost)) as caught:
            await task
        assert caught.value.side_effects == "maybe"
        await asyncio.sleep(1.5)
        # Run once, and killed when its caller was gone; the sandbox is as good as before.
        assert (await box.exec("cat log")).stdout == "x\n"
        await box.close()


async def test_a_call_with_a_key_is_repeated_after_a_broken_connection() -> None:
    async with served() as (fake, server), connected(server.url) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        task = asyncio.ensure_future(box.exec("append-and-say out", timeout=20, idempotency_key="k"))
        await until(lambda: "/workspace/log" in fake.boxes[box.id].files)
        for connection in list(server._uvicorn.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and cycle.scope["path"].endswith("/exec"):
                connection.transport.abort()
        assert (await task).stdout == "out\n"
        assert (await box.exec("cat log")).stdout == "x\n"
        await box.close()


async def test_a_server_is_killed_during_a_command(process: ServerProcess) -> None:
    async with connected(process.url) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        running = await box.spawn("sleep 1000", timeout=2000)
        task = asyncio.ensure_future(box.exec("sleep 1000", timeout=2000))
        await asyncio.sleep(0.3)
        process.end()
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(task, PATIENCE + SLACK)
        assert (caught.value.details["reason"], caught.value.side_effects) == ("engine_down", "maybe")
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(running.wait(), SLACK)
        assert (box.state, box.loss) == ("unhealthy", "engine_down")
        with pytest.raises(EngineUnavailable):
            await Sandbox.create(SMALL, backend=backend)
        await box.close()  # removed when the server is back, or by the reaper of its machine


async def test_one_of_two_servers_is_killed(process: ServerProcess) -> None:
    async with served() as (fake, server), connected(server.url, process.url) as backend:
        boxes = await asyncio.gather(*[Sandbox.create(SMALL, backend=backend) for _ in range(6)])
        assert len(fake.boxes) == 3
        assert {seen.id for seen in await backend.list({})} == {box.id for box in boxes}
        process.end()
        here = [box for box in boxes if box.id in fake.boxes]
        there = [box for box in boxes if box not in here]
        await until(lambda: all(box.loss == "engine_down" for box in there))
        for box in here:
            assert (await box.exec("echo on")).stdout == "on\n"
        more = [await Sandbox.create(SMALL, backend=backend) for _ in range(3)]
        assert len(fake.boxes) == 6
        for box in here + more:
            await box.close()
        assert fake.boxes == {}


async def test_a_host_to_avoid_is_used_only_if_no_other_has_room() -> None:
    one, two = served(), served(quota=Quota(sandboxes=2))
    async with one as (busy, first), two as (_, second), connected(first.url, second.url) as backend:
        hosts = [server.url.removeprefix("http://") for server in (first, second)]
        boxes = [await Sandbox.create(SMALL, backend=backend, avoid_hosts=hosts[:1]) for _ in range(3)]
        assert [backend.host_of(box.id) for box in boxes] == [hosts[1], hosts[1], hosts[0]]
        assert list(busy.boxes) == [boxes[2].id]
        for box in boxes:
            await box.close()
        assert backend.host_of(boxes[0].id) == "unknown"


async def test_only_the_server_that_has_a_sandbox_must_answer(tmp_path: Path) -> None:
    servers = [ServerProcess(tmp_path / name) for name in ("one", "two", "three")]
    try:
        async with connected(servers[0].url) as maker, connected(servers[2].url) as other_maker:
            box = await Sandbox.create(SMALL, backend=maker)
            gone = await Sandbox.create(SMALL, backend=other_maker)
            servers[2].end()
            # A client that begins when one server is down already, and sees another one end.
            async with connected(*[server.url for server in servers]) as backend:
                servers[1].end()
                again = await Sandbox.connect(box.id, backend=backend)
                assert (await again.exec("echo here")).stdout == "here\n"
                assert (await backend.inspect(box.id)).state == "running"
                assert await Sandbox.list(backend=backend) != []
                for call in (backend.inspect(gone.id), backend.attach(gone.id), backend.logs(gone.id, 1)):
                    with pytest.raises(EngineUnavailable) as caught:
                        await call
                    assert servers[1].url in str(caught.value)
                    assert servers[2].url in str(caught.value)
                    assert servers[0].url not in str(caught.value)
                await again.close()
            async with connected(servers[0].url) as backend:
                assert (await backend.inspect(gone.id)).state == "absent"
            await box.close()
    finally:
        for server in servers:
            server.end()


async def test_calls_to_an_ended_server_fail_before_patience(process: ServerProcess) -> None:
    backend = RemoteBackend(process.url, TOKEN, patience=60.0)
    await backend.start()
    box = await Sandbox.create(SMALL, backend=backend)
    calls = [asyncio.ensure_future(box.exec("sleep 1000", timeout=2000)) for _ in range(3)]
    running = await box.spawn("sleep 1000", timeout=2000)
    await asyncio.sleep(0.5)
    process.end()
    start = time.monotonic()
    for call in [*calls, asyncio.ensure_future(running.wait())]:
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(call, SLACK)
        assert caught.value.details["reason"] == "engine_down"
    assert time.monotonic() - start < 3.0  # a quiet machine needs 0.7 s
    start = time.monotonic()
    with pytest.raises(EngineUnavailable):
        await backend.inspect(box.id)
    assert time.monotonic() - start < 1.0
    await backend.close()


async def test_full_and_unreachable_servers_are_skipped() -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    unreachable = f"http://127.0.0.1:{gone.getsockname()[1]}"
    gone.close()
    one, two = served(quota=Quota(sandboxes=1)), served(quota=Quota(sandboxes=3))
    async with one as (small, first), two as (large, second), connected(unreachable, first.url, second.url) as backend:
        boxes = await asyncio.gather(*[Sandbox.create(SMALL, backend=backend) for _ in range(4)])
        assert (len(small.boxes), len(large.boxes)) == (1, 3)
        with pytest.raises(QuotaExceeded):
            await Sandbox.create(SMALL, backend=backend)
        # Found again by a client that did not make them, and forked where they live.
        async with connected(first.url, second.url) as other:
            found = [await Sandbox.connect(box.id, backend=other) for box in boxes]
            assert all([(await box.exec("true")).ok for box in found])
        for box in boxes:
            await box.close()


async def test_a_server_that_comes_back_is_used_again() -> None:
    async with served() as (_, server):
        port = int(server.url.rpartition(":")[2])
        backend = RemoteBackend(server.url, TOKEN, patience=PATIENCE)
        await backend.start()
        lost = await Sandbox.create(SMALL, backend=backend)
    async with served(port=port) as (fake, _):
        await until(lambda: lost.loss is not None)
        await until(lambda: backend._servers[0].up)
        async with Sandbox.create(SMALL, backend=backend) as box:
            assert (await box.exec("true")).ok
        await lost.close()
        assert fake.boxes == {}
        await backend.close()


# Disconnected clients


async def test_sandboxes_are_removed_after_their_client_disconnected() -> None:
    async with served(quota=Quota(disconnected_seconds=1.0)) as (fake, server):
        async with connected(server.url) as backend:
            box = await Sandbox.create(SMALL, backend=backend)
            await asyncio.sleep(2.0)
            assert box.id in fake.boxes
        async with connected(server.url) as backend:
            again = await Sandbox.connect(box.id, backend=backend)
            await asyncio.sleep(2.0)
            assert (await again.exec("true")).ok
            await again.close()
        await until(lambda: not fake.boxes)


async def test_snapshots_are_removed_after_their_client_disconnected() -> None:
    async with (
        served(quota=Quota(disconnected_seconds=1.0, snapshots=2)) as (fake, server),
        connected(server.url) as other,
        await Sandbox.create(SMALL, backend=other) as box,
    ):
        async with connected(server.url) as backend:
            leaver = await Sandbox.create(SMALL, backend=backend)
            mine = [await leaver.snapshot(), await leaver.snapshot()]
            with pytest.raises(QuotaExceeded):
                await box.snapshot()
            await asyncio.sleep(2.0)
            assert len(fake.snapshot_files) == 2  # its client is there
        async with Sandbox.create(SMALL, backend=other, snapshot=mine[0]) as copy:
            await until(lambda: len(fake.snapshot_files) == 1)
            await asyncio.sleep(2.0)
            await copy.reset()  # what it was made from is kept for it
            await Sandbox.discard(await box.snapshot(), backend=other)
        await until(lambda: not fake.snapshot_files)


async def test_a_time_to_live_ends_without_its_client() -> None:
    async with served() as (fake, server):
        async with connected(server.url) as backend:
            box = await Sandbox.create(SMALL, backend=backend, ttl=100)
            await box.extend(1)
            box._expiry.stop()
        await until(lambda: not fake.boxes)


async def test_commands_are_killed_when_their_client_disconnects() -> None:
    async with served() as (fake, server):
        async with connected(server.url) as backend:
            box = await Sandbox.create(SMALL, backend=backend)
            process = await box.spawn("sleep 1000", timeout=2000)
            task = asyncio.ensure_future(box.exec("sleep 1000", timeout=2000))
            processes = fake.boxes[box.id].processes
            await until(lambda: len(processes) >= 2)
        with pytest.raises(SandboxLost):
            await task
        with pytest.raises((SandboxLost, EngineUnavailable)):
            await process.wait()
        await until(lambda: not processes)
        assert box.id in fake.boxes


async def test_cancelling_returns_when_the_command_is_dead() -> None:
    async with served() as (fake, server), connected(server.url) as backend:  # noqa: SIM117
        async with Sandbox.create(SMALL, backend=backend) as box:
            processes = fake.boxes[box.id].processes
            for _ in range(5):
                task = asyncio.ensure_future(box.exec("sleep 1000"))
                await until(lambda: processes)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert not processes


async def test_a_failed_creation_does_not_count() -> None:
    async with served(quota=Quota(sandboxes=1)) as (fake, server), connected(server.url) as backend:
        fake.inject(Fault("create", "fail", phase="start", times=2))
        for _ in range(2):
            with pytest.raises(AgentkitError):
                await Sandbox.create(SMALL, backend=backend)
        async with Sandbox.create(SMALL, backend=backend):
            assert len(fake.boxes) == 1


async def test_a_server_that_is_stopped_removes_what_it_made(process: ServerProcess) -> None:
    async with connected(process.url) as backend:
        await Sandbox.create(SMALL, backend=backend)
        assert process.end(signal.SIGTERM) == 0


def test_the_token_is_never_an_argument() -> None:
    source = (Path(__file__).parents[3] / "sandboxes" / "server" / "app.py").read_text()
    assert re.search(r"sys\.argv|argparse", source) is None


async def test_a_server_that_refuses_connections_is_reported_once() -> None:
    backend = RemoteBackend(["http://127.0.0.1:1"], token="0" * 32)
    with pytest.raises(EngineUnavailable) as caught:
        await backend.start()
    await backend.close()
    assert str(caught.value).count("does not answer") == 1
