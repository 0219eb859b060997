"""A back end without an engine: real files and real commands of a small kind, in memory, with faults on request.

Invariant: it keeps every promise of ``Backend`` and passes the conformance suite; whatever it breaks was asked for, and
the same seed, script and callers give the same course, also in virtual time (``virtual_time.run``), where waiting takes
no time. Nothing leaves the process: no file, thread, socket or subprocess.

A simulation looks like this::

    async def scenario() -> None:
        backend = FakeBackend(seed=7, faults=[Fault("create", "fail", phase="start", probability=0.2, times=None)])
        await backend.start()
        box = await Sandbox.create(backend=backend)
        backend.die(box.id)                      # the container is gone: channel lost at once, event "died"
        ...
        assert backend.boxes == {}               # nothing leaked

    virtual_time.run(scenario(), limit=3600)

**Faults by script** (``faults=`` or ``inject``): a ``Fault`` says which call (``op``: a method of ``Backend`` or
``Channel`` by name, or ``"*"``) meets what (``does``), how often and with which probability; see ``Fault``.

**Faults by hand**, at once: ``die``, ``oom``, ``freeze``/``thaw`` (paused behind the owner's back), ``mute``/``unmute``
(agent hangs, its commands go on), ``cut`` (the agent crashes: connection lost, container still there), ``slow``
(seconds that every call to one sandbox takes more), ``engine_down(kill=…)``/``engine_up``, ``cut_events`` (streams
end), ``losing_events`` (events are dropped silently while it is true), ``forget`` (removed by someone else),
``unkillable`` (processes survive their kill: results are tainted).

**What it saw**: ``boxes`` (all sandboxes that exist now, by id), ``most`` (the most that ever existed at once),
``calls`` (time, op, id of every call), ``executed`` of each box (requests that really ran).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import NamedTuple

from agentkit.errors import EngineUnavailable, ImageError, SandboxError, SandboxLost, StartTimeout, UnsupportedFeature
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends.fake_box import Box
from agentkit.sandboxes.backends.fake_channel import FakeChannel
from agentkit.sandboxes.backends.fake_faults import PHASES, Fault, Phase, Script
from agentkit.sandboxes.backends.fake_files import Node
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

__all__ = ["FakeBackend", "Fault"]

ENGINE_TIMEOUT = 30.0
"""Seconds after which a call to a hanging engine fails."""


class Call(NamedTuple):
    """One call that reached the back end."""

    time: float
    """Seconds of the loop's clock."""
    op: str
    id: str


class FakeBackend(Backend):
    """Sandboxes in memory. ``create_seconds`` and ``call_seconds`` are how long things take when nothing is wrong."""

    name = "fake"

    def __init__(
        self,
        seed: int = 0,
        faults: Iterable[Fault] = (),
        *,
        create_seconds: float = 0.2,
        call_seconds: float = 0.001,
    ) -> None:
        self.boxes: dict[str, Box] = {}
        self.most = 0
        self.calls: list[Call] = []
        self.script = Script(seed, faults)
        self.losing_events = False
        self.create_seconds = create_seconds
        self.call_seconds = call_seconds
        self._up = True
        self._snapshots: dict[str, tuple[dict[str, Node], dict[str, Node]]] = {}
        self._listeners: list[asyncio.Queue[BackendEvent | None]] = []
        self._ending: set[asyncio.Task[None]] = set()

    # Faults by hand.

    def inject(self, fault: Fault) -> Fault:
        """From now on; ``fault.times = 0`` ends it."""
        self.script.faults.append(fault)
        return fault

    def die(self, id: str, exit_code: int = 137) -> None:
        self.end(self.boxes[id], exit_code, oom=False)

    def oom(self, id: str) -> None:
        """The memory limit kills the main process."""
        self.end(self.boxes[id], 137, oom=True)

    def freeze(self, id: str) -> None:
        """Somebody else pauses it."""
        self._set_paused(self.boxes[id], True)

    def thaw(self, id: str) -> None:
        self._set_paused(self.boxes[id], False)

    def mute(self, id: str) -> None:
        self.boxes[id].mute(True)

    def unmute(self, id: str) -> None:
        self.boxes[id].mute(False)

    def cut(self, id: str) -> None:
        self.boxes[id].cut("agent_dead")

    def slow(self, id: str, seconds: float) -> None:
        self.boxes[id].latency = seconds

    def unkillable(self, id: str) -> None:
        self.boxes[id].machine.unkillable = True

    def forget(self, id: str) -> None:
        """Somebody else removes it."""
        self._drop(self.boxes[id])

    def engine_down(self, kill: bool = False) -> None:
        """The engine is gone, with all containers if ``kill``; event streams end."""
        self._up = False
        self.cut_events()
        if kill:
            for box in list(self.boxes.values()):
                self.end(box, 137, oom=False)

    def engine_up(self) -> None:
        self._up = True

    def cut_events(self) -> None:
        for listener in self._listeners:
            listener.put_nowait(None)

    # What the fakes ask.

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def note(self, op: str, id: str) -> None:
        self.calls.append(Call(self.now(), op, id))

    def end(self, box: Box, exit_code: int, oom: bool) -> None:
        """The sandbox's main process has ended, and all others with it."""
        if box.exit_code is not None or self.boxes.get(box.id) is not box:
            return
        box.exit_code, box.oom_killed, box.paused = exit_code, oom, False
        if oom:
            self._tell(BackendEvent(box.id, "oom"))
        self._tell(BackendEvent(box.id, "died", exit_code))
        self._power_off(box, "oom" if oom else "exited")

    # Backend.

    def recipe(self) -> None:
        """Nothing of it outlives the process."""

    async def start(self) -> None:
        self._check_engine()

    async def close(self) -> None:
        self.cut_events()
        await asyncio.gather(*self._ending)

    def check(self, spec: SandboxSpec) -> None:
        for name, asked in (
            ("network", spec.network.mode != "none"),
            ("mounts", spec.mounts),
            ("cap_add", spec.cap_add),
            ("runtime", spec.runtime),
            ("gpus", spec.resources.gpus),
        ):
            if asked:
                raise UnsupportedFeature(f"the fake back end has no {name}; leave it at its default", field=name)

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        self.check(spec)
        await self._engine_call("create", id)
        if id in self.boxes:
            raise SandboxError(f"there is a sandbox {id} already")
        box: Box | None = None
        try:
            for phase in PHASES:
                await self._phase("create", id, spec, phase)
                if phase == "create":
                    if spec.image in self._snapshots or not spec.image.startswith("fake-snapshot/"):
                        box = self._put(Box(self, id, spec, labels))
                    else:
                        raise ImageError(f"there is no image {spec.image}", image=spec.image)
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
        box = self._there(id)
        self._power_off(box, "replaced")
        await asyncio.gather(*self._ending)
        for phase in PHASES[2:]:
            await self._phase("restart", id, box.spec, phase)
        if self.boxes.get(id) is not box:
            raise SandboxLost(f"sandbox {id} was removed while it restarted", reason="removed")
        box.machine.files.empty_mounts()
        box.machine.oom_kills, box.latency = 0, 0.0
        box.exit_code, box.oom_killed, box.paused = None, False, False
        box.machine.thaw()
        box.mute(False)
        return self._connect(box)

    async def pause(self, id: str) -> None:
        await self._engine_call("pause", id)
        self._set_paused(self._running(id), True)

    async def resume(self, id: str) -> None:
        await self._engine_call("resume", id)
        self._set_paused(self._running(id), False)

    async def snapshot(self, id: str, name: str) -> Snapshot:
        await self._engine_call("snapshot", id)
        files = self._running(id).machine.files
        image = f"fake-snapshot/{name}"
        self._snapshots[image] = files.export(mounts=False), files.export(mounts=True)
        return Snapshot(id=name, backend=self.name, image=image, archive=None)

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        await self._engine_call("restore", id)
        if snapshot.image not in self._snapshots:
            raise ImageError(f"there is no snapshot {snapshot.id}: was it discarded?", image=snapshot.image)
        files = self._running(id).machine.files
        files.empty_mounts()
        files.load(self._snapshots[snapshot.image][1])

    async def discard(self, snapshot: Snapshot) -> None:
        await self._engine_call("discard", snapshot.id)
        self._snapshots.pop(snapshot.image, None)

    async def remove(self, id: str) -> None:
        await self._engine_call("remove", id)
        if id in self.boxes:
            self._drop(self.boxes[id])
        await asyncio.gather(*self._ending)

    async def inspect(self, id: str) -> Observed:
        await self._engine_call("inspect", id)
        return self.boxes[id].observed if id in self.boxes else Observed(id, "absent", {})

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        await self._engine_call("list", "")
        return [box.observed for box in self.boxes.values() if labels.items() <= box.labels.items()]

    async def logs(self, id: str, tail: int) -> bytes:
        await self._engine_call("logs", id)
        self._there(id)
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

    # Their parts.

    def _check_engine(self) -> None:
        if not self._up:
            raise EngineUnavailable("the fake engine is down; call engine_up()")

    async def _engine_call(self, op: str, id: str) -> None:
        """What every call to the engine goes through; ``create`` and ``restart`` meet their faults in a phase."""
        self.note(op, id)
        self._check_engine()
        await asyncio.sleep(self.call_seconds)
        if op not in ("create", "restart"):
            for fault in self.script.drawn(op, id):
                if fault.does in ("slow", "hang"):
                    await asyncio.sleep(fault.seconds if fault.does == "slow" else ENGINE_TIMEOUT)
                if fault.does in ("fail", "hang"):
                    raise EngineUnavailable(f"the fake engine did not do {op}")
                if fault.does in ("die", "oom") and id in self.boxes:
                    self.end(self.boxes[id], 137, fault.does == "oom")
        self._check_engine()

    async def _phase(self, op: str, id: str, spec: SandboxSpec, phase: Phase) -> None:
        await asyncio.sleep(self.create_seconds / len(PHASES))
        for fault in self.script.drawn(op, id, phase):
            limit = spec.pull_timeout if phase == "pull" else spec.start_timeout
            seconds = {"slow": fault.seconds, "hang": limit}.get(fault.does, 0.0)
            await asyncio.sleep(min(seconds, limit))
            if fault.does == "slow" and seconds < limit:
                continue
            if phase == "pull":
                raise ImageError(f"image {spec.image} cannot be pulled", image=spec.image)
            if phase == "create" and fault.does == "fail":
                raise EngineUnavailable("the fake engine created nothing")
            raise StartTimeout(f"sandbox {id} did not start (phase {phase})", phase=phase, log_tail="")
        self._check_engine()

    def _put(self, box: Box) -> Box:
        if box.spec.image in self._snapshots:
            box.machine.files.load(self._snapshots[box.spec.image][0])
        self.boxes[box.id] = box
        self.most = max(self.most, len(self.boxes))
        return box

    def _connect(self, box: Box) -> Channel:
        if box.exit_code is not None or self.boxes.get(box.id) is not box:
            raise StartTimeout(f"sandbox {box.id} ended while it started", phase="ready", log_tail="")
        box.contact_made()
        return FakeChannel(box)

    def _there(self, id: str) -> Box:
        if id not in self.boxes:
            raise SandboxLost(f"there is no sandbox {id}", reason="removed")
        return self.boxes[id]

    def _running(self, id: str) -> Box:
        box = self._there(id)
        if box.exit_code is not None:
            raise SandboxLost(f"sandbox {id} has exited", reason="exited", exit_code=box.exit_code)
        return box

    def _set_paused(self, box: Box, paused: bool) -> None:
        if box.paused != paused:
            box.paused = paused
            box.machine.freeze() if paused else box.machine.thaw()
            self._tell(BackendEvent(box.id, "paused" if paused else "resumed"))

    def _drop(self, box: Box) -> None:
        del self.boxes[box.id]
        if box.exit_code is None:
            box.exit_code = 137
            self._tell(BackendEvent(box.id, "died", 137))
        self._tell(BackendEvent(box.id, "removed"))
        self._power_off(box, "removed")

    def _power_off(self, box: Box, reason: str) -> None:
        box.cut(reason)
        box.contact_made()
        box.drop_results()
        task = asyncio.ensure_future(box.machine.kill_all())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _tell(self, event: BackendEvent) -> None:
        if not self.losing_events:
            for listener in self._listeners:
                listener.put_nowait(event)
