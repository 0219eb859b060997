"""Score untrusted Python programs in warm sandboxes, from any trainer: blocking or asynchronous, in any process."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkit.envs.code_runner.runner import Limits, runner
from agentkit.errors import EnvError
from agentkit.portal import portal


@functools.cache
def sandboxes(process: int, backend: str, memory: int) -> Any:
    """Return the pool of this process. It starts with the first program, and ends with the process."""
    return runner(backend, memory)


@dataclass(frozen=True)
class Programs:
    """Settings only: copies in other processes have pools of their own."""

    backend: str = "docker"
    limits: Limits = field(default_factory=lambda: Limits(seconds=2))

    async def score(self, program: str, cases: Sequence[tuple[str, str]]) -> float | None:
        """Return the share of cases (input, expected output) that the program solves; None if sandboxes failed."""
        if not cases:
            raise ValueError("there are no cases")
        pool = sandboxes(os.getpid(), self.backend, self.limits.memory)
        try:
            runs = await pool.use(lambda one: one.run(program, [given for given, _ in cases], self.limits))
        except EnvError:
            return None
        pairs = zip(runs, cases, strict=True)
        return sum(not run.failure and run.stdout.split() == wanted.split() for run, (_, wanted) in pairs) / len(runs)

    async def scores(self, programs: Sequence[str], cases: Sequence[tuple[str, str]]) -> list[float | None]:
        return await asyncio.gather(*(self.score(program, cases) for program in programs))

    def __call__(self, programs: Sequence[str], cases: Sequence[tuple[str, str]]) -> list[float | None]:
        """Score programs at the same time, and wait for the results."""
        return portal().run(self.scores(programs, cases))
