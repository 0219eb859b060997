"""Sandboxes on sandbox servers of other machines.

Invariant: a sandbox lives on one server, which gets all its calls. A new sandbox is created on the first server in the
order of ``placement.py`` that takes it. Losing a server loses only its own sandboxes (``SandboxLost`` with reason
``engine_down``), and it is used again when it is back; what was to be removed there meanwhile is removed then. Calls to
the other servers do not wait for it. The token is sent only over loopback or TLS.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
import secrets
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from agentkit.errors import (
    ConfigError,
    EngineUnavailable,
    ImageError,
    ProtocolError,
    QuotaExceeded,
    SandboxError,
    SandboxLost,
)
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends.remote.channel import RemoteChannel
from agentkit.sandboxes.backends.remote.connection import HostStatus, ServerConnection
from agentkit.sandboxes.backends.remote.health import PATIENCE
from agentkit.sandboxes.backends.remote.placement import order
from agentkit.sandboxes.server.auth import PORT, find_token, is_loopback
from agentkit.sandboxes.server.protocol import SNAPSHOT_IMAGE, pack_json, unpack
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished, stopped
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

URLS = "AGENTKIT_SANDBOX_URL"
_TIMEOUT = 30.0
_LOOKUP_TIMEOUT = 10.0
"""Seconds that a server may take to tell whether it has a sandbox."""
_UNDO_TIMEOUT = 20.0
"""Seconds that a server may take to remove what a cancelled or broken creation left."""


class RemoteBackend(Backend):
    """Sandboxes on one or several sandbox servers (``agentkit sandbox serve``).

    Args:
        urls: one URL, several separated by commas, or a sequence of URLs. Default: ``$AGENTKIT_SANDBOX_URL``, or this
            machine's server. URLs of other machines must use ``https``.
        token: one token for all servers, or one per server. Default: the token that
            ``agentkit.sandboxes.server.auth.find_token`` finds.
        ca: a file of certificates to trust instead of the system's.
        patience: seconds of silence after which a server and its sandboxes count as lost.

    Raises:
        ConfigError: a URL is malformed, repeated or unencrypted, or the number of tokens does not match.

    Example:
        ::

            backend = RemoteBackend(["https://one:8765", "https://two:8765"], token=token)
            await backend.start()
            async with Sandbox.create(backend=backend) as box:
                ...
            await backend.close()
    """

    name = "remote"

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | Sequence[str] | None = None,
        *,
        ca: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        urls = urls or os.environ.get(URLS) or f"http://127.0.0.1:{PORT}"
        addresses = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        tokens = [token or find_token()] * len(addresses) if token is None or isinstance(token, str) else list(token)
        if len(tokens) != len(addresses) or len(set(addresses)) != len(addresses):
            raise ConfigError(f"{len(addresses)} servers need as many different URLs, and one token or one for each")
        for url in addresses:
            _check_url(url)
        client = secrets.token_hex(16)
        tls = ssl.create_default_context(cafile=ca) if any(url.startswith("https") for url in addresses) else None
        self._servers = [
            ServerConnection(url, key, client, tls, patience) for url, key in zip(addresses, tokens, strict=True)
        ]
        self._rng = random.Random()
        self._locations: dict[str, ServerConnection] = {}
        self._listeners: list[asyncio.Queue[BackendEvent | None]] = []
        for server in self._servers:
            server.on_event = self._publish

    def recipe(self) -> None:
        """Return None: the server removes the sandboxes of an owner that died."""

    @property
    def concurrency(self) -> int:
        return max(1, sum(server.concurrency for server in self._servers))

    async def start(self) -> None:
        """Connect to the servers; at least one must answer, and none may refuse the token (``AccessDenied``)."""
        results = await asyncio.gather(*[server.start() for server in self._servers], return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        fatal = [error for error in errors if not isinstance(error, EngineUnavailable)]
        if fatal or len(errors) == len(results):
            await self.close()
            raise (fatal or errors)[0]

    async def close(self) -> None:
        self._publish(None)
        await asyncio.gather(*[server.close() for server in self._servers])

    def check(self, spec: SandboxSpec) -> None:
        """Do nothing: the server checks with its back end and its policy before it creates anything."""

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        """Also raises ``AccessDenied`` if the server's policy does not allow ``spec``."""
        content = pack_json({"spec": spec.model_dump(mode="json", exclude={"avoid_hosts"}), "labels": dict(labels)})
        timeout = spec.pull_timeout + spec.start_timeout
        refusal: Exception = _no_server()
        for server in self._candidates(spec):
            server.pending += 1
            try:
                response = await server.call("PUT", f"/v1/sandboxes/{id}", content, timeout=timeout)
                self._locations[id] = server
                return _channel(server, id, response)[1]
            except (QuotaExceeded, EngineUnavailable) as error:
                if error.side_effects != "none":
                    await finished(self._undo(server, id))
                refusal = error
            except ImageError as error:
                raise _of_server(server.url, error) from None
            except (asyncio.CancelledError, ProtocolError):
                await finished(self._undo(server, id))
                raise
            finally:
                server.pending -= 1
        raise refusal

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        server = await self._server_of(id)
        response = await server.call("POST", f"/v1/sandboxes/{id}/attach", timeout=_TIMEOUT)
        self._locations[id] = server
        return _channel(server, id, response)

    async def restart(self, id: str) -> Channel:
        server = await self._server_of(id)
        return _channel(server, id, await server.call("POST", f"/v1/sandboxes/{id}/restart", timeout=10 * _TIMEOUT))[1]

    async def pause(self, id: str) -> None:
        await self._post(id, "pause")

    async def resume(self, id: str) -> None:
        await self._post(id, "resume")

    async def extend(self, id: str, ttl: float | None) -> None:
        await self._post(id, "extend", ttl)

    async def snapshot(self, id: str, name: str) -> Snapshot:
        """The server chooses the name."""
        return unpack(Snapshot, await self._post(id, "snapshot"))

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        await self._post(id, "restore", snapshot.id)

    async def discard(self, snapshot: Snapshot) -> None:
        if server := self._server_with_snapshot(snapshot.image):
            await server.call("DELETE", f"/v1/snapshots/{snapshot.id}", timeout=10 * _TIMEOUT)

    async def remove(self, id: str) -> None:
        """Remove a sandbox, on all servers if this client does not know which one has it.

        A server that is down removes it when it is back.
        """
        known = self._locations.get(id)
        await asyncio.gather(*[server.remove(id) for server in ([known] if known else self._servers)])
        self._locations.pop(id, None)

    async def inspect(self, id: str) -> Observed:
        try:
            server = await self._server_of(id)
        except SandboxLost:
            return Observed(id, "absent", {})
        return await _inspect(server, id)

    def host_of(self, id: str) -> str:
        """Return ``host:port`` of the server that has a sandbox; ``unknown`` if this client does not know it."""
        server = self._servers[0] if len(self._servers) == 1 else self._locations.get(id)
        return server.host if server is not None else "unknown"

    def hosts(self) -> list[HostStatus]:
        """Return the state of each server as this client knows it. Does no I/O."""
        owned = Counter(server.host for server in self._locations.values())
        return [server.status(owned[server.host]) for server in self._servers]

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        """Return the sandboxes on all servers that are not down."""
        content = pack_json(dict(labels))
        calls = [_list(server, content) for server in self._reachable()]
        found = await asyncio.gather(*calls)
        if not any(server.up for server in self._servers):
            raise _no_server()
        return [observed for some in found for observed in some]

    async def pull(self, image: str, *, timeout: float = 600.0, refresh: bool = False) -> bool:
        """Let all servers that answer fetch an image at the same time.

        Raises:
            AccessDenied: the policy of a server does not allow the image.
            ImageError: a server cannot obtain it.
            QuotaExceeded: a server accepts no sandboxes and fetches nothing; all others have the image.
            EngineUnavailable: no server answers.
        """
        content = pack_json({"image": image, "timeout": timeout, "refresh": refresh})
        answers = await self.ask_all("POST", "/v1/pull", content, timeout=timeout)
        found = {url: answer for url, answer in answers.items() if not isinstance(answer, EngineUnavailable)} or answers
        refusals = [(url, answer) for url, answer in found.items() if isinstance(answer, SandboxError)]
        for url, error in sorted(refusals, key=lambda refusal: isinstance(refusal[1], QuotaExceeded)):
            raise _of_server(url, error)
        return any(unpack(bool, answer) for answer in found.values() if isinstance(answer, bytes))

    async def ask_all(
        self, method: str, path: str, content: bytes = b"", *, timeout: float = _TIMEOUT
    ) -> dict[str, bytes | SandboxError]:
        """Send a request to every server, also before ``start``; return its response or its error by URL."""

        async def ask(server: ServerConnection) -> bytes | SandboxError:
            try:
                await server.start()
                return await server.call(method, path, content, timeout=timeout)
            except SandboxError as error:
                return error

        answers = await asyncio.gather(*[ask(server) for server in self._servers])
        return {server.url: answer for server, answer in zip(self._servers, answers, strict=True)}

    async def logs(self, id: str, tail: int) -> bytes:
        return await (await self._server_of(id)).call("GET", f"/v1/sandboxes/{id}/logs", tail=tail)

    async def events(self) -> AsyncIterator[BackendEvent]:
        """Yield the events of all servers; raise ``EngineUnavailable`` when one of them may have missed events."""
        self._reachable()
        queue: asyncio.Queue[BackendEvent | None] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.remove(queue)
        raise EngineUnavailable("the event stream of a sandbox server ended; events may have been missed")

    def _publish(self, fields: dict[str, Any] | None) -> None:
        event = None if fields is None else unpack(BackendEvent, pack_json(fields))
        for queue in self._listeners:
            queue.put_nowait(event)

    # Servers

    def _reachable(self) -> list[ServerConnection]:
        servers = [server for server in self._servers if server.up]
        if not servers:
            raise _no_server()
        return servers

    def _candidates(self, spec: SandboxSpec) -> list[ServerConnection]:
        """Return the servers that can create ``spec``, in the order in which to ask them."""
        if spec.image.startswith(f"{SNAPSHOT_IMAGE}/"):
            server = self._server_with_snapshot(spec.image)
            if server is None:
                raise ImageError(f"the server of snapshot {spec.image} is gone, and the snapshot too", image=spec.image)
            return [server]
        up = self._reachable()
        avoid = {index for index, server in enumerate(up) if server.host in spec.avoid_hosts}
        found = order([server.placement for server in up], self._rng, avoid)
        if not found:
            reasons = "; ".join(f"{server.url}: {server.placement.reason}" for server in up)
            raise QuotaExceeded(f"no sandbox server accepts new sandboxes: {reasons}")
        return [up[index] for index in found]

    def _server_with_snapshot(self, image: str) -> ServerConnection | None:
        servers = (server for server in self._servers if server.boot)
        return next((server for server in servers if image.startswith(f"{SNAPSHOT_IMAGE}/{server.boot}/")), None)

    async def _server_of(self, id: str) -> ServerConnection:
        """Return the server that has ``id``.

        Raises ``SandboxLost`` if no server has it, ``EngineUnavailable`` if some servers do not answer.
        """
        if len(self._servers) == 1:
            return self._servers[0]
        if id not in self._locations:
            self._locations[id] = await self._find(id)
        return self._locations[id]

    async def _find(self, id: str) -> ServerConnection:
        """Ask all reachable servers; a silent server matters only if none of the others has ``id``."""
        asked = {asyncio.ensure_future(self._has(server, id)): server for server in self._servers if server.up}
        silent = [server for server in self._servers if not server.up]
        waiting = set(asked)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        if task.result():
                            return asked[task]
                    except (EngineUnavailable, asyncio.TimeoutError):
                        silent.append(asked[task])
        finally:
            await stopped(waiting)
        if silent:
            urls = ", ".join(server.url for server in silent)
            raise EngineUnavailable(f"no reachable sandbox server has {id}, and {urls} cannot be reached")
        raise SandboxLost(f"no sandbox server has {id}", reason="removed")

    async def _has(self, server: ServerConnection, id: str) -> bool:
        return (await asyncio.wait_for(_inspect(server, id), _LOOKUP_TIMEOUT)).state != "absent"

    async def _post(self, id: str, verb: str, argument: Any = None) -> bytes:
        server = await self._server_of(id)
        return await server.call("POST", f"/v1/sandboxes/{id}/{verb}", pack_json(argument), timeout=_TIMEOUT)

    async def _undo(self, server: ServerConnection, id: str) -> None:
        """Remove what a failed creation may have left."""
        self._locations.pop(id, None)
        try:
            await asyncio.wait_for(server.remove(id), _UNDO_TIMEOUT)
        except (SandboxError, asyncio.TimeoutError):
            server.remove_later(id)


async def _inspect(server: ServerConnection, id: str) -> Observed:
    return unpack(Observed, await server.call("GET", f"/v1/sandboxes/{id}"))


async def _list(server: ServerConnection, content: bytes) -> list[Observed]:
    """Return the sandboxes on one server; none if it is down, since they are lost then."""
    try:
        return unpack(list[Observed], await server.call("POST", "/v1/list", content))
    except EngineUnavailable:
        await server.verdict()
        if server.up:  # an incomplete list would show its sandboxes as removed
            raise
        return []


def _channel(server: ServerConnection, id: str, response: bytes) -> tuple[SandboxSpec, Channel]:
    fields = unpack(dict[str, Any], response)
    channel = RemoteChannel(
        server, id, str(fields.get("channel")), str(fields.get("isolation")), fields.get("resumes") is True
    )
    return unpack(SandboxSpec, pack_json(fields.get("spec"))), channel


def _of_server(url: str, error: SandboxError) -> SandboxError:
    """Return a copy of the error whose message names the server."""
    named = copy.copy(error)
    named.args = (f"{url}: {error}",)
    return named


def _no_server() -> EngineUnavailable:
    return EngineUnavailable("no sandbox server answers; check that they run and are reachable from here")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the URL of a server; write https://host:port")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(f"{url} would receive the token unencrypted; use https, or a tunnel to this machine")
