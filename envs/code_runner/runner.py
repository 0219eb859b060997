"""Run Python programs that a model wrote, in warm sandboxes that the environments of a process share.

Invariant: a program sees only its own text and inputs, nothing of the host and nothing of other programs: a sandbox is
restarted between two calls of ``run``, with new processes, name spaces and temporary file systems. The inputs of one
call share a sandbox, so a program can learn only those inputs, and its output goes only to the caller. The end of a
program is a ``Run``, even if its sandbox fails without an external cause. Only failures of the engine, and failures
before the program starts, are an ``EnvError``.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentkit.envs.code_runner import launcher
from agentkit.envs.shared_resources import SharedResource
from agentkit.errors import ConfigError, EnvCrashed, EnvTimeout, PoolExhausted, SandboxError
from agentkit.sandboxes.attribution import Cause, cause_of
from agentkit.sandboxes.backends import check_backend
from agentkit.sandboxes.spec import Resources, SandboxSpec, parse_size
from agentkit.sandboxes.types import ExecResult

if TYPE_CHECKING:  # environments without tools also run without the packages of sandboxes
    from agentkit.envs.isolation.redundancy import Redundancy
    from agentkit.sandboxes.pool.pool import Lease
    from agentkit.sandboxes.sandbox import Sandbox

Failure = Literal["", "time limit", "memory limit", "output limit", "runtime error"]

SOURCE_LIMIT = 64 << 10
"""Bytes of the longest program."""
_PATIENCE = 8.0
"""Seconds of real time per second of processor time, because the machine may be busy."""
_MARGIN = 0.25
"""Seconds of processor time in addition to the limit, for the sandbox itself."""
_ATTEMPTS = 3
"""Sandboxes that are tried if the engine, or a request to it, ends them."""
_USES = 500
_WAIT = 600.0
"""Seconds to wait for a sandbox; callers have shorter timeouts."""
_SIGXCPU = 24
_LAUNCHER = Path(launcher.__file__).read_text()


@dataclass(frozen=True)
class Limits:
    """Limits of one run of a program."""

    seconds: int = 2
    """Processor time of all processes; real time is limited to eight times that, plus one second."""
    memory: int = 256 << 20
    """Bytes of address space of one process; all processes together may use twice that."""
    output: int = 64 << 10
    """Bytes of each stream."""


@dataclass(frozen=True)
class Run:
    """The result of a program: ``failure`` is empty if it ended by itself with exit code 0."""

    stdout: str
    stderr: str
    failure: Failure


@dataclass(frozen=True)
class _Prepared:
    """The location of a program, and the processor time that its sandbox had used before."""

    directory: str
    processor_time: float


@dataclass(frozen=True)
class _Failed:
    """A failure of a sandbox while a program ran."""

    error: SandboxError
    cause: Cause

    @property
    def failure(self) -> Failure:
        """The result if the program is responsible for the failure."""
        return "memory limit" if self.error.details.get("reason") == "oom" else "runtime error"


def check_time_limit(time_limit: int) -> None:
    """Raise ``ValueError`` if ``time_limit`` is not a valid limit."""
    if type(time_limit) is not int or not 1 <= time_limit <= 600:
        raise ValueError(f"time_limit={time_limit!r} must lie between 1 and 600 whole seconds")


def runner(backend: str, memory: int | str, redundancy: Redundancy | None = None) -> SharedResource[Runner]:
    """Return a use of the sandboxes of ``backend``.

    Args:
        backend: name of the back end.
        memory: bytes that a program may use.
        redundancy: its ``spares`` (in addition to one sandbox), ``hedge`` and ``health`` apply; None: one spare.

    Raises:
        ConfigError: ``memory`` is not a size, or another argument is of a wrong type.
    """
    check_backend("backend", backend)
    if redundancy is not None:
        from agentkit.envs.isolation.redundancy import check_redundancy

        check_redundancy(redundancy)
    try:
        size = int(parse_size(memory))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"memory={memory!r}: {error}") from None
    if size < 64 << 20:
        raise ConfigError(f"memory={memory!r} is too little for Python: give it at least 64m")
    return SharedResource(("programs", backend, size, redundancy), lambda: Runner(backend, size, redundancy))


class Runner:
    """The sandboxes of one back end, at most two for each processor."""

    def __init__(self, backend: str, memory: int, redundancy: Redundancy | None = None) -> None:
        scratch = max(memory // 4, 16 << 20)
        processors = max(2, os.cpu_count() or 2)
        from agentkit.envs.isolation.redundancy import Redundancy
        from agentkit.sandboxes.pool.health import usage_of
        from agentkit.sandboxes.pool.pool import SandboxPool
        from agentkit.sandboxes.recovery.hedge import Hedge
        from agentkit.sandboxes.sandbox import Sandbox

        redundancy = redundancy or Redundancy(spares=1)
        spec = SandboxSpec(
            resources=Resources(memory=2 * memory, pids=64, tmp=scratch, workspace=scratch, shm=scratch // 4),
            env={"OMP_NUM_THREADS": "1"},
            ttl=None,
            idle_timeout=None,
        )
        ready = 1 + redundancy.spares
        self._pool = SandboxPool(
            spec, backend, min_idle=ready, max_size=max(ready, 2 * processors), max_uses=_USES, reset=Sandbox.restart,
            acquire_timeout=_WAIT, drain_timeout=0.0, health=redundancy.health, host=usage_of(backend),
            hedge=None if redundancy.hedge is None else Hedge(redundancy.hedge),
        )  # fmt: skip
        self._proved: set[Limits] = set()
        """Limits with which an empty program ran successfully."""

    async def start(self) -> None:
        """Start the pool. Raises ``EnvCrashed`` without an engine, ``ConfigError`` for an unknown back end."""
        with _environment_failures():
            await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def run(
        self,
        source: str,
        inputs: Sequence[str],
        limits: Limits,
        enough: Callable[[int, Run], bool] = lambda *_: False,
        begun: Callable[[], None] = lambda: None,
    ) -> list[Run]:
        """Run a program on each input in order, until a result is ``enough``.

        If the sandbox fails while the program runs, without a recorded external cause, the input is retried once; after
        another failure it counts as a failed run.

        Args:
            begun: called when the program starts.

        Raises:
            EnvCrashed, EnvTimeout: the engine failed, or the sandboxes cannot run any program.
        """
        runs: list[Run] = []
        external = unexplained = 0
        with _environment_failures():
            if limits not in self._proved:
                await self._prove(limits)
            while len(runs) < len(inputs) and not (runs and enough(len(runs) - 1, runs[-1])):
                failed = await self._go_on(source, inputs, limits, enough, begun, runs)
                if failed is None:
                    break
                if failed.cause == "external":
                    external += 1
                    if external == _ATTEMPTS or not failed.error.retryable:
                        raise failed.error
                elif failed.cause == "program" or unexplained:
                    runs.append(Run("", "", failed.failure))
                else:
                    unexplained += 1
        return runs

    async def _prove(self, limits: Limits) -> None:
        """Check that an empty program runs, so that a later failure to start is caused by the program.

        Raises:
            SandboxError: the sandboxes cannot run it.
        """
        async with self._sandbox() as lease:
            run = await _run(lease.box, await _prepare(lease.box, ""), "", limits)
        if run.failure:
            raise SandboxError(f"no program can be started: {run.failure}: {run.stderr.strip()}")
        self._proved.add(limits)

    async def _go_on(
        self,
        source: str,
        inputs: Sequence[str],
        limits: Limits,
        enough: Callable[[int, Run], bool],
        begun: Callable[[], None],
        runs: list[Run],
    ) -> _Failed | None:
        """Run the program in a fresh sandbox on the remaining inputs. Returns None if the sandbox did not fail."""
        async with self._sandbox() as lease:
            box = lease.box
            ran = False
            for index in range(len(runs), len(inputs)):
                try:
                    prepared = await _prepare(box, source)
                    ran = True
                    begun()
                    runs.append(await _run(box, prepared, inputs[index], limits))
                except SandboxError as error:
                    cause = await cause_of(error, box) if ran else "external"
                    lease.release(discard=True)
                    return _Failed(error, cause)
                if enough(index, runs[-1]):
                    break
        return None

    @contextlib.asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[Lease]:
        lease = await self._pool.acquire()
        try:
            yield lease
        except BaseException:  # also after a cancellation, because the state of the sandbox is unknown
            lease.release(discard=True)
            raise
        lease.release()


async def _prepare(box: Sandbox, source: str) -> _Prepared:
    """Write the program into a new directory."""
    directory = f"run-{uuid.uuid4().hex}"
    await box.files.write(f"{directory}/main.py", source.encode("utf-8", "replace"))
    return _Prepared(directory, await _processor_time(box))


async def _run(box: Sandbox, prepared: _Prepared, text: str, limits: Limits) -> Run:
    arguments = [str(limits.seconds), str(limits.memory), "main.py"]
    result = await box.exec(
        ["python3", "-I", "-S", "-c", _LAUNCHER, *arguments],
        cwd=prepared.directory,
        stdin=text,
        timeout=_PATIENCE * limits.seconds + 1,
        output_limit=limits.output,
    )
    used = await _processor_time(box) - prepared.processor_time
    return Run(result.stdout, result.stderr, _failure(result, late=used > limits.seconds + _MARGIN))


async def _processor_time(box: Sandbox) -> float:
    """Return the processor time of all processes so far; 0 if the back end does not measure it."""
    return (await box.stats()).cpu_seconds or 0.0


def _failure(result: ExecResult, *, late: bool) -> Failure:
    if late or result.timed_out or result.signal == _SIGXCPU:
        return "time limit"
    if result.oom_killed or (result.exit_code == 1 and result.stderr.rstrip().endswith("MemoryError")):
        return "memory limit"
    if result.truncated:
        return "output limit"
    return "" if result.exit_code == 0 else "runtime error"


@contextlib.contextmanager
def _environment_failures():
    """Convert a failure of a sandbox to one of the environment."""
    try:
        yield
    except PoolExhausted as error:
        raise EnvTimeout(f"no sandbox for the program became free: {error}") from error
    except SandboxError as error:
        raise EnvCrashed(f"the sandbox for the program failed: {error}") from error
