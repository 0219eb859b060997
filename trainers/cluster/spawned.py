"""Placement of roles in separate processes.

Invariant: a role behaves the same under every placement. Its public coroutine methods can be awaited by thousands of
tasks at once, cancelled, and fail with the same ``AgentkitError``; a placement adds only ``RoleError``: a process
died or hangs, or the role raised another type of error. Placed roles end with the caller.

``place`` is the only entry point. It returns an object with the role's coroutine methods.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from agentkit.errors import ConfigError, RoleError
from agentkit.trainers.role_host import resolve, set_threads
from agentkit.trainers.role_process import RoleCall, RoleProcess
from agentkit.trainers.transport import FrameKind, encode

logger = logging.getLogger(__name__)

RoleT = TypeVar("RoleT")

CLOSE_S = 30.0
"""Seconds for a role's ``close`` before its process is killed."""
NOTICE_S = 1.0
"""Seconds to notice the death of a rank after another one failed: the others fail in a collective because of it."""
GRACE_S = 5.0
"""Seconds for the other ranks to finish their calls after one rank failed; they may hang in a collective."""

# Survives a SIGKILL of the parent: at the end of its input it kills the process groups given as arguments and removes
# the directory that is the first argument.
_GUARD = 'trap "" INT TERM HUP; read -r _; for group; do kill -s KILL -- "-$group"; done; [ -z "$0" ] || rm -rf -- "$0"'


async def place(
    factory: Callable[..., RoleT] | str,
    *args: Any,
    placement: Literal["inline", "process"] = "inline",
    ranks: int = 1,
    threads: int | None = None,
    name: str = "role",
    log: Path | None = None,
    start_timeout: float = 600.0,
    call_timeout: float | None = None,
    **kwargs: Any,
) -> RoleT:
    """Construct ``factory(*args, **kwargs)`` in the given placement; return an object with its coroutine methods.

    ``factory`` is a class or function, or its name ``"package.module:name"``; only the process of the role imports it.

    ``inline``: the role itself.

    ``process``: a proxy of a role in a fresh interpreter with its own session. ``factory`` must be importable by name,
    arguments and results must pickle (large numpy arrays are not copied into the pickle and must not change until the
    call returns). Cancelling a call cancels the coroutine in the process and does not wait for its clean-up.
    The process ignores Ctrl-C and ends when this process ends in any way; keep the thread of this event loop alive as
    long as the role. The proxy has only the coroutine methods. Its ``close``
    awaits the role's ``close`` and ends the process; it is idempotent.

    Args:
        ranks: processes of the role. With more than one, each is constructed with ``rank=``, ``world_size=`` and
            ``init_method=`` (a rendezvous file for ``torch.distributed``), every call goes to all of them at once and
            returns rank 0's result. An error in any rank ends the whole group, after ``GRACE_S`` for the
            others, and is raised by the call; later calls raise ``RoleError``.
        threads: CPU threads of torch and of numerical libraries. In a process: set in its environment before imports.
            Inline: torch's threads of this whole process; the last role placed decides.
        name: names the role in messages.
        log: file to which the process's output is appended (``-rank1`` and so on is put before the suffix for further
            ranks); without it only the end of the output is kept, for error messages.
        start_timeout: seconds for starting the process, importing and constructing the role.
        call_timeout: seconds after which a call that has not ended counts as hung: its process is killed and all its
            calls raise ``RoleError``. ``None``: calls may take any time.

    Raises:
        ConfigError: several ranks inline, or a factory that cannot be imported by name.
        RoleError: the process could not be started, or the constructor raised. An ``AgentkitError`` of the constructor
        is raised unchanged.
    """
    if placement == "inline":
        if ranks != 1:
            raise ConfigError(f"{name}: {ranks} ranks need placement 'process': each rank is a process")
        set_threads(threads)
        role = resolve(factory)(*args, **kwargs)
        set_threads(threads)  # the constructor may have imported torch
        return role
    _check_importable(factory, name)
    rendezvous = Path(tempfile.mkdtemp(prefix="agentkit-ranks-")) if ranks > 1 else None
    logs = [log] + [log and log.with_name(f"{log.stem}-rank{rank}{log.suffix}") for rank in range(1, ranks)]
    names = [name if ranks == 1 else f"{name} rank {rank}" for rank in range(ranks)]
    proxy = RemoteRole(name, names, logs, call_timeout, rendezvous)
    extra: list[dict[str, Any]] = [{}]
    if rendezvous is not None:
        init_method = f"file://{rendezvous / 'store'}"
        extra = [{"rank": rank, "world_size": ranks, "init_method": init_method} for rank in range(ranks)]
    constructors = [(factory, args, {**kwargs, **more}, threads) for more in extra]
    await proxy._start(constructors, _environment(threads, ranks), start_timeout)
    return cast(RoleT, proxy)


class RemoteRole:
    """The proxy of a role in one process, or in one process per rank. Created by ``place``."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        logs: Sequence[Path | None],
        call_timeout: float | None,
        rendezvous: Path | None,
    ) -> None:
        self._name = name
        self._processes = [
            RoleProcess(of_rank, log=log, call_timeout=call_timeout, on_end=self._on_end)
            for of_rank, log in zip(names, logs, strict=True)
        ]
        self._methods: frozenset[str] = frozenset()
        self._rendezvous = rendezvous
        self._guard: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<{self._name} in {len(self._processes)} process(es){'' if self.alive() else ', ended'}>"

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if method.startswith("_") or method not in self._methods:
            raise AttributeError(f"the role {self.__dict__.get('_name')!r} has no public coroutine method {method!r}")

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await self._call(method, args, kwargs)

        call.__name__ = method
        self.__dict__[method] = call  # later lookups skip this function
        return call

    def alive(self) -> bool:
        """Return whether all processes of the role run. (A process that hangs is alive.)"""
        return self._failure is None and all(process.alive for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    async def close(self) -> None:
        """Await the role's ``close`` for at most ``CLOSE_S``, then end its processes. Idempotent.

        After the processes have ended, raises the error of the role's ``close``, if any.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        elif self._closing.done():
            return
        await asyncio.shield(self._closing)

    async def _start(self, constructors: Sequence[Any], environment: dict[str, str], timeout: float) -> None:
        try:
            for process in self._processes:
                await process.start(environment)
            self._guard = _start_guard(self.pids, self._rendezvous)
            requests = [
                process.request(FrameKind.CONSTRUCT, "its constructor", encode(constructor))
                for process, constructor in zip(self._processes, constructors, strict=True)
            ]
            try:
                methods = await asyncio.wait_for(self._results(requests), timeout)
            except asyncio.TimeoutError:
                raise RoleError(
                    f"{self._name} was not constructed within {timeout} s, so it was killed. Its last output:\n"
                    + "\n".join(process.tail() for process in self._processes)
                ) from None
            self._methods = methods
        except BaseException:
            self._failure = f"{self._name} could not be started"
            await asyncio.shield(asyncio.get_running_loop().create_task(self._end_all(self._failure)))
            raise

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._failure is not None:
            raise RoleError(self._failure)
        body = encode((method, args, kwargs))
        return await self._results([process.request(FrameKind.CALL, method, body) for process in self._processes])

    async def _results(self, requests: list[RoleCall]) -> Any:
        """Wait for all requests and return the first one's result; raise the error of the first request that fails."""
        try:
            if len(requests) == 1:
                return await requests[0].future
            futures = [request.future for request in requests]
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            if any(future.done() and future.exception() is not None for future in futures):
                await asyncio.wait(futures, timeout=NOTICE_S)
            ended_first = sorted(zip(futures, self._processes, strict=True), key=lambda pair: pair[1].alive)
            for future, process in ended_first:
                error = future.exception() if future.done() else None
                if error is not None:
                    for other in futures:
                        other.add_done_callback(_forget)
                    await self._fail(f"{self._name} has ended because {process.name} failed: {error}")
                    raise error
            return futures[0].result()
        except asyncio.CancelledError:
            for request, process in zip(requests, self._processes, strict=True):
                process.cancel(request)
            raise

    def _on_end(self, error: RoleError) -> None:
        """Handle the end of a process: the others cannot continue without it."""
        first, self._failure = self._failure is None, self._failure or str(error)
        if not any(process.alive for process in self._processes):
            self._release()  # at once: the ids of ended groups may be reused
        elif first:
            self._ending = asyncio.get_running_loop().create_task(self._end_failed())

    async def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_failed())
        await asyncio.shield(self._ending)

    async def _end_failed(self) -> None:
        futures = [future for process in self._processes for future in process.pending()]
        if futures:
            await asyncio.wait(futures, timeout=GRACE_S)
        await self._end_all(str(self._failure))

    async def _end_all(self, cause: str) -> None:
        await asyncio.gather(*(process.kill(cause) for process in self._processes))
        self._release()

    async def _close(self) -> None:
        try:
            if self._failure is None and "close" in self._methods:
                await asyncio.wait_for(self._call("close", (), {}), CLOSE_S)
        except asyncio.TimeoutError:
            logger.warning("%s did not close within %s s; its processes are killed", self._name, CLOSE_S)
        finally:
            self._failure = self._failure or f"{self._name} is closed"
            if self._ending is not None:
                await asyncio.shield(self._ending)
            await asyncio.gather(*(process.stop() for process in self._processes))
            self._release()

    def _release(self) -> None:
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None
        if self._rendezvous is not None:
            shutil.rmtree(self._rendezvous, ignore_errors=True)


def _forget(future: asyncio.Future[Any]) -> None:
    """Mark a future's error as retrieved; another rank's error is reported."""
    if not future.cancelled():
        future.exception()


def _check_importable(factory: Callable[..., Any] | str, name: str) -> None:
    if isinstance(factory, str):
        return  # the process that imports it reports errors
    module, path = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if module is None or path is None or module == "__main__" or "<" in path or inspect.ismethod(factory):
        raise ConfigError(
            f"{name}: {factory!r} cannot be imported by name in another process; use a class or function at the top "
            "level of a module other than the main script"
        )


def _environment(threads: int | None, ranks: int) -> dict[str, str]:
    environment = dict(os.environ)
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
            environment[variable] = str(threads)
    if ranks > 1:
        # All ranks are on this machine, even if its host name resolves to another address.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _start_guard(groups: Sequence[int], directory: Path | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, str(directory or ""), *map(str, groups)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
