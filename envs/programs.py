"""Runs Python programs that a model wrote, in warm sandboxes that the environments of a process share.

Invariant: a program sees its own text and inputs, nothing else of the host and nothing of another program: a sandbox is
restarted between two calls of ``run``, so it has new processes, name spaces and temporary file systems each time. The
inputs of one call share a sandbox. The program can thereby learn only these inputs, which it is given anyway, and it
cannot take them out: what it wrote goes to the caller alone. How a program ends is a ``Run``, and so is a sandbox that
fails under it without an external cause; only the engine's failures, and those before the program begins, are an
``EnvError``.
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
from agentkit.sandboxes.attribution import Cause, cause_of
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
"""Sandboxes that are tried if the engine, or a request to it, ends them."""
_USES = 500
_WAIT = 600.0
"""Seconds in line for a sandbox; whoever asks has a shorter timeout of their own."""
_SIGXCPU = 24
_LAUNCHER = Path(launcher.__file__).read_text()


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


@dataclass(frozen=True)
class _Prepared:
    """Where a program lies, and what the sandbox had used before it runs."""

    directory: str
    processor_time: float


@dataclass(frozen=True)
class _Failed:
    """A sandbox failed under a program."""

    error: SandboxError
    cause: Cause

    @property
    def failure(self) -> Failure:
        """What that makes of the run, if it is the program's failure."""
        return "memory limit" if self.error.details.get("reason") == "oom" else "runtime error"


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
        processors = max(2, os.cpu_count() or 2)
        from agentkit.sandboxes.pool import SandboxPool
        from agentkit.sandboxes.sandbox import Sandbox

        spec = SandboxSpec(
            resources=Resources(memory=2 * memory, pids=64, tmp=scratch, workspace=scratch, shm=scratch // 4),
            env={"OMP_NUM_THREADS": "1"},
            ttl=None,
            idle_timeout=None,
        )
        self._pool = SandboxPool(
            spec, backend, min_idle=2, max_size=2 * processors, max_uses=_USES, reset=Sandbox.restart,
            acquire_timeout=_WAIT, drain_timeout=0.0,
        )  # fmt: skip
        self._proved: set[Limits] = set()
        """Limits within which a program that does nothing ended well."""

    async def start(self) -> None:
        """Raises ``EnvCrashed`` if there is no engine, ``ConfigError`` if there is no such back end."""
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
        """Run a program on each input in turn, until one of them (its index, its run) was ``enough``.

        A sandbox that fails while the program runs, without an external cause on record, costs one retry; each further
        one is a failed run. ``begun`` is called when the program starts.

        Raises ``EnvCrashed`` or ``EnvTimeout``: the engine failed, or the sandboxes cannot run any program.
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
        """See that programs can be run, so that one that cannot be started later has itself to blame.

        Raises ``SandboxError``.
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
        """Run the program in a fresh sandbox on the inputs that have no run yet. None if the sandbox did not fail."""
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
        lease = await self._pool.take()
        try:
            yield lease
        except BaseException:  # cancelled, too: what runs there is not known
            lease.release(discard=True)
            raise
        lease.release()


async def _prepare(box: Sandbox, source: str) -> _Prepared:
    """A new directory with the program."""
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


@contextlib.contextmanager
def _environment_failures():
    """A failed sandbox fails its environment, not its policy."""
    try:
        yield
    except PoolExhausted as error:
        raise EnvTimeout(f"no sandbox for the program became free: {error}") from error
    except SandboxError as error:
        raise EnvCrashed(f"the sandbox for the program failed: {error}") from error
