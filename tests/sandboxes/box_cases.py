"""What may go wrong in a single sandbox, case by case, whatever its back end: on a real engine, and in virtual time.

A case gets a ``Ground`` to stand on and dice. Its bounds are those that are promised; only ``Ground.patience``, which
is 1 in virtual time, stretches them. Numbers are those of the list of faults in the documentation.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from unittest import mock

import pytest

from agentkit.errors import DiskFull, FileTooLarge, LeaseExpired, PathError, SandboxLost
from agentkit.sandboxes import Sandbox


class Ground(Protocol):
    """Where a case is played."""

    patience: float
    flood: int
    """Bytes of a flood that is worth the name here."""

    async def create(self, **fields: Any) -> Sandbox:
        """A small sandbox; removed when the case is over."""
        ...

    async def there(self, id: str) -> bool:
        """Whether anything is left of a sandbox."""
        ...

    async def out_of_memory(self) -> tuple[Sandbox, SandboxLost]:
        """A sandbox whose main process the memory limit has killed, and what a call in flight raised."""
        ...

    def memory(self) -> int:
        """Bytes that the host's side uses."""
        ...


Case = Callable[[Ground, random.Random], Awaitable[None]]
CASES: dict[int, Case] = {}


def case(number: int) -> Callable[[Case], Case]:
    def put(function: Case) -> Case:
        CASES[number] = function
        return function

    return put


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = asyncio.get_running_loop().time()

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._start


@case(3)
async def runs_out_of_time(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    before = (await box.stats()).processes
    limit, clock = rng.uniform(0.5, 1), Clock()
    result = await box.exec("echo early; echo err >&2; sleep 1000; echo late", timeout=limit)
    assert limit <= clock.seconds <= limit + 2 * ground.patience
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


@case(4)
async def hides_from_its_kill(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    before = (await box.stats()).processes
    for escape in rng.sample(ESCAPES, len(ESCAPES)):
        clock = Clock()
        result = await box.exec(escape, timeout=0.3)
        assert clock.seconds <= 0.3 + 2 * ground.patience
        assert (result.timed_out, result.tainted) == (True, False)
    await asyncio.sleep(2.5)
    assert not await box.files.exists("late")
    assert (await box.stats()).processes == before


@case(5)
async def leaves_a_child_with_its_output(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    clock = Clock()
    result = await box.exec(f"sleep {rng.randint(30, 1000)} & echo hi")
    assert (result.stdout, result.exit_code) == ("hi\n", 0)
    assert clock.seconds <= 0.5 * ground.patience
    clock = Clock()
    assert (await box.exec("echo next")).stdout == "next\n"
    assert clock.seconds <= 0.5 * ground.patience


@case(6)
async def floods(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    limit, before = rng.randint(1000, 1 << 20), ground.memory()
    result = await box.exec(
        f"echo first; yes | head -c {ground.flood}; echo; echo last", output_limit=limit, timeout=300
    )
    assert result.truncated
    assert len(result.stdout_bytes) <= limit
    assert result.stdout.startswith("first\ny\n")
    assert result.stdout.endswith("\nlast\n")
    endless = await box.exec("yes; echo never", output_limit=limit, timeout=1)
    assert (endless.timed_out, endless.truncated) == (True, True)
    process = await box.spawn("yes", output_limit=limit)  # nobody reads it
    await asyncio.sleep(1)
    await process.kill()
    await process.wait()
    assert ground.memory() - before < 3 * (limit + (1 << 20))
    assert (await box.exec("echo usable")).stdout == "usable\n"


@case(7)
async def writes_what_is_no_text(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    for data in (
        b"\x00\xff\xfe\xc3\x28\xed\xa0\x80\x1b[31m\x1b]0;title\x07\r\n\x08",
        rng.randbytes(rng.randint(1, 100_000)),
        b"x" * rng.randint(1 << 19, 1 << 20),  # one line
        b"\n" * 10_000,
    ):
        result = await box.exec(["cat"], stdin=data)
        assert (result.stdout_bytes, result.truncated) == (data, False)
        assert result.stdout == data.decode("utf-8", "replace")


@case(8)
async def multiplies(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    bomb = asyncio.ensure_future(box.exec("while :; do sleep 1000 & done; wait", timeout=0.5))
    while not bomb.done():
        assert await box.ping(2 * ground.patience) >= 0  # the agent is not starved of its own
        await asyncio.sleep(0.2)
    await asyncio.wait({bomb})  # out of processes, or of time
    stats = await box.stats()
    assert stats.processes is None or stats.processes <= box.spec.resources.pids
    clock = Clock()
    await box.restart()
    assert clock.seconds <= 2 * ground.patience
    assert (await box.exec("echo usable")).stdout == "usable\n"


@case(9)
async def wants_too_much_memory(ground: Ground, rng: random.Random) -> None:
    box, other = await ground.create(), await ground.create()
    result = await box.exec("head -c 200000000 /dev/zero | tail -c 150000000 > /dev/null", timeout=60)
    assert (result.exit_code, result.oom_killed) == (137, True)
    assert box.state == "ready"
    result = await box.exec("echo usable")
    assert (result.stdout, result.oom_killed) == ("usable\n", False)
    lost, error = await ground.out_of_memory()
    assert error.details["reason"] == lost.loss == "oom"
    assert (await other.exec("true")).ok


@case(10)
async def fills_its_disk(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    size = box.spec.resources.workspace
    result = await box.exec(f"head -c {2 * size} /dev/zero > fill")
    assert result.exit_code not in (0, None)
    assert "No space left" in result.stderr
    with pytest.raises(DiskFull):
        await box.files.write("more", b"x" * rng.randint(1 << 16, size))
    assert (await box.exec("echo usable")).stdout == "usable\n"
    await box.reset()
    await box.files.write("more", b"x" * (size // 2))


@case(24)
async def is_prolonged_as_its_time_ends(ground: Ground, rng: random.Random) -> None:
    """With a wall clock that jumps by an hour, either way, at some moment."""
    jump, at = rng.choice([-3600.0, 3600.0]), time.time() + rng.uniform(0, 3)
    wall = time.time

    def jumping() -> float:
        return wall() + (jump if wall() >= at else 0.0)

    with mock.patch("time.time", jumping):
        bystander = await ground.create(ttl=600)
        boxes = [await ground.create(ttl=2.0) for _ in range(3)]
        clock = Clock()
        await asyncio.sleep(1.0)
        late = [rng.uniform(-0.2, 0.2), rng.choice([-0.001, 0.0, 0.001]), -0.5]
        outcomes = await asyncio.gather(*map(_extend, boxes, late))
        assert outcomes[2]
        await asyncio.sleep(3.0)
        for box, alive in zip(boxes, outcomes, strict=True):
            assert await ground.there(box.id) == alive
            ends = [change for change in box.history if change.after == "stopping"]
            assert [change.cause for change in ends] == ([] if alive else ["time to live ended"])
            if alive:
                assert (await box.exec("echo on")).stdout == "on\n"
            else:
                with pytest.raises(LeaseExpired):
                    await box.exec("true")
        assert clock.seconds < 60
        assert (await bystander.exec("true")).ok


async def _extend(box: Sandbox, late: float) -> bool:
    """Prolong it ``late`` seconds after its time has ended; whether it was in time."""
    expires = box._expires_at
    assert expires is not None
    await asyncio.sleep(expires + late - asyncio.get_running_loop().time())
    try:
        await box.extend(600)
    except (LeaseExpired, SandboxLost):
        return False
    return True


@case(25)
async def shows_hostile_files(ground: Ground, rng: random.Random) -> None:
    box = await ground.create()
    await box.exec(
        "mkdir d; ln -s /etc/passwd d/link; ln -s ../../../../../../etc d/up; mkfifo d/pipe; echo x > d/file",
        check=True,
    )
    await box.files.write("d/new\nline", "y")
    await box.files.write("d/..x", "z")
    await box.files.write("d/big", b"b" * (limit := rng.randint(1000, 100_000)))
    clock = Clock()
    for path in ("d/pipe", "/dev/zero", "d", "d/up"):
        with pytest.raises(PathError):
            await box.files.read(path)
    with pytest.raises(FileTooLarge):
        await box.files.read("d/big", limit=limit - 1)
    assert clock.seconds < 5 * ground.patience
    with tempfile.TemporaryDirectory() as host:
        left_out = await box.files.download("d", f"{host}/out")
        assert {path.rpartition("/")[2] for path in left_out} == {"link", "up", "pipe"}
        with os.scandir(f"{host}/out") as entries:
            assert {entry.name: entry.is_file(follow_symlinks=False) for entry in entries} == dict.fromkeys(
                ["file", "new\nline", "..x", "big"], True
            )
        for path in ("d/pipe", "d/link"):
            with pytest.raises(PathError):
                await box.files.download(path, f"{host}/other")
        with pytest.raises(FileTooLarge):
            await box.files.download("d", f"{host}/small", limit=limit - 1)
        assert set(os.listdir(host)) <= {"out", "small"}
