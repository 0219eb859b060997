"""One pretended sandbox: its machine, its connections, and what is in store for it.

Invariant: a box that has ended runs nothing, answers nobody and has no timer left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from agentkit.sandboxes.backends.fake_faults import Fault, Script
from agentkit.sandboxes.backends.fake_files import FakeFiles
from agentkit.sandboxes.backends.fake_machine import Machine, Proc
from agentkit.sandboxes.backends.fake_programs import PROGRAMS
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import ExecRequest, ExecResult, Observed


class Connection(Protocol):
    """A channel, as its box sees it."""

    def lose(self, reason: str) -> None: ...


class World(Protocol):
    """What a box asks of the back end that it belongs to."""

    script: Script
    call_seconds: float

    def now(self) -> float: ...

    def note(self, op: str, id: str) -> None: ...

    def end(self, box: Box, exit_code: int, oom: bool) -> None: ...


class Box:
    """One pretended sandbox."""

    def __init__(self, world: World, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> None:
        self.id = id
        self.spec = spec
        self.labels = dict(labels)
        self.created = world.now()
        self.exit_code: int | None = None
        self.oom_killed = False
        self.paused = False
        self.latency = 0.0
        self.channels: list[Connection] = []
        self.results: dict[str, asyncio.Task[ExecResult]] = {}
        self.executed: list[ExecRequest] = []
        self._world = world
        self._awaiting: Fault | None = None
        self._heard = asyncio.Event()
        self._heard.set()
        self._dead_man: asyncio.TimerHandle | None = None
        resources = spec.resources
        mounts = {spec.workdir: resources.workspace, "/tmp": resources.tmp, "/dev/shm": resources.shm}
        files = FakeFiles(mounts, world.now, writable_root=not spec.readonly_root)
        self.machine = Machine(files, resources.memory, resources.pids, PROGRAMS, spec.user.partition(":")[0])

    @property
    def observed(self) -> Observed:
        state = "exited" if self.exit_code is not None else "paused" if self.paused else "running"
        return Observed(self.id, state, self.labels, self.exit_code, self.oom_killed, self.created)

    def note(self, op: str) -> None:
        self._world.note(op, self.id)

    async def arrive(self, op: str) -> None:
        """What a call to the agent goes through before it is served."""
        await asyncio.sleep(self._world.call_seconds + self.latency)
        for fault in self._world.script.drawn(op, self.id):
            if fault.does == "slow":
                await asyncio.sleep(fault.seconds)
            elif fault.does == "hang" and op != "exec":
                await asyncio.Event().wait()
            elif fault.does == "fail":
                self.cut("agent_dead")
            elif fault.does in ("die", "oom"):
                asyncio.get_running_loop().call_later(fault.seconds, self._world.end, self, 137, fault.does == "oom")
            elif fault.does in ("hang", "taint"):
                self._awaiting = fault
        await self._heard.wait()
        await self.machine.breathe()

    async def disturb(self, proc: Proc) -> None:
        """What was in store for the command that has just started."""
        fault, self._awaiting = self._awaiting, None
        if fault is not None and fault.does == "taint":
            proc.machine.unkillable = True
        if fault is not None and fault.does == "hang":
            proc.send(19)
            await asyncio.sleep(float("inf"))

    def cut(self, reason: str) -> None:
        """All connections end."""
        for channel in list(self.channels):
            channel.lose(reason)

    def mute(self, quiet: bool) -> None:
        self._heard.clear() if quiet else self._heard.set()

    def contact_made(self) -> None:
        if self._dead_man is not None:
            self._dead_man.cancel()
            self._dead_man = None

    def contact_ended(self) -> None:
        """The dead-man switch: without any contact the agent ends the sandbox after a while."""
        if not self.channels and self.exit_code is None and self.spec.idle_timeout is not None:
            loop = asyncio.get_running_loop()
            self._dead_man = loop.call_later(self.spec.idle_timeout, self._world.end, self, 0, False)

    def drop_results(self) -> None:
        """Forget what idempotency keys stand for, as an agent does that ends."""
        for task in self.results.values():
            task.cancel()
        self.results.clear()
