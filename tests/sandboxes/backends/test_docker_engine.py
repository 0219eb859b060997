"""Calls of an engine that answers, refuses, hangs or does not exist, and the threads that make them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from requiring import require

from agentkit.errors import EngineUnavailable, UnsupportedFeature
from agentkit.sandboxes.backends.docker import events as docker_stream
from agentkit.sandboxes.backends.docker.engine import DockerEngine, EngineRefused
from agentkit.sandboxes.tasks import bounded
from agentkit.sandboxes.threads import DaemonThreadPool

Handler = Callable[[str], Awaitable[bytes | None]]


@pytest.fixture(autouse=True)
def sdk() -> None:
    require("docker", "pip install 'agentkit-rl[docker]'")


class Pretender:
    """A minimal HTTP server on a unix socket; with None as the answer it does not respond."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path, self.handler = path, handler
        self.asked: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Pretender:
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request = head.split(b"\r\n")[0].decode()
                self.asked.append(request)
                if (answer := await self.handler(request)) is not None:
                    writer.write(answer)
        except (OSError, asyncio.IncompleteReadError):
            pass


def answer(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


async def modern(request: str) -> bytes | None:
    """An engine that starts, and then answers only requests for its info."""
    if "/version" in request:
        return answer('{"ApiVersion": "1.41"}')
    if "/info" in request:
        return answer('{"NCPU": 2}')
    if "/containers/refused/json" in request:
        return answer('{"message": "no"}', "409 Conflict")
    return None


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[DockerEngine]:
    async with Pretender(tmp_path / "s", modern):
        engine = DockerEngine(f"unix://{tmp_path}/s")
        await engine.start()
        yield engine
        engine.close()


async def test_a_missing_engine_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    for _ in range(2):
        engine = DockerEngine(f"unix://{tmp_path}/none")
        with pytest.raises(
            EngineUnavailable, match=r"no container engine answers.*apt-get install docker.io"
        ) as caught:
            await engine.start()
        assert caught.value.retryable
        assert caught.value.side_effects == "none"
        with pytest.raises(EngineUnavailable, match="not started"):
            await engine.call("look", lambda client: client.info())


async def test_an_engine_on_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    with pytest.raises(UnsupportedFeature, match="agentkit sandbox serve"):
        DockerEngine()


async def test_an_old_engine_is_refused(tmp_path: Path) -> None:
    async def old(request: str) -> bytes | None:
        return answer('{"ApiVersion": "1.40"}' if "/version" in request else "{}")

    async with Pretender(tmp_path / "s", old):
        with pytest.raises(EngineUnavailable, match=r"1\.41"):
            await DockerEngine(f"unix://{tmp_path}/s").start()


async def test_another_server_on_the_socket_is_refused(tmp_path: Path) -> None:
    async def garbage(request: str) -> bytes | None:
        return b"SSH-2.0-OpenSSH\r\n\r\n"

    async with Pretender(tmp_path / "s", garbage):
        with pytest.raises(EngineUnavailable):
            await DockerEngine(f"unix://{tmp_path}/s").start()


async def test_a_silent_engine_is_an_error_after_the_timeout(engine: DockerEngine) -> None:
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"did not answer in 0\.3 s"):
        await engine.call("look", lambda client: client.containers(), timeout=0.3)
    assert time.monotonic() - began < 10
    # Also where the SDK itself would wait for ever.
    with pytest.raises(EngineUnavailable):
        await engine.call("pull", lambda client: list(client.pull("x", stream=True)), timeout=0.3, queue="pull")


async def test_a_refusal_keeps_its_status(engine: DockerEngine) -> None:
    with pytest.raises(EngineRefused, match="no") as caught:
        await engine.call("look", lambda client: client.inspect_container("refused"))
    assert caught.value.status == 409


async def test_removals_do_not_wait_for_other_calls(engine: DockerEngine) -> None:
    release = threading.Event()
    blocked = [asyncio.ensure_future(engine.call("create", lambda _: release.wait(30))) for _ in range(50)]
    await asyncio.sleep(0.1)
    assert await asyncio.wait_for(engine.call("remove", lambda _: "done", queue="removal"), 10) == "done"
    release.set()
    assert all(await asyncio.gather(*blocked))


async def test_a_cancelled_change_finishes_before_the_cancellation(engine: DockerEngine) -> None:
    ended = False

    def slow(_: object) -> None:
        nonlocal ended
        time.sleep(0.5)
        ended = True

    task = asyncio.ensure_future(engine.call("create", slow, changes=True))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_a_cancelled_query_is_not_waited_for(engine: DockerEngine) -> None:
    release = threading.Event()
    task = asyncio.ensure_future(engine.call("look", lambda _: release.wait(30)))
    await asyncio.sleep(0.1)
    task.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 5
    release.set()


async def test_a_call_that_is_cancelled_in_the_queue_never_runs(engine: DockerEngine) -> None:
    release, done = threading.Event(), []
    blocked = [asyncio.ensure_future(engine.call("create", lambda _: release.wait(30))) for _ in range(20)]
    late = asyncio.ensure_future(engine.call("create", lambda _: done.append(1), changes=True))
    await asyncio.sleep(0.1)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    release.set()
    await asyncio.gather(*blocked)
    assert done == []


async def test_events_end_with_the_engine(tmp_path: Path) -> None:
    async def events(request: str) -> bytes | None:
        return b'HTTP/1.0 200 OK\r\n\r\n{"Action": "die"}\n'

    async with Pretender(tmp_path / "s", events) as engine:
        told = docker_stream.events(str(tmp_path / "s"), "1.41", {"label": ["a=b"]}, 10)
        assert await anext(told) == {"Action": "die"}
        engine.writers[0].transport.abort()
        with pytest.raises(EngineUnavailable):
            await anext(told)
        assert "filters=%7B%22label" in engine.asked[0]


@pytest.mark.parametrize(
    "said", [b"garbage", b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000, b"", b"HTTP/1.0 200 OK\r\n\r\nno json\n"]
)
async def test_malformed_event_streams(tmp_path: Path, said: bytes) -> None:
    async def garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    server = await asyncio.start_unix_server(garbage, tmp_path / "s")
    with pytest.raises(EngineUnavailable):
        await anext(docker_stream.events(str(tmp_path / "s"), "1.41", {}, 10))
    server.close()


async def test_a_silent_stream_ends_in_time(tmp_path: Path) -> None:
    async def silent(request: str) -> bytes | None:
        return None

    async with Pretender(tmp_path / "s", silent):
        with pytest.raises(EngineUnavailable, match="did not answer"):
            await anext(docker_stream.events(str(tmp_path / "s"), "1.41", {}, 0.2))


# Threads


def test_a_thread_pool_runs_at_most_its_size_of_calls() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def job(_: object) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    made, unmade = [], []
    pool: DaemonThreadPool[object] = DaemonThreadPool("test", 3, lambda: made.append(1), unmade.append)
    for future in [pool.submit(job) for _ in range(50)]:
        future.result(30)
    assert most == 3
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError):
        pool.submit(job)


def test_a_resource_is_created_once_per_thread_and_released() -> None:
    unmade = threading.Event()
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    pool: DaemonThreadPool[object] = DaemonThreadPool("test", 1, make, lambda _: unmade.set())
    assert len({pool.submit(id).result(30) for _ in range(5)}) == 1
    assert len(made) == 1
    pool.close()
    assert unmade.wait(30)


def test_a_failed_resource_fails_the_call_but_not_the_pool() -> None:
    attempts = []

    def make() -> int:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return 7

    pool: DaemonThreadPool[int] = DaemonThreadPool("test", 1, make, lambda _: None)
    with pytest.raises(OSError, match="not yet"):
        pool.submit(lambda seven: seven).result(30)
    assert pool.submit(lambda seven: seven).result(30) == 7
    pool.close()


async def test_bounded_waits() -> None:
    with pytest.raises(asyncio.TimeoutError):
        await bounded(asyncio.sleep(30), 0.05)
    assert await bounded(asyncio.sleep(0, 5), 10) == 5
    task = asyncio.ensure_future(bounded(asyncio.sleep(30), 60))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
