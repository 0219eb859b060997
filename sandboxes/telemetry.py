"""Reports of the sandboxes of this process, for the metrics and events of runs.

Invariant: reporting neither blocks nor raises, and stores nothing without a listener. Pools report ``Created``,
``CreationFailed`` and ``Retired``; recoveries report ``recovery.record.Recovery``, environments ``Stepped``, sandbox
servers ``Served``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Created:
    """A pool created a sandbox."""

    host: str
    seconds: float


@dataclass(frozen=True)
class CreationFailed:
    """A pool could not create a sandbox."""

    error: str
    """Name of the class of the error."""


@dataclass(frozen=True)
class Retired:
    """A pool took a sandbox out of use."""

    sandbox: str
    host: str
    reason: str
    in_use: bool
    """Whether it was acquired and used, not idle in its pool or kept as a spare."""


@dataclass(frozen=True)
class Stepped:
    """An environment in a sandbox answered a step."""

    host: str
    seconds: float


@dataclass(frozen=True)
class Served:
    """Something happened to a sandbox of a sandbox server in this process."""

    what: Literal[
        "created", "not created", "lost", "restarted", "adopted", "removed", "oom", "timeout", "taint", "died",
        "paused", "resumed",
    ]  # fmt: skip
    sandbox: str
    """Empty if it was not created."""
    tenant: str
    cause: str = ""
    """One of ``LOSS_REASONS`` for a loss and a restart after one, otherwise a text."""
    seconds: float | None = None
    """Duration of the creation, or from the loss to the end of the restart."""


class OpenPool(Protocol):
    """A ``SandboxPool``, as its observers see it. Its methods may be called in any thread."""

    def stats(self) -> Any: ...

    def hosts(self) -> Mapping[str, int]: ...

    def servers(self) -> Sequence[Any]: ...

    def usage(self) -> Mapping[str, Any]: ...


Listener = Callable[[object], None]
_pools: list[weakref.ref[OpenPool]] = []
_listeners: list[Listener] = []


def opened(pool: OpenPool) -> None:
    """Note that ``pool`` was started."""
    _pools.append(weakref.ref(pool))


def closed(pool: OpenPool) -> None:
    """Note that ``pool`` was closed."""
    _pools[:] = [known for known in _pools if known() not in (pool, None)]


def open_pools() -> list[OpenPool]:
    """Return the pools of this process that are started and not closed. Thread-safe."""
    return [pool for known in tuple(_pools) if (pool := known()) is not None]


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with every record that is reported during the body of ``with``.

    Args:
        listener: must neither block nor raise; it is called in the threads of the pools.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report(record: object) -> None:
    """Pass ``record`` to all listeners."""
    for listener in tuple(_listeners):
        listener(record)
