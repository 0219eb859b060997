"""Metrics of a sandbox server, for Prometheus.

Invariant: labels have few values. Paths, methods and names that a client chooses never become one. ``GET /metrics``
needs a token of its own or the server's, and answers within ``ENGINE_SECONDS`` and a little, also while the engine of
the sandboxes is silent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from agentkit.errors import SandboxError
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.server.admission import Message, Receive, Send, bearer_token
from agentkit.sandboxes.server.config import OPERATOR
from agentkit.sandboxes.server.tenants import Tenants

PATH = "/metrics"
ENGINE_SECONDS = 3.0
"""Time that the engine gets to list its sandboxes."""
ERROR = "agentkit.error"
"""Key of a request's scope: the name of the class of the error with which it ended."""

_EXEC_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)
_CREATE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 300)
_VERBS = {
    "channels": ["exec", "spawn", "read", "write", "list", "stat", "remove", "mkdir", "stats", "ping"],
    "processes": ["input", "end", "kill"],
    "sandboxes": ["logs", "attach", "restart", "snapshot", "restore", "extend", "pause", "resume"],
}
_PLAIN = frozenset({"boot", "stream", "list", "drain", "status", "pull", "calls", "snapshots"})

App = Callable[[Message, Receive, Send], Awaitable[None]]


def route(method: str, path: str) -> str:
    """Return the label of a request, which is one of a fixed number: ``sandboxes/create``, ``channels/exec``, …"""
    head, *rest = path.removeprefix("/v1/").split("/")
    if head in _VERBS and len(rest) == 2:
        return f"{head}/{rest[1]}" if rest[1] in _VERBS[head] else "other"
    if head == "sandboxes" and len(rest) == 1:
        return {"PUT": "sandboxes/create", "DELETE": "sandboxes/remove", "GET": "sandboxes/inspect"}.get(
            method, "other"
        )
    return head if path.startswith("/v1/") and head in _PLAIN else "other"


class ServerMetrics:
    """ASGI middleware: measures all requests of ``app`` and answers ``GET /metrics``.

    Args:
        app: the application behind it.
        tenants: the tenants of the server.
        backend: the back end of the sandboxes.
    """

    def __init__(self, app: App, tenants: Tenants, backend: Backend) -> None:
        self._app, self._backend, self._tenants = app, backend, tenants
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "agentkit_requests", "Requests by route and HTTP status.", ["route", "status"], registry=registry
        )
        self._in_progress = Gauge("agentkit_requests_in_progress", "Requests in progress.", registry=registry)
        self._creations = Histogram(
            "agentkit_sandbox_creation_seconds",
            "Time to create a sandbox, of successful creations.",
            registry=registry,
            buckets=_CREATE_BUCKETS,
        )
        self._failures = Counter(
            "agentkit_sandbox_creation_failures",
            "Creations that failed, by class of the error.",
            ["error"],
            registry=registry,
        )
        self._execs = Histogram(
            "agentkit_exec_seconds",
            "Time of a command, from the request to its response.",
            registry=registry,
            buckets=_EXEC_BUCKETS,
        )
        self._now = _Families()
        registry.register(self._now)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == PATH:
            await self._answer(scope, send)
        else:
            await self._measured(scope, receive, send)

    async def _measured(self, scope: Message, receive: Receive, send: Send) -> None:
        name, began, status = route(scope["method"], scope["path"]), time.monotonic(), 0

        async def observed_send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        self._in_progress.inc()
        try:
            await self._app(scope, receive, observed_send)
        finally:
            self._in_progress.dec()
            # 499: the client left before the response began.
            self._requests.labels(name, str(status or 499)).inc()
            seconds = time.monotonic() - began
            if name == "sandboxes/create" and status == 200:
                self._creations.observe(seconds)
            elif name == "sandboxes/create":
                self._failures.labels(scope.get(ERROR, "Refused")).inc()
            elif name == "channels/exec" and status == 200:
                self._execs.observe(seconds)

    async def _answer(self, scope: Message, send: Send) -> None:
        if scope["method"] != "GET":
            status, body = 405, b""
        elif not self._tenants.may_read_metrics(bearer_token(dict(scope["headers"]))):
            status, body = 401, b"the token is missing or wrong\n"
        else:
            status, body = 200, await self._render()
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode() if status == 200 else b"text/plain")]
        headers += [(b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _render(self) -> bytes:
        states = await self._states()
        self._now.families = list(self._families(states))
        return generate_latest(self._registry)

    def _families(self, states: Mapping[str, str] | None) -> Iterator[Metric]:
        """Yield what is measured at the moment of a scrape."""
        sandboxes = GaugeMetricFamily("agentkit_sandboxes", "Sandboxes by tenant and state.", None, ["tenant", "state"])
        expired = CounterMetricFamily(
            "agentkit_sandboxes_expired",
            "Sandboxes removed because their time to live ended or their clients were gone.",
            None,
            ["tenant"],
        )
        snapshots = GaugeMetricFamily("agentkit_snapshots", "Stored snapshots.", None, ["tenant"])
        for tenant, sessions in self._tenants.sessions().items():
            for state, number in sessions.count(states).items():
                sandboxes.add_metric([tenant, state], number)
            expired.add_metric([tenant], sessions.expired)
            snapshots.add_metric([tenant], sessions.num_snapshots)
        used = GaugeMetricFamily("agentkit_host_used_ratio", "Share of the machine in use.", None, ["resource"])
        host = self._tenants.host
        for resource, share in vars(host.usage).items():
            used.add_metric([resource], share)
        images = self._tenants.images
        fetches = CounterMetricFamily(
            "agentkit_image_fetches", "Images that were missing and were fetched, or not.", None, ["result"]
        )
        for result in ("fetched", "failed"):
            fetches.add_metric([result], images.counts[result])
        removals = CounterMetricFamily("agentkit_images_removed", "Unused images that were removed.")
        removals.add_metric([], images.counts["removed"])
        yield from (sandboxes, expired, snapshots, used, fetches, removals)
        for name, text, value in (
            ("agentkit_sandbox_limit", "Largest number of sandboxes.", self._tenants[OPERATOR].share.total.sandboxes),
            ("agentkit_images", "Images that this server fetched and did not remove.", images.num_fetched),
            ("agentkit_engine_up", "1 if the engine of the sandboxes answered this scrape.", states is not None),
            ("agentkit_host_accepting", "1 if the machine accepts new sandboxes.", not host.reason),
            ("agentkit_host_draining", "1 if an operator has stopped creations.", host.draining),
        ):
            yield GaugeMetricFamily(name, text, value)

    async def _states(self) -> Mapping[str, str] | None:
        """Return the state of every sandbox by id; None if the engine does not answer."""
        try:
            found = await asyncio.wait_for(self._backend.list({}), ENGINE_SECONDS)
        except (SandboxError, asyncio.TimeoutError):
            return None
        return {observed.id: observed.state for observed in found}


class _Families:
    """Collector of families that are made for each scrape."""

    def __init__(self) -> None:
        self.families: list[Metric] = []

    def collect(self) -> list[Metric]:
        return self.families
