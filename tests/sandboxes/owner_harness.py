"""Real processes that own real sandboxes and can be killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PATIENCE = 120.0
"""Seconds that a busy machine is given for what must take a few."""

OWNER = """
import asyncio, json, os, sys
from agentkit.sandboxes import Resources, Sandbox, SandboxSpec
from agentkit.sandboxes import backends
from agentkit.sandboxes.reaper import heartbeat

async def main(kind, count, ttl):
    backend = backends.backend(kind)
    await backend.start()
    spec = SandboxSpec(resources=Resources(memory=64 << 20, tmp=8 << 20, workspace=8 << 20, shm=1 << 20), ttl=ttl)
    boxes = []
    for index in range(count):
        boxes.append(await Sandbox.create(spec, backend=backend))
        if index % 3 == 0:
            await boxes[-1].spawn("sleep 600 & sleep 600", timeout=600)
        elif index % 3 == 1:
            await boxes[-1].pause()
    print(json.dumps({"ids": [box.id for box in boxes], "run": heartbeat.current().run}), flush=True)
    if sys.stdin.readline() == "close\\n":
        for box in boxes:
            await box.close()
    elif count:
        await asyncio.sleep(3600)

asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) or None))
"""


class OwnerProcess:
    """A process that owns sandboxes."""

    def __init__(self, backend: str, count: int, ttl: float = 3600.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, backend, str(count), str(ttl)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.ids: list[str] = said["ids"]
        self.run: str = said["run"]

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def owner() -> Iterator[Callable[..., OwnerProcess]]:
    made: list[OwnerProcess] = []

    def make(*arguments: Any) -> OwnerProcess:
        made.append(OwnerProcess(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.end()


def until(condition: Callable[[], object], what: str, timeout: float = PATIENCE) -> float:
    """Wait until the condition holds; return the seconds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout, f"{what}: not within {timeout:g} s"
        time.sleep(0.05)
    return time.monotonic() - begin
