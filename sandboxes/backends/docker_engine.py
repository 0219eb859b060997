"""The container engine as an event loop sees it: bounded calls of the docker SDK, and typed errors.

Invariant: every call ends within its timeout (and that of the line it waits in) with a result, ``Refused`` (the engine
said no) or ``EngineUnavailable`` (it said nothing). A call that changes something is over when ``call`` returns, also
when the caller was cancelled, so that what it made can be found and removed. Removals have threads of their own:
clean-up never waits behind creation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentkit.errors import EngineUnavailable, SandboxError, UnsupportedFeature
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.lane import Lane

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

CALL_TIMEOUT = 60.0
"""Seconds that the engine has to answer one ordinary call. A busy one takes a second or two."""
LINE_TIMEOUT = 600.0
"""Seconds that a call may wait for the calls before it."""
OLDEST_API = (1, 41)
"""Engine 20.10."""

LaneName = Literal["life", "pull", "removal"]


class Refused(SandboxError):
    """The engine answered that it will not; ``details``: ``status``, the HTTP status."""

    @property
    def status(self) -> int:
        return self.details["status"]


class Engine:
    """One container engine, reached over its unix socket (``DOCKER_HOST``, or the usual place)."""

    def __init__(self, host: str | None = None) -> None:
        self.host = engine_host(host)
        if not self.host.startswith("unix://"):
            raise UnsupportedFeature(
                f"the engine at {self.host} is not on this host's unix socket, but sandboxes share a directory with "
                "their host; run `agentkit sandbox serve` over there and use the remote back end"
            )
        self.info: dict[str, Any] = {}
        self._version: str | None = None
        self._lanes: dict[LaneName, Lane[APIClient]] = {}

    @property
    def socket(self) -> str:
        """Path of the engine's socket."""
        return self.host.removeprefix("unix://")

    @property
    def api(self) -> str:
        """The negotiated API version, such as ``1.41``."""
        if self._version is None:
            raise RuntimeError("the engine was not started: await backend.start() first")
        return self._version

    async def start(self) -> None:
        """Connect and agree on a version. Raises ``EngineUnavailable`` with the remedy."""
        if self._lanes:
            return
        cpus = os.cpu_count() or 1
        # Starting a container is 0.1 s of computing for the engine: more at once only makes each slower.
        sizes: dict[LaneName, int] = {
            "life": max(2, cpus),
            "pull": 4,
            "removal": max(2, cpus),
        }
        self._lanes = {
            name: Lane(f"agentkit-docker-{name}", size, self.client, lambda client: client.close())
            for name, size in sizes.items()
        }
        try:
            version, self.info = await self.call(
                "start", lambda client: (client.version()["ApiVersion"], client.info()), timeout=20.0
            )
            if tuple(map(int, version.split("."))) < OLDEST_API:
                raise EngineUnavailable(
                    f"the engine at {self.host} speaks API {version}; 1.41 (Docker 20.10) is the oldest that works"
                )
        except BaseException:
            self.close()
            raise
        self._version = version

    def close(self) -> None:
        """Let go of the engine. Twice is fine."""
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    def client(self) -> APIClient:
        """A client of the SDK, for one thread. It blocks; its reads are bounded by its ``timeout``."""
        return make_client(self.host, self._version)

    async def call(
        self,
        what: str,
        job: Callable[[APIClient], T],
        *,
        timeout: float = CALL_TIMEOUT,
        lane: LaneName = "life",
        changes: bool = False,
    ) -> T:
        """Run ``job`` in a thread. ``what`` names it in errors; ``changes`` waits for its end even when cancelled."""
        if lane not in self._lanes:
            raise EngineUnavailable(f"{what}: this back end is not started, or closed")

        def bounded(client: APIClient) -> T:
            client.timeout = timeout  # pyright: ignore[reportAttributeAccessIssue]
            return job(client)

        future = self._lanes[lane].submit(bounded)
        waiter = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiter}, timeout=timeout + LINE_TIMEOUT)
        except asyncio.CancelledError:
            # Not begun: it never will. Begun: it cannot be called back, only be awaited.
            if not future.cancel() and changes:
                await finished(asyncio.wait({waiter}))
            waiter.add_done_callback(_see)
            raise
        if not waiter.done():
            future.cancel()
            waiter.add_done_callback(_see)
            raise EngineUnavailable(f"{what}: the engine at {self.host} is too busy: calls wait for minutes")
        try:
            return waiter.result()
        except Exception as error:
            raise self.translate(what, error, timeout) from error

    def translate(self, what: str, error: Exception, timeout: float = CALL_TIMEOUT) -> Exception:
        """What the SDK raised, as one of our errors."""
        import requests
        from docker.errors import APIError, DockerException

        if isinstance(error, SandboxError):
            return error
        if isinstance(error, APIError) and error.response is not None:
            return Refused(f"{what}: the engine says: {error.explanation}", status=error.response.status_code)
        if isinstance(error, requests.exceptions.Timeout):
            return EngineUnavailable(f"{what}: the engine at {self.host} did not answer in {timeout:g} s")
        if isinstance(error, (requests.exceptions.RequestException, DockerException, OSError)):
            return EngineUnavailable(f"{what}: {unreachable(self.host, error)}")
        return error


def _see(future: asyncio.Future[Any]) -> None:
    """Take note of a result that nobody waits for, so that nothing is printed about it."""
    if not future.cancelled():
        future.exception()


def engine_host(host: str | None = None) -> str:
    """Where the engine listens: ``host``, else ``DOCKER_HOST``, else the usual place."""
    return host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def make_client(host: str | None = None, version: str | None = None, timeout: float = CALL_TIMEOUT) -> APIClient:
    """A client of the docker SDK whose every read is bounded; ``version=None`` asks the engine for its own.

    Raises ``EngineUnavailable`` with the remedy.
    """
    host = engine_host(host)
    try:
        import docker
        from docker.errors import DockerException
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            "the docker SDK is not installed: pip install 'agentkit-rl[docker]'", missing="docker"
        ) from error

    class Client(docker.APIClient):
        # The SDK sets no timeout at all for pulls and builds: a stalled registry would keep a thread for ever.
        def send(self, request: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout") is None:
                kwargs["timeout"] = self.timeout
            return super().send(request, **kwargs)

    try:
        return Client(base_url=host, version=version or "auto", timeout=timeout)  # pyright: ignore[reportArgumentType]
    except DockerException as error:
        raise EngineUnavailable(unreachable(host, error)) from error


def unreachable(host: str, error: Exception) -> str:
    """What to tell who cannot reach the engine."""
    reason = str(error)
    if "Permission denied" in reason:
        remedy = "this user may not use it: add it to the group docker (`usermod -aG docker NAME`, then log in again)"
    else:
        remedy = (
            "install and start it (Debian: `apt-get install docker.io`, then `systemctl start docker` or `dockerd`)"
        )
    return f"no container engine answers at {host}; {remedy}, or name another by DOCKER_HOST ({reason[:200]})"
