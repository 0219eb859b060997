"""Faults of a single sandbox: cases that run on a real engine and in virtual time.

A case gets a ``Host``, which makes sandboxes, and a random number generator. Its time bounds are the documented ones,
multiplied by ``Host.patience`` (1 in virtual time). The numbers are those of the list of faults in the documentation.

A real engine runs the commands of a case in a shell. ``COMMANDS`` maps each of them to the coroutine that plays it in
virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from unittest import mock

import pytest

from agentkit.errors import DiskFull, FileTooLarge, PathError, SandboxExpired, SandboxLost
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.testing.fake import Command, FakeFile, Script


class Host(Protocol):
    """Makes the sandboxes of a case."""

    patience: float
    """The factor by which time bounds are stretched."""
    flood: int
    """Bytes of a large output."""

    async def create(self, **fields: Any) -> Sandbox:
        """Create a small sandbox; it is removed at the end of the case."""
        ...

    async def exists(self, id: str) -> bool:
        """Return whether anything is left of a sandbox."""
        ...

    async def out_of_memory(self) -> tuple[Sandbox, SandboxLost]:
        """Return a sandbox whose main process the memory limit killed, and the error of a call in flight."""
        ...

    def memory(self) -> int:
        """Return the bytes of memory that this process uses."""
        ...


Case = Callable[[Host, random.Random], Awaitable[None]]
CASES: dict[int, Case] = {}


def case(number: int) -> Callable[[Case], Case]:
    def put(function: Case) -> Case:
        CASES[number] = function
        return function

    return put


COMMANDS: dict[str, Script] = {}
"""Coroutines by command line."""


def plays(*lines: str) -> Callable[[Script], Script]:
    def put(script: Script) -> Script:
        COMMANDS.update(dict.fromkeys(lines, script))
        return script

    return put


class Clock:
    """Measures seconds since its creation."""

    def __init__(self) -> None:
        self._start = asyncio.get_running_loop().time()

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._start


OVERRUN = "echo early; echo err >&2; sleep 1000; echo late"


@plays(OVERRUN)
async def overrun(command: Command) -> None:
    await command.write("early\n")
    await command.write("err\n", "stderr")
    await command.sleep(1000)
    await command.write("late\n")


@case(3)
async def command_times_out(host: Host, rng: random.Random) -> None:
    box = await host.create()
    before = (await box.stats()).processes
    limit, clock = rng.uniform(0.5, 1), Clock()
    result = await box.exec(OVERRUN, timeout=limit)
    assert limit <= clock.seconds <= limit + 2 * host.patience
    assert (result.timed_out, result.exit_code, result.tainted) == (True, None, False)
    assert (result.stdout, result.stderr) == ("early\n", "err\n")
    assert (await box.stats()).processes == before
    assert box.state == "ready"
    assert (await box.exec("echo usable")).stdout == "usable\n"


ESCAPES = (
    "(sleep 2; touch late) & sleep 1000",
    "setsid sh -c 'sleep 2; touch late' & sleep 1000",
    "setsid sh -c 'setsid sh -c \"sleep 2; touch late\" & sleep 1000' & sleep 1000",
    "trap '' TERM INT HUP; sleep 2; touch late; sleep 1000",
)


@plays(*ESCAPES)
async def escape(command: Command) -> None:
    async def child(command: Command) -> None:
        await command.sleep(2)
        command.box.files["/workspace/late"] = FakeFile()

    command.start(child)
    await command.sleep(1000)


@case(4)
async def processes_escape_the_kill(host: Host, rng: random.Random) -> None:
    box = await host.create()
    before = (await box.stats()).processes
    for escape in rng.sample(ESCAPES, len(ESCAPES)):
        clock = Clock()
        result = await box.exec(escape, timeout=0.3)
        assert clock.seconds <= 0.3 + 2 * host.patience
        assert (result.timed_out, result.tainted) == (True, False)
    await asyncio.sleep(2.5)
    assert not await box.files.exists("late")
    assert (await box.stats()).processes == before


BACKGROUND = "sleep $DELAY & echo hi"


@plays(BACKGROUND)
async def background(command: Command) -> None:
    async def child(command: Command) -> None:
        await command.sleep(float(command.env["DELAY"]))

    command.start(child)
    await command.write("hi\n")


@case(5)
async def background_child_holds_the_output(host: Host, rng: random.Random) -> None:
    box = await host.create()
    clock = Clock()
    result = await box.exec(BACKGROUND, env={"DELAY": str(rng.randint(30, 1000))})
    assert (result.stdout, result.exit_code) == ("hi\n", 0)
    assert clock.seconds <= 0.5 * host.patience
    clock = Clock()
    assert (await box.exec("echo next")).stdout == "next\n"
    assert clock.seconds <= 0.5 * host.patience


FLOOD = "echo first; yes | head -c $SIZE; echo; echo last"
ENDLESS = "yes; echo never"
BLOCK = b"y\n" * (1 << 19)


@plays(FLOOD)
async def flood(command: Command) -> None:
    await command.write("first\n")
    left = int(command.env["SIZE"])
    while left > 0:
        await command.write(BLOCK[:left])
        left -= len(BLOCK)
    await command.write("\nlast\n")


@plays(ENDLESS)
async def flood_without_end(command: Command) -> None:
    while True:
        await command.write(BLOCK)
        await command.sleep(0.01)


@case(6)
async def large_output(host: Host, rng: random.Random) -> None:
    box = await host.create()
    limit, before = rng.randint(1000, 1 << 20), host.memory()
    result = await box.exec(FLOOD, env={"SIZE": str(host.flood)}, output_limit=limit, timeout=300)
    assert result.truncated
    assert len(result.stdout_bytes) <= limit
    assert result.stdout.startswith("first\ny\n")
    assert result.stdout.endswith("\nlast\n")
    endless = await box.exec(ENDLESS, output_limit=limit, timeout=1)
    assert (endless.timed_out, endless.truncated) == (True, True)
    process = await box.spawn(ENDLESS, output_limit=limit)  # its output is not read
    await asyncio.sleep(1)
    await process.kill()
    await process.wait()
    assert host.memory() - before < 3 * (limit + (1 << 20))
    assert (await box.exec("echo usable")).stdout == "usable\n"


@plays("cat")
async def cat(command: Command) -> None:
    while data := await command.read():
        await command.write(data)


@case(7)
async def binary_output(host: Host, rng: random.Random) -> None:
    box = await host.create()
    for data in (
        b"\x00\xff\xfe\xc3\x28\xed\xa0\x80\x1b[31m\x1b]0;title\x07\r\n\x08",
        rng.randbytes(rng.randint(1, 100_000)),
        b"x" * rng.randint(1 << 19, 1 << 20),  # one line
        b"\n" * 10_000,
    ):
        result = await box.exec(["cat"], stdin=data)
        assert (result.stdout_bytes, result.truncated) == (data, False)
        assert result.stdout == data.decode("utf-8", "replace")


FORK_BOMB = "while :; do sleep 1000 & done; wait"


@plays(FORK_BOMB)
async def fork_bomb(command: Command) -> int:
    async def child(command: Command) -> None:
        await command.sleep(1000)

    with contextlib.suppress(BlockingIOError):
        while True:
            command.start(child)
    return 2


@case(8)
async def too_many_processes(host: Host, rng: random.Random) -> None:
    box = await host.create()
    bomb = asyncio.ensure_future(box.exec(FORK_BOMB, timeout=0.5))
    while not bomb.done():
        assert await box.ping(2 * host.patience) >= 0  # the agent still has its own processes
        await asyncio.sleep(0.2)
    await asyncio.wait({bomb})  # it ran out of processes or of time
    stats = await box.stats()
    assert stats.processes is None or stats.processes <= box.spec.resources.pids
    clock = Clock()
    await box.restart()
    assert clock.seconds <= 2 * host.patience
    assert (await box.exec("echo usable")).stdout == "usable\n"


MEMORY_HOG = "head -c 200000000 /dev/zero | tail -c 150000000 > /dev/null"


@plays(MEMORY_HOG)
async def memory_hog(command: Command) -> None:
    await command.sleep(1)
    raise MemoryError


@case(9)
async def too_much_memory(host: Host, rng: random.Random) -> None:
    box, other = await host.create(), await host.create()
    result = await box.exec(MEMORY_HOG, timeout=60)
    assert (result.exit_code, result.oom_killed) == (137, True)
    assert box.state == "ready"
    result = await box.exec("echo usable")
    assert (result.stdout, result.oom_killed) == ("usable\n", False)
    lost, error = await host.out_of_memory()
    assert error.details["reason"] == lost.loss == "oom"
    assert (await other.exec("true")).ok


FILL = "head -c $SIZE /dev/zero > fill"


@plays(FILL)
async def fill(command: Command) -> int:
    await command.sleep(1)
    box = command.box
    box.files["/workspace/fill"] = FakeFile(bytes(box.mounts["/workspace"] - box.used("/workspace")))
    await command.write("No space left on device\n", "stderr")
    return 1


@case(10)
async def full_disk(host: Host, rng: random.Random) -> None:
    box = await host.create()
    size = box.spec.resources.workspace
    result = await box.exec(FILL, env={"SIZE": str(2 * size)})
    assert result.exit_code not in (0, None)
    assert "No space left" in result.stderr
    with pytest.raises(DiskFull):
        await box.files.write("more", b"x" * rng.randint(1 << 16, size))
    assert (await box.exec("echo usable")).stdout == "usable\n"
    await box.reset()
    await box.files.write("more", b"x" * (size // 2))


@case(24)
async def extended_as_its_time_ends(host: Host, rng: random.Random) -> None:
    """The wall clock jumps an hour forward or back at a random moment."""
    jump, at = rng.choice([-3600.0, 3600.0]), time.time() + rng.uniform(0, 3)
    wall = time.time

    def jumping() -> float:
        return wall() + (jump if wall() >= at else 0.0)

    with mock.patch("time.time", jumping):
        bystander = await host.create(ttl=600)
        boxes = await asyncio.gather(*(host.create(ttl=2.0) for _ in range(3)))
        clock = Clock()
        await asyncio.sleep(1.0)
        late = [rng.uniform(-0.2, 0.2), rng.choice([-0.001, 0.0, 0.001]), -0.5]
        outcomes = await asyncio.gather(*map(_extend, boxes, late))
        assert outcomes[2]
        await asyncio.sleep(3.0)
        for box, alive in zip(boxes, outcomes, strict=True):
            assert await host.exists(box.id) == alive
            ends = [change for change in box.history if change.after == "stopping"]
            assert [change.cause for change in ends] == ([] if alive else ["time to live ended"])
            if alive:
                assert (await box.exec("echo on")).stdout == "on\n"
            else:
                with pytest.raises(SandboxExpired):
                    await box.exec("true")
        assert clock.seconds < 60
        assert (await bystander.exec("true")).ok


async def _extend(box: Sandbox, late: float) -> bool:
    """Extend its time to live ``late`` seconds after the end; return whether that was in time."""
    expires = box._expiry.at
    if expires is None:  # it has expired already, on a busy host
        return False
    await asyncio.sleep(expires + late - asyncio.get_running_loop().time())
    try:
        await box.extend(600)
    except (SandboxExpired, SandboxLost):
        return False
    return True


HOSTILE_FILES = "mkdir d; ln -s /etc/passwd d/link; ln -s ../../../../../../etc d/up; mkfifo d/pipe; echo x > d/file"


@plays(HOSTILE_FILES)
async def make_hostile_files(command: Command) -> None:
    await command.sleep()
    command.box.files |= {
        "/workspace/d/link": FakeFile(kind="symlink"),
        "/workspace/d/up": FakeFile(kind="symlink"),
        "/workspace/d/pipe": FakeFile(kind="other"),
        "/workspace/d/file": FakeFile(b"x\n"),
    }


@case(25)
async def hostile_files(host: Host, rng: random.Random) -> None:
    box = await host.create()
    await box.exec(HOSTILE_FILES, check=True)
    await box.files.write("d/new\nline", "y")
    await box.files.write("d/..x", "z")
    await box.files.write("d/big", b"b" * (limit := rng.randint(1000, 100_000)))
    clock = Clock()
    for path in ("d/pipe", "/dev/zero", "d", "d/up"):
        with pytest.raises(PathError):
            await box.files.read(path)
    with pytest.raises(FileTooLarge):
        await box.files.read("d/big", limit=limit - 1)
    assert clock.seconds < 5 * host.patience
    with tempfile.TemporaryDirectory() as directory:
        left_out = await box.files.download("d", f"{directory}/out")
        assert {path.rpartition("/")[2] for path in left_out} == {"link", "up", "pipe"}
        with os.scandir(f"{directory}/out") as entries:
            assert {entry.name: entry.is_file(follow_symlinks=False) for entry in entries} == dict.fromkeys(
                ["file", "new\nline", "..x", "big"], True
            )
        for path in ("d/pipe", "d/link"):
            with pytest.raises(PathError):
                await box.files.download(path, f"{directory}/other")
        with pytest.raises(FileTooLarge):
            await box.files.download("d", f"{directory}/small", limit=limit - 1)
        assert set(os.listdir(directory)) <= {"out", "small"}
