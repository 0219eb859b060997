"""Nothing is left of a killed owner: real owner processes with real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_harness import left_of, runtime_directory
from owner_harness import PATIENCE, OwnerProcess, owner, until

from agentkit.sandboxes import paths
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.reaper import records
from agentkit.sandboxes.reaper.sweep import sweep

__all__ = ["owner", "runtime_directory"]

pytestmark = pytest.mark.usefixtures("runtime_directory")


def reapers(run: str) -> list[int]:
    """Return the reaper processes of an owner. Their launcher briefly has the same arguments, but leads no session."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
                named = run.encode() in words and any(b"sandboxes.reaper" in word for word in words)
                if named and os.getsid(int(name)) == int(name):
                    found.append(int(name))
    return found


def test_a_killed_owner_leaves_nothing(owner: Callable[..., OwnerProcess]) -> None:
    mine, other = owner("local", 4), owner("local", 1)
    until(lambda: len(reapers(mine.run)) == 1, "there is a reaper")
    os.kill(mine.process.pid, signal.SIGKILL)
    mine.process.wait()
    until(lambda: not any(left_of(id) for id in mine.ids), "sandboxes of a killed owner are gone")
    until(lambda: not reapers(mine.run), "the reaper ends by itself")
    assert not paths.heartbeat_path(mine.run).exists()
    assert left_of(other.ids[0])
    assert len(reapers(other.run)) == 1
    other.tell("close")
    assert other.process.wait(PATIENCE) == 0
    until(lambda: not reapers(other.run), "the reaper of an owner that has ended in order ends")
    assert not left_of(other.ids[0])


def test_a_forked_child_does_not_hide_the_end_of_its_parent(tmp_path: Path) -> None:
    script = f"""
import os, time
from agentkit.sandboxes.reaper import heartbeat, process, records
from agentkit.sandboxes.backends.local.backend import LocalBackend
process.register(LocalBackend(), "ak-00000000000000f0")
parent = heartbeat.current()
child = os.fork()
if child == 0:
    assert heartbeat.current().run != parent.run
    open({str(tmp_path / "child")!r}, "w").write(f"{{os.getpid()}} {{parent.run}}")
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text(), "the child has forked")
        child, run = (tmp_path / "child").read_text().split()
        process.kill()
        process.wait()
        until(lambda: not paths.record_path("ak-00000000000000f0").exists(), "the record of a dead owner goes")
        until(lambda: not reapers(run), "the reaper ends")
        os.kill(int(child), signal.SIGKILL)
    finally:
        process.kill()


def test_a_killed_reaper_is_replaced(owner: Callable[..., OwnerProcess]) -> None:
    script = """
import os, signal, sys, time
from agentkit.sandboxes.reaper import heartbeat, process, records
from agentkit.sandboxes.backends.local.backend import LocalBackend
backend = LocalBackend()
process.watch(backend)
print(heartbeat.current().run, flush=True)
sys.stdin.readline()
process.watch(backend)
sys.stdin.readline()
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        run = process.stdout.readline().strip()
        until(lambda: len(reapers(run)) == 1, "there is a reaper")

        def killed() -> bool:  # one that had not begun when it was killed may have been replaced already
            for pid in reapers(run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not reapers(run)

        until(killed, "the reaper is dead")
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: reapers(run), "there is another reaper")
        process.stdin.close()
    until(lambda: not reapers(run), "the reaper ends with its owner")


def test_time_ends_also_for_an_owner_that_hangs(owner: Callable[..., OwnerProcess]) -> None:
    mine = owner("local", 2)
    os.kill(mine.process.pid, signal.SIGSTOP)
    records.extend(mine.ids[0], 0.5)
    until(lambda: not left_of(mine.ids[0]), "a sandbox whose time has ended is removed")
    assert left_of(mine.ids[1])
    os.kill(mine.process.pid, signal.SIGCONT)


async def test_two_sweeps_at_once(owner: Callable[..., OwnerProcess]) -> None:
    mine = owner("local", 3)
    for pid in reapers(mine.run):
        os.kill(pid, signal.SIGKILL)
    os.kill(mine.process.pid, signal.SIGKILL)
    mine.process.wait()
    backend = LocalBackend()
    await backend.start()
    reports = await asyncio.gather(*(sweep(backend) for _ in range(3)))
    assert not any(report.failed for report in reports)
    assert not any(left_of(id) for id in mine.ids)
    assert not paths.heartbeat_path(mine.run).exists()
    await backend.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_owner_of_twenty_local_sandboxes(owner: Callable[..., OwnerProcess]) -> None:
    _kill_owner_of_twenty("local", owner)


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.fault(21)
@pytest.mark.timeout(900)
def test_a_killed_owner_of_twenty_containers(docker_backend: Any, owner: Callable[..., OwnerProcess]) -> None:
    _kill_owner_of_twenty("docker", owner)


def _kill_owner_of_twenty(backend: str, owner: Callable[..., OwnerProcess]) -> None:
    mine, other = owner(backend, 20), owner(backend, 1)
    os.kill(mine.process.pid, signal.SIGKILL)
    mine.process.wait()
    seconds = until(lambda: not any(_there(backend, id) for id in mine.ids), "twenty sandboxes are gone", 30)
    print(f"20 {backend} sandboxes were gone {seconds:.1f} s after their owner was killed")
    until(lambda: not reapers(mine.run), "the reaper ends by itself")
    assert _there(backend, other.ids[0])
    other.tell("close")
    assert other.process.wait(PATIENCE) == 0
    assert not _there(backend, other.ids[0])


def _there(backend: str, id: str) -> bool:
    if backend == "local":
        return bool(left_of(id))
    if paths.sandbox_directory(id).exists() or paths.record_path(id).exists():
        return True
    found = subprocess.run(["docker", "inspect", id], capture_output=True, timeout=60, check=False)
    return found.returncode == 0
