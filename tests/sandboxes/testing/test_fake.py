"""The scripted back end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentkit.errors import CommandNotFound, DiskFull, FileTooLarge, PathError, SandboxLost
from agentkit.sandboxes import Resources, Sandbox
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import COMMANDS, Command, FakeBackend, FakeFile, Script


def play(scenario: Callable[[Sandbox, FakeBackend], Awaitable[None]], **commands: Script) -> None:
    """Run ``scenario`` with a sandbox of these commands in virtual time."""

    async def main() -> None:
        backend = FakeBackend(commands=commands)
        await backend.start()
        async with Sandbox.create(backend=backend, resources=Resources(pids=16, workspace=1 << 20)) as box:
            await scenario(box, backend)
        assert backend.boxes == {}
        await backend.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    virtual_time.run(main(), limit=10_000)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_command_gets_its_words_and_environment_and_input() -> None:
    async def show(command: Command, *words: str) -> int:
        await command.write(f"{words} {command.env} {command.request.cwd}")
        while data := await command.read():
            await command.write(data, "stderr")
        return len(words)

    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        result = await box.exec("show a b", env={"A": "1"}, cwd="/tmp", stdin=b"in")
        assert (result.exit_code, result.stdout, result.stderr) == (2, "('a', 'b') {'A': '1'} /tmp", "in")
        assert (await box.exec(["show", "a b"])).stdout == "('a b',) {} /workspace"
        with pytest.raises(CommandNotFound, match="no command 'ls -l' is scripted"):
            await box.exec("ls -l")
        assert len(backend.boxes[box.id].executed) == 2

    play(scenario, show=show)


def test_a_complete_command_line_takes_precedence_over_its_first_word() -> None:
    async def special(command: Command) -> int:
        return 9

    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        assert (await box.exec("sleep 1; exit 9")).exit_code == 9
        assert (await box.exec("sleep 1")).exit_code == 0

    play(scenario, **{"sleep 1; exit 9": special})


def test_a_timeout_kills_the_children_and_an_end_does_not() -> None:
    async def parent(command: Command, seconds: str) -> None:
        command.start(COMMANDS["sleep"], "100")
        await command.write("early")
        await command.sleep(float(seconds))

    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        processes = backend.boxes[box.id].processes
        result = await box.exec("parent 1000", timeout=5)
        assert (result.timed_out, result.exit_code, result.signal, result.stdout) == (True, None, 9, "early")
        assert result.duration == pytest.approx(5)
        assert not processes
        assert (await box.exec("parent 1")).ok
        assert len(processes) == 1
        await asyncio.sleep(100)
        assert not processes

    play(scenario, parent=parent)


def test_errors_of_a_script_reach_the_caller() -> None:
    async def wrong(command: Command) -> None:
        raise ZeroDivisionError

    async def hungry(command: Command) -> None:
        raise MemoryError

    async def fork(command: Command) -> None:
        while True:
            command.start(COMMANDS["sleep"], "10")

    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        with pytest.raises(ZeroDivisionError):
            await box.exec("wrong")
        result = await box.exec("hungry")
        assert (result.exit_code, result.signal, result.oom_killed) == (137, 9, True)
        with pytest.raises(BlockingIOError, match="all 16 processes"):
            await box.exec("fork")
        await box.spawn("sleep 10")
        with pytest.raises(CommandNotFound, match="all 16 processes"):
            await box.exec("true")

    play(scenario, wrong=wrong, hungry=hungry, fork=fork)


def test_a_spawned_command_can_be_talked_to() -> None:
    async def echo_input(command: Command) -> None:
        while data := await command.read():
            await command.write(data)

    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        process = await box.spawn("cat", timeout=100)
        output = aiter(process)
        await process.write(b"ping")
        assert await anext(output) == ("stdout", b"ping")
        await process.close_stdin()
        assert [item async for item in output] == []
        assert (await process.wait()).exit_code == 0
        with pytest.raises(BrokenPipeError):
            await process.write(b"late")
        killed = await box.spawn("sleep 1000")
        await killed.kill(15)
        assert ((await killed.wait()).exit_code, (await killed.wait()).signal) == (143, 15)
        lost = await box.spawn("sleep 1000")
        backend.die(box.id)
        with pytest.raises(SandboxLost):
            await lost.wait()

    play(scenario, cat=echo_input)


def test_a_paused_sandbox_stands_still() -> None:
    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        process = await box.spawn("sleep 10")
        start = now()
        await asyncio.sleep(5)
        await box.pause()
        await asyncio.sleep(100)
        await box.resume()
        await process.wait()
        assert now() - start == pytest.approx(105, abs=0.1)

    play(scenario)


def test_files() -> None:
    async def scenario(box: Sandbox, backend: FakeBackend) -> None:
        await box.files.write("d/a", b"123")
        await box.files.mkdir("d/sub")
        backend.boxes[box.id].files["/workspace/d/link"] = FakeFile(kind="symlink")
        assert [(info.path, info.kind) for info in await box.files.list("d")] == [
            ("/workspace/d/a", "file"),
            ("/workspace/d/link", "symlink"),
            ("/workspace/d/sub", "directory"),
        ]
        with pytest.raises(FileTooLarge):
            await box.files.read("d/a", limit=2)
        for path in ("d", "missing", "/dev/zero", "d/link"):
            with pytest.raises(PathError):
                await box.files.read(path)
        with pytest.raises(PathError):
            await box.files.write("/etc/passwd", b"")
        with pytest.raises(DiskFull):
            await box.files.write("large", bytes(1 << 20))
        async with box.fork() as child:
            await child.files.remove("d/sub")
            assert await child.files.read("d/a") == b"123"
        assert await box.files.exists("d/sub")
        await box.files.remove("d")
        assert not await box.files.exists("d/a")
        await box.files.write("x", b"")
        await box.reset()
        assert await box.files.list() == []

    play(scenario)
