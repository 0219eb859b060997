"""The actor: it constructs one role and runs its calls.

Invariant: calls begin, and cancellations take effect, in the order in which they were made; every call is answered once
unless it was cancelled. Nothing imports torch before the role does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pkgutil
import random
import socket
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import psutil

from agentkit.errors import RoleError
from agentkit.trainers.cluster.encoding import Encoded, decode, encode, encode_error

HEARTBEAT_S = 5.0
"""Seconds after which ``collect`` returns without an answer, as a sign of life."""
TICK_S = 0.004
"""Seconds in which answers, or calls, are gathered for one message."""
PORTS = range(20_000, 32_000)
"""Ports for rendezvous: below those that Linux gives to connections, above those of Ray's workers."""


class Kind(IntEnum):
    """Kind of an operation that is sent to a host."""

    CONSTRUCT = 0
    CALL = 1
    CANCEL = 2


class Operation(NamedTuple):
    """One operation; ``body`` is encoded, or a reference to an encoded value in the object store."""

    kind: Kind
    number: int
    body: Any = None


class Answer(NamedTuple):
    """The end of call ``number``: its result or its error."""

    number: int
    failed: bool
    body: Encoded


class Surroundings(NamedTuple):
    """What a host takes over from the driver's process, before anything is imported or constructed."""

    path: Sequence[str]
    """Where modules are found, after the node's own places."""
    directory: str
    """The working directory, if the node has it."""


class Identity(NamedTuple):
    """Where a host runs."""

    pid: int
    address: str
    node: str
    outputs: tuple[str, ...]
    """The files that receive its output."""


class Host:
    """The role of one process and its running calls. Made an actor by ``agentkit.trainers.cluster.channel``."""

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        import ray.util

        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        self._identity = Identity(os.getpid(), address, node, tuple(_outputs()))
        self._where = f"{name} (pid {os.getpid()} on {address})"
        self._role: Any = None
        self._methods: frozenset[str] = frozenset()
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._answers: list[Answer] = []
        self._answered = asyncio.Event()
        _enter(surroundings, interface(address))

    async def identity(self) -> Identity:
        """Return where this process runs."""
        return self._identity

    async def rendezvous(self) -> str:
        """Return a URL with a free port of this node, at which ranks can meet."""
        address = self._identity.address
        for port in random.SystemRandom().sample(PORTS, 100):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind((address, port))
                return f"tcp://{address}:{port}"
        raise RoleError(f"{self._where} found no free port between {PORTS.start} and {PORTS.stop}")

    async def submit(self, operations: list[Operation]) -> None:
        """Begin calls and cancel calls. The caller awaits one ``submit`` before it sends the next."""
        for kind, number, body in operations:
            if kind == Kind.CANCEL:
                task = self._tasks.get(number)
                if task is not None:
                    task.cancel()
                continue
            try:
                value = decode(body if isinstance(body, tuple) else await body)
                if kind == Kind.CONSTRUCT:
                    self._construct(*value)
                    self._answer(number, False, encode(self._methods))
                    continue
                method, args, kwargs = value
                if method not in self._methods:
                    raise RoleError(f"{self._where} has no public coroutine method {method!r}")
                call = getattr(self._role, method)(*args, **kwargs)
            except Exception as error:
                self._answer(number, True, encode_error(error, self._where))
                continue
            task = asyncio.get_running_loop().create_task(call)
            self._tasks[number] = task
            task.add_done_callback(lambda task, number=number, method=method: self._ended(number, method, task))

    async def collect(self) -> list[Answer]:
        """Return answers as soon as there are some, or nothing after ``HEARTBEAT_S``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._answered.wait(), HEARTBEAT_S)
            await asyncio.sleep(0)  # calls that end in the same tick answer together
        self._answered.clear()
        answers, self._answers = self._answers, []
        return answers

    def _construct(self, factory: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._role = pkgutil.resolve_name(factory)(*args, **kwargs)
        cls = type(self._role)
        self._methods = frozenset(
            name
            for name in dir(cls)
            if not name.startswith("_") and asyncio.iscoroutinefunction(getattr(cls, name, None))
        )

    def _ended(self, number: int, method: str, task: asyncio.Task[Any]) -> None:
        del self._tasks[number]
        if task.cancelled():
            # The caller ignores this answer if it cancelled the call; otherwise the role cancelled itself, and the
            # caller must not see a CancelledError.
            error: BaseException | None = RoleError(f"{self._where} cancelled its own call of {method}")
        else:
            error = task.exception()
        if error is None:
            try:
                self._answer(number, False, encode(task.result()))
                return
            except Exception as cause:
                error = RoleError(f"{self._where}: the result of {method} cannot be sent to another process: {cause!r}")
        self._answer(number, True, encode_error(error, self._where))

    def _answer(self, number: int, failed: bool, body: Encoded) -> None:
        self._answers.append(Answer(number, failed, body))
        self._answered.set()


def _enter(surroundings: Surroundings, interface: str) -> None:
    # Gloo would take the interface of the host name, which is often that of 127.0.0.1.
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    for name in ("NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
    sys.path += [entry for entry in surroundings.path if entry not in sys.path]
    with contextlib.suppress(OSError):
        os.chdir(surroundings.directory)


def interface(address: str) -> str:
    """Return the name of the network interface of this machine that has ``address``; ``lo`` if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return "lo"


def _outputs() -> list[str]:
    """Return the files to which stdout and stderr of this process go."""
    files = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
    return [file for file in dict.fromkeys(files) if os.path.isfile(file)]
