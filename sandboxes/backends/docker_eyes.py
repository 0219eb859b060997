"""What an engine says of sandboxes, and how it is read. Changes nothing.

Invariant: a container is a sandbox only by its label, whatever its name; all others are as good as absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from agentkit.errors import SandboxError, SandboxLost, UnsupportedFeature
from agentkit.sandboxes.backends import docker_options as options
from agentkit.sandboxes.backends import docker_stream
from agentkit.sandboxes.backends.docker_engine import Engine, LaneName, Refused
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed

if TYPE_CHECKING:
    from docker import APIClient

LOG_TAIL = 50
"""Lines of the main process's output that errors bring along."""
_EVENTS_TIMEOUT = 30.0
_STOP_PATIENCE = 30.0
"""Seconds before the end of a container in which a request to end it is looked for: `docker stop` waits for 10."""
_RECORD_LAG = 0.3
"""Seconds after which a request that ended a container is on record: the engine notes it once the signal is sent."""
_EXITED = re.compile(r"Exited \((\d+)\)")
_STATES: dict[str, Any] = {"running": "running", "restarting": "running", "paused": "paused"}
_EVENTS: dict[str, Any] = {"die": "died", "oom": "oom", "pause": "paused", "unpause": "resumed", "destroy": "removed"}


class Eyes:
    """Looks at the sandboxes of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def find(self, id: str, lane: LaneName = "life") -> dict[str, Any] | None:
        """What the engine says of container ``id``, if it is a sandbox of agentkit's."""
        try:
            found = await self._engine.call(f"inspect {id}", lambda client: client.inspect_container(id), lane=lane)
        except Refused as error:
            if error.status == 404:
                return None
            raise
        ours = (found["Config"].get("Labels") or {}).get(options.MANAGED) == "1" and found["Name"] == f"/{id}"
        return found if ours else None

    async def need(self, id: str) -> dict[str, Any]:
        """Like ``find``. Raises ``SandboxLost`` if there is none."""
        found = await self.find(id)
        if found is None:
            raise SandboxLost(f"there is no sandbox {id}", reason="removed")
        return found

    async def inspect(self, id: str) -> Observed:
        found = await self.find(id)
        if found is None:
            return Observed(id, "absent", {})
        seen = observed(id, found)
        return replace(seen, external=await self._was_ended(id, found)) if seen.state == "exited" else seen

    async def _was_ended(self, id: str, found: Mapping[str, Any]) -> bool:
        """Whether the engine was asked to end this container: it records each request to kill or stop one."""
        ended = _seconds(found["State"]["FinishedAt"])
        since = max(_seconds(found["State"]["StartedAt"]), ended - _STOP_PATIENCE)
        filters = {"container": [found["Id"]], "event": ["kill", "stop"]}
        first: Any = f"{since:.9f}"  # as the engine takes it; the SDK's types know whole seconds alone

        def look(client: APIClient) -> bool:
            last: Any = f"{time.time():.9f}"
            return bool(list(client.events(first, last, filters=filters, decode=True)))

        what = f"events of {id}"
        if await self._engine.call(what, look):
            return True
        await asyncio.sleep(_RECORD_LAG)
        return await self._engine.call(what, look)

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        wanted = [f"{name}={value}" for name, value in {**labels, options.MANAGED: "1"}.items()]
        # Whoever cleans up begins with this: it must not wait behind creations.
        found = await self._engine.call(
            "list", lambda client: client.containers(all=True, filters={"label": wanted}), lane="removal"
        )
        return [
            Observed(
                id=item["Names"][0].lstrip("/"),
                state=_STATES.get(item["State"], "exited"),
                labels=item["Labels"],
                exit_code=int(match[1]) if (match := _EXITED.match(item["Status"])) else None,
                created=float(item["Created"]),
            )
            for item in found
            if item["Names"]  # one that is being removed may have lost its name
        ]

    async def logs(self, id: str, tail: int) -> bytes:
        await self.need(id)
        try:
            return await self._engine.call(
                f"logs of {id}", lambda client: client.logs(id, stdout=True, stderr=True, tail=max(0, tail))
            )
        except Refused as error:
            raise SandboxLost(f"sandbox {id} is gone: {error}", reason="removed") from error

    async def log_tail(self, id: str) -> str:
        """For an error's details; empty if there is none to be had."""
        with contextlib.suppress(SandboxError):
            return (await self.logs(id, LOG_TAIL)).decode("utf-8", "replace")
        return ""

    async def lost(self, id: str, seen: Observed) -> SandboxLost:
        """The error that says how a sandbox ended."""
        if seen.state == "absent":
            return SandboxLost(f"sandbox {id} was removed", reason="removed")
        return SandboxLost(
            f"sandbox {id} ended with exit code {seen.exit_code}{': it ran out of memory' if seen.oom_killed else ''}",
            reason="oom" if seen.oom_killed else "exited",
            exit_code=seen.exit_code,
            log_tail=await self.log_tail(id),
        )

    async def events(self) -> AsyncIterator[BackendEvent]:
        filters = {"type": ["container"], "label": [f"{options.MANAGED}=1"], "event": list(_EVENTS)}
        stream = docker_stream.events(self._engine.socket, self._engine.api, filters, _EVENTS_TIMEOUT)
        async with contextlib.aclosing(stream) as happenings:
            async for event in happenings:
                attributes = event.get("Actor", {}).get("Attributes", {})
                kind, id, code = (
                    _EVENTS.get(str(event.get("Action"))),
                    attributes.get("name"),
                    attributes.get("exitCode"),
                )
                if kind is not None and id:
                    yield BackendEvent(id, kind, int(code) if kind == "died" and str(code).isdigit() else None)


def observed(id: str, found: Mapping[str, Any]) -> Observed:
    """The engine's account of a container, as ours."""
    state = found["State"]
    running = bool(state["Running"])
    return Observed(
        id=id,
        state="paused" if running and state.get("Paused") else "running" if running else "exited",
        labels=found["Config"].get("Labels") or {},
        exit_code=None if running else state["ExitCode"],
        oom_killed=bool(state.get("OOMKilled")),
    )


def _seconds(text: str) -> float:
    """Seconds since the epoch of the engine's time, such as ``2026-01-31T12:00:00.123456789Z``."""
    moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    fraction = re.match(r"\.\d+", text[19:])
    return moment.timestamp() + (float(fraction[0]) if fraction else 0.0)


def definition(id: str, found: Mapping[str, Any]) -> SandboxSpec:
    """What a sandbox was made from. Raises ``UnsupportedFeature`` if another version of agentkit made it."""
    labels = found["Config"]["Labels"]
    if labels.get(options.TRANSPORT) == "exec":
        raise UnsupportedFeature(
            f"sandbox {id} was made by an older version of agentkit, which ran commands by `docker exec`: remove it "
            "and create a new one"
        )
    try:
        return options.definition(labels)
    except ValueError as error:
        raise UnsupportedFeature(f"sandbox {id} was made by another version of agentkit: {error}") from error
