"""The tenants of a sandbox server: their tokens, and the sandboxes of each.

Invariant: every tenant has its own ``SandboxSessions`` and its own application on top of it, and a token leads to
exactly one of them. So no request can name a sandbox, channel, command, call, snapshot or event of another tenant.
Only the operator's token leads to ``Operation``.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agentkit.errors import ConfigError, SandboxError
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.reaper import process
from agentkit.sandboxes.reaper.labels import MANAGED, RUN
from agentkit.sandboxes.reaper.registration import Registration
from agentkit.sandboxes.server.admission import App
from agentkit.sandboxes.server.auth import find_tokens
from agentkit.sandboxes.server.config import OPERATOR, ImageConfig, ServerConfig
from agentkit.sandboxes.server.host import Host
from agentkit.sandboxes.server.images import ImageCache
from agentkit.sandboxes.server.sessions import SandboxSessions
from agentkit.sandboxes.server.shares import Share
from agentkit.sandboxes.server.state import ServerState
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import begin, finished, stopped, tracked
from agentkit.sandboxes.threads import in_thread
from agentkit.sandboxes.types import BackendEvent

_log = logging.getLogger(__name__)

_INTERVAL = 1.0
"""Seconds between two measurements of the machine."""


class Operation(Protocol):
    """Operations of a server that need the operator's token."""

    def drain(self, draining: bool) -> None:
        """Refuse new sandboxes, or accept them again; existing ones continue."""
        ...

    def status(self) -> Mapping[str, Any]:
        """Return the state of the server and what each tenant uses, as plain data."""
        ...


@dataclass(eq=False)
class Tenant:
    """One tenant. ``digests``: SHA-256 of its tokens; empty after it was removed from the configuration."""

    sessions: SandboxSessions
    app: App
    digests: frozenset[bytes] = frozenset()

    @property
    def share(self) -> Share:
        return self.sessions.share


class Tenants:
    """The tenants of one server, between ``start`` and ``stop``.

    Attributes:
        host: the machine of the server.
        images: the images of the server.
    """

    def __init__(
        self,
        backend: Backend,
        host: Host,
        make_app: Callable[[SandboxSessions, Operation | None], App],
        files: ServerState | None = None,
    ) -> None:
        """Begin without tenants.

        Args:
            backend: where sandboxes are created.
            host: the machine of the server.
            make_app: returns the application for a tenant; it gets an ``Operation`` for the operator only.
            files: the saved sandboxes, for the next process of the server; None: sandboxes end with this process.
        """
        self.host = host
        self._backend = backend
        self._make_app = make_app
        self._files = files
        fetched, save = ({}, lambda _: None) if files is None else (files.load_images(), files.save_images)
        self.images = ImageCache(backend, host, ImageConfig(), self._images_in_use, fetched, save)
        self._tenants: dict[str, Tenant] = {}
        self._metrics_readers: frozenset[bytes] = frozenset()
        self._shares: list[Share] = []
        self._started = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, config: ServerConfig, operator_tokens: Iterable[str]) -> None:
        """Start the back end and all tenants, and adopt what an earlier process of the server left.

        Args:
            config: see ``configure``.
            operator_tokens: see ``configure``.

        Raises:
            EngineUnavailable: the back end cannot be started.
            ConfigError: see ``configure``, or a server of this name already runs.
        """
        if self._files is None:
            await self.configure(config, operator_tokens)
            await self._backend.start()
        else:
            self._files.open()
            try:
                await self.configure(config, operator_tokens)
                await finished(in_thread(process.watch, self._backend))
                await self._backend.start()
                await self._adopt(self._files)
            except BaseException:
                self._files.close(keep=True)
                raise
        self._started = True
        for tenant in self._tenants.values():
            await tenant.sessions.start()
        for work in (self._measure_host(), self._forward_events(), self.images.maintain()):
            tracked(work, self._tasks)

    async def stop(self, *, keep: bool = False) -> None:
        """Remove all sandboxes of all tenants within 30 s; the reaper removes the rest.

        Args:
            keep: leave them to the next process of the server.
        """
        await stopped(set(self._tasks))
        sessions = [tenant.sessions for tenant in self._tenants.values()]
        await asyncio.gather(*[each.hand_over() if keep else each.stop() for each in sessions])
        await self._backend.close()
        if self._files is not None:
            self._files.close(keep=keep)

    async def _adopt(self, files: ServerState) -> None:
        """Give their tenants the sandboxes and snapshots of earlier processes; remove those that belong to none."""
        present = {seen.id: seen for seen in await self._backend.list({MANAGED: "1", RUN: files.run})}
        for saved in files.sandboxes():
            seen, tenant = present.get(saved.id), self._tenants.get(saved.tenant)
            if tenant is None or seen is None or seen.state not in ("running", "paused"):
                files.forget("sandboxes", saved.id)
            else:
                del present[saved.id]
                tenant.sessions.adopt(saved, running=seen.state == "running")
        for id in present:
            _log.warning("removing sandbox %s of an earlier process of this server, which ended or is not known", id)
            begin(self._remove(id), self._tasks, _log_failure)
        existing = {seen.id for seen in await self._backend.snapshots()}
        for saved in files.snapshots():
            if saved.snapshot.id not in existing:
                files.forget("snapshots", saved.snapshot.id)
            elif tenant := self._tenants.get(saved.tenant):
                tenant.sessions.adopt_snapshot(saved)
            else:
                files.forget("snapshots", saved.snapshot.id)
                begin(self._backend.discard(saved.snapshot), self._tasks, _log_failure)

    async def _remove(self, id: str) -> None:
        await self._backend.remove(id)
        await Registration(id, SandboxSpec(), self._backend).unregister()

    async def configure(self, config: ServerConfig, operator_tokens: Iterable[str]) -> None:
        """Use this configuration from now on.

        A tenant that is new starts; one that is missing can no longer send requests, and its sandboxes are removed like
        those of a disconnected client. Event streams of a tenant end if one of its tokens is no longer valid.

        Args:
            config: the configuration.
            operator_tokens: the server's own tokens.

        Raises:
            ConfigError: the token of a tenant cannot be used; the previous configuration stays.
        """
        digests = {OPERATOR: frozenset(map(_digest, operator_tokens))}
        for name, settings in config.tenants.items():
            tokens = () if settings.token_file is None else find_tokens(settings.token_file)
            digests[name] = frozenset([*map(_digest, tokens), *map(bytes.fromhex, settings.token_sha256)])
        _check_distinct(digests)
        readers = () if config.metrics_token_file is None else find_tokens(config.metrics_token_file)
        self._metrics_readers = frozenset(map(_digest, readers))
        self.host.watermarks = config.watermarks.shares()
        self.images.config = config.images
        for name in [*digests, *(self._tenants.keys() - digests.keys())]:
            tenant = self._tenants.get(name) or await self._add(name, config)
            tenant.share.own, tenant.share.total = config.quota_of(name), config.quota
            tenant.sessions.policy = config.policy_of(name)
            if tenant.digests - digests.get(name, frozenset()):
                tenant.sessions.disconnect()
            tenant.digests = digests.get(name, frozenset())

    async def _add(self, name: str, config: ServerConfig) -> Tenant:
        share = Share(name, config.quota_of(name), config.quota, self._shares)
        sessions = SandboxSessions(
            self._backend, self.host, share, config.policy_of(name), self._exists, self.images, self._files
        )
        tenant = self._tenants[name] = Tenant(sessions, self._make_app(sessions, self if name == OPERATOR else None))
        if self._started:
            await sessions.start()
        return tenant

    def _images_in_use(self) -> set[str]:
        return {image for tenant in self._tenants.values() for image in tenant.sessions.images}

    def _exists(self, id: str) -> bool:
        return any(id in tenant.sessions for tenant in self._tenants.values())

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def identify(self, token: bytes) -> Tenant | None:
        """Return the tenant that has this token, in a time that does not depend on the tokens."""
        digest, found = hashlib.sha256(token).digest(), None
        for tenant in self._tenants.values():
            if _contains(tenant.digests, digest):
                found = tenant
        return found

    def may_read_metrics(self, token: bytes) -> bool:
        """Return whether this token is the operator's, or the one for metrics."""
        readers = self._tenants[OPERATOR].digests | self._metrics_readers
        return _contains(readers, hashlib.sha256(token).digest())

    def sessions(self) -> Mapping[str, SandboxSessions]:
        """Return the sandboxes of each tenant."""
        return {name: tenant.sessions for name, tenant in self._tenants.items()}

    # Operation

    def drain(self, draining: bool) -> None:
        self.host.draining = draining
        self._send_state()

    def status(self) -> Mapping[str, Any]:
        tenants = {name: tenant.share.report() for name, tenant in self._tenants.items()}
        return {**self._tenants[OPERATOR].sessions.report(), "tenants": tenants}

    # The machine and its engine

    def _send_state(self) -> None:
        for tenant in self._tenants.values():
            tenant.sessions.send_state()

    async def _measure_host(self) -> None:
        while True:
            before = self.host.reason
            self.host.update()
            if bool(before) != bool(self.host.reason):
                self._send_state()
            await self._drop_removed()
            await asyncio.sleep(_INTERVAL)

    async def _drop_removed(self) -> None:
        """Forget tenants that were removed from the configuration and have nothing left."""
        for name, tenant in list(self._tenants.items()):
            if not tenant.digests and not any(tenant.share.report().values()):
                del self._tenants[name]
                self._shares.remove(tenant.share)
                await tenant.sessions.stop()

    async def _forward_events(self) -> None:
        pause = 0.1
        while True:
            try:
                async for event in self._backend.events():
                    pause = 0.1
                    self._publish(event)
            except SandboxError as error:
                _log.warning("the event stream of the back end ended: %s", error)
            self._publish(None)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    def _publish(self, event: BackendEvent | None) -> None:
        for tenant in self._tenants.values():
            tenant.sessions.publish(event)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.warning("what is left of an earlier process stays for the reaper: %s", error)


def _contains(known: Iterable[bytes], digest: bytes) -> bool:
    """Return whether a digest is among ``known``; takes the same time for every digest."""
    return sum(hmac.compare_digest(digest, each) for each in known) > 0


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _check_distinct(digests: Mapping[str, frozenset[bytes]]) -> None:
    """Raise ``ConfigError`` if a token belongs to two tenants."""
    owners: dict[bytes, str] = {}
    for name, each in digests.items():
        for digest in each:
            if (other := owners.setdefault(digest, name)) != name:
                raise ConfigError(f"{other} and {name} have the same token; give each tenant its own")
