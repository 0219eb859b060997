"""State of one tenant of a sandbox server: its sandboxes, their channels and snapshots, and when each expires.

Invariant: clients reach only sandboxes that clients of the same tenant created. A sandbox is removed at the latest when
its time to live ends, when all its clients have been disconnected for ``Quota.disconnected_seconds``, or when the
server stops. A snapshot is removed when its client has been disconnected for that time and no sandbox made from it is
left. If the server dies, the reaper removes them. Sandboxes in creation count against the quota.

With a ``ServerState``, sandboxes and snapshots outlive the process for the time that it states: the next process of the
server adopts them, with the channels that clients have open, and removes the sandboxes that no file describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentkit.errors import EngineUnavailable, InvalidTransition, QuotaExceeded, SandboxError, SandboxLost
from agentkit.sandboxes import paths, telemetry
from agentkit.sandboxes.agent.channel import AgentChannel
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.reaper.registration import Registration
from agentkit.sandboxes.server.calls import Calls
from agentkit.sandboxes.server.host import Host
from agentkit.sandboxes.server.images import ImageCache
from agentkit.sandboxes.server.policy import Policy, Quota, check_image_name, permitted
from agentkit.sandboxes.server.protocol import HEARTBEAT_SECONDS, SNAPSHOT_IMAGE, pack_json
from agentkit.sandboxes.server.recent import Recent
from agentkit.sandboxes.server.shares import Share
from agentkit.sandboxes.server.state import SavedSandbox, SavedSnapshot, ServerState
from agentkit.sandboxes.server.streams import EventStream
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import begin, loop_time, retrieve, tracked
from agentkit.sandboxes.types import BackendEvent, ExecResult, Observed, Snapshot

_log = logging.getLogger(__name__)

_INTENDED = ("closed", "replaced")
"""Reasons for which channels end that are no failures."""
_STOP_SECONDS = 30.0
_DRAIN_SECONDS = 2.0
"""Seconds that running calls get before a restart; then they are cut."""


@dataclass(eq=False)
class SandboxSession:
    """A sandbox of a client."""

    id: str
    spec: SandboxSpec
    registration: Registration
    last_contact: float
    key: str = ""
    """The key of the sandbox's channel; empty while the sandbox is created."""
    clients: set[str] = field(default_factory=set)
    deadline: float | None = None
    expiring: bool = False
    removing: bool = False
    lost: tuple[float, str] | None = None
    """When and why its channel was lost; None after a restart."""


@dataclass(eq=False)
class StoredSnapshot:
    """A snapshot of a client; ``snapshot`` is None while it is taken."""

    client: str
    last_contact: float
    snapshot: Snapshot | None = None


class SandboxSessions:
    """The sandboxes of one tenant's clients. It is used in one event loop, between ``start`` and ``stop``."""

    def __init__(
        self,
        backend: Backend,
        host: Host,
        share: Share,
        policy: Policy,
        exists: Callable[[str], bool],
        images: ImageCache,
        files: ServerState | None,
    ) -> None:
        self.boot = secrets.token_hex(8) if files is None else files.boot
        """Identifies this server; with a ``state``, in all of its processes."""
        self._files = files
        self.backend = backend
        self.host = host
        self.share = share
        self.policy = policy
        share.held = self._held
        self._images = images
        self._exists = exists
        """Whether any tenant has a sandbox of this id."""
        self._sessions: dict[str, SandboxSession] = {}
        self._channels: dict[str, tuple[str, Channel]] = {}
        self._adopted: dict[str, SandboxSession] = {}
        """By channel key: adopted sandboxes whose agents are not connected yet."""
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._closed_channels = Recent()
        self._removed = Recent()
        self.calls = Calls()
        """The calls in progress."""
        self._snapshots: dict[str, StoredSnapshot] = {}
        self._streams: dict[EventStream, None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._restarting: EngineUnavailable | None = None
        """The error of new calls after a restart was announced."""
        self.expired = 0
        """Sandboxes that were removed because their time to live ended or their clients were gone."""

    @property
    def quota(self) -> Quota:
        """The limits of all tenants."""
        return self.share.total

    async def start(self) -> None:
        """Start the background tasks. The back end has started."""
        self.background(self._expire_sessions())

    async def stop(self) -> None:
        """Tell the clients that their sandboxes are lost, and remove all within 30 s; the reaper removes the rest."""
        for key in [*self._channels, *self._adopted]:
            self._close_channel(key, "engine_down")
        self._stopping = True
        self.calls.refuse()
        await self._end_work([*self.calls.running.values(), *self._tasks])
        removals = [asyncio.ensure_future(self.remove(id, "the server stops")) for id in list(self._sessions)]
        removals += [asyncio.ensure_future(self.discard(id)) for id in list(self._snapshots)]
        if removals:
            _, late = await asyncio.wait(removals, timeout=_STOP_SECONDS / 2)
            for task in late:
                task.cancel()

    async def hand_over(self) -> None:
        """Announce a restart, wait for running calls, and leave everything to the next process of the server.

        Commands with an idempotency key continue in their sandboxes. Other calls are cut after ``_DRAIN_SECONDS``.
        """
        assert self._files is not None
        keep = self._files.keep
        self._restarting = EngineUnavailable("the sandbox server restarts", restarting=keep)
        self._broadcast(restarting=keep)
        await self.calls.drain(_DRAIN_SECONDS)
        self._stopping = True
        self.calls.refuse()
        await self._end_work([*self.calls.attached(), *self._tasks])
        for _, channel in [*self._channels.values()]:
            await channel.close()

    async def _end_work(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel tasks and end the event streams."""
        self.disconnect()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS / 3)

    def check_accepting(self) -> None:
        """Raise ``EngineUnavailable`` if a restart was announced: the call must wait for the next process."""
        if self._restarting is not None:
            raise EngineUnavailable(str(self._restarting), **self._restarting.details)

    def cause(self, error: Exception) -> Exception:
        """Return the error that the client of a failed call gets: ``EngineUnavailable`` once the server stops."""
        if not self._stopping:
            return error
        cut = self._restarting or EngineUnavailable("the sandbox server stops")
        cut = EngineUnavailable(f"the call was cut: {cut}", **cut.details)
        cut.side_effects = "maybe"
        return cut

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run ``work`` to its end and log its failure."""
        begin(work, self._tasks, _log_failure)

    @contextlib.contextmanager
    def buffered(self, size: int) -> Iterator[None]:
        """Count a response against the quota while its client reads it. Raises ``QuotaExceeded``."""
        try:
            self.share.check(responses=size if self.share.used("responses") else 0)
        except QuotaExceeded as error:
            refusal = QuotaExceeded(f"earlier responses are not read yet; read them faster ({error})")
            refusal.side_effects = "maybe"
            raise refusal from None
        with self.share.counted(responses=size):
            yield

    # Sandboxes

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str], client: str) -> SandboxSession:
        """Create a sandbox. Raises the errors of ``permitted`` and ``Backend.create``."""
        began = loop_time()
        try:
            session = await self._create(id, spec, labels, client)
        except Exception as error:
            self._report("not created", "", type(error).__name__)
            raise
        self._report("created", id, seconds=loop_time() - began)
        return session

    async def _create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str], client: str) -> SandboxSession:
        if not paths.is_id(id):
            raise SandboxError(f"{id!r} is not a sandbox id: ak- and 16 hexadecimal digits")
        snapshot = self._snapshot_of(spec)
        allowed = permitted(self.policy, spec, check_image=snapshot is None)
        if snapshot is not None:
            allowed = allowed.model_copy(update={"image": snapshot.image})
        self.backend.check(allowed)
        if self._exists(id):
            raise SandboxError(f"sandbox {id} already exists")
        self.host.check()
        self.share.check(sandboxes=1, cpus=spec.resources.cpus, memory=spec.resources.memory)
        session = self._sessions[id] = SandboxSession(id, spec, Registration(id, spec, self.backend), loop_time())
        try:
            if snapshot is None:
                await self._images.use(allowed)
            channel = await self.backend.create(id, allowed, {**labels, **await session.registration.register()})
        except BaseException:
            self._forget(session)
            self.background(session.registration.unregister())
            raise
        if self._sessions.get(id) is not session:
            self.background(self.backend.remove(id))
            raise SandboxLost(f"sandbox {id} was removed during its creation", reason="removed")
        if spec.ttl is not None:  # for a client that ends before it sets the time to live with ``extend``
            session.deadline = loop_time() + spec.start_timeout + spec.ttl
        self._set_channel(session, channel, client)
        self.send_state()
        return session

    async def pull(self, image: str, timeout: float, refresh: bool) -> bool:
        """Fetch an image. Raises ``AccessDenied``, ``QuotaExceeded`` and the errors of ``Backend.pull``."""
        check_image_name(self.policy, image)
        self.host.check()
        return await self._images.fetch(image, timeout, refresh=refresh)

    @property
    def images(self) -> set[str]:
        """The names and ids of the images that sandboxes and snapshots use."""
        snapshots = {stored.snapshot.image for stored in self._snapshots.values() if stored.snapshot is not None}
        return snapshots | {session.spec.image for session in self._sessions.values()}

    async def attach(self, id: str, client: str) -> SandboxSession:
        session = self.session(id)
        if session.key in self._adopted:
            await self._reconnect(session)
        if session.key not in self._channels:
            self._set_channel(session, (await self.backend.attach(id))[1], client)
        elif client not in session.clients:
            session.clients.add(client)
            self._save(session)
        return session

    async def restart(self, id: str, client: str) -> SandboxSession:
        session = self.session(id)
        old, began = self._channels.get(session.key), loop_time()
        channel = await self.backend.restart(id)
        self._adopted.pop(session.key, None)
        if old is not None:
            await old[1].close()
        self._set_channel(session, channel, client)
        (since, cause), session.lost = session.lost or (began, "requested"), None
        self._report("restarted", id, cause, loop_time() - since)
        return session

    async def remove(self, id: str, cause: str = "by its client") -> None:
        session = self._sessions.get(id)
        if session is None:
            return
        session.removing = True
        self._close_channel(session.key, "removed")
        await self.backend.remove(id)
        await session.registration.unregister()
        if self._sessions.get(id) is session:
            self._report("removed", id, cause)
        self._forget(session)
        self.send_state()

    async def extend(self, id: str, ttl: float | None) -> None:
        session = self.session(id)
        await session.registration.extend(ttl)
        session.deadline = None if ttl is None else loop_time() + ttl
        self._save(session)

    def count(self, states: Mapping[str, str] | None) -> Counter[str]:
        """Return the number of sandboxes in each state: ``creating``, a state of the engine, or ``unknown``.

        Args:
            states: the state of each sandbox that the engine knows, by id; None if it does not answer.
        """
        return Counter(
            "creating" if not session.key else "unknown" if states is None else states.get(session.id, "absent")
            for session in self._sessions.values()
        )

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def __contains__(self, id: str) -> bool:
        return id in self._sessions

    async def inspect(self, id: str) -> Observed:
        return await self.backend.inspect(id) if id in self._sessions else Observed(id, "absent", {})

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        return [observed for observed in await self.backend.list(labels) if observed.id in self._sessions]

    def session(self, id: str) -> SandboxSession:
        """Return a sandbox and note that its client is connected. Raises ``SandboxLost``."""
        session = self._sessions.get(id)
        if session is None:
            raise SandboxLost(f"this server has no sandbox {id}", reason="removed")
        session.last_contact = loop_time()
        return session

    async def channel(self, key: str) -> Channel:
        """Return an open channel. Raises ``SandboxLost``, and ``InvalidTransition`` for an adopted, paused sandbox."""
        if key in self._adopted:
            await self._reconnect(self._adopted[key])
        if key not in self._channels:
            reason = self._closed_channels.get(key, "engine_down")
            raise SandboxLost(f"the connection to the sandbox is lost: {reason}", reason=reason)
        id, channel = self._channels[key]
        self.session(id)
        return channel

    def describe(self, session: SandboxSession) -> bytes:
        """Encode the data that a client needs to use a sandbox."""
        channel = self._channels[session.key][1] if session.key in self._channels else None
        isolation = "" if channel is None else channel.isolation
        resumes = channel is not None and self.linger(channel) > 0
        spec = session.spec.model_dump(mode="json")
        return pack_json({"channel": session.key, "isolation": isolation, "spec": spec, "resumes": resumes})

    def linger(self, channel: Channel) -> float:
        """Return the seconds for which commands of ``channel`` wait for the next process of the server."""
        return self._files.keep if self._files is not None and isinstance(channel, AgentChannel) else 0.0

    # Snapshots

    async def snapshot(self, id: str, client: str) -> Snapshot:
        self.share.check(snapshots=1)
        self.session(id)
        name = paths.new_id()
        stored = self._snapshots[name] = StoredSnapshot(client, loop_time())
        try:
            taken = stored.snapshot = await self.backend.snapshot(id, name)
        finally:
            stored.last_contact = loop_time()
            if stored.snapshot is None:
                del self._snapshots[name]
        if self._files is not None:
            self._files.save_snapshot(SavedSnapshot(taken, self.share.name, client))
        # The client gets a name only: no path and no image of the server.
        return Snapshot(name, "remote", f"{SNAPSHOT_IMAGE}/{self.boot}/{name}", None)

    async def restore(self, id: str, name: str) -> None:
        await self.backend.restore(self.session(id).id, self._stored(name, self._snapshots.get(name)))

    async def discard(self, name: str) -> None:
        stored = self._snapshots.get(name)
        if stored is not None and stored.snapshot is not None:
            await self.backend.discard(stored.snapshot)
            self._snapshots.pop(name, None)
            if self._files is not None:
                self._files.forget("snapshots", name)

    def _snapshot_of(self, spec: SandboxSpec) -> Snapshot | None:
        """Return the snapshot from which ``spec`` is created; None if ``spec`` names an ordinary image."""
        kind, _, rest = spec.image.partition("/")
        if kind != SNAPSHOT_IMAGE:
            return None
        boot, _, name = rest.partition("/")
        return self._stored(spec.image, self._snapshots.get(name) if boot == self.boot else None)

    def _stored(self, name: str, stored: StoredSnapshot | None) -> Snapshot:
        if stored is None or stored.snapshot is None:
            raise SandboxError(f"this server has no snapshot {name}; it may have been discarded")
        return stored.snapshot

    # Event streams

    def subscribe(self, client: str, keys: list[str]) -> EventStream:
        """Open the event stream of a client. ``keys``: channels that the client has open."""
        stream = EventStream(client)
        self._streams[stream] = None
        stream.send(hello=self.boot, body=self.quota.body, concurrency=self.backend.concurrency, **self.report())
        stream.send(lost={key: self._closed_channels.get(key, "engine_down") for key in keys if not self._is_open(key)})
        if self._stopping:
            stream.end()
        return stream

    def unsubscribe(self, stream: EventStream) -> None:
        """Forget the event stream of a client that has disconnected."""
        self._streams.pop(stream, None)
        for session in self._sessions.values():
            if stream.client in session.clients:
                session.last_contact = loop_time()

    def report(self) -> Mapping[str, Any]:
        """Return the load and the state of the machine as plain data."""
        return {"load": self.share.load(), "host": self.host.describe()}

    def send_state(self) -> None:
        """Send the load and the state of the machine to all clients."""
        self._broadcast(**self.report())

    def _broadcast(self, **fields: Any) -> None:
        for stream in self._streams:
            stream.send(**fields)

    def publish(self, event: BackendEvent | None) -> None:
        """Send an event of a sandbox of this tenant to all clients; None: events may have been missed."""
        if event is None:
            self._broadcast(engine="silent")
        elif event.id in self._sessions or event.id in self._removed:
            self._broadcast(event=event)
            session = self._sessions.get(event.id)
            if session is not None and not session.removing and event.kind != "removed":  # which is a loss, too
                status = "" if event.exit_code is None else f"its main process ended with status {event.exit_code}"
                self._report(event.kind, event.id, status)

    def disconnect(self) -> None:
        """End the event streams: clients have to authenticate again."""
        for stream in self._streams:
            stream.end()

    # Adoption

    def adopt(self, saved: SavedSandbox, *, running: bool) -> None:
        """Take over a sandbox of an earlier process of the server, which runs or is paused."""
        registration = Registration(saved.id, saved.spec, self.backend)
        session = SandboxSession(saved.id, saved.spec, registration, loop_time(), saved.key)
        session.clients, session.deadline = set(saved.clients), saved.deadline
        self._sessions[saved.id] = self._adopted[saved.key] = session
        if running:
            self._begin_reconnecting(session)

    def adopt_snapshot(self, saved: SavedSnapshot) -> None:
        """Take over a snapshot of an earlier process of the server."""
        self._snapshots[saved.snapshot.id] = StoredSnapshot(saved.client, loop_time(), saved.snapshot)

    async def _reconnect(self, session: SandboxSession) -> None:
        """Connect to the agent of an adopted sandbox, once for all callers."""
        await asyncio.shield(self._connecting.get(session.key) or self._begin_reconnecting(session))

    def _begin_reconnecting(self, session: SandboxSession) -> asyncio.Task[None]:
        key = session.key

        async def connect() -> None:
            try:
                channel = (await self.backend.attach(session.id))[1]
            except InvalidTransition:  # paused: the next call tries again
                raise
            except SandboxError as error:
                if self._adopted.pop(key, None) is not None:
                    self._end_channel(key, str(error.details.get("reason", "agent_dead")))
            else:
                if self._adopted.pop(key, None) is None:  # removed or restarted meanwhile
                    await channel.close()
                else:
                    self._open_channel(session, channel)
                    self._report("adopted", session.id, "of an earlier process of the server")

        task = self._connecting[key] = tracked(connect(), self._tasks)
        task.add_done_callback(retrieve)
        task.add_done_callback(lambda _: self._connecting.pop(key, None))
        return task

    # Bookkeeping

    def boxes(self) -> list[tuple[SandboxSession, Channel | None]]:
        """Return all sandboxes, with their channels if these are open."""
        return [(session, self._channels.get(session.key, ("", None))[1]) for session in self._sessions.values()]

    def note(self, key: str, result: ExecResult) -> None:
        """Report what a command did to the sandbox of a channel."""
        id = self._channels.get(key, ("",))[0]
        for what, happened in (("oom", result.oom_killed), ("timeout", result.timed_out), ("taint", result.tainted)):
            if happened:
                self._report(what, id, f"a command of {result.duration:.1f} s")

    def _report(self, what: Any, id: str, cause: str = "", seconds: float | None = None) -> None:
        telemetry.report(telemetry.Served(what, id, self.share.name, cause, seconds))

    def _save(self, session: SandboxSession) -> None:
        if self._files is not None and self._sessions.get(session.id) is session:
            clients, tenant = sorted(session.clients), self.share.name
            saved = SavedSandbox(session.id, tenant, session.spec, session.key, clients, session.deadline)
            self._files.save_sandbox(saved)

    def _held(self, name: str) -> float:
        """Return how much of an amount of ``TenantQuota`` the sandboxes and snapshots use."""
        match name:
            case "sandboxes":
                return len(self._sessions)
            case "snapshots":
                return len(self._snapshots)
            case "cpus" | "memory":
                return sum(getattr(session.spec.resources, name) for session in self._sessions.values())
        return 0

    def _forget(self, session: SandboxSession) -> None:
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
            self._removed[session.id] = ""
            if self._files is not None:
                self._files.forget("sandboxes", session.id)

    def _is_open(self, key: str) -> bool:
        return key in self._channels or key in self._adopted

    def _set_channel(self, session: SandboxSession, channel: Channel, client: str) -> None:
        session.key = secrets.token_hex(16)
        session.clients.add(client)
        self._open_channel(session, channel)
        self._save(session)

    def _open_channel(self, session: SandboxSession, channel: Channel) -> None:
        key = session.key
        self._channels[key] = (session.id, channel)

        def ended(lost: asyncio.Future[str]) -> None:
            reason = "closed" if lost.cancelled() else lost.result()
            if key in self._channels and reason not in _INTENDED and not self._stopping:
                session.lost = loop_time(), reason
                self._report("lost", session.id, reason)
            self._close_channel(key, reason)

        channel.lost.add_done_callback(ended)

    def _close_channel(self, key: str, reason: str) -> None:
        if self._channels.pop(key, None) is not None or self._adopted.pop(key, None) is not None:
            self._end_channel(key, reason)

    def _end_channel(self, key: str, reason: str) -> None:
        self._closed_channels[key] = reason
        if not self._stopping:
            self._broadcast(lost={key: reason})

    async def _expire_sessions(self) -> None:
        """Send heartbeats and remove expired sandboxes and snapshots, until cancelled."""
        while True:
            self.send_state()
            connected, now = {stream.client for stream in self._streams}, loop_time()
            for session in list(self._sessions.values()):
                if session.clients & connected:
                    session.last_contact = now
                late = session.deadline is not None and session.deadline <= now
                if session.key and not session.expiring and (late or self._abandoned(session.last_contact)):
                    session.expiring = True
                    self.background(self._expire(session))
            self._expire_snapshots(connected)
            await asyncio.sleep(min(HEARTBEAT_SECONDS, self.quota.disconnected_seconds / 4))

    async def _expire(self, session: SandboxSession) -> None:
        _log.info("removing sandbox %s: its time to live ended, or its clients are gone", session.id)
        try:
            await asyncio.wait_for(
                self.remove(session.id, "its time to live ended, or its clients are gone"), _STOP_SECONDS
            )
            self.expired += 1
        finally:
            session.expiring = False

    def _expire_snapshots(self, connected: set[str]) -> None:
        used = {session.spec.image for session in self._sessions.values()}
        for name, stored in list(self._snapshots.items()):
            if stored.client in connected or f"{SNAPSHOT_IMAGE}/{self.boot}/{name}" in used:
                stored.last_contact = loop_time()
            elif stored.snapshot is not None and self._abandoned(stored.last_contact):
                stored.last_contact = loop_time()  # a failed removal is retried after the same time
                _log.info("removing snapshot %s: its client is gone", name)
                self.background(self.discard(name))

    def _abandoned(self, last_contact: float) -> bool:
        return last_contact + self.quota.disconnected_seconds <= loop_time()


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.warning("background task failed: %s: %s", type(error).__name__, error)
