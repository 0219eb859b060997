"""Sandboxes over restarts of their server: real server processes that end by signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agentkit.errors import EngineUnavailable, SandboxLost
from agentkit.sandboxes import Resources, Sandbox, SandboxSpec
from agentkit.sandboxes.backend import Process
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.server.state import ServerState

TOKEN = "a-token-of-the-tests-alone"
SLACK = 60.0
SMALL = SandboxSpec(resources=Resources(memory=128 << 20, tmp=8 << 20, workspace=16 << 20, shm=1 << 20))


class Machine:
    """A host with its own runtime directory, on which a server is started and ended again."""

    def __init__(self, directory: Path, backend: str = "local") -> None:
        directory.chmod(0o700)
        self.directory = directory
        self._backend = backend
        self._environment = {
            **os.environ,
            "AGENTKIT_SANDBOX_TOKEN": TOKEN,
            "AGENTKIT_RUNTIME_DIR": str(directory),
        }
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.name = f"{backend}-{self._port}"
        self._popen: subprocess.Popen[str] | None = None

    async def start(self, **options: object) -> None:
        self._popen = self.launch(**{"keep": 60.0, **options})
        assert self._popen.stdout is not None
        assert await asyncio.to_thread(self._popen.stdout.readline) == f"{self.url}\n"

    def launch(self, config: str = "", port: int | None = None, **options: object) -> subprocess.Popen[str]:
        file = self.directory / "server.yaml"
        file.write_text(config)
        code = (
            "from agentkit.sandboxes.server.app import serve\n"
            f"serve({self._backend!r}, port={self._port if port is None else port}, config={str(file)!r}, "
            f"announce=lambda url: print(url, flush=True), **{options!r})"
        )
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", code], stdout=pipe, stderr=pipe, env=self._environment, text=True
        )

    async def end(self, number: int = signal.SIGKILL) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)
            await asyncio.to_thread(self._popen.communicate, timeout=SLACK)
            self._popen = None

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.communicate()

    @property
    def sandboxes(self) -> list[str]:
        """Return what exists of sandboxes, whether a server runs or not."""
        directory = self.directory / "sandboxes"
        return [path.name for path in directory.glob("ak-*") if path.is_dir()] if directory.exists() else []


async def machines(directory: Path, backend: str) -> AsyncIterator[Machine]:
    """Yield one machine, and leave nothing on it."""
    machine = Machine(directory, backend)
    try:
        yield machine
    finally:
        machine.kill()
        # The next process of the server takes over what is left, and removes it.
        await machine.start(keep=1.0)
        await machine.end(signal.SIGINT)
    assert machine.sandboxes == []


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    async for machine in machines(tmp_path, "local"):
        yield machine


@contextlib.asynccontextmanager
async def connected(machine: Machine, patience: float = 10.0) -> AsyncIterator[RemoteBackend]:
    backend = RemoteBackend(machine.url, TOKEN, patience=patience)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SLACK
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_killed_server_finds_its_sandboxes_again(machine: Machine) -> None:
    await machine.start()
    async with connected(machine) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        frozen = await Sandbox.create(SMALL, backend=backend)
        await box.files.write("note", b"kept")
        await frozen.files.write("note", b"frozen")
        await frozen.pause()
        snapshot = await box.snapshot()
        await box.extend(1000)
        await machine.end()
        with pytest.raises((SandboxLost, EngineUnavailable)):
            await box.exec("true")
        await until(lambda: box.loss == "engine_down")  # without an announcement nothing waits
        await machine.start(config="quota: {sandboxes: 2}")
        await until(lambda: backend._servers[0].up)
        assert (backend.hosts()[0].used, backend.hosts()[0].limit) == (2, 2)  # adopted ones count
        again = await Sandbox.connect(box.id, backend=backend)
        assert (await again.exec("cat note")).stdout == "kept"
        await backend.resume(frozen.id)
        thawed = await Sandbox.connect(frozen.id, backend=backend)
        assert await thawed.files.read("note") == b"frozen"
        await thawed.close(remove=True)
        async with Sandbox.create(SMALL, backend=backend, snapshot=snapshot) as copy:
            assert await copy.files.read("note") == b"kept"
        await again.close(remove=True)


@pytest.mark.slow
async def test_without_a_successor_everything_is_removed(machine: Machine) -> None:
    await machine.start(keep=4.0)
    async with connected(machine, patience=1.0) as backend:
        await Sandbox.create(SMALL, backend=backend)
        await (await Sandbox.create(SMALL, backend=backend)).pause()
        await machine.end()
        killed = time.monotonic()
        await until(lambda: not machine.sandboxes)
        assert time.monotonic() - killed > 3.0


async def test_sigint_removes_everything(machine: Machine) -> None:
    await machine.start()
    async with connected(machine) as backend:
        await Sandbox.create(SMALL, backend=backend)
        assert machine.sandboxes
        await machine.end(signal.SIGINT)
        assert machine.sandboxes == []


async def test_damaged_files_lose_only_what_they_describe(machine: Machine) -> None:
    await machine.start()
    async with connected(machine) as backend:
        boxes = [await Sandbox.create(SMALL, backend=backend) for _ in range(3)]
        await machine.end()
        files = next((machine.directory / "servers").iterdir()) / "sandboxes"
        (files / boxes[0].id).write_bytes(b'{"id": "ak-')
        (files / boxes[1].id).unlink()
        (files / "ak-0123456789abcdef").write_bytes((files / boxes[2].id).read_bytes())
        (files.parent / "boot").write_bytes(b"\xff\0")
        await machine.start()
        await until(lambda: machine.sandboxes == [boxes[2].id])
        await until(lambda: backend._servers[0].up)
        again = await Sandbox.connect(boxes[2].id, backend=backend)
        assert (await again.exec("echo here")).stdout == "here\n"
        for box in boxes[:2]:
            with pytest.raises(SandboxLost):
                await Sandbox.connect(box.id, backend=backend)


async def test_a_second_server_of_one_name_is_refused(machine: Machine) -> None:
    await machine.start()
    async with connected(machine) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        second = machine.launch(port=0, name=machine.name, keep=60.0)
        _, errors = await asyncio.to_thread(second.communicate, timeout=SLACK)
        assert second.returncode != 0
        assert f"ConfigError: the sandbox server {machine.name} already runs as process" in errors
        assert (await box.exec("true")).ok


async def _append(box: Sandbox, stop: asyncio.Event) -> int:
    """Append numbers to a file, one command for each, until ``stop``; return how many."""
    count = 0
    while not stop.is_set():
        count += 1
        await box.exec(f"echo {count} >> log", timeout=60, check=True)
    return count


async def _copy(process: Process, stop: asyncio.Event) -> None:
    """Exchange numbered lines with ``cat`` until ``stop``: none is lost or repeated."""
    lines, rest, number = process.__aiter__(), b"", 0
    while not stop.is_set():
        number += 1
        await process.write(b"%d\n" % number * 100)
        while rest.count(b"\n") < 100:
            stream, data = await anext(lines)
            rest += data if stream == "stdout" else b""
        assert rest == b"%d\n" % number * 100
        rest = b""
    await process.close_stdin()
    assert [item async for item in lines] == []
    assert (await process.wait()).exit_code == 0


async def planned_restart(machine: Machine) -> None:
    await machine.start()
    async with connected(machine) as backend:
        boxes = [await Sandbox.create(SMALL, backend=backend) for _ in range(3)]
        stop = asyncio.Event()
        appending = [asyncio.ensure_future(_append(box, stop)) for box in boxes[:2]]
        copying = asyncio.ensure_future(_copy(await boxes[2].spawn("cat", timeout=1000), stop))
        idle = await boxes[2].spawn("read -r line; echo $line; exit 3", timeout=1000)
        keyed = asyncio.ensure_future(boxes[2].exec("sleep 6; echo on", timeout=60, idempotency_key="key"))
        cut = asyncio.ensure_future(boxes[2].exec("touch begun; sleep 1000", timeout=2000))
        await asyncio.sleep(1.0)
        await machine.end(signal.SIGTERM)
        # Calls that are made while there is no server wait for the next one.
        during = [asyncio.ensure_future(Sandbox.create(SMALL, backend=backend))]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in [*during, *appending, copying])
        await machine.start()
        boxes.append(await during[0])
        with pytest.raises(EngineUnavailable) as caught:
            await cut
        assert caught.value.side_effects == "maybe"
        assert (await keyed).stdout == "on\n"
        await idle.write(b"late\n")
        result = await idle.wait()
        assert (result.exit_code, result.stdout) == (3, "late\n")
        stop.set()
        for box, task in zip(boxes, appending, strict=False):
            wanted = "".join(f"{number}\n" for number in range(1, await task + 1))
            assert (await box.exec("cat log")).stdout == wanted
        await copying
        assert (await boxes[2].exec("pgrep -f 'sleep [1]000' || echo none")).stdout == "none\n"
        for box in boxes:
            assert box.loss is None
            await box.close()
        assert machine.sandboxes == []


@pytest.mark.slow
async def test_a_planned_restart_loses_no_call(machine: Machine) -> None:
    await planned_restart(machine)


@pytest.mark.docker
async def test_a_planned_restart_with_containers(tmp_path: Path) -> None:
    async for machine in machines(tmp_path, "docker"):
        await planned_restart(machine)


@pytest.mark.slow
async def test_a_server_that_does_not_return_in_time_loses_its_sandboxes(machine: Machine) -> None:
    await machine.start(keep=3.0)
    async with connected(machine) as backend:
        box = await Sandbox.create(SMALL, backend=backend)
        process = await box.spawn("cat", timeout=1000)
        began = time.monotonic()
        await machine.end(signal.SIGTERM)
        with pytest.raises(SandboxLost) as caught:
            await box.exec("true")
        assert caught.value.details["reason"] == "engine_down"
        with pytest.raises(SandboxLost):
            await process.wait()
        assert 2.0 < time.monotonic() - began < SLACK


@pytest.mark.slow
async def test_times_to_live_and_clients_are_kept(machine: Machine) -> None:
    config = "quota: {disconnected_seconds: 4}"
    await machine.start(config=config)
    async with connected(machine) as backend:
        async with connected(machine) as leaver:
            abandoned = await Sandbox.create(SMALL, backend=leaver)
            expiring = await Sandbox.create(SMALL, backend=backend)
            lasting = await Sandbox.create(SMALL, backend=backend)
            await expiring.extend(8.0)
            expiring._expiry.stop()
        extended = time.monotonic()
        await machine.end(signal.SIGTERM)
        await machine.start(config=config)
        assert abandoned.id in machine.sandboxes
        await until(lambda: machine.sandboxes == [lasting.id])
        assert time.monotonic() - extended > 6.0
        # Its client is known to the new process, and connected.
        await asyncio.sleep(2.0)
        assert (await backend.inspect(lasting.id)).state == "running"


@pytest.fixture
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.mark.usefixtures("own_runtime")
@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "x" * 65])
def test_names_are_file_names(name: str) -> None:
    from agentkit.errors import ConfigError

    with pytest.raises(ConfigError, match="--name"):
        ServerState(name, 1.0)
