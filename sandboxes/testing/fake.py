"""A scripted back end in memory for tests and simulations, with fault injection.

A command is a coroutine that the test supplies. It gets a ``Command`` and the other words of the command line, and
returns the exit code (None counts as 0)::

    async def count(command: Command, limit: str) -> int:
        for number in range(int(limit)):
            await command.sleep(1)
            await command.write(f"{number}\n")
        command.box.files["/workspace/done"] = FakeFile(b"yes")
        return 0

    async def scenario() -> None:
        backend = FakeBackend(commands={"count": count}, seed=7)
        await backend.start()
        box = await Sandbox.create(backend=backend)
        backend.inject(Fault("exec", "die", seconds=2))
        with pytest.raises(SandboxLost):
            await box.exec("count 10")
        await box.close()
        assert backend.boxes == {}

    virtual_time.run(scenario(), limit=3600)

A key of ``commands`` is a complete command line or its first word; ``COMMANDS`` are always known. The same seed, faults
and callers give the same sequence of events. Nothing leaves the process: no file, thread, socket or subprocess.

Faults are injected by rule (``faults=``, ``inject``; see ``Fault``) or directly by the methods ``die``, ``oom``,
``freeze``, ``mute``, ``cut``, ``slow``, ``unkillable``, ``forget``, ``engine_down`` and ``cut_events``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from agentkit.errors import EngineUnavailable, ImageError, SandboxError, SandboxLost, StartTimeout
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.testing.fake_sandbox import COMMANDS, Command, FakeChannel, FakeFile, FakeSandbox, Script
from agentkit.sandboxes.testing.faults import PHASES, Fault, Phase, Rules
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

__all__ = ["COMMANDS", "Call", "Command", "FakeBackend", "FakeFile", "FakeSandbox", "Fault", "Script"]

ENGINE_TIMEOUT = 30.0
"""Seconds after which a call to a hanging engine fails."""
SNAPSHOT_PREFIX = "fake-snapshot/"


class Call(NamedTuple):
    """One call that reached the back end."""

    time: float
    """Seconds of the event loop's clock."""
    op: str
    id: str


class FakeBackend(Backend):
    """Sandboxes in memory.

    Args:
        commands: Coroutines by command line or by its first word, beside ``COMMANDS``.
        seed: Decides which faults with a probability happen.
        faults: Rules of fault injection.
        create_seconds: Seconds that a creation or restart takes.
        call_seconds: Seconds that any other call takes.
    """

    name = "fake"

    def __init__(
        self,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        *,
        commands: Mapping[str, Script] | None = None,
        create_seconds: float = 0.2,
        call_seconds: float = 0.001,
    ) -> None:
        self.commands: Mapping[str, Script] = {**COMMANDS, **(commands or {})}
        self.boxes: dict[str, FakeSandbox] = {}
        """The sandboxes that exist now, by id."""
        self.most = 0
        """The most sandboxes that existed at once."""
        self.images: set[str] = set()
        """The images that were fetched."""
        self.calls: list[Call] = []
        self.snapshot_files: dict[str, dict[str, FakeFile]] = {}
        self.rules = Rules(seed, faults)
        self.losing_events = False
        """Whether events are dropped silently."""
        self.create_seconds = create_seconds
        self.call_seconds = call_seconds
        self._up = True
        self._listeners: list[asyncio.Queue[BackendEvent | None]] = []
        self._ending: set[asyncio.Future[Any]] = set()

    async def pull(self, image: str, *, timeout: float = 600.0, refresh: bool = False) -> bool:
        missing = image not in self.images
        self.images.add(image)
        return missing

    async def remove_image(self, image: str, keep: Collection[str]) -> bool:
        if image in keep or any(box.spec.image == image for box in self.boxes.values()):
            return False
        self.images.discard(image)
        return True

    # Fault injection.

    def inject(self, fault: Fault) -> Fault:
        """Add a rule; ``fault.times = 0`` ends it."""
        self.rules.faults.append(fault)
        return fault

    def die(self, id: str) -> None:
        """Kill the main process: the connection is lost, and ``died`` is reported."""
        self.end(self.boxes[id], 137, oom=False)

    def oom(self, id: str) -> None:
        """Let the memory limit kill the main process."""
        self.end(self.boxes[id], 137, oom=True)

    def freeze(self, id: str) -> None:
        """Pause it without its owner's knowledge."""
        self._set_paused(self.boxes[id], True)

    def thaw(self, id: str) -> None:
        self._set_paused(self.boxes[id], False)

    def mute(self, id: str) -> None:
        """Let its agent hang; running commands continue."""
        self.boxes[id].heard.clear()

    def unmute(self, id: str) -> None:
        self.boxes[id].heard.set()

    def cut(self, id: str) -> None:
        """Let its agent crash: the connection is lost, the sandbox stays."""
        self.boxes[id].cut("agent_dead")

    def slow(self, id: str, seconds: float) -> None:
        """Delay every call to it by ``seconds``."""
        self.boxes[id].latency = seconds

    def unkillable(self, id: str) -> None:
        """Let its processes survive their kill: results are tainted."""
        self.boxes[id].unkillable = True

    def forget(self, id: str) -> None:
        """Remove it without its owner's knowledge."""
        self._drop(self.boxes[id])

    def engine_down(self, kill: bool = False) -> None:
        """Stop the engine, and with ``kill`` all sandboxes; event streams end."""
        self._up = False
        self.cut_events()
        if kill:
            for box in list(self.boxes.values()):
                self.end(box, 137, oom=False)

    def engine_up(self) -> None:
        self._up = True

    def cut_events(self) -> None:
        """End all event streams."""
        for listener in self._listeners:
            listener.put_nowait(None)

    def end(self, box: FakeSandbox, exit_code: int, oom: bool) -> None:
        """End the main process of a sandbox, and all others with it."""
        if box.exit_code is not None or self.boxes.get(box.id) is not box:
            return
        box.exit_code, box.oom_killed = exit_code, oom
        if oom:
            self._report(BackendEvent(box.id, "oom"))
        self._report(BackendEvent(box.id, "died", exit_code))
        self._power_off(box, "oom" if oom else "exited")

    def note(self, op: str, id: str) -> None:
        self.calls.append(Call(asyncio.get_running_loop().time(), op, id))

    # Backend.

    def recipe(self) -> None:
        """Return None: nothing outlives the process."""

    async def start(self) -> None:
        self._check_engine()

    async def close(self) -> None:
        self.cut_events()
        await self._ended()

    def check(self, spec: SandboxSpec) -> None:
        """Accept everything: a command does what its script does."""

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        await self._engine_call("create", id)
        if id in self.boxes:
            raise SandboxError(f"sandbox {id} exists already")
        box: FakeSandbox | None = None
        try:
            for phase in PHASES:
                await self._phase("create", id, spec, phase)
                if phase == "create":
                    if spec.image.startswith(SNAPSHOT_PREFIX) and spec.image not in self.snapshot_files:
                        raise ImageError(f"no image {spec.image!r}", image=spec.image)
                    box = self.boxes[id] = FakeSandbox(self, id, spec, labels)
                    box.files |= {
                        path: replace(file)
                        for path, file in self.snapshot_files.get(spec.image, {}).items()
                        if not box.mount(path)
                    }
                    self.most = max(self.most, len(self.boxes))
            assert box is not None
            return self._connect(box)
        except BaseException:
            if box is not None and self.boxes.get(id) is box:
                self._drop(box)
            raise

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        await self._engine_call("attach", id)
        box = self._running(id)
        return box.spec, self._connect(box)

    async def restart(self, id: str) -> Channel:
        await self._engine_call("restart", id)
        box = self._existing(id)
        self._power_off(box, "replaced")
        await self._ended()
        for phase in PHASES[2:]:
            await self._phase("restart", id, box.spec, phase)
        if self.boxes.get(id) is not box:
            raise SandboxLost(f"sandbox {id} was removed while it restarted", reason="removed")
        self._set_mounted_files(box, {})
        box.exit_code, box.oom_killed, box.latency = None, False, 0.0
        box.heard.set()
        return self._connect(box)

    async def pause(self, id: str) -> None:
        await self._engine_call("pause", id)
        self._set_paused(self._running(id), True)

    async def resume(self, id: str) -> None:
        await self._engine_call("resume", id)
        self._set_paused(self._running(id), False)

    async def snapshot(self, id: str, name: str) -> Snapshot:
        await self._engine_call("snapshot", id)
        image = f"{SNAPSHOT_PREFIX}{name}"
        self.snapshot_files[image] = {path: replace(file) for path, file in self._running(id).files.items()}
        return Snapshot(id=name, backend=self.name, image=image, archive=None)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        await self._engine_call("restore", id)
        if snapshot.image not in self.snapshot_files:
            raise ImageError(f"no snapshot {snapshot.id!r}: it was discarded", image=snapshot.image)
        self._set_mounted_files(self._running(id), self.snapshot_files[snapshot.image])

    async def discard(self, snapshot: Snapshot) -> None:
        await self._engine_call("discard", snapshot.id)
        self.snapshot_files.pop(snapshot.image, None)

    async def remove(self, id: str) -> None:
        await self._engine_call("remove", id)
        if id in self.boxes:
            self._drop(self.boxes[id])
        await self._ended()

    async def inspect(self, id: str) -> Observed:
        await self._engine_call("inspect", id)
        return self.boxes[id].observed if id in self.boxes else Observed(id, "absent", {})

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        await self._engine_call("list", "")
        return [box.observed for box in self.boxes.values() if labels.items() <= box.labels.items()]

    async def logs(self, id: str, tail: int) -> bytes:
        await self._engine_call("logs", id)
        self._existing(id)
        return b""

    async def events(self) -> AsyncIterator[BackendEvent]:
        self._check_engine()
        queue: asyncio.Queue[BackendEvent | None] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.remove(queue)
        self._check_engine()

    def _check_engine(self) -> None:
        if not self._up:
            raise EngineUnavailable("the fake engine is down; call engine_up()")

    async def _engine_call(self, op: str, id: str) -> None:
        """Let a call reach the engine; faults of ``create`` and ``restart`` occur in a phase."""
        self.note(op, id)
        self._check_engine()
        await asyncio.sleep(self.call_seconds)
        for fault in self.rules.draw(op, id) if op not in ("create", "restart") else ():
            if fault.does in ("slow", "hang"):
                await asyncio.sleep(fault.seconds if fault.does == "slow" else ENGINE_TIMEOUT)
            if fault.does in ("fail", "hang"):
                raise EngineUnavailable(f"the fake engine did not do {op}")
            if fault.does in ("die", "oom") and id in self.boxes:
                self.end(self.boxes[id], 137, fault.does == "oom")
        self._check_engine()

    async def _phase(self, op: str, id: str, spec: SandboxSpec, phase: Phase) -> None:
        await asyncio.sleep(self.create_seconds / len(PHASES))
        for fault in self.rules.draw(op, id, phase):
            limit = spec.pull_timeout if phase == "pull" else spec.start_timeout
            seconds = {"slow": fault.seconds, "hang": limit}.get(fault.does, 0.0)
            await asyncio.sleep(min(seconds, limit))
            if fault.does == "slow" and seconds < limit:
                continue
            if phase == "pull":
                raise ImageError(f"image {spec.image} cannot be pulled", image=spec.image)
            if phase == "create" and fault.does == "fail":
                raise EngineUnavailable("the fake engine did not create the sandbox")
            raise StartTimeout(f"sandbox {id} did not start (phase {phase})", phase=phase, log_tail="")
        self._check_engine()

    def _connect(self, box: FakeSandbox) -> Channel:
        if box.exit_code is not None or self.boxes.get(box.id) is not box:
            raise StartTimeout(f"sandbox {box.id} ended while it started", phase="ready", log_tail="")
        return FakeChannel(box)

    def _existing(self, id: str) -> FakeSandbox:
        if id not in self.boxes:
            raise SandboxLost(f"no sandbox {id!r}", reason="removed")
        return self.boxes[id]

    def _running(self, id: str) -> FakeSandbox:
        box = self._existing(id)
        if box.exit_code is not None:
            raise SandboxLost(f"sandbox {id} has exited", reason="exited", exit_code=box.exit_code)
        return box

    def _set_paused(self, box: FakeSandbox, paused: bool) -> None:
        if box.paused != paused:
            box.thawed.clear() if paused else box.thawed.set()
            self._report(BackendEvent(box.id, "paused" if paused else "resumed"))

    def _set_mounted_files(self, box: FakeSandbox, files: Mapping[str, FakeFile]) -> None:
        root = {path: file for path, file in box.files.items() if not box.mount(path)}
        box.files = root | {path: replace(file) for path, file in files.items() if box.mount(path)}

    def _drop(self, box: FakeSandbox) -> None:
        del self.boxes[box.id]
        if box.exit_code is None:
            box.exit_code = 137
            self._report(BackendEvent(box.id, "died", 137))
        self._report(BackendEvent(box.id, "removed"))
        self._power_off(box, "removed")

    def _power_off(self, box: FakeSandbox, reason: str) -> None:
        box.cut(reason)
        box.thawed.set()
        box.unkillable = False
        for task in (*box.results.values(), *box.processes):
            task.cancel()
        self._ending |= box.processes
        box.results.clear()

    async def _ended(self) -> None:
        """Wait until all processes of ended sandboxes have ended."""
        ending, self._ending = self._ending, set()
        if ending:
            await asyncio.wait(ending)

    def _report(self, event: BackendEvent) -> None:
        if not self.losing_events:
            for listener in self._listeners:
                listener.put_nowait(event)
