"""One training run in a process of its own, under a schedule of fault rates.

Invariant: the run is `agentkit run`, as a user starts it. When ``observe`` returns or raises, the run has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentkit.jsonl import read_jsonl
from benchmarks.faults.nemesis import Fault, Nemesis

START_TIMEOUT = 900.0
"""Seconds until the first training step has ended, which includes the creation of all containers."""
STEP_TIMEOUT = 300.0
"""Seconds that a training step may take under faults."""
STOP_TIMEOUT = 120.0
REMOVAL_TIMEOUT = 60.0
"""Seconds after the end of the run within which its last container must be gone."""
POLL = 0.1


@dataclass(frozen=True)
class Phase:
    """A part of a run with one fault rate. It begins and ends between two training steps."""

    rate: float
    """Share of the containers that is attacked per minute."""
    start: float
    """Seconds since the epoch."""
    end: float


@dataclass
class Observed:
    """What one run did."""

    phases: list[Phase] = field(default_factory=list)
    steps: list[Mapping[str, Any]] = field(default_factory=list)
    """Rows of the run's metrics, one for each training step."""
    recoveries: list[Mapping[str, Any]] = field(default_factory=list)
    """Events of the run: ``time``, ``cause``, ``by``, ``seconds`` and ``episodes`` of each recovery."""
    faults: list[Fault] = field(default_factory=list)
    containers: int = 0
    """Largest number of containers that ran at the same time."""
    left: int = 0
    """Containers that remained after the run."""
    exit_code: int | None = None


class RunFailed(Exception):
    """The run ended too early, or made no progress; the message contains the end of its output."""


async def observe(
    config: Mapping[str, Any], directory: Path, schedule: Sequence[tuple[float, float]], seed: int
) -> Observed:
    """Start a run and attack its containers.

    Args:
        config: settings of the run; ``dir`` and a label of its containers are added.
        directory: an empty directory for the run and its output.
        schedule: (rate, seconds) of each phase, in order. A phase ends with the first step that ends after its time.
        seed: of the nemesis.

    Raises:
        RunFailed: see there.
    """
    name = secrets.token_hex(8)
    env = {**config["env"], "sandbox_spec": {**config["env"].get("sandbox_spec", {}), "labels": {"faults": name}}}
    file, run = directory / "run.yaml", directory / "run"
    file.write_text(yaml.safe_dump({**config, "env": env, "dir": str(run)}))
    nemesis, found = Nemesis(f"agentkit.user.faults={name}", random.Random(seed)), Observed()
    with (directory / "output.txt").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentkit", "run", str(file), stdout=output, stderr=output, env=os.environ
        )
    progress = _Progress(process, run / "metrics.jsonl", directory / "output.txt")
    try:
        await progress.next_step(START_TIMEOUT)
        for rate, seconds in schedule:
            found.phases.append(await _phase(nemesis, progress, rate, seconds))
            found.containers = max(found.containers, len(await nemesis.containers("running")))
        process.send_signal(signal.SIGINT)  # the run finishes its step and writes a checkpoint
        found.exit_code = await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found.steps, found.faults = progress.rows(), nemesis.faults
    found.recoveries = [event for event in read_jsonl(run / "events.jsonl") if event["event"] == "sandbox_recovered"]
    end = time.monotonic() + REMOVAL_TIMEOUT
    while (left := await nemesis.containers()) and time.monotonic() < end:  # noqa: ASYNC110 (no event)
        await asyncio.sleep(0.5)
    found.left = len(left)
    return found


async def _phase(nemesis: Nemesis, progress: _Progress, rate: float, seconds: float) -> Phase:
    """Attack for ``seconds`` and until the step in progress has ended; then undo what can be undone."""
    over, start = asyncio.Event(), time.time()
    attacking = asyncio.ensure_future(nemesis.attack(rate, over))
    try:
        while time.time() < start + seconds:
            await progress.next_step(STEP_TIMEOUT)
    finally:
        over.set()
        await asyncio.wait({attacking})
    attacking.result()
    await nemesis.heal()
    return Phase(rate, start, time.time())


class _Progress:
    """Waits for the training steps of a run."""

    def __init__(self, process: asyncio.subprocess.Process, metrics: Path, output: Path) -> None:
        self._process, self._metrics, self._output = process, metrics, output

    def rows(self) -> list[Mapping[str, Any]]:
        return [row for row in read_jsonl(self._metrics) if "time/step" in row]

    async def next_step(self, timeout: float) -> None:
        """Return when one more step has ended. Raises ``RunFailed``."""
        before, end = len(self.rows()), time.monotonic() + timeout
        while len(self.rows()) == before:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), POLL)
                raise RunFailed(f"the run ended with {self._process.returncode}:\n{self._tail()}")
            if time.monotonic() > end:
                raise RunFailed(f"no step ended in {timeout:g} s:\n{self._tail()}")

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]
