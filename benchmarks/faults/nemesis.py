"""Kill, pause, freeze and slow containers of one run, at random times.

Invariant: only running containers with the given label are attacked, each at most once. ``heal`` undoes the faults that
are not final.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

TIMEOUT = 60.0
"""Seconds that a command of the engine may take."""
ATTACKS = {
    "killed": ("docker", "kill"),
    "paused": ("docker", "pause"),
    "frozen": ("docker", "kill", "--signal", "STOP"),
    "slowed": ("docker", "update", "--cpus", "0.01"),
}
"""The command for each kind of fault; the name of the container follows. The engine reports a pause, but not a stop."""
REMEDIES = {
    "paused": ("docker", "unpause"),
    "frozen": ("docker", "kill", "--signal", "CONT"),
    "slowed": ("docker", "update", "--cpus", "1"),
}
"""The command that undoes a fault, if it is not final."""


@dataclass(frozen=True)
class Fault:
    """One injected fault."""

    at: float
    """Seconds since the epoch at which the engine had carried it out."""
    kind: str
    container: str


def choose(running: Sequence[str], attacked: Collection[str], rng: random.Random) -> tuple[str, str] | None:
    """Return a kind of fault and its victim, or None if every container has been attacked."""
    candidates = sorted(set(running) - set(attacked))
    return (rng.choice(list(ATTACKS)), rng.choice(candidates)) if candidates else None


class Nemesis:
    """Fault injector for the containers with the label ``label`` (``name=value``)."""

    def __init__(self, label: str, rng: random.Random) -> None:
        self.faults: list[Fault] = []
        self._lasting: list[Fault] = []
        """Faults to undo."""
        self._label, self._rng = label, rng

    async def containers(self, *status: str) -> list[str]:
        """Return the names of the run's containers, by default in any state."""
        filters = [f"label={self._label}", *(f"status={one}" for one in status)]
        _, listed = await command("docker", "ps", "-a", "--format={{.Names}}", *(f"--filter={one}" for one in filters))
        return listed.split()

    async def attack(self, rate: float, until: asyncio.Event) -> None:
        """Attack until ``until`` is set; ``rate`` is the expected share of the containers that is attacked per minute.

        The times between two faults are exponentially distributed.
        """
        while not until.is_set():
            running = await self.containers("running")
            pause = self._rng.expovariate(rate * len(running) / 60) if rate and running else 1.0
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(until.wait(), pause)
                return
            if not rate:
                continue
            chosen = choose(await self.containers("running"), {fault.container for fault in self.faults}, self._rng)
            if chosen is not None:
                await self._inject(*chosen)

    async def heal(self) -> None:
        """Resume and unthrottle all attacked containers that still exist."""
        left = await self.containers()
        for fault in self._lasting:
            if fault.container in left:
                await command(*REMEDIES[fault.kind], fault.container)
        self._lasting.clear()

    async def _inject(self, kind: str, container: str) -> None:
        code, _ = await command(*ATTACKS[kind], container)
        if code:
            return  # the container had ended before
        self.faults.append(fault := Fault(time.time(), kind, container))
        if kind in REMEDIES:
            self._lasting.append(fault)


async def command(*arguments: str) -> tuple[int, str]:
    """Run a command of the engine. Return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT)
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    return process.returncode or 0, output.decode()
