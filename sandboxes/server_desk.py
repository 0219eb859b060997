"""What a sandbox server keeps: the sandboxes that its clients had made, their connections, and when they end.

Invariant: clients reach only what was made through this server. Each sandbox is removed at the latest when its time to
live ends, when no client has been connected to it for the lease, or when the server stops; a snapshot when its client
has been away for the lease and no sandbox that was made from it is left. If the server dies, the reaper does it. There
are never more than the limits allow, those being made counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from agentkit.errors import QuotaExceeded, SandboxError, SandboxLost
from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Backend, Channel, Process
from agentkit.sandboxes.claims import Claim
from agentkit.sandboxes.remote_protocol import BEAT, SNAPSHOTS, pack_json
from agentkit.sandboxes.server_policy import Limits, Policy, permitted
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Observed, Snapshot

T = TypeVar("T")

_log = logging.getLogger(__name__)

_REMEMBERED = 10_000
"""Ends of channels, withdrawn calls and the like that are still known afterwards."""
_QUEUE = 1000
"""Lines that wait for a client; one that is further behind must begin anew."""
_STOP = 30.0


class Box:
    """One sandbox of a client."""

    def __init__(self, id: str, spec: SandboxSpec, claim: Claim, now: float) -> None:
        self.id = id
        self.spec = spec
        self.claim = claim
        self.key = ""
        self.holders: set[str] = set()
        self.ending = False
        self.contact = now
        self.deadline: float | None = None


class Kept:
    """One snapshot of a client."""

    def __init__(self, client: str, now: float) -> None:
        self.client = client
        self.contact = now
        self.snapshot: Snapshot | None = None
        """None while it is being made."""


class Memory(OrderedDict[str, str]):
    """The last things to be remembered."""

    def __setitem__(self, key: str, value: str) -> None:
        super().__setitem__(key, value)
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


class Desk:
    """Made and used in one event loop, between ``start`` and ``stop``."""

    def __init__(self, backend: Backend, policy: Policy, limits: Limits) -> None:
        self.boot = secrets.token_hex(8)
        self.backend = backend
        self.policy = policy
        self.limits = limits
        self.boxes: dict[str, Box] = {}
        self.processes: dict[str, Process] = {}
        self._channels: dict[str, tuple[str, Channel]] = {}
        self._ends = Memory()
        self._gone = Memory()
        self._withdrawn = Memory()
        self._calls: dict[str, asyncio.Task[Any]] = {}
        self._snapshots: dict[str, Kept] = {}
        self._streams: dict[asyncio.Queue[bytes | None], str] = {}
        self._tasks: set[asyncio.Future[Any]] = set()
        self._held = 0
        self._stopping = False

    async def start(self) -> None:
        """Start the back end too. Raises ``EngineUnavailable``."""
        await self.backend.start()
        self.background(self._keep())
        self.background(self._follow_events())

    async def stop(self) -> None:
        """Remove everything. Bounded by 30 s; the reaper takes what is left then."""
        self._stopping = True
        for queue in self._streams:
            _offer(queue, None)
        for task in [*self._calls.values(), *self._tasks]:
            task.cancel()
        if ending := [*self._calls.values(), *self._tasks]:
            await asyncio.wait(ending, timeout=_STOP / 3)
        work = [asyncio.ensure_future(self.remove(id)) for id in list(self.boxes)]
        work += [asyncio.ensure_future(self.discard(id)) for id in list(self._snapshots)]
        if work:
            _, late = await asyncio.wait(work, timeout=_STOP / 2)
            for task in late:
                task.cancel()
        await self.backend.close()

    def background(self, work: Awaitable[Any]) -> None:
        """Let ``work`` run to its end, whoever leaves."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            _log.warning("work in the background failed: %s: %s", type(error).__name__, error)

    # Calls.

    async def run(self, call: str, work: Coroutine[Any, Any, T], left: Awaitable[Any] | None) -> T:
        """Work that ends when its caller withdraws it, or leaves (``left`` ends; None lets it run on)."""
        if self._stopping or call in self._withdrawn:
            work.close()
            raise SandboxError("the call was withdrawn")
        task = self._calls[call] = asyncio.ensure_future(work)
        watch = None if left is None else asyncio.ensure_future(left)
        try:
            await asyncio.wait({task} if watch is None else {task, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if watch is not None:
                watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            del self._calls[call]
        if task.cancelled():
            raise SandboxError("the call was withdrawn")
        return task.result()

    async def withdraw(self, call: str) -> None:
        """End a call, also one that arrives later, and return when nothing of it runs any more."""
        self._withdrawn[call] = ""
        if task := self._calls.get(call):
            task.cancel()
            await asyncio.wait({task}, timeout=_STOP)

    @contextlib.contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count an answer until its client has it. Raises ``QuotaExceeded`` if too much waits: the answer is lost."""
        if self._held and self._held + size > self.limits.answers:
            error = QuotaExceeded(f"answers of {self._held} bytes wait for their clients already: take them faster")
            error.side_effects = "maybe"
            raise error
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    # Sandboxes.

    @property
    def load(self) -> tuple[int, int]:
        """How many there are, and how many there may be."""
        return len(self.boxes), self.limits.sandboxes

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str], client: str) -> Box:
        if not paths.is_id(id):
            raise SandboxError(f"{id!r} is no sandbox id: ak- and 16 hexadecimal digits")
        made_of = self._snapshot_of(spec)
        allowed = permitted(self.policy, spec, image=made_of is None)
        if made_of is not None:
            allowed = allowed.model_copy(update={"image": made_of.image})
        self.backend.check(allowed)
        if id in self.boxes:
            raise SandboxError(f"there is a sandbox {id} already")
        if len(self.boxes) >= self.limits.sandboxes:
            raise QuotaExceeded(f"this server has all the {self.limits.sandboxes} sandboxes that it may have")
        box = self.boxes[id] = Box(id, spec, Claim(id, spec, self.backend), self._now())
        try:
            marks = await box.claim.make()
            channel = await self.backend.create(id, allowed, {**labels, **marks})
        except BaseException:
            # The back end left nothing of it.
            self._drop(box)
            self.background(box.claim.drop())
            raise
        if self.boxes.get(id) is not box:
            self.background(self.backend.remove(id))
            raise SandboxLost(f"sandbox {id} was removed while it was made", reason="removed")
        if spec.ttl is not None:  # its client begins its time by ``extend``, unless it dies before it is ready
            box.deadline = self._now() + spec.start_timeout + spec.ttl
        self._adopt(box, channel, client)
        self.tell_load()
        return box

    async def attach(self, id: str, client: str) -> Box:
        box = self.box(id)
        if box.key not in self._channels:
            self._adopt(box, (await self.backend.attach(id))[1], client)
        box.holders.add(client)
        return box

    async def restart(self, id: str, client: str) -> Box:
        box = self.box(id)
        old = self._channels.get(box.key)
        channel = await self.backend.restart(id)
        if old is not None:
            await old[1].close()
        self._adopt(box, channel, client)
        return box

    async def remove(self, id: str) -> None:
        box = self.boxes.get(id)
        if box is None:
            return
        if box.key in self._channels:
            self._end(box.key, "removed")
        await self.backend.remove(id)
        await box.claim.drop()
        self._drop(box)
        self.tell_load()

    async def extend(self, id: str, ttl: float | None) -> None:
        box = self.box(id)
        await box.claim.extend(ttl)
        box.deadline = None if ttl is None else self._now() + ttl

    async def inspect(self, id: str) -> Observed:
        return await self.backend.inspect(id) if id in self.boxes else Observed(id, "absent", {})

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        return [seen for seen in await self.backend.list(labels) if seen.id in self.boxes]

    def box(self, id: str) -> Box:
        """One that is there, whose client is here. Raises ``SandboxLost``."""
        box = self.boxes.get(id)
        if box is None:
            raise SandboxLost(f"this server has no sandbox {id}", reason="removed")
        box.contact = self._now()
        return box

    def channel(self, key: str) -> tuple[Box, Channel]:
        """Raises ``SandboxLost``."""
        known = self._channels.get(key)
        if known is None:
            reason = self._ends.get(key, "engine_down")
            raise SandboxLost(f"the connection to the sandbox is lost: {reason}", reason=reason)
        return self.box(known[0]), known[1]

    def isolation(self, box: Box) -> str:
        return self._channels[box.key][1].isolation if box.key in self._channels else ""

    # Snapshots.

    async def snapshot(self, id: str, client: str) -> Snapshot:
        if len(self._snapshots) >= self.limits.snapshots:
            raise QuotaExceeded(f"this server has all the {self.limits.snapshots} snapshots that it may have")
        self.box(id)
        name = paths.new_id()
        kept = self._snapshots[name] = Kept(client, self._now())
        try:
            kept.snapshot = await self.backend.snapshot(id, name)
        finally:
            kept.contact = self._now()
            if kept.snapshot is None:
                del self._snapshots[name]
        # What the client gets leads back here by its name alone: no path, no image of the server's.
        return Snapshot(name, "remote", f"{SNAPSHOTS}/{self.boot}/{name}", None)

    async def restore(self, id: str, name: str) -> None:
        kept = self._snapshots.get(name)
        if kept is None or kept.snapshot is None:
            raise SandboxError(f"this server has no snapshot {name}: was it discarded?")
        await self.backend.restore(self.box(id).id, kept.snapshot)

    async def discard(self, name: str) -> None:
        kept = self._snapshots.get(name)
        if kept is not None and kept.snapshot is not None:
            await self.backend.discard(kept.snapshot)
            self._snapshots.pop(name, None)

    def _free_snapshots(self, here: set[str], now: float) -> None:
        """Discard those whose client has been away for the lease, unless a sandbox that was made from it is there."""
        used = {box.spec.image for box in self.boxes.values()}
        for name, kept in list(self._snapshots.items()):
            if kept.client in here or f"{SNAPSHOTS}/{self.boot}/{name}" in used:
                kept.contact = now
            elif kept.snapshot is not None and kept.contact + self.limits.lease <= now:
                kept.contact = now  # tried again after another lease, should it fail
                _log.info("snapshot %s has outlived its client", name)
                self.background(self.discard(name))

    def _snapshot_of(self, spec: SandboxSpec) -> Snapshot | None:
        kind, _, rest = spec.image.partition("/")
        if kind != SNAPSHOTS:
            return None
        boot, _, name = rest.partition("/")
        kept = self._snapshots.get(name) if boot == self.boot else None
        if kept is None or kept.snapshot is None:
            raise SandboxError(f"this server has no snapshot {spec.image}: was it discarded?")
        return kept.snapshot

    # What clients are told.

    def subscribe(self, client: str, keys: list[str]) -> asyncio.Queue[bytes | None]:
        """Lines for one client, from now on, ended by None. ``keys``: channels that it believes in."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE)
        self._streams[queue] = client
        _offer(queue, _line(hello=self.boot, load=self.load, body=self.limits.body))
        lost = {key: self._ends.get(key, "engine_down") for key in keys if key not in self._channels}
        _offer(queue, _line(lost=lost))
        return queue

    def unsubscribe(self, queue: asyncio.Queue[bytes | None]) -> None:
        client = self._streams.pop(queue, None)
        for box in self.boxes.values():
            if client in box.holders:
                box.contact = self._now()

    def tell(self, **fields: Any) -> None:
        for queue in self._streams:
            _offer(queue, _line(**fields))

    def tell_load(self) -> None:
        self.tell(load=self.load)

    def _drop(self, box: Box) -> None:
        if self.boxes.get(box.id) is box:
            del self.boxes[box.id]
            self._gone[box.id] = ""

    def _adopt(self, box: Box, channel: Channel, client: str) -> None:
        key = box.key = secrets.token_hex(16)
        self._channels[key] = (box.id, channel)
        box.holders.add(client)
        channel.lost.add_done_callback(lambda lost: self._end(key, "closed" if lost.cancelled() else lost.result()))

    def _end(self, key: str, reason: str) -> None:
        if self._channels.pop(key, None) is not None:
            self._ends[key] = reason
            self.tell(lost={key: reason})

    async def _follow_events(self) -> None:
        pause = 0.1
        while True:
            try:
                async for event in self.backend.events():
                    pause = 0.1
                    if event.id in self.boxes or event.id in self._gone:
                        self.tell(event={"id": event.id, "kind": event.kind, "exit_code": event.exit_code})
            except SandboxError as problem:
                _log.warning("the engine tells of no events: %s", problem)
            self.tell(engine="silent")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def _keep(self) -> None:
        """Beat, and end what has outlived its time."""
        while True:
            self.tell_load()
            here, now = set(self._streams.values()), self._now()
            for box in list(self.boxes.values()):
                if box.holders & here:
                    box.contact = now
                late = box.deadline is not None and box.deadline <= now
                if box.key and not box.ending and (late or box.contact + self.limits.lease <= now):
                    box.ending = True
                    self.background(self._expire(box))
            self._free_snapshots(here, now)
            await asyncio.sleep(min(BEAT, self.limits.lease / 4))

    async def _expire(self, box: Box) -> None:
        _log.info("sandbox %s has outlived its time, or its clients", box.id)
        try:
            await asyncio.wait_for(self.remove(box.id), _STOP)
        finally:
            box.ending = False

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _offer(queue: asyncio.Queue[bytes | None], line: bytes | None) -> None:
    """To one who is too far behind, the end is told: their picture is no longer true."""
    if queue.qsize() >= _QUEUE - 1:
        while not queue.empty():
            queue.get_nowait()
        line = None
    queue.put_nowait(line)


def _line(**fields: Any) -> bytes:
    return pack_json(fields) + b"\n"
