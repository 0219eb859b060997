"""Ctrl-C: once finishes, twice cancels, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import gone

PROGRAM = """
import asyncio, subprocess, sys, time
from agentkit import signals

signals.GRACE_S = 1.0

async def work(stop):
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    try:
        if sys.argv[1] == "obedient":
            await stop.wait()
            return "saved"
        if sys.argv[1] == "slow":
            await asyncio.sleep(600)
        while True:  # stuck: the event loop never runs again
            time.sleep(0.01)
    finally:
        if sys.argv[1] != "stuck":
            child.kill()
            child.wait()

try:
    print(signals.run_interruptible(work, lambda text: print("said", text, flush=True)))
except KeyboardInterrupt:
    sys.exit(signals.STOPPED)
"""


def started(kind: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, pid = process.stdout.readline().split()
    assert word == "child"
    return process, int(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_finishes_cleanly(number: signal.Signals) -> None:
    process, child = started("obedient")
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "finishing with a checkpoint" in output
    assert "saved" in output
    assert gone(child)


def test_twice_cancels_and_cleans_up() -> None:
    process, child = started("slow")
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None, "once is a request, not an order"
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert gone(child)


def test_twice_kills_an_unresponsive_process_with_its_children() -> None:
    process, child = started("stuck")
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert gone(child)


def test_a_third_interrupt_exits_at_once() -> None:
    process, child = started("stuck")
    for _ in range(3):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.1)
    process.communicate(timeout=0.9)
    assert process.returncode == 130
    assert gone(child)
