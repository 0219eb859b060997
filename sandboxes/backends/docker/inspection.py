"""Queries about the sandboxes of an engine. Nothing here changes anything.

Invariant: only the label makes a container a sandbox, not its name; other containers are treated as absent.
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
from agentkit.sandboxes.backends.docker import events as docker_events
from agentkit.sandboxes.backends.docker import options
from agentkit.sandboxes.backends.docker.engine import DockerEngine, EngineRefused, QueueName
from agentkit.sandboxes.reaper.labels import MANAGED
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import BackendEvent, Observed

if TYPE_CHECKING:
    from docker import APIClient

LOG_TAIL = 50
"""Lines of the main process's output that errors contain."""
_EVENTS_TIMEOUT = 30.0
_STOP_WINDOW = 30.0
"""Seconds before the end of a container in which a request to stop it counts: `docker stop` waits for 10."""
_RECORD_LAG = 0.3
"""Seconds after which the engine has recorded a request to stop a container: it does so after the signal."""
_EXITED = re.compile(r"Exited \((\d+)\)")
_STATES: dict[str, Any] = {"running": "running", "restarting": "running", "paused": "paused"}
_EVENTS: dict[str, Any] = {"die": "died", "oom": "oom", "pause": "paused", "unpause": "resumed", "destroy": "removed"}


class DockerInspector:
    """Find and observe the sandboxes of one engine."""

    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine

    async def find(self, id: str, queue: QueueName = "lifecycle") -> dict[str, Any] | None:
        """Return the engine's description of container ``id`` if it is a sandbox, else None."""
        found = await self._engine.find(f"inspect {id}", lambda client: client.inspect_container(id), queue)
        if found is None or found["Name"] != f"/{id}":
            return None
        return found if (found["Config"].get("Labels") or {}).get(MANAGED) == "1" else None

    async def need(self, id: str) -> dict[str, Any]:
        """Like ``find``. Raises ``SandboxLost`` if there is no such sandbox."""
        found = await self.find(id)
        if found is None:
            raise SandboxLost(f"there is no sandbox {id}", reason="removed")
        return found

    async def inspect(self, id: str) -> Observed:
        found = await self.find(id)
        if found is None:
            return Observed(id, "absent", {})
        seen = observed(id, found)
        return replace(seen, external=await self._was_stopped(id, found)) if seen.state == "exited" else seen

    async def _was_stopped(self, id: str, found: Mapping[str, Any]) -> bool:
        """Return whether someone asked the engine to end this container: it records each such request."""
        ended = _seconds(found["State"]["FinishedAt"])
        since = max(_seconds(found["State"]["StartedAt"]), ended - _STOP_WINDOW)
        filters = {"container": [found["Id"]], "event": ["kill", "stop"]}
        first: Any = f"{since:.9f}"  # the engine accepts fractions; the types of the SDK do not

        def look(client: APIClient) -> bool:
            last: Any = f"{time.time():.9f}"
            return bool(list(client.events(first, last, filters=filters, decode=True)))

        what = f"events of {id}"
        if await self._engine.call(what, look):
            return True
        await asyncio.sleep(_RECORD_LAG)
        return await self._engine.call(what, look)

    async def list(self, labels: Mapping[str, str]) -> list[Observed]:
        wanted = [f"{name}={value}" for name, value in {**labels, MANAGED: "1"}.items()]
        # Clean-up starts with this call, which therefore must not wait for creations.
        found = await self._engine.call(
            "list", lambda client: client.containers(all=True, filters={"label": wanted}), queue="removal"
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
            if item["Names"]  # a container that is being removed may have no name
        ]

    async def logs(self, id: str, tail: int) -> bytes:
        await self.need(id)
        try:
            return await self._engine.call(
                f"logs of {id}", lambda client: client.logs(id, stdout=True, stderr=True, tail=max(0, tail))
            )
        except EngineRefused as error:
            raise SandboxLost(f"sandbox {id} is gone: {error}", reason="removed") from error

    async def log_tail(self, id: str) -> str:
        """Return the end of the logs for an error; empty if they cannot be read."""
        with contextlib.suppress(SandboxError):
            return (await self.logs(id, LOG_TAIL)).decode("utf-8", "replace")
        return ""

    async def lost(self, id: str, seen: Observed) -> SandboxLost:
        """Return the error that describes how a sandbox ended."""
        if seen.state == "absent":
            return SandboxLost(f"sandbox {id} was removed", reason="removed")
        return SandboxLost(
            f"sandbox {id} ended with exit code {seen.exit_code}{': it ran out of memory' if seen.oom_killed else ''}",
            reason="oom" if seen.oom_killed else "exited",
            exit_code=seen.exit_code,
            log_tail=await self.log_tail(id),
        )

    async def events(self) -> AsyncIterator[BackendEvent]:
        filters = {"type": ["container"], "label": [f"{MANAGED}=1"], "event": list(_EVENTS)}
        stream = docker_events.events(self._engine.socket, self._engine.api, filters, _EVENTS_TIMEOUT)
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                attributes = event.get("Actor", {}).get("Attributes", {})
                kind, id = _EVENTS.get(str(event.get("Action"))), attributes.get("name")
                if kind is not None and id:
                    code = str(attributes.get("exitCode"))
                    yield BackendEvent(id, kind, int(code) if kind == "died" and code.isdigit() else None)


def observed(id: str, found: Mapping[str, Any]) -> Observed:
    """Convert the engine's description of a container."""
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
    """Parse the engine's time, such as ``2026-01-31T12:00:00.123456789Z``; return seconds since the epoch."""
    moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
    fraction = re.match(r"\.\d+", text[19:])
    return moment.timestamp() + (float(fraction[0]) if fraction else 0.0)


def definition(id: str, found: Mapping[str, Any]) -> SandboxSpec:
    """Return the specification of a sandbox. Raises ``UnsupportedFeature`` if it is unreadable."""
    try:
        return options.definition(found["Config"]["Labels"])
    except ValueError as error:
        raise UnsupportedFeature(
            f"sandbox {id} was created by another version of agentkit; remove it and create a new one ({error})"
        ) from error
