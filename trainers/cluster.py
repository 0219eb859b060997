"""Where roles live: in this process, or in processes of their own. No role knows which.

Invariant: a role behaves alike under every placement. Its public coroutine methods can be awaited by thousands of tasks
at once, cancelled, and fail with the same ``AgentkitError``; what a placement adds is ``RoleError``, when a process
died, hangs, or the role raised something that is no ``AgentkitError``. Nothing that is placed outlives the caller.

``place`` is the only entry. A further placement is a further branch there, which returns an object with the role's
coroutine methods.
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
from agentkit.trainers.role_process import Request, RoleProcess
from agentkit.trainers.transport import Kind, encode

logger = logging.getLogger(__name__)

RoleT = TypeVar("RoleT")

CLOSE_S = 30.0
"""Seconds that a role's own ``close`` gets before its process is ended without it."""
GRACE_S = 5.0
"""Seconds that the other ranks get to finish their calls after one rank failed; they may be stuck in a collective."""

# Outlives a parent that is killed with SIGKILL: upon the end of its input it kills the process groups given as
# arguments, whoever they started included, and removes the directory named first.
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
    """Construct ``factory(*args, **kwargs)`` where ``placement`` says, and return what has its coroutine methods.

    ``factory`` is a class or function, or its name ``"package.module:name"``, which only the process that constructs
    the role imports.

    ``inline``: the role itself.

    ``process``: a proxy of a role in a fresh interpreter with its own session. ``factory`` must be importable by name,
    arguments and results must pickle (large numpy arrays travel without a copy into the pickle and must not be changed
    until the call returns). Cancelling a call cancels the coroutine in the process and does not wait for its clean-up.
    The process ignores Ctrl-C, and ends with this one, however this one ends; so keep the thread that runs this event
    loop alive as long as the role. Other attributes than coroutine methods do not exist on the proxy. Its ``close``
    awaits the role's ``close`` and ends the process; it is idempotent.

    Args:
        ranks: processes of the role. With more than one, each is constructed with ``rank=``, ``world_size=`` and
            ``init_method=`` (a rendezvous file for ``torch.distributed``) besides, every call goes to all of them at
            once and returns rank 0's result. An error in any rank ends the whole group, after ``GRACE_S`` for the
            others, and is raised by the call; later calls raise ``RoleError``.
        threads: CPU threads of torch and of numerical libraries. In a process: set in its environment before anything
            is imported. Inline: torch's threads of this whole process, so the last role placed decides for all.
        name: names the role in messages.
        log: file to which the process's output is appended (``-rank1`` and so on is put before the suffix for further
            ranks); without it only the end is kept, for error messages.
        start_timeout: seconds for starting the process, importing and constructing the role.
        call_timeout: seconds after which a call that has not ended counts as hung: its process is killed and all its
            calls raise ``RoleError``. ``None``: calls may take any time.

    Raises:
        ConfigError: several ranks inline, or a factory that cannot be imported by name.
        RoleError: the process could not be started, or the constructor raised. An ``AgentkitError`` that the
            constructor raised is raised as it is.
    """
    if placement == "inline":
        if ranks != 1:
            raise ConfigError(f"{name}: {ranks} ranks need placement 'process': each rank is a process")
        set_threads(threads)
        role = resolve(factory)(*args, **kwargs)
        set_threads(threads)  # making it may have been the first to import torch
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
    """The proxy of a role in one process, or in one process for each rank. Made by ``place`` alone."""

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
        self.__dict__[method] = call  # found without this function from now on
        return call

    def alive(self) -> bool:
        """Whether calls are possible: no process of the role has ended. (A process that hangs is alive.)"""
        return self._failure is None and all(process.alive for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    async def close(self) -> None:
        """Await the role's ``close`` for at most ``CLOSE_S``, then end its processes. Idempotent.

        Raises what the role's ``close`` raised, once the processes are gone; a role that ended before is not an error.
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
                process.request(Kind.CONSTRUCT, "its constructor", encode(constructor))
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
        return await self._results([process.request(Kind.CALL, method, body) for process in self._processes])

    async def _results(self, requests: list[Request]) -> Any:
        """The first request's result, once all have one; the error of the first one that fails."""
        try:
            if len(requests) == 1:
                return await requests[0].future
            futures = [request.future for request in requests]
            await asyncio.wait(futures, return_when=asyncio.FIRST_EXCEPTION)
            for future, process in zip(futures, self._processes, strict=True):
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
        """A process ended: without it the others cannot go on, and what was made for the group is not needed."""
        first, self._failure = self._failure is None, self._failure or str(error)
        if not any(process.alive for process in self._processes):
            self._release()  # at once: the guard must not keep the ids of groups that are gone
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
            logger.warning("%s did not close within %s s; its processes are ended without it", self._name, CLOSE_S)
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
    """Mark a future's error as seen: another rank's is the one that is reported."""
    if not future.cancelled():
        future.exception()


def _check_importable(factory: Callable[..., Any] | str, name: str) -> None:
    if isinstance(factory, str):
        return  # told by the process that imports it
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
        # All ranks are on this machine; a host name that does not resolve to it must not matter.
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
