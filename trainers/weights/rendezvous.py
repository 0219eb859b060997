"""Where the learner and the engines of one update meet: a key-value store of the learner's first rank.

An update is a *round* of one or more *attempts*. In each attempt, the receivers that still need weights arrive, the
learner decides who takes part, and all of them say when they are done. The first one that fails says so; the others
then leave the attempt as well, and meet in the next one.

Invariant: no wait is without a limit, and every wait ends soon after another participant has failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

ARRIVE_S = 60.0
"""Seconds for all receivers of an update to arrive; those that do not are left out."""
REJOIN_S = 15.0
"""Seconds for them to arrive again after an interruption."""
ATTEMPTS = 5
CONNECT_S = 30.0
"""Seconds to connect the participants of an attempt with each other."""
REACH_S = (2.0, 3.0, 5.0)
"""Seconds of each attempt to reach the store: on a busy machine, its first answer is sometimes lost."""
NOTICE_S = 0.2
"""Seconds after which a waiting participant looks again whether another one has failed."""


class Interrupted(Exception):
    """An attempt failed: a participant was lost, or did not answer in time."""


class Plan(NamedTuple):
    """The learner's decision about an attempt."""

    members: int
    """Receivers 1 … ``members``, in the order of their arrival, take part."""
    ranks: int
    """Ranks of the learner."""
    connection: str = ""
    """Name of the connection to use; those that do not have it connect anew."""
    refusal: str = ""
    """Why there is no transfer; empty otherwise."""


class Attempt:
    """One attempt, as each participant sees it."""

    def __init__(self, store: Store, round_name: str, number: int) -> None:
        self.store = PrefixStore(f"{round_name}/{number}", store)

    def arrive(self, connection: str) -> int:
        """Return the number of this receiver, from 1, which has ``connection`` from an earlier update."""
        number = self.store.add("arrived", 1)
        self.store.set(f"connection/{number}", connection)
        return number

    def arrivals(self, expected: int, limit: float) -> list[str]:
        """Wait for ``expected`` receivers, or until ``limit``; return the connections of those that came."""
        end = time.monotonic() + limit
        while self.counted("arrived") < expected and time.monotonic() < end:
            time.sleep(0.005)
        arrived = min(self.counted("arrived"), expected)
        keys = [f"connection/{number}" for number in range(1, arrived + 1)]
        with contextlib.suppress(Interrupted):  # one was lost in between: the attempt will show it
            self.wait_until(lambda: self.store.check(keys), NOTICE_S, "the connections", alone=True)
        return [self.store.get(key).decode() if self.store.check([key]) else "" for key in keys]

    def decide(self, plan: Plan) -> None:
        self.store.set("plan", json.dumps(plan))

    def plan(self, limit: float) -> Plan:
        """Return the learner's decision. Raises ``Interrupted`` if there is none within ``limit`` seconds."""
        return Plan(*json.loads(self._wait_for("plan", limit)))

    def conclude(self, done: int) -> None:
        """Report how many receivers have all weights."""
        self.store.set("result", str(done))

    def result(self, limit: float) -> int:
        """Return what rank 0 of the learner reports."""
        return int(self._wait_for("result", limit))

    def fail(self, reason: str) -> None:
        """Let all participants leave the attempt."""
        self.store.set("failed", reason)

    def failed(self) -> str:
        """Return why the attempt failed, or an empty string."""
        return self.store.get("failed").decode() if self.store.check(["failed"]) else ""

    def count(self, what: str) -> None:
        """Report that this participant has done ``what``."""
        self.store.add(what, 1)

    def counted(self, what: str) -> int:
        return self.store.add(what, 0)

    def _wait_for(self, key: str, limit: float) -> str:
        """Return the value of a key that rank 0 of the learner sets, whatever happens to others."""
        self.wait_until(lambda: self.store.check([key]), limit, f"the learner's {key}", alone=True)
        return self.store.get(key).decode()

    def wait_until(self, condition: Callable[[], bool], limit: float, what: str, *, alone: bool = False) -> None:
        """Wait. Raises ``Interrupted`` after ``limit`` seconds and, unless ``alone``, after a failure of another."""
        end = time.monotonic() + limit
        look, pause = time.monotonic() + NOTICE_S, 0.0002
        while not condition():
            now = time.monotonic()
            if now > look and not alone:
                if reason := self.failed():
                    raise Interrupted(reason)
                look = now + NOTICE_S
            if now > end:
                raise Interrupted(f"{what} did not come within {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.005)


def host_store() -> tuple[Store, str]:
    """Return a new store in this process, and its address for ``reach_store``."""
    address = own_address()
    store = TCPStore(address, 0, None, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
    return store, f"{address}:{store.port}"


def reach_store(address: str) -> Store:
    """Connect to the store at ``address``. Raises ``Interrupted`` if it does not answer."""
    host, _, port = address.rpartition(":")
    problem = ""
    for seconds in REACH_S:
        try:
            return TCPStore(host, int(port), None, False, timedelta(seconds=seconds), wait_for_workers=False)
        except RuntimeError as error:
            problem = str(error)
    raise Interrupted(f"the learner's store at {address} does not answer ({problem})")


def own_address() -> str:
    """Return the address of the interface that collectives of this process use; without a choice, ``127.0.0.1``."""
    addresses: Any = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    return next((entry.address for entry in addresses if "." in entry.address), "127.0.0.1")
