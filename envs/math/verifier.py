"""Symbolic equality of LaTeX expressions, computed in worker processes.

Invariant: every comparison ends with a verdict or with an ``EnvError``. All environments of a process share one
verifier.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os

from agentkit.envs.shared_resources import SharedResource
from agentkit.envs.workers.client import ForkServer
from agentkit.envs.workers.worker import Worker
from agentkit.errors import ConfigError, EnvCrashed

LONGEST = 1_000
"""Maximum length of an expression in characters; longer expressions count as not equal."""
WORKER = "agentkit.envs.math.worker"
_TIMEOUT = 60.0
"""Seconds of real time for a comparison, which may take three seconds of processor time."""
_ATTEMPTS = 2


def verifier() -> SharedResource[Verifier]:
    """Return the verifier that this process shares. Raises ``ConfigError`` if ``math_verify`` is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "comparing expressions needs math-verify: pip install 'agentkit-rl[math]' (for the sandboxes' image: "
            "agentkit sandbox build --package math-verify)"
        )
    return SharedResource("math verifier", Verifier)


class Verifier:
    """Compares expressions in worker processes, one for each processor.

    Args:
        module: name of the module that the workers run.
    """

    def __init__(self, module: str = WORKER) -> None:
        # One thread for numerical libraries: the memory limit of a comparison includes the stacks of threads.
        self._server = ForkServer(module, env={"OMP_NUM_THREADS": "1"})
        self._idle: list[Worker] = []
        self._slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def start(self) -> None:
        """Do nothing: processes start with the first comparison."""

    async def close(self) -> None:
        """End all processes. Idempotent."""
        await asyncio.to_thread(self._server.close)

    async def equal(self, gold: str, answer: str) -> bool:
        """Return whether two LaTeX expressions are equal. Raises ``EnvCrashed``, ``EnvTimeout``."""
        if max(len(gold), len(answer)) > LONGEST:
            return False
        async with self._slots:
            worker = self._idle.pop() if self._idle else Worker(self._server)
            try:
                for _ in range(_ATTEMPTS):
                    with contextlib.suppress(EnvCrashed):
                        _, verdict = await worker.call_async("compare", gold, answer, timeout=_TIMEOUT)
                        if verdict != "failed":
                            return verdict == "equal"
            finally:
                self._idle.append(worker)
        raise EnvCrashed(f"the process that compares expressions died {_ATTEMPTS} times")
