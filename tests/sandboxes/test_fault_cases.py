"""Each documented fault is injected on a real engine and simulated over many seeds.

This module simulates the faults that the scripted back end cannot show: faults of frames and of owners.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from seeds import over_all_seeds

from agentkit.errors import SandboxError
from agentkit.sandboxes import paths
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.agent.channel import AgentChannel
from agentkit.sandboxes.agent.connection import AgentConnection
from agentkit.sandboxes.agent.protocol import Kind
from agentkit.sandboxes.reaper import heartbeat
from agentkit.sandboxes.reaper import labels as label
from agentkit.sandboxes.reaper.owner import Owner, boot_id
from agentkit.sandboxes.reaper.sweep import Report, sweep
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend
from agentkit.sandboxes.testing.faults import Fault
from agentkit.sandboxes.types import ExecRequest, ExecResult

NUMBERS = range(1, 26)
PAGE = Path(__file__).parents[2] / "docs" / "sandboxes" / "faults.md"


# --- 15: frames -------------------------------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """Records the frames that the host sends."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.sent, self.ended = protocol.Decoder(), [], False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += [frame for frame in self.decoder.feed(bytes(data)) if frame.kind != Kind.PING]

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.ended = True


async def corrupt_frames(seed: int) -> None:
    """Corrupt valid answers: each call ends with a valid result or a typed error, in bounded memory."""
    rng, limit = random.Random(seed), 1000
    connection = AgentConnection("nonce", lambda _: None, lambda *_: None)
    transport = Wire()
    connection.connection_made(transport)
    connection.data_received(protocol.encode(Kind.HELLO, 0, protocol.pack(protocol.VERSION, b"nonce", b"boot")))
    channel = AgentChannel(connection, isolation="container", workdir="/", heartbeat=5.0)
    calls = [asyncio.ensure_future(channel.exec(ExecRequest(("true",), 5.0, limit, "/"))) for _ in range(3)]
    await asyncio.sleep(0)
    answers = b""
    for frame in transport.sent:
        answers += protocol.encode(Kind.OUTPUT, frame.id, rng.randbytes(rng.randint(0, 900)))
        answers += protocol.encode(Kind.DONE, frame.id, protocol.pack(rng.randint(0, 255), 0, 0, 0.1, b"end", b""))
    corrupt: Callable[[bytes], bytes] = rng.choice(
        [
            lambda data: data,
            lambda data: data[: rng.randrange(len(data))],
            lambda data: data[(cut := rng.randrange(len(data))) :] + data[:cut],
            lambda data: data + data[rng.randrange(len(data)) :],
            lambda data: rng.randbytes(len(data)),
            lambda data: b"".join(bytes([byte ^ (rng.random() < 0.01) << rng.randrange(8)]) for byte in data),
            lambda data: rng.choice([b"\xff\xff\xff\xff", b"\x00\x10\x00\x01"]) + data[4:],
        ]
    )
    data = corrupt(answers)
    while data and not transport.ended:
        size = rng.randint(1, 2000)
        connection.data_received(data[:size])
        data = data[size:]
    results = await asyncio.gather(*calls, return_exceptions=True)  # unanswered calls end by their timeout
    for result in results:
        if isinstance(result, ExecResult):
            assert result.exit_code is None or 0 <= result.exit_code <= 255
            assert len(result.stdout_bytes) <= limit
            assert len(result.stderr_bytes) <= limit
        else:
            assert isinstance(result, SandboxError), result
    assert len(connection._decoder._buffer) <= protocol.MAX_PAYLOAD + 9
    assert transport.ended == connection.lost.done()
    await channel.close()


# --- 21: owners -------------------------------------------------------------------------------------------------------


async def dead_owners(seed: int) -> None:
    """Several reapers clean up after dead owners, on an engine that sometimes fails; other sandboxes stay."""
    rng, backend = random.Random(seed), FakeBackend(seed, create_seconds=0.01)
    await backend.start()
    dead = Owner(boot_id(), 2**30, 1, os.stat("/proc/self/ns/pid").st_ino)
    elsewhere = Owner("0" * 8 + "-0000-0000-0000-" + "0" * 12, 7, 7, 7)
    mine, expected = heartbeat.current(), set()
    for _ in range(rng.randint(1, 20)):
        id, whose = f"ak-{rng.getrandbits(64):016x}", rng.choice(["dead", "living", "elsewhere", "foreign"])
        run = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        labels = {
            "dead": {label.ID: id, label.OWNER: str(dead), label.RUN: run},
            "living": mine.labels(id),
            "elsewhere": {label.ID: id, label.OWNER: str(elsewhere), label.RUN: run},
            "foreign": {label.ID: "another", label.OWNER: str(dead), label.RUN: run},
        }[whose]
        await backend.create(id, SandboxSpec(idle_timeout=None), {label.MANAGED: "1", **labels})
        if whose != "dead":
            expected.add(id)
        rng.choice([lambda _: None, backend.freeze, backend.die, backend.mute])(id)
    backend.inject(Fault("remove", "fail", times=rng.randint(0, 5), probability=0.3))
    start = asyncio.get_running_loop().time()
    reports: list[Report] = []
    while expected != set(backend.boxes):
        assert asyncio.get_running_loop().time() - start <= 30
        reports += await asyncio.gather(*(sweep(backend) for _ in range(rng.randint(1, 3))))
        await asyncio.sleep(1)
    backend.rules.faults.clear()
    for box in list(backend.boxes):
        await backend.remove(box)
    await backend.close()


SIMULATED: dict[int, Callable[[int], Coroutine[Any, Any, None]]] = {15: corrupt_frames, 21: dead_owners}
PARAMETERS = [pytest.param(number, marks=pytest.mark.fault(number)) for number in SIMULATED]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    paths.runtime_root()


def play(number: int, seed: int) -> None:
    try:
        virtual_time.run(SIMULATED[number](seed), limit=100_000)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("number", PARAMETERS)
def test_simulated(number: int) -> None:
    for seed in range(30):
        play(number, seed)


@over_all_seeds
@pytest.mark.parametrize("number", PARAMETERS)
def test_simulated_over_all_seeds(number: int, seeds: range) -> None:
    for seed in seeds:
        play(number, seed)


# --- the list itself --------------------------------------------------------------------------------------------------


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print the fault tests; ``listed`` loads this module as a plugin."""
    for item in session.items:
        for mark in item.iter_markers("fault"):
            where = "docker" if item.get_closest_marker("docker") else "seeds" if "all_seeds" in item.name else "some"
            print(f"FAULT {mark.args[0]} {where} {item.nodeid}")


def listed() -> dict[int, dict[str, set[str]]]:
    """Return the collected tests by number of the fault and by kind (``docker``, ``seeds``)."""
    here = Path(__file__)
    files = [str(path) for path in sorted(here.parent.rglob("test_*.py")) if "mark.fault(" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "-p", here.stem, *files]
    path = os.pathsep.join([str(here.parent), str(here.parent.parent), *sys.path])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=here.parents[2],
        env={**os.environ, "PYTHONPATH": path},
    )
    found: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for number, where, name in re.findall(r"^FAULT (\d+) (\w+) (.*)$", done.stdout, re.M):
        found[int(number)][where].add(name)
    assert found, done.stdout + done.stderr
    return found


def test_each_fault_is_injected_for_real_and_simulated_and_documented() -> None:
    found = listed()
    assert [number for number in NUMBERS if not found[number]["docker"]] == [], "not on a real engine"
    assert [number for number in NUMBERS if not found[number]["seeds"]] == [], "not over all seeds"
    assert set(found) == set(NUMBERS)
    rows = dict(re.findall(r"^\| (\d+) \|.*\| (`.*`) \|$", PAGE.read_text(), re.M))
    assert sorted(map(int, rows)) == list(NUMBERS)
    for number, tests in rows.items():
        names = " ".join(found[int(number)]["docker"])
        assert all(test in names for test in re.findall("`([^`]+)`", tests)), f"{number}: {tests} is not among {names}"
