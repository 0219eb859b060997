"""Runs Python programs that a model wrote, in warm sandboxes that the environments of a process share.

Invariant: a program sees its own text and input, nothing else of the host; each run has a fresh directory, and a
sandbox that holds anything of an earlier program (a process, a file) is never given to the next. How a program ends is
a ``Run``; a sandbox that fails, or cannot start it, is an ``EnvError``, whatever the program did before.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentkit.envs import launcher
from agentkit.envs.shared import Share
from agentkit.errors import ConfigError, EnvCrashed, EnvTimeout, PoolExhausted, SandboxError
from agentkit.sandboxes.spec import Resources, SandboxSpec, parse_size
from agentkit.sandboxes.types import ExecResult

if TYPE_CHECKING:  # an environment without tools also runs where what sandboxes need is not installed
    from agentkit.sandboxes.pool import Lease
    from agentkit.sandboxes.sandbox import Sandbox

Failure = Literal["", "time limit", "memory limit", "output limit", "runtime error"]

SOURCE_LIMIT = 64 << 10
"""Bytes of the longest program."""
_PATIENCE = 8.0
"""Seconds of real time for a second of processor time: the machine may be busy."""
_MARGIN = 0.25
"""Seconds of processor time beyond the limit for what the sandbox itself does during a run."""
_ATTEMPTS = 3
"""Sandboxes that are tried, if one is lost."""
_USES = 500
_WAIT = 600.0
"""Seconds in line for a sandbox; whoever asks has a shorter timeout of their own."""
_SIGXCPU = 24
_LAUNCHER = Path(launcher.__file__).read_text()
_CLEAN = ("find", "/tmp", "/dev/shm", ".", "-mindepth", "1", "-delete")


@dataclass(frozen=True)
class Limits:
    """What one run of a program may use."""

    seconds: int = 2
    """of processor time, of all processes together; eight times that, and a second more, of real time."""
    memory: int = 256 << 20
    """Bytes of address space of one process; all together may use twice that."""
    output: int = 64 << 10
    """Bytes of each stream."""


@dataclass(frozen=True)
class Run:
    """How a program ended: ``failure`` is empty if it ended by itself with exit code 0."""

    stdout: str
    stderr: str
    failure: Failure


def check_time_limit(time_limit: int) -> None:
    """Raises ``ValueError`` for what programs cannot be limited to."""
    if type(time_limit) is not int or not 1 <= time_limit <= 600:
        raise ValueError(f"time_limit={time_limit!r} must lie between 1 and 600 whole seconds")


def runner(backend: str, memory: int | str) -> Share[Runner]:
    """A share in the sandboxes of ``backend`` whose programs may use ``memory`` bytes each.

    Raises ``ConfigError`` for a size that is none.
    """
    try:
        size = int(parse_size(memory))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"memory={memory!r}: {error}") from None
    if size < 64 << 20:
        raise ConfigError(f"memory={memory!r} is too little for Python: give it at least 64m")
    return Share(("programs", backend, size), lambda: Runner(backend, size))


class Runner:
    """The sandboxes of one back end, as many as there are processors, and what is run in them."""

    def __init__(self, backend: str, memory: int) -> None:
        scratch = max(memory // 4, 16 << 20)
        from agentkit.sandboxes.pool import SandboxPool

        spec = SandboxSpec(
            resources=Resources(memory=2 * memory, pids=64, tmp=scratch, workspace=scratch, shm=scratch // 4),
            env={"OMP_NUM_THREADS": "1"},
            ttl=None,
            idle_timeout=None,
        )
        self._pool = SandboxPool(
            spec, backend, min_idle=1, max_size=max(2, os.cpu_count() or 2), max_uses=_USES, reset=_renew,
            acquire_timeout=_WAIT, drain_timeout=0.0,
        )  # fmt: skip

    async def start(self) -> None:
        """Raises ``EnvCrashed`` if there is no engine, ``ConfigError`` if there is no such back end."""
        with _environment_failures():
            await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def run(
        self, source: str, inputs: Sequence[str], limits: Limits, enough: Callable[[int, Run], bool] = lambda *_: False
    ) -> list[Run]:
        """Run a program on each input in turn, until one of them (its index, its run) was ``enough``.

        Raises ``EnvCrashed`` or ``EnvTimeout``: the sandbox failed, and so did those in its place.
        """
        with _environment_failures():
            for attempt in range(_ATTEMPTS):
                try:
                    return await self._try(source, inputs, limits, enough)
                except SandboxError as error:
                    if not error.retryable or attempt + 1 == _ATTEMPTS:
                        raise
        raise AssertionError("unreachable")

    async def _try(
        self, source: str, inputs: Sequence[str], limits: Limits, enough: Callable[[int, Run], bool]
    ) -> list[Run]:
        runs: list[Run] = []
        async with self._sandbox() as lease:
            for index, text in enumerate(inputs):
                if index and not await _clean(lease.box):
                    await lease.box.restart()
                runs.append(await _run(lease.box, source, text, limits))
                if enough(index, runs[-1]):
                    break
        return runs

    @contextlib.asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Lease]:
        lease = await self._pool.take()
        try:
            yield lease
        except BaseException:  # cancelled, too: what runs there is not known
            lease.release(discard=True)
            raise
        lease.release()


async def _run(box: Sandbox, source: str, text: str, limits: Limits) -> Run:
    directory, secret = f"run-{uuid.uuid4().hex}", uuid.uuid4().hex
    await box.files.write(f"{directory}/main.py", source.encode("utf-8", "replace"))
    before = await _processor_time(box)
    arguments = [secret, str(limits.seconds), str(limits.memory), "main.py"]
    result = await box.exec(
        ["python3", "-I", "-S", "-c", _LAUNCHER, *arguments],
        cwd=directory,
        stdin=text,
        timeout=_PATIENCE * limits.seconds + 1,
        output_limit=limits.output,
    )
    if secret in result.stderr:
        raise SandboxError(f"no program can be started: {result.stderr.replace(secret, '').strip()}")
    used = await _processor_time(box) - before
    return Run(result.stdout, result.stderr, _failure(result, late=used > limits.seconds + _MARGIN))


async def _processor_time(box: Sandbox) -> float:
    """Of all that ever ran in it; 0 where the back end cannot tell: there, each process has its own limit alone."""
    return (await box.stats()).cpu_seconds or 0.0


def _failure(result: ExecResult, *, late: bool) -> Failure:
    if late or result.timed_out or result.signal == _SIGXCPU:
        return "time limit"
    if result.oom_killed or (result.exit_code == 1 and result.stderr.rstrip().endswith("MemoryError")):
        return "memory limit"
    if result.truncated:
        return "output limit"
    return "" if result.exit_code == 0 else "runtime error"


async def _clean(box: Sandbox) -> bool:
    """Remove what a program left; whether nothing can be left, processes included."""
    if box.info.tainted or (await box.stats()).processes != 2:  # the first process of its name space, and the agent
        return False
    return (await box.exec(_CLEAN, timeout=10)).ok


async def _renew(box: Sandbox) -> None:
    if not await _clean(box):
        await box.restart()


@contextlib.contextmanager
def _environment_failures():
    """A failed sandbox fails its environment, not its policy."""
    try:
        yield
    except PoolExhausted as error:
        raise EnvTimeout(f"no sandbox for the program became free: {error}") from error
    except SandboxError as error:
        raise EnvCrashed(f"the sandbox for the program failed: {error}") from error
