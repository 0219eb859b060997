"""Calls of the docker SDK from an event loop, with timeouts and typed errors.

Invariant: every call ends within its timeout plus that of its queue, with a result, ``EngineRefused`` (the engine
refused the request) or ``EngineUnavailable`` (it did not answer). A call that changes something has ended when ``call``
returns, even if the caller was cancelled, so its effects can be found and removed. Removals have their own threads:
clean-up never waits for creations.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentkit.errors import EngineUnavailable, SandboxError, UnsupportedFeature
from agentkit.sandboxes.tasks import finished, retrieve
from agentkit.sandboxes.threads import DaemonThreadPool

if TYPE_CHECKING:
    from docker import APIClient

T = TypeVar("T")

CALL_TIMEOUT = 60.0
"""Seconds in which the engine must answer an ordinary call. A busy engine needs one or two."""
QUEUE_TIMEOUT = 600.0
"""Seconds that a call may wait for earlier calls."""
OLDEST_API = (1, 41)
"""Engine 20.10."""

QueueName = Literal["lifecycle", "pull", "removal"]


class EngineRefused(SandboxError):
    """The engine refused a request; ``details["status"]`` is the HTTP status."""

    @property
    def status(self) -> int:
        return self.details["status"]


class DockerEngine:
    """A container engine, reached over its Unix socket (``DOCKER_HOST``, or the default socket)."""

    def __init__(self, host: str | None = None) -> None:
        self.host = engine_host(host)
        if not self.host.startswith("unix://"):
            raise UnsupportedFeature(
                f"the engine at {self.host} is not a Unix socket of this machine; run `agentkit sandbox serve` on its "
                "machine and use the remote back end"
            )
        self.info: dict[str, Any] = {}
        self._version: str | None = None
        self._queues: dict[QueueName, DaemonThreadPool[APIClient]] = {}

    @property
    def socket(self) -> str:
        return self.host.removeprefix("unix://")

    @property
    def api(self) -> str:
        """The negotiated API version, such as ``1.41``."""
        if self._version is None:
            raise RuntimeError("the back end is not started; await backend.start() first")
        return self._version

    async def start(self) -> None:
        """Connect and negotiate the API version. Raises ``EngineUnavailable``."""
        if self._queues:
            return
        cpus = os.cpu_count() or 1
        # Starting a container takes 0.1 s of processor time in the engine: more at once only slow each other down.
        sizes: dict[QueueName, int] = {"lifecycle": max(2, cpus), "pull": 4, "removal": max(2, cpus)}
        self._queues = {
            name: DaemonThreadPool(f"agentkit-docker-{name}", size, self.client, lambda client: client.close())
            for name, size in sizes.items()
        }
        try:
            version, self.info = await self.call(
                "start", lambda client: (client.version()["ApiVersion"], client.info()), timeout=20.0
            )
            if tuple(map(int, version.split("."))) < OLDEST_API:
                raise EngineUnavailable(
                    f"the engine at {self.host} has API {version}; update it to API 1.41 (Docker 20.10) or newer"
                )
        except BaseException:
            self.close()
            raise
        self._version = version

    def close(self) -> None:
        """Disconnect. May be called twice."""
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.close()

    def client(self) -> APIClient:
        """Return a client of the SDK for one thread. It blocks; its ``timeout`` bounds each read."""
        return make_client(self.host, self._version)

    async def call(
        self,
        what: str,
        job: Callable[[APIClient], T],
        *,
        timeout: float = CALL_TIMEOUT,
        queue: QueueName = "lifecycle",
        changes: bool = False,
    ) -> T:
        """Run ``job`` in a thread and return its result.

        Args:
            what: the name of the call in errors.
            job: gets a client of the SDK.
            timeout: seconds in which the engine must answer.
            queue: the threads to use.
            changes: wait for the end of the call even when cancelled.

        Raises:
            EngineRefused: the engine refuses the request.
            EngineUnavailable: the engine does not answer.
        """
        if queue not in self._queues:
            raise EngineUnavailable(f"{what}: the back end is not started, or closed")

        def bounded(client: APIClient) -> T:
            client.timeout = timeout  # pyright: ignore[reportAttributeAccessIssue]
            return job(client)

        future = self._queues[queue].submit(bounded)
        waiter = asyncio.wrap_future(future)
        waiter.add_done_callback(retrieve)
        try:
            await asyncio.wait({waiter}, timeout=timeout + QUEUE_TIMEOUT)
        except asyncio.CancelledError:
            # A call that waits is cancelled; a call that runs cannot be.
            if not future.cancel() and changes:
                await finished(asyncio.wait({waiter}))
            raise
        if not waiter.done():
            future.cancel()
            raise EngineUnavailable(f"{what}: the engine at {self.host} is overloaded: calls wait for minutes")
        try:
            return waiter.result()
        except Exception as error:
            raise self._translated(what, error, timeout) from error

    async def find(self, what: str, job: Callable[[APIClient], T], queue: QueueName = "lifecycle") -> T | None:
        """Return the result of ``job``; None if the engine does not have what it asks for."""
        try:
            return await self.call(what, job, queue=queue)
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise

    def _translated(self, what: str, error: Exception, timeout: float) -> Exception:
        if isinstance(error, SandboxError):
            return error
        import requests
        from docker.errors import APIError, DockerException

        if isinstance(error, APIError) and error.response is not None:
            return EngineRefused(f"{what}: the engine reports: {error.explanation}", status=error.response.status_code)
        if isinstance(error, requests.exceptions.Timeout):
            return EngineUnavailable(f"{what}: the engine at {self.host} did not answer in {timeout:g} s")
        if isinstance(error, (requests.exceptions.RequestException, DockerException, OSError)):
            return EngineUnavailable(f"{what}: {unreachable(self.host, error)}")
        return error


def engine_host(host: str | None = None) -> str:
    """Return the address of the engine: ``host``, ``DOCKER_HOST`` or the default socket."""
    return host or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def make_client(host: str | None = None, version: str | None = None, timeout: float = CALL_TIMEOUT) -> APIClient:
    """Return a client of the docker SDK with a timeout for every read; ``version=None`` negotiates the version.

    Raises ``EngineUnavailable``.
    """
    host = engine_host(host)
    try:
        import docker
        from docker.errors import DockerException
    except ModuleNotFoundError as error:
        raise EngineUnavailable(
            "the docker SDK is not installed: pip install 'agentkit-rl[docker]'", missing="docker"
        ) from error

    class BoundedClient(docker.APIClient):
        # The SDK has no timeout for pulls and builds: a stalled registry would block the thread forever.
        def send(self, request: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout") is None:
                kwargs["timeout"] = self.timeout
            return super().send(request, **kwargs)

    try:
        return BoundedClient(base_url=host, version=version or "auto", timeout=timeout)  # pyright: ignore[reportArgumentType]
    except DockerException as error:
        raise EngineUnavailable(unreachable(host, error)) from error


def unreachable(host: str, error: Exception) -> str:
    """Return the message for an engine that cannot be reached, with the remedy."""
    reason = str(error)
    if "Permission denied" in reason:
        remedy = (
            "this user has no permission: add it to the group docker (`usermod -aG docker NAME`), then log in again"
        )
    else:
        remedy = (
            "install and start it (Debian: `apt-get install docker.io`, then `systemctl start docker` or `dockerd`)"
        )
    return f"no container engine answers at {host}; {remedy}, or set DOCKER_HOST ({reason[:200]})"
