"""Sandboxes on other machines: every call of a back end, sent to one of several sandbox servers.

Invariant: a sandbox lives on one server and all its calls go there. A new one goes to the server with the smallest part
of its places taken; if that one is full or cannot be reached, to the next. A server that is lost takes only its own
sandboxes with it (``SandboxLost``, ``engine_down``), and gets new ones when it is back. The token goes to loopback, or
over TLS, and nowhere else.

    backend = RemoteBackend(["https://one:8765", "https://two:8765"], token=…)
    await backend.start()
    async with await Sandbox.create(backend=backend) as box: …
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from agentkit.errors import (
    ConfigError,
    EngineUnavailable,
    ImageError,
    ProtocolError,
    QuotaExceeded,
    SandboxLost,
)
from agentkit.sandboxes.aio import finished, stopped
from agentkit.sandboxes.backend import Backend, Channel
from agentkit.sandboxes.backends.remote_channel import RemoteChannel
from agentkit.sandboxes.backends.remote_link import Link
from agentkit.sandboxes.remote_protocol import SNAPSHOTS, pack_json, unpack
from agentkit.sandboxes.server_access import PORT, find_token, is_loopback
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed, Snapshot

URLS = "AGENTKIT_SANDBOX_URL"
_ENGINE = 30.0
_UNDO = 20.0
"""Seconds that a server may take to clear away what a client did not wait for."""


class RemoteBackend(Backend):
    """``urls``: one server or several (default: ``$AGENTKIT_SANDBOX_URL``, separated by commas, or this machine's).
    ``token``: one for all, or one for each (default: as ``server_access.find_token`` has it). ``ca``: a file of
    certificates to trust instead of the system's. ``patience``: seconds without an answer after which a server and
    its sandboxes count as lost. Raises ``ConfigError``."""

    name = "remote"

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | Sequence[str] | None = None,
        *,
        ca: str | None = None,
        patience: float = 10.0,
    ) -> None:
        urls = urls or os.environ.get(URLS) or f"http://127.0.0.1:{PORT}"
        places = [url.strip().rstrip("/") for url in (urls.split(",") if isinstance(urls, str) else urls)]
        tokens = [token or find_token()] * len(places) if token is None or isinstance(token, str) else list(token)
        if len(tokens) != len(places) or len(set(places)) != len(places):
            raise ConfigError(f"{len(places)} servers need as many different URLs, and one token or one for each")
        for url in places:
            _check_url(url)
        client = secrets.token_hex(16)
        tls = ssl.create_default_context(cafile=ca) if any(url.startswith("https") for url in places) else None
        self._links = [Link(url, key, client, tls, patience) for url, key in zip(places, tokens, strict=True)]
        self._patience = patience
        self._homes: dict[str, Link] = {}
        self._listeners: list[asyncio.Queue[BackendEvent | None]] = []
        for link in self._links:
            link.on_event = self._hear

    def recipe(self) -> None:
        """Its server removes what outlives its owner."""

    async def start(self) -> None:
        """At least one server must answer, and none may refuse the token (``AccessDenied``)."""
        results = await asyncio.gather(*[link.start() for link in self._links], return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        fatal = [error for error in errors if not isinstance(error, EngineUnavailable)]
        if fatal or len(errors) == len(results):
            await self.close()
            raise (fatal or errors)[0]

    async def close(self) -> None:
        self._hear(None)
        await asyncio.gather(*[link.close() for link in self._links])

    def check(self, spec: SandboxSpec) -> None:
        """The server checks, with its back end and its policy, before anything is made."""

    async def create(self, id: str, spec: SandboxSpec, labels: Mapping[str, str]) -> Channel:
        """Raises ``AccessDenied`` too, if the server's owner does not allow what ``spec`` asks for."""
        content = pack_json({"spec": spec.model_dump(mode="json"), "labels": dict(labels)})
        timeout = spec.pull_timeout + spec.start_timeout
        refusal: Exception = EngineUnavailable("no sandbox server answers; are they running?")
        for link in self._candidates(spec):
            link.pending += 1
            try:
                made = await link.call("PUT", f"/v1/sandboxes/{id}", content, timeout=timeout)
                self._homes[id] = link
                return self._channel(link, id, made)[1]
            except (QuotaExceeded, EngineUnavailable) as error:
                if error.side_effects != "none":
                    await finished(self._undo(link, id))
                    raise
                refusal = error
            except (asyncio.CancelledError, ProtocolError):
                await finished(self._undo(link, id))
                raise
            finally:
                link.pending -= 1
        raise refusal

    async def attach(self, id: str) -> tuple[SandboxSpec, Channel]:
        link = await self._home(id)
        return self._channel(link, id, await link.call("POST", f"/v1/sandboxes/{id}/attach", timeout=_ENGINE))

    async def restart(self, id: str) -> Channel:
        link = await self._home(id)
        answer = await link.call("POST", f"/v1/sandboxes/{id}/restart", timeout=10 * _ENGINE)
        return self._channel(link, id, answer)[1]

    async def pause(self, id: str) -> None:
        await self._change(id, "pause")

    async def resume(self, id: str) -> None:
        await self._change(id, "resume")

    async def extend(self, id: str, ttl: float | None) -> None:
        await self._change(id, "extend", ttl)

    async def snapshot(self, id: str, name: str) -> Snapshot:
        """The server gives it a name of its own."""
        return unpack(Snapshot, await self._change(id, "snapshot"))

    async def restore(self, id: str, snapshot: Snapshot) -> None:
        await self._change(id, "restore", snapshot.id)

    async def discard(self, snapshot: Snapshot) -> None:
        if link := self._keeper(snapshot.image):
            await link.call("DELETE", f"/v1/snapshots/{snapshot.id}", timeout=10 * _ENGINE)

    async def remove(self, id: str) -> None:
        with contextlib.suppress(SandboxLost):
            link = await self._home(id)
            await link.call("DELETE", f"/v1/sandboxes/{id}", timeout=_ENGINE)
        self._homes.pop(id, None)

    async def inspect(self, id: str) -> Observed:
        try:
            link = await self._home(id)
        except SandboxLost:
            return Observed(id, "absent", {})
        return unpack(Observed, await link.call("GET", f"/v1/sandboxes/{id}"))

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        """Those on servers that answer."""
        content = pack_json(dict(labels))
        links = self._answering()
        results = await asyncio.gather(
            *[link.call("POST", "/v1/list", content) for link in links], return_exceptions=True
        )
        answers = [result for result in results if not isinstance(result, EngineUnavailable)]
        if not answers:
            raise _none_answers()
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [seen for answer in answers if isinstance(answer, bytes) for seen in unpack(list[Observed], answer)]

    async def logs(self, id: str, tail: int) -> bytes:
        return await (await self._home(id)).call("GET", f"/v1/sandboxes/{id}/logs", tail=tail)

    async def events(self) -> AsyncIterator[BackendEvent]:
        """Also raises when one of several servers stops telling: list, and listen again."""
        self._answering()
        queue: asyncio.Queue[BackendEvent | None] = asyncio.Queue()
        self._listeners.append(queue)
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._listeners.remove(queue)
        raise EngineUnavailable("a sandbox server tells no more of what happens; events may have been missed")

    def _hear(self, event: dict[str, Any] | None) -> None:
        told = None if event is None else unpack(BackendEvent, pack_json(event))
        for queue in self._listeners:
            queue.put_nowait(told)

    # Servers.

    def _answering(self) -> list[Link]:
        links = [link for link in self._links if link.up]
        if not links:
            raise _none_answers()
        return links

    def _candidates(self, spec: SandboxSpec) -> list[Link]:
        """Where it could be made, the emptiest first."""
        if spec.image.startswith(f"{SNAPSHOTS}/"):
            keeper = self._keeper(spec.image)
            if keeper is None:
                raise ImageError(
                    f"the server that has {spec.image} is gone, and the snapshot with it", image=spec.image
                )
            return [keeper]
        return sorted(self._answering(), key=lambda link: (link.load[0] + link.pending) / link.load[1])

    def _keeper(self, image: str) -> Link | None:
        return next((link for link in self._links if link.boot and image.startswith(f"{SNAPSHOTS}/{link.boot}/")), None)

    async def _home(self, id: str) -> Link:
        """The server that has ``id``.

        Raises ``SandboxLost`` if all say that they have not, ``EngineUnavailable`` if some cannot say.
        """
        if len(self._links) == 1:
            return self._links[0]
        if id not in self._homes:
            self._homes[id] = await self._find(id)
        return self._homes[id]

    async def _find(self, id: str) -> Link:
        """Ask all servers that answer; one that does not is missed only if none of the others has ``id``."""
        asked = {asyncio.ensure_future(self._has(link, id)): link for link in self._links if link.up}
        silent = [link for link in self._links if not link.up]
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
            places = ", ".join(link.url for link in silent)
            raise EngineUnavailable(f"no sandbox server that answers has {id}, and {places} cannot be reached")
        raise SandboxLost(f"no server has a sandbox {id}", reason="removed")

    async def _has(self, link: Link, id: str) -> bool:
        call = link.call("GET", f"/v1/sandboxes/{id}")
        return unpack(Observed, await asyncio.wait_for(call, self._patience)).state != "absent"

    def _channel(self, link: Link, id: str, answer: bytes) -> tuple[SandboxSpec, Channel]:
        told = unpack(dict[str, Any], answer)
        channel = RemoteChannel(link, id, str(told.get("channel")), str(told.get("isolation")))
        return unpack(SandboxSpec, pack_json(told.get("spec"))), channel

    async def _change(self, id: str, verb: str, argument: Any = None) -> bytes:
        link = await self._home(id)
        return await link.call("POST", f"/v1/sandboxes/{id}/{verb}", pack_json(argument), timeout=_ENGINE)

    async def _undo(self, link: Link, id: str) -> None:
        """Leave nothing of what may or may not have been made; its time to live ends what this does not reach."""
        self._homes.pop(id, None)
        with contextlib.suppress(EngineUnavailable, asyncio.TimeoutError):
            await asyncio.wait_for(link.call("DELETE", f"/v1/sandboxes/{id}"), _UNDO)


def _none_answers() -> EngineUnavailable:
    return EngineUnavailable("no sandbox server answers: are they running, and reachable from here?")


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no server's URL: write https://host:port")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ConfigError(f"{url} would get the token unencrypted: use https, or a tunnel to this machine")
