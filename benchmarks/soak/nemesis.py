"""Breaks sandboxes from outside, at random moments, in ways that their pool does not expect."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import docker
from docker.errors import DockerException

from agentkit.sandboxes.pool import SandboxPool
from agentkit.sandboxes.sandbox import Sandbox

EVERY = 1.5
"""Mean seconds between two attacks."""


class Nemesis:
    """``users`` holds what each user does at present: a task to cancel. ``done`` counts the attacks that took place."""

    def __init__(self, pool: SandboxPool, users: Mapping[int, asyncio.Task[None]], rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._pool, self._users, self._rng = pool, users, rng
        self._client = docker.from_env(timeout=60)
        self._stopped: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled. What it stopped, goes on then."""
        attacks: dict[str, Callable[[Sandbox], Awaitable[bool]]] = {
            "docker kill": lambda box: self._engine(box, "kill"),
            "docker pause": lambda box: self._engine(box, "pause"),
            "docker rm -f": lambda box: self._engine(box, "remove", force=True),
            "agent stopped": self._stop_agent,
            "agent killed": lambda box: self._signal_agent(box, signal.SIGKILL),
            "garbage frames": self._garbage,
            "user cancelled": self._cancel,
        }
        try:
            while True:
                await asyncio.sleep(self._rng.expovariate(1 / EVERY))
                boxes = self._boxes()
                name = self._rng.choice(list(attacks))
                if boxes and await attacks[name](self._rng.choice(boxes)):
                    self.done[name] += 1
        finally:
            for task in self._stopped:
                task.cancel()
            await asyncio.gather(*self._stopped, return_exceptions=True)
            self._client.close()

    def _boxes(self) -> list[Sandbox]:
        """Those in use three times: that is where it hurts."""
        assert self._pool._stock is not None
        places = [place for place in self._pool._stock.ledger if place.sandbox is not None]
        busy = [place for place in places if place.state == "busy"]
        return [place.box for place in [*places, *busy, *busy]]

    async def _engine(self, box: Sandbox, what: str, **options: bool) -> bool:
        with contextlib.suppress(DockerException):  # gone already, or not running
            await asyncio.to_thread(lambda: getattr(self._client.containers.get(box.id), what)(**options))
            return True
        return False

    async def _signal_agent(self, box: Sandbox, number: int) -> bool:
        def send() -> bool:
            agent = self._client.containers.get(box.id).attrs["State"]["Pid"]
            if agent:
                os.kill(agent, number)
            return bool(agent)

        with contextlib.suppress(DockerException, ProcessLookupError):
            return await asyncio.to_thread(send)
        return False

    async def _stop_agent(self, box: Sandbox) -> bool:
        if not await self._signal_agent(box, signal.SIGSTOP):
            return False

        async def go_on() -> None:
            try:
                await asyncio.sleep(self._rng.choice([0.5, 3.0, 30.0]))
            finally:
                await self._signal_agent(box, signal.SIGCONT)

        task = asyncio.ensure_future(go_on())
        self._stopped.add(task)
        task.add_done_callback(self._stopped.discard)
        return True

    async def _garbage(self, box: Sandbox) -> bool:
        """What a hostile agent could send: noise, or a true frame's beginning."""
        link = getattr(box._channel, "_link", None)
        if link is None or link.lost.done():
            return False
        link.data_received(self._rng.choice([self._rng.randbytes(100), b"\0\0\0\x05\x0d\0\0\0\x01half!", b"\xff" * 9]))
        return True

    async def _cancel(self, box: Sandbox) -> bool:
        running = [task for task in self._users.values() if not task.done()]
        return bool(running) and self._rng.choice(running).cancel()
