"""Inject faults into sandboxes from outside, at random times."""

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

from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.sandbox import Sandbox

EVERY = 1.5
"""Mean seconds between two attacks."""


class Nemesis:
    """Fault injector. ``users`` holds each user's current task, to cancel; ``done`` counts the injected faults."""

    def __init__(self, pool: SandboxPool, users: Mapping[int, asyncio.Task[None]], rng: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._pool, self._users, self._rng = pool, users, rng
        self._client = docker.from_env(timeout=60)
        self._stopped: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Inject faults until cancelled; then resume everything that is stopped."""
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
        """Return all sandboxes, those in use three times, so that they are chosen more often."""
        busy = self._pool.sandboxes("busy")
        return [*self._pool.sandboxes(), *busy, *busy]

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
        """Return bytes that a hostile agent could send: noise, or the beginning of a valid frame."""
        connection = getattr(box._channel, "_connection", None)
        if connection is None or connection.lost.done():
            return False
        noise = [self._rng.randbytes(100), b"\0\0\0\x05\x0d\0\0\0\x01half!", b"\xff" * 9]
        connection.data_received(self._rng.choice(noise))
        return True

    async def _cancel(self, box: Sandbox) -> bool:
        running = [task for task in self._users.values() if not task.done()]
        return bool(running) and self._rng.choice(running).cancel()
