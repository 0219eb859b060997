"""The pool on a real engine: containers are killed and frozen, agents slowed down, engines stopped. Bounds are those
that are promised, stretched by ``PATIENCE`` for machines that are busy with other things."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError
from private_engine import PrivateEngine, may_run_one, private_engine
from requiring import require

from agentkit.errors import BreakerOpen, EngineUnavailable, PoolExhausted, SandboxError, SandboxLost
from agentkit.sandboxes.backends.docker import DockerBackend
from agentkit.sandboxes.breaker import Breaker
from agentkit.sandboxes.pool import Lease, SandboxPool
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.supervisor import Supervisor

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE = float(os.environ.get("AGENTKIT_TEST_PATIENCE", "10"))
SPEC = SandboxSpec(start_timeout=60 * PATIENCE)


class Injector:
    """Does to containers what their owner does not expect."""

    def __init__(self, host: str) -> None:
        self._client = docker.DockerClient(host, timeout=60)

    async def do(self, id: str, what: str) -> None:
        await asyncio.to_thread(lambda: getattr(self._client.containers.get(id), what)())

    async def agent(self, id: str) -> int:
        """The agent's process, by the host's numbers: the only child of the container's init."""

        def find() -> int:
            main = self._client.containers.get(id).attrs["State"]["Pid"]
            return int(Path(f"/proc/{main}/task/{main}/children").read_text().split()[0])

        return await asyncio.to_thread(find)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def injector(docker_backend: DockerBackend):
    made = Injector(docker_backend.engine.host)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def pooled(backend: DockerBackend, **settings: Any) -> AsyncIterator[SandboxPool]:
    async with SandboxPool(SPEC, backend, acquire_timeout=60 * PATIENCE, **settings) as pool:
        await asyncio.wait_for(pool.filled(), 60 * PATIENCE)
        yield pool
    assert pool.stats().size == pool.stats().removing == 0
    assert pool.stats().counters.left_behind == 0


def idle(pool: SandboxPool) -> list[str]:
    assert pool._stock is not None
    return [place.box.id for place in pool._stock.ledger.idle()]


async def until(condition: Callable[[], bool], within: float) -> float:
    """Seconds until it holds; a failure beyond ``within`` promised ones."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start <= within * PATIENCE, f"not within {within} s (times {PATIENCE:g})"
        await asyncio.sleep(0.01)
    return loop.time() - start


async def test_01_killed_while_idle(docker_backend, injector):
    async with pooled(docker_backend, min_idle=2, max_size=3) as pool:
        victim = idle(pool)[0]
        await injector.do(victim, "kill")
        print(f"noticed after {await until(lambda: victim not in idle(pool), 0.5):.3f} s")
        print(f"replaced after {await until(lambda: len(idle(pool)) == 2, 5):.3f} s")
        async with pool.acquire() as box:
            assert box.id != victim
            assert (await box.exec("true")).ok


async def test_02_killed_while_it_works(docker_backend, injector):
    async with (
        pooled(docker_backend, min_idle=1, max_size=3) as pool,
        Supervisor(pool, recovery="replay").run() as box,
        pool.acquire() as other,
    ):
        await box.exec("echo kept > log")
        work = asyncio.ensure_future(box.exec("sleep 600", timeout=900))
        await asyncio.sleep(1)
        await injector.do(box.status.id, "kill")
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(work, 1 * PATIENCE)
        assert (await other.exec("true")).ok
        assert await asyncio.wait_for(box.read("log"), 10 * PATIENCE) == b"kept\n"


async def test_11_frozen_behind_our_back(docker_backend, injector):
    async with pooled(docker_backend, min_idle=1, max_size=2) as pool:
        async with pool.acquire() as _:
            await until(lambda: bool(idle(pool)), 10)
            victim = idle(pool)[0]
            await injector.do(victim, "pause")
            print(f"noticed after {await until(lambda: victim not in idle(pool), 17):.3f} s")
        await until(lambda: bool(idle(pool)) and victim not in idle(pool), 20)


async def test_14_one_of_eight_is_slow(docker_backend, injector):
    async with pooled(docker_backend, min_idle=8, max_size=8) as pool:
        victim = idle(pool)[3]
        agent = await injector.agent(victim)

        async def slow_down() -> None:
            while True:
                os.kill(agent, signal.SIGSTOP)
                await asyncio.sleep(1.0)
                os.kill(agent, signal.SIGCONT)
                await asyncio.sleep(0.02)

        slowing = asyncio.ensure_future(slow_down())
        try:
            # Set aside, or found out by a canary: handed out it is not, and the others are left alone.
            await until(lambda: victim not in idle(pool) and pool.stats().idle <= 7, 25)
            assert pool.stats().degraded <= 1
            async with pool.acquire() as box:
                assert box.id != victim
        finally:
            slowing.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGCONT)


async def test_22_crash_loop(docker_backend, injector):
    async with pooled(docker_backend, min_idle=2, max_size=2) as pool:
        stop = asyncio.Event()

        async def crash_all() -> None:
            while not stop.is_set():
                for id in idle(pool):
                    with contextlib.suppress(APIError):
                        await injector.do(id, "kill")
                await asyncio.sleep(0.1)

        crashing = asyncio.ensure_future(crash_all())
        try:
            await until(lambda: pool.stats().breaker == "open", 30)
            before = pool.stats().counters.created
            await asyncio.sleep(30)
            assert pool.stats().counters.created - before <= 4
        finally:
            stop.set()
            await crashing
        await until(lambda: len(idle(pool)) == 2, 90)


async def test_23_storm(docker_backend, injector):
    rng = random.Random(23)
    async with pooled(docker_backend, min_idle=2, max_size=8, max_uses=20, reset=_clean) as pool:
        outcomes: dict[str, int] = {}
        held: dict[str, int] = {}

        async def customer(number: int) -> None:
            try:
                async with pool.acquire() as box:
                    assert held.setdefault(box.id, number) == number
                    assert pool.stats().size <= 8
                    try:
                        await box.exec(f"echo {number} > mine; sleep 0.05; cat mine")
                        outcome = "served"
                    finally:
                        del held[box.id]
            except (PoolExhausted, BreakerOpen, SandboxError, asyncio.CancelledError) as error:
                outcome = type(error).__name__
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

        async def kill_some() -> None:
            for _ in range(8):
                await asyncio.sleep(rng.uniform(0.1, 1))
                if held:
                    with contextlib.suppress(APIError):
                        await injector.do(rng.choice(sorted(held)), "kill")

        customers = [asyncio.ensure_future(customer(number)) for number in range(200)]
        for one in rng.sample(customers, 30):
            asyncio.get_running_loop().call_later(rng.uniform(0, 3), one.cancel)
        killing = asyncio.ensure_future(kill_some())
        await asyncio.gather(*customers, return_exceptions=True)
        await killing
        print(outcomes)
        assert outcomes["served"] >= 100
        assert pool.stats().busy == 0


async def _clean(box) -> None:
    await box.files.remove("mine")


async def _hold(pool: SandboxPool, number: int) -> list[Lease]:
    return [await pool.take() for _ in range(number)]


@pytest.fixture
async def private(docker_backend: DockerBackend) -> AsyncIterator[tuple[PrivateEngine, DockerBackend]]:
    """Only needs ``docker_backend`` for the image, and for its runtime directory."""
    require(may_run_one(), "run as root, with dockerd installed")
    async with private_engine() as engine:
        backend = DockerBackend(engine.host)
        await backend.start()
        try:
            yield engine, backend
        finally:
            await backend.close()


async def test_16_the_engine_does_not_answer(private):
    engine, backend = private
    breaker = Breaker(time=asyncio.get_running_loop().time, open=5.0)
    async with pooled(backend, min_idle=1, max_size=4, breaker=breaker) as pool:
        lease = await pool.take()
        await until(lambda: len(idle(pool)) == 1, 20)
        engine.freeze()
        try:
            spare = await pool.take()  # what is there needs no engine
            with pytest.raises((BreakerOpen, PoolExhausted, EngineUnavailable)):
                await pool.take(timeout=200)
            assert (await lease.box.exec("echo works")).stdout == "works\n"
            assert (await spare.box.exec("echo works")).stdout == "works\n"
        finally:
            engine.thaw()
        lease.release()
        spare.release()
        await until(lambda: len(idle(pool)) == 1, 120)


async def test_17_the_engine_restarts_and_everything_dies(private):
    engine, backend = private
    async with pooled(backend, min_idle=3, max_size=5) as pool:
        lease = await pool.take()
        await until(lambda: len(idle(pool)) == 3, 30)
        before = {lease.box.id, *idle(pool)}
        await engine.stop()
        with pytest.raises(SandboxError):
            await lease.box.exec("true")
        assert not idle(pool)
        await engine.start()
        lease.release()
        took = await until(lambda: len(idle(pool)) == 3, 120)
        print(f"filled again {took:.1f} s after the engine's return")
        assert not before & set(idle(pool))
        async with pool.acquire() as box:
            assert (await box.exec("true")).ok
