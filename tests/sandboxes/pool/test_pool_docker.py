"""The pool on a real engine: containers are killed and paused, agents slowed down, engines stopped.

Time limits are the documented ones times ``PATIENCE``, for busy machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import docker
import psutil
import pytest
from docker.errors import APIError
from private_engine import PrivateEngine, may_run_one, private_engine
from relay import EngineRelay, engine_relay
from requiring import require

from agentkit.errors import BreakerOpen, PoolExhausted, ProtocolError, SandboxError, SandboxLost, StartTimeout
from agentkit.sandboxes import diagnosis, paths
from agentkit.sandboxes.agent import protocol
from agentkit.sandboxes.backends.docker import options as docker_options
from agentkit.sandboxes.backends.docker.backend import DockerBackend
from agentkit.sandboxes.backends.docker.engine import DockerEngine
from agentkit.sandboxes.pool.breaker import Breaker
from agentkit.sandboxes.pool.decisions import CRASH_LOOP
from agentkit.sandboxes.pool.health import HealthPolicy
from agentkit.sandboxes.pool.pool import SandboxPool
from agentkit.sandboxes.reaper.labels import user_labels
from agentkit.sandboxes.recovery.supervisor import Supervisor
from agentkit.sandboxes.sandbox import Sandbox
from agentkit.sandboxes.spec import SandboxSpec

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE = float(os.environ.get("AGENTKIT_TEST_PATIENCE", "10"))
SPEC = SandboxSpec(start_timeout=60 * PATIENCE)


class Injector:
    """Injects faults into containers."""

    def __init__(self, host: str) -> None:
        self._client = docker.DockerClient(host, timeout=60)

    async def do(self, id: str, what: str) -> None:
        await asyncio.to_thread(lambda: getattr(self._client.containers.get(id), what)())

    async def agent(self, id: str) -> int:
        """Return the process id of the agent on the host."""
        require(os.geteuid() == 0, "run as root: the case signals a process in a sandbox")
        return await asyncio.to_thread(lambda: self._client.containers.get(id).attrs["State"]["Pid"])

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
        await asyncio.wait_for(pool.wait_filled(), 60 * PATIENCE)
        yield pool
    assert pool.stats().size == pool.stats().removing == 0
    assert pool.stats().counters.left_behind == 0


def idle(pool: SandboxPool) -> list[str]:
    """Return the ids of idle sandboxes, including those under a check."""
    return [box.id for box in pool.sandboxes("idle", "checking")]


async def until(condition: Callable[[], bool], within: float) -> float:
    """Return the seconds until ``condition`` holds; fail after ``within`` seconds times ``PATIENCE``."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not condition():
        assert loop.time() - start <= within * PATIENCE, f"not within {within} s (times {PATIENCE:g})"
        await asyncio.sleep(0.01)
    return loop.time() - start


@pytest.mark.fault(1)
async def test_01_killed_while_idle(docker_backend, injector):
    async with pooled(docker_backend, min_idle=2, max_size=3) as pool:
        victim = idle(pool)[0]
        await injector.do(victim, "kill")
        print(f"noticed after {await until(lambda: victim not in idle(pool), 0.5):.3f} s")
        print(f"replaced after {await until(lambda: len(idle(pool)) == 2, 5):.3f} s")
        async with pool.acquire() as box:
            assert box.id != victim
            assert (await box.exec("true")).ok


@pytest.mark.fault(2)
async def test_02_killed_during_a_command(docker_backend, injector, monkeypatch):
    monkeypatch.setattr(diagnosis, "SETTLE_TIME", 0.5 * PATIENCE)
    async with (
        pooled(docker_backend, min_idle=1, max_size=3) as pool,
        Supervisor(pool, recovery="replay").run() as box,
        pool.acquire() as other,
    ):
        await box.exec("echo kept > log")
        work = asyncio.ensure_future(box.exec("echo part; sleep 600", timeout=900))
        await asyncio.sleep(1)
        await injector.do(box.status.id, "kill")
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(work, 1 * PATIENCE)
        told = caught.value.details
        assert (told["reason"], told["exit_code"], told["stdout"]) == ("exited", 137, b"part\n")
        assert isinstance(told["log_tail"], str)
        assert (await other.exec("true")).ok
        assert await asyncio.wait_for(box.read("log"), 10 * PATIENCE) == b"kept\n"


BOMB = """
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.1)
"""


@pytest.mark.fault(8)
async def test_08_full_of_processes_while_idle(docker_backend):
    async def leave_it(box: Sandbox) -> None:
        """A reset that leaves processes running."""

    health = HealthPolicy(canary_interval=3)
    async with pooled(docker_backend, min_idle=1, max_size=2, max_uses=9, reset=leave_it, health=health) as pool:
        async with pool.acquire() as box:
            await box.exec(f"setsid python3 -c '{BOMB}' > /dev/null 2>&1 &")
            victim = box.id
        await until(lambda: victim not in idle(pool) and not pool.stats().removing and bool(idle(pool)), 30)
        assert pool.stats().counters.retired.keys() & {"canary failed"} or any(
            reason.startswith("pids") for reason in pool.stats().counters.retired
        )
        async with pool.acquire() as box:
            assert box.id != victim
            assert (await box.exec("true")).ok


@pytest.mark.fault(11)
async def test_11_paused_by_others(docker_backend, injector):
    async with pooled(docker_backend, min_idle=1, max_size=2) as pool:
        async with pool.acquire() as lease:
            await until(lambda: bool(idle(pool)), 10)
            victim = idle(pool)[0]
            await injector.do(victim, "pause")
            print(f"noticed after {await until(lambda: victim not in idle(pool), 5):.3f} s")
            # One in use: the waiting call fails, and release and close work.
            work = asyncio.ensure_future(lease.exec("sleep 600", timeout=900))
            await asyncio.sleep(0.5)
            await injector.do(lease.id, "pause")
            with pytest.raises(SandboxLost) as caught:
                await asyncio.wait_for(work, 5 * PATIENCE)
            assert caught.value.details["reason"] in ("frozen", "hung")
        await until(lambda: bool(idle(pool)) and victim not in idle(pool), 20)


@pytest.mark.fault(12)
async def test_12_the_agent_is_stopped(docker_backend, injector):
    async with pooled(docker_backend, min_idle=2, max_size=3) as pool:
        lease = await pool.acquire()
        await until(lambda: len(idle(pool)) == 2, 10)
        victim = idle(pool)[0]
        work = asyncio.ensure_future(lease.box.exec("sleep 600", timeout=900))
        for id in (victim, lease.box.id):
            os.kill(await injector.agent(id), signal.SIGSTOP)
        async with pool.acquire() as box:
            assert box.id != victim  # checked before it is handed out
            await until(lambda: victim not in idle(pool), 5)
            await until(lambda: lease.failure == "hung", 5)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(work, 1 * PATIENCE)
        lease.release()
        await until(lambda: len(idle(pool)) == 2 and not pool.stats().removing, 20)


@pytest.mark.fault(13)
async def test_13_the_agent_dies(docker_backend, injector):
    async with (
        pooled(docker_backend, min_idle=1, max_size=3) as pool,
        Supervisor(pool, recovery="replay").run() as box,
    ):
        await until(lambda: bool(idle(pool)), 10)
        victim = idle(pool)[0]
        os.kill(await injector.agent(victim), signal.SIGKILL)
        print(f"noticed after {await until(lambda: victim not in idle(pool), 0.05):.3f} s")
        await box.exec("echo kept >> log")
        work = asyncio.ensure_future(box.exec("echo half >> log; sleep 600", timeout=900))
        await asyncio.sleep(1)
        os.kill(await injector.agent(box.status.id), signal.SIGKILL)
        with pytest.raises(SandboxLost) as caught:
            await asyncio.wait_for(work, 1 * PATIENCE)
        assert caught.value.side_effects == "maybe"
        assert await asyncio.wait_for(box.read("log"), 10 * PATIENCE) == b"kept\n"  # the call in flight is not repeated


@pytest.mark.fault(14)
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
            # Set aside for slowness or replaced after a failed command; the others are not affected.
            await until(lambda: victim not in idle(pool) and pool.stats().idle <= 7, 25)
            assert pool.stats().degraded <= 1
            async with pool.acquire() as box:
                assert box.id != victim
        finally:
            slowing.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGCONT)


@pytest.mark.fault(22)
async def test_22_crash_loop_of_a_supervised_sandbox(docker_backend, injector):
    async with pooled(docker_backend, min_idle=1, max_size=3) as pool, Supervisor(pool).run() as box:
        crashes = 0
        while box.status.observed != "failed":
            if box.status.observed == "running":
                await injector.do(box.status.id, "kill")
                crashes += 1
                await until(lambda: box.status.observed != "running", 5)
            await asyncio.sleep(0.02)
        assert crashes == 4  # the sandbox, and three restarts
        assert "crash loop" in box.status.cause
        with pytest.raises(SandboxLost, match="crash loop"):
            await box.exec("true")
        assert pool.stats().breaker == "closed"  # the engine has no fault
        used = time.process_time()
        await asyncio.sleep(3)
        assert time.process_time() - used < 0.5  # no busy loop


@pytest.mark.fault(22)
async def test_22_crash_loop_of_idle_sandboxes(docker_backend, injector):
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
            await until(lambda: pool.stats().failures > CRASH_LOOP, 60)
            with pytest.raises(PoolExhausted, match=r"died at once, the last: ak-.*: (exited|agent_dead)\. The"):
                await pool.acquire()
            assert pool.stats().breaker == "closed"
            before, used = pool.stats().counters.created, time.process_time()
            await asyncio.sleep(12)
            assert pool.stats().counters.created - before <= 1
            assert time.process_time() - used < 1.0  # no busy loop
        finally:
            stop.set()
            await crashing
        await until(lambda: len(idle(pool)) == 2, 60)


async def test_all_idle_sandboxes_are_killed_at_once(docker_backend, injector):
    async with pooled(docker_backend, min_idle=4, max_size=8) as pool:
        await until(lambda: len(idle(pool)) == 4, 60)
        await asyncio.gather(*(injector.do(id, "kill") for id in idle(pool)))
        await until(lambda: not idle(pool), 5)
        start = asyncio.get_running_loop().time()
        (await pool.acquire(timeout=2 * PATIENCE)).release()
        print(f"acquired after {asyncio.get_running_loop().time() - start:.1f} s")
        print(f"full after {await until(lambda: len(idle(pool)) == 4, 10):.1f} s")
        assert pool.stats().breaker == "closed"


@pytest.mark.fault(23)
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
        assert sum(outcomes.values()) == 200
        assert outcomes["served"] >= 100
        assert pool.stats().busy == 0


async def _clean(box) -> None:
    await box.files.remove("mine")


@pytest.fixture
async def relayed(docker_backend: DockerBackend, tmp_path: Path) -> AsyncIterator[tuple[EngineRelay, DockerBackend]]:
    """The engine behind a relay that can refuse and stall."""
    async with engine_relay(tmp_path, docker_backend.engine.socket) as relay:
        backend = DockerBackend(relay.host)
        await backend.start()
        try:
            yield relay, backend
        finally:
            await backend.close()


LIAR = """
import os, socket, sys
nonce = open(sys.argv[1] + "/nonce", "rb").read()
(name,) = [name for name in os.listdir(sys.argv[1]) if name.endswith(".sock")]
host = socket.socket(socket.AF_UNIX)
host.connect(sys.argv[1] + "/" + name)
host.sendall(bytes.fromhex(sys.argv[2]).replace(b"N" * 32, nonce))
while True:  # one answer to each frame
    head = host.recv(9, socket.MSG_WAITALL)
    if len(head) < 9:
        break
    host.recv(int.from_bytes(head[:4], "big"), socket.MSG_WAITALL)
    if head[4] != 2:
        host.sendall(bytes.fromhex(sys.argv[3]).replace(b"IDID", head[5:]))
"""
_DONE = protocol.encode(protocol.Kind.DONE, int.from_bytes(b"IDID", "big"), protocol.pack(0, 0, 0, 0.1, b"", b""))
LIES = {
    "garbage": b"\xff" * 1000,
    "half a frame": _DONE[:-1],
    "an excessive length": b"\xff\xff\xff\xff" + _DONE[4:],
    "an answer twice": _DONE * 2,
    "endless output": protocol.encode(protocol.Kind.OUTPUT, int.from_bytes(b"IDID", "big"), b"x" * 10_000) * 3,
}


@pytest.mark.fault(15)
@pytest.mark.parametrize("lie", LIES)
async def test_15_the_agent_sends_invalid_frames(docker_backend, monkeypatch, lie):
    def pretend(nonce: bytes) -> None:
        hello = protocol.encode(protocol.Kind.HELLO, 0, protocol.pack(protocol.VERSION, nonce, b"boot"))
        main = ["python3", "-I", "-S", "-c", LIAR, paths.MOUNT, hello.hex(), LIES[lie].hex()]
        monkeypatch.setattr(docker_options, "MAIN", tuple(main))

    pretend(b"N" * 32)
    box = await Sandbox.create(SPEC, backend=docker_backend)
    before = psutil.Process().memory_info().rss
    if lie == "an answer twice":
        assert (await box.exec("true")).ok  # the second one is an error
    with pytest.raises((ProtocolError, SandboxLost)):
        await box.exec("true", timeout=1, output_limit=10_000)
    assert box.loss is not None
    assert psutil.Process().memory_info().rss - before < 32 << 20
    await box.close()
    if lie == "garbage":
        pretend(b"W" * 32)  # a wrong nonce
        with pytest.raises(StartTimeout, match="nonce is wrong"):
            await Sandbox.create(SPEC, backend=docker_backend, start_timeout=PATIENCE)


@pytest.mark.fault(16)
@pytest.mark.parametrize("how", ["refuses", "stalls"])
async def test_16_the_engine_does_not_answer(relayed, how, monkeypatch):
    relay, backend = relayed
    monkeypatch.setitem(
        DockerEngine.call.__kwdefaults__, "timeout", 2.0 * PATIENCE
    )  # of each call, for all of the test
    breaker = Breaker(time=asyncio.get_running_loop().time, open=3.0)
    async with pooled(backend, min_idle=2, max_size=14, breaker=breaker) as pool:
        lease = await pool.acquire()
        await until(lambda: len(idle(pool)) == 2, 20)
        await relay.refuse() if how == "refuses" else relay.stall()
        held = [lease, await pool.acquire(), await pool.acquire()]  # idle sandboxes need no engine
        takers = [asyncio.ensure_future(pool.acquire()) for _ in range(10)]
        outcomes = await asyncio.wait_for(asyncio.gather(*takers, return_exceptions=True), 60 * PATIENCE)
        assert {type(outcome) for outcome in outcomes} == {BreakerOpen}
        assert pool.stats().counters.create_failures <= 10
        start = asyncio.get_running_loop().time()
        with pytest.raises(BreakerOpen):
            await pool.acquire()
        assert asyncio.get_running_loop().time() - start < 0.1 * PATIENCE
        for one in held:
            assert (await one.box.exec("echo works")).stdout == "works\n"
        await relay.open()
        for one in held:
            one.release()
        await until(lambda: len(idle(pool)) == 2 and pool.stats().breaker == "closed", 60)


@pytest.mark.fault(18)
async def test_18_events_are_lost(relayed, injector):
    relay, backend = relayed
    # Without pings and commands, only the comparison with the engine's list can detect it.
    health = HealthPolicy(ping_interval=600, canary_interval=600)
    async with pooled(backend, min_idle=3, max_size=4, health=health) as pool:
        relay.deaf = True
        await relay.cut()
        await asyncio.sleep(3)  # the end of the event stream causes a comparison, its silence does not
        before = idle(pool)
        await injector.do(before[0], "pause")
        print(f"found after {await until(lambda: before[0] not in idle(pool), 17):.1f} s")
        await injector.do(before[1], "kill")
        await until(lambda: before[1] not in idle(pool), 0.5)
        await until(lambda: len(idle(pool)) == 3 and not pool.stats().removing, 20)
        assert before[2] in idle(pool)  # running sandboxes are not touched
        assert set(idle(pool)) == {one.id for one in await backend.list(user_labels(pool.labels))}


@pytest.fixture
async def private(docker_backend: DockerBackend) -> AsyncIterator[tuple[PrivateEngine, DockerBackend]]:
    """A private engine; ``docker_backend`` provides the image and the runtime directory."""
    require(may_run_one(), "run as root, with dockerd installed")
    async with private_engine() as engine:
        backend = DockerBackend(engine.host)
        await backend.start()
        try:
            yield engine, backend
        finally:
            await backend.close()


@pytest.mark.fault(17)
async def test_17_the_engine_restarts_and_everything_dies(private):
    engine, backend = private
    async with pooled(backend, min_idle=3, max_size=5) as pool:
        lease = await pool.acquire()
        await until(lambda: len(idle(pool)) == 3, 30)
        before = {lease.box.id, *idle(pool)}
        await engine.stop()
        with pytest.raises(SandboxError):
            await lease.box.exec("true")
        assert not idle(pool)
        await engine.start()
        lease.release()
        at_once = []
        took = await until(lambda: (at_once.append(pool.stats().creating), len(idle(pool)) == 3)[1], 120)
        assert max(at_once) <= max(2, os.cpu_count() or 2)
        print(f"filled {took:.1f} s after the restart of the engine")
        assert not before & set(idle(pool))
        async with pool.acquire() as box:
            assert (await box.exec("true")).ok
