"""Batched calls to one actor: start it, call it, detect its end, stop it.

Invariant: every call ends. It returns, raises what the role raised, or raises ``RoleError`` with the process, the cause
of its end and its last output. Calls begin in the order in which they were made.

A Ray call costs about 1 ms of CPU, so calls and answers travel in batches: at most one ``submit`` and one ``collect``
are under way, and each waits ``TICK_S`` for more. ``collect`` returns at least every ``HEARTBEAT_S``; its silence means
that the process hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentkit.errors import RoleError
from agentkit.trainers.cluster.encoding import decode, decode_error
from agentkit.trainers.cluster.host import TICK_S, Host, Identity, Kind, Operation, Surroundings
from agentkit.trainers.cluster.placement import Slot

SILENCE_S = 60.0
"""Seconds without a heartbeat after which a process counts as hung, and is killed."""
EXIT_S = 5.0
"""Seconds for a killed process to disappear, and for another node to send the last output of a process."""
TAIL_BYTES = 4096
FRAME_LINES = (":job_id:", ":actor_name:", ":task_name:")
"""Starts of lines that Ray adds to a process's output."""


class RoleCall(NamedTuple):
    """One running call; ``future`` yields its result or its error."""

    number: int
    method: str
    future: asyncio.Future[Any]


class Channel:
    """One actor that hosts a role (or one of its ranks).

    Args:
        name: of the role (and rank), for messages.
        on_end: called once, when the actor has ended in any way.
    """

    def __init__(self, name: str, on_end: Callable[[RoleError], None]) -> None:
        self.name = name
        self.identity: Identity | None = None
        self._on_end = on_end
        self._calls: dict[int, RoleCall] = {}
        self._numbers = itertools.count(1)
        self._operations: list[Operation] = []
        self._outgoing = asyncio.Event()
        self._stop = asyncio.Event()
        self._constructed = False
        self._actor: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._cause = ""
        self._end: RoleError | None = None

    @property
    def alive(self) -> bool:
        """Whether the actor runs, as far as is known here."""
        return self._watcher is not None and self._end is None

    async def start(self, slot: Slot, surroundings: Surroundings) -> None:
        """Start the actor in its reserved place. On an error call ``kill``."""
        resources = dict(slot.resources)
        self._actor = (
            ray.remote(Host)
            .options(
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                max_restarts=0,  # a restarted engine would serve the weights of its model's files
                max_concurrency=1000,
                scheduling_strategy=PlacementGroupSchedulingStrategy(slot.group, slot.bundle),
            )
            .remote(self.name, surroundings)
        )
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        identifying = asyncio.ensure_future(_value(self._actor.identity.remote()))
        await asyncio.wait((identifying, self._watcher), return_when=asyncio.FIRST_COMPLETED)
        if self._end is not None:
            identifying.cancel()
            raise RoleError(str(self._end))
        try:
            self.identity = await identifying
        except RayError:
            await asyncio.shield(self._watcher)  # its calls fail for the same reason
            raise RoleError(str(self._end)) from None

    async def rendezvous(self) -> str:
        """Return a URL at which ranks can meet on the actor's node."""
        return await _value(self._actor.rendezvous.remote())

    def request(self, kind: Kind, method: str, body: Any) -> RoleCall:
        """Start a call. Raises ``RoleError`` if the actor has ended."""
        if self._end is not None:
            raise RoleError(str(self._end))
        call = RoleCall(next(self._numbers), method, asyncio.get_running_loop().create_future())
        self._calls[call.number] = call
        self._send(Operation(kind, call.number, body))
        return call

    def cancel(self, call: RoleCall) -> None:
        """Cancel the coroutine of a call that has not ended; its future is cancelled at once."""
        if self._calls.pop(call.number, None) is not None:
            call.future.cancel()
            self._send(Operation(Kind.CANCEL, call.number))

    def pending(self) -> list[asyncio.Future[Any]]:
        """Return the futures of all running calls."""
        return [call.future for call in self._calls.values()]

    async def kill(self, cause: str) -> None:
        """End the actor at once; pending and later calls raise ``RoleError(cause)``. Idempotent."""
        if self._watcher is None:
            return
        self._cause = self._cause or cause
        self._stop.set()
        await asyncio.shield(self._watcher)

    async def tail(self) -> str:
        """Return the end of the output of the actor's process, or where to find it."""
        if self.identity is None:
            return ""
        if self.identity.node == ray.get_runtime_context().get_node_id():
            return _tail(self.identity.outputs)
        strategy = NodeAffinitySchedulingStrategy(self.identity.node, soft=False)
        reading = ray.remote(_tail).options(num_cpus=0, scheduling_strategy=strategy).remote(self.identity.outputs)
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            return await asyncio.wait_for(_value(reading), EXIT_S)
        return f"(on node {self.identity.address}: {', '.join(self.identity.outputs)})"

    # messages

    def _send(self, operation: Operation) -> None:
        self._operations.append(operation)
        self._outgoing.set()

    async def _submit(self) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            operations, self._operations = self._operations, []
            await self._actor.submit.remote(operations)
            await asyncio.sleep(TICK_S)

    async def _collect(self) -> None:
        while True:
            # A constructor may import for minutes without a heartbeat; it has a limit of its own.
            limit = SILENCE_S if self._constructed else None
            for number, failed, body in await asyncio.wait_for(_value(self._actor.collect.remote()), limit):
                self._constructed = True
                call = self._calls.pop(number, None)
                if call is None or call.future.done():
                    continue  # it was cancelled
                try:
                    if failed:
                        call.future.set_exception(decode_error(body))
                    else:
                        call.future.set_result(decode(body))
                except Exception as cause:
                    error = RoleError(f"{self._where()}: the result of {call.method} cannot be read: {cause!r}")
                    call.future.set_exception(error)
            await asyncio.sleep(TICK_S)

    # the end

    async def _watch(self) -> None:
        """Serve calls until the actor ends or has to be killed; then kill it and fail pending calls."""
        loop = asyncio.get_running_loop()
        serving = [loop.create_task(work) for work in (self._submit(), self._collect(), self._stop.wait())]
        try:
            await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in serving:
                task.cancel()
            results = await asyncio.gather(*serving, return_exceptions=True)
            errors = [result for result in results if isinstance(result, Exception)]
            await self._finish(errors[0] if errors else None)

    async def _finish(self, error: Exception | None) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        if self.identity is not None and self.identity.node == ray.get_runtime_context().get_node_id():
            await _gone(self.identity.pid)
        cause = self._cause or await self._obituary(error)
        pending, self._calls = list(self._calls.values()), {}
        self._end = RoleError(cause)
        for call in pending:
            if not call.future.done():
                call.future.set_exception(RoleError(cause))
        self._on_end(self._end)

    async def _obituary(self, error: Exception | None) -> str:
        during = ", ".join(sorted({call.method for call in self._calls.values()}))
        calls = f" during {len(self._calls)} call(s) of {during}" if during else ""
        if isinstance(error, asyncio.TimeoutError):
            end = f"gave no sign of life for {SILENCE_S:g} s{calls}, so it was killed."
        elif isinstance(error, RayError):
            end = f"has ended{calls}. {_reason(error)}"
        else:
            end = f"was ended{calls} by an error in its channel: {error!r}."
        return f"{self._where()} {end} Its last output:\n{await self.tail() or '(none)'}"

    def _where(self) -> str:
        if self.identity is None:
            return self.name
        return f"{self.name} (pid {self.identity.pid} on {self.identity.address})"


async def _value(reference: Any) -> Any:
    return await reference


def _reason(error: RayError) -> str:
    """Return the part of Ray's message that tells why an actor ended."""
    text = " ".join(str(error).split())
    for start in ("Worker exit detail:", "The actor is dead because"):
        if start in text:
            text = text.split(start, 1)[1].strip()
            break
    # Ray goes on with causes that it considers possible.
    return f"Ray: {'. '.join(text.split('. ')[:2])}."


def _tail(files: tuple[str, ...]) -> str:
    """Return the last lines of these files of this machine."""
    lines: list[str] = []
    for file in files:
        with contextlib.suppress(OSError), Path(file).open("rb") as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines += output.read().decode(errors="replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith(FRAME_LINES)).strip()


async def _gone(pid: int) -> None:
    """Wait until a process of this machine has ended; Ray does not kill one that is stopped, so do that here."""
    for limit in (EXIT_S / 5, EXIT_S):
        deadline = time.monotonic() + limit
        while psutil.pid_exists(pid) and time.monotonic() < deadline:  # noqa: ASYNC110  (no event signals it)
            await asyncio.sleep(0.01)
        if not psutil.pid_exists(pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
