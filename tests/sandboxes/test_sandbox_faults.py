"""A single sandbox under all faults of the scripted back end, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentkit.errors import (
    AgentkitError,
    EngineUnavailable,
    ImageError,
    InvalidTransition,
    SandboxError,
    SandboxExpired,
    SandboxLost,
    StartTimeout,
)
from agentkit.sandboxes import Sandbox
from agentkit.sandboxes.sandbox import ANSWER_GRACE
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend
from agentkit.sandboxes.testing.faults import Fault

Scenario = Callable[[FakeBackend], Coroutine[Any, Any, None]]


def simulate(scenario: Scenario, *faults: Fault) -> None:
    async def main() -> None:
        backend = FakeBackend(seed=1, faults=faults)
        await backend.start()
        await scenario(backend)
        assert backend.boxes == {}
        await backend.close()

    virtual_time.run(main(), limit=100_000)


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    ("fault", "error", "phase"),
    [
        (Fault("create", "fail", phase="pull"), ImageError, None),
        (Fault("create", "hang", phase="pull"), ImageError, None),
        (Fault("create", "fail", phase="create"), EngineUnavailable, None),
        (Fault("create", "fail", phase="start"), StartTimeout, "start"),
        (Fault("create", "hang", phase="start"), StartTimeout, "start"),
        (Fault("create", "fail", phase="ready"), StartTimeout, "ready"),
    ],
)
def test_a_failed_creation_names_the_phase_and_leaves_nothing(
    fault: Fault, error: type[SandboxError], phase: str | None
) -> None:
    async def scenario(backend: FakeBackend) -> None:
        with pytest.raises(error) as caught:
            await Sandbox.create(backend=backend)
        assert caught.value.details.get("phase") == phase
        assert backend.boxes == {}
        async with Sandbox.create(backend=backend) as box:
            assert (await box.exec("echo hi")).stdout == "hi\n"

    simulate(scenario, fault)


def test_a_creation_can_be_cancelled_at_any_moment() -> None:
    async def scenario(backend: FakeBackend) -> None:
        for step in range(60):
            task = asyncio.ensure_future(
                Sandbox.create(backend=backend, setup=("sleep", "0.1"), ready=("sleep", "0.1"))
            )
            await asyncio.sleep(step * 0.01)
            task.cancel()
            try:
                box = await task
            except asyncio.CancelledError:
                assert backend.boxes == {}
            else:
                await box.close()

    simulate(scenario)


@pytest.mark.parametrize(("does", "reason"), [("die", "exited"), ("oom", "oom"), ("fail", "agent_dead")])
def test_a_sandbox_is_lost_during_a_command(does: Any, reason: str) -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box, Sandbox.create(backend=backend) as other:
            backend.inject(Fault("exec", does, seconds=1, id=box.id))
            with pytest.raises(SandboxLost) as caught:
                await box.exec("sleep 10")
            assert caught.value.details["reason"] == reason
            assert caught.value.side_effects == "maybe"
            assert (box.state, box.loss) == ("unhealthy", reason)
            assert box.history[-1].cause == f"connection lost: {reason}"
            with pytest.raises(SandboxLost):
                await box.files.read("x")
            assert (await other.exec("echo fine")).ok
            await box.restart()
            assert (box.state, box.generation, box.loss) == ("ready", 2, None)
            assert (await box.exec("echo back")).ok

    simulate(scenario)


@pytest.mark.parametrize(
    ("call", "limit"),
    [
        pytest.param(lambda box: box.exec("true", timeout=0.1), 2.1, id="exec 0.1 s"),
        pytest.param(lambda box: box.exec("true", timeout=2), 4.0, id="exec 2 s"),
        pytest.param(lambda box: box.exec("true", timeout=600), 5.0, id="exec 600 s"),
        pytest.param(lambda box: box.files.read("x"), 5.0, id="read"),
        pytest.param(lambda box: box.files.write("x", b"1" * 100), 5.0, id="write"),
        pytest.param(lambda box: box.stats(), 5.0, id="stats"),
    ],
)
@pytest.mark.parametrize("how", ["mute", "freeze"])
def test_a_silent_agent_counts_as_hung(how: str, call: Any, limit: float) -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            process = await box.spawn("sleep 1000")
            waiting = asyncio.ensure_future(process.wait())
            getattr(backend, how)(box.id)
            start = now()
            with pytest.raises(SandboxLost) as caught:
                await call(box)
            assert now() - start <= limit
            assert caught.value.details["reason"] == "hung"
            assert (box.state, box.loss) == ("unhealthy", "hung")
            with pytest.raises(SandboxLost):
                await waiting  # everything that waits for the sandbox fails
            assert now() - start <= limit
            with pytest.raises(SandboxLost):
                await box.exec("true")
            backend.thaw(box.id)
            assert box.state == "unhealthy"
            await box.restart()
            assert (await box.exec("echo back")).stdout == "back\n"

    simulate(scenario)


@pytest.mark.parametrize("silent", [3.5, 100.0])
def test_a_command_that_is_killed_slowly_is_waited_for_while_its_agent_answers(silent: float) -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            backend.inject(Fault("exec", "slow", seconds=silent))
            start = now()
            if silent < ANSWER_GRACE:
                assert (await box.exec("sleep 0.1", timeout=1)).ok
                assert box.state == "ready"
            else:
                with pytest.raises(SandboxLost, match="did not answer for 11 s") as caught:
                    await box.exec("sleep 0.1", timeout=1)
                assert caught.value.details["reason"] == "agent_dead"
                assert now() - start == pytest.approx(1 + ANSWER_GRACE + 1.9, abs=2)

    simulate(scenario)


def test_a_sandbox_paused_by_its_owner_is_not_lost() -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            process = await box.spawn("sleep 900", timeout=1000)
            with box.watched():
                for seconds in (0.5, 2.9, 3.1, 30.0):
                    await asyncio.sleep(1.7)
                    await box.pause()
                    await asyncio.sleep(seconds)
                    await box.resume()
                    assert box.state == "ready"
                await asyncio.sleep(10)
            await process.kill()
            assert box.loss is None

    simulate(scenario)


def test_a_slow_answer_or_a_late_event_loop_is_not_a_loss() -> None:
    """A delayed event loop, as on a busy host, receives answers late. That is not a failure of the sandbox."""

    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        loop = asyncio.get_running_loop()
        async with Sandbox.create(backend=backend) as box:
            work = asyncio.ensure_future(box.exec("sleep 3", timeout=10))
            backend.mute(box.id)
            for _ in range(8):
                await asyncio.sleep(0.2)
                time.sleep(0.4)  # noqa: ASYNC251  (the loop is blocked on purpose)
            assert not work.done()
            assert box.state == "busy"
            backend.unmute(box.id)
            assert (await work).ok
        assert loop.is_running()
        await backend.close()

    asyncio.run(main())


def test_a_ping_distinguishes_silence_from_loss() -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            backend.slow(box.id, 0.5)
            assert await box.ping(2) == pytest.approx(0.5, abs=0.01)
            backend.mute(box.id)
            with pytest.raises(asyncio.TimeoutError):
                await box.ping(2)
            backend.unmute(box.id)
            assert box.state == "ready"
            backend.cut(box.id)
            with pytest.raises(SandboxLost):
                await box.ping(2)

    simulate(scenario)


def test_processes_that_survive_their_kill_taint_the_sandbox() -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            backend.inject(Fault("exec", "taint", id=box.id))
            result = await box.exec("sleep 1000", timeout=1)
            assert (result.timed_out, result.tainted) == (True, True)
            assert box.info.tainted
            assert (box.state, box.loss) == ("unhealthy", "tainted")
            for refused in (box.exec("true"), box.spawn("true"), box.shell(), box.files.read("x"), box.snapshot()):
                with pytest.raises(SandboxLost) as caught:
                    await refused
                assert caught.value.details["reason"] == "tainted"
            await box.restart()
            assert not box.info.tainted
            assert (await box.exec("true")).ok

    simulate(scenario)


def test_commands_run_while_the_engine_is_down() -> None:
    async def scenario(backend: FakeBackend) -> None:
        box = await Sandbox.create(backend=backend)
        backend.engine_down()
        assert (await box.exec("echo on")).stdout == "on\n"
        for impossible in (box.pause, box.snapshot, box.logs, lambda: Sandbox.create(backend=backend)):
            with pytest.raises(EngineUnavailable):
                await impossible()
        assert (await box.exec("echo on")).stdout == "on\n"
        with pytest.raises(EngineUnavailable):
            await box.close()
        assert box.state == "stopping"
        backend.engine_up()
        await box.close()
        assert box.state == "removed"

    simulate(scenario)


def test_a_failed_pause_is_undone() -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            backend.inject(Fault("pause", "hang"))
            with pytest.raises(EngineUnavailable):
                await box.pause()
            assert box.state == "ready"
            task = asyncio.ensure_future(box.pause())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await box.exec("echo on")).ok
            await box.pause()
            with pytest.raises(InvalidTransition):
                await box.exec("true")

    simulate(scenario)


def test_an_error_in_the_body_is_not_hidden_by_an_error_of_the_engine() -> None:
    async def scenario(backend: FakeBackend) -> None:
        box = await Sandbox.create(backend=backend)

        async def use() -> None:
            async with box:
                backend.engine_down()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await use()
        backend.engine_up()
        await box.close()

    simulate(scenario)


def test_the_time_to_live_ends_while_the_engine_is_down() -> None:
    async def scenario(backend: FakeBackend) -> None:
        box = await Sandbox.create(backend=backend, ttl=100)
        task = asyncio.ensure_future(box.exec("sleep 1000", timeout=2000))
        await asyncio.sleep(50)
        backend.engine_down()
        await asyncio.sleep(60)
        with pytest.raises(SandboxLost):
            await task
        with pytest.raises(SandboxExpired):
            await box.exec("true")
        assert box.id in backend.boxes
        backend.engine_up()
        await asyncio.sleep(100)
        assert backend.boxes == {}
        assert [item.cause for item in box.history if item.after == "stopping"] == ["time to live ended"]

    simulate(scenario)


def test_extending_races_with_the_end() -> None:
    async def scenario(backend: FakeBackend) -> None:
        for late in (99.0, 99.999, 100.0, 100.001, 101.0):
            box = await Sandbox.create(backend=backend, ttl=100)
            born = now()
            await asyncio.sleep(born + late - now())
            try:
                await box.extend(100)
            except (SandboxExpired, SandboxLost):
                await asyncio.sleep(1)
                assert backend.boxes == {}
            else:
                await asyncio.sleep(99)
                assert (await box.exec("true")).ok
                await asyncio.sleep(2)
                assert backend.boxes == {}

    simulate(scenario)


def test_closing_while_it_restarts() -> None:
    async def scenario(backend: FakeBackend) -> None:
        for delay in (0.0, 0.05, 0.1, 0.2, 0.3):
            for writable in (False, True):
                box = await Sandbox.create(backend=backend, readonly_root=not writable)
                task = asyncio.ensure_future(box.reset())
                await asyncio.sleep(delay)
                await box.close()
                await asyncio.wait({task})
                assert task.cancelled() or task.exception() is None or isinstance(task.exception(), SandboxError)
                assert (box.state, backend.boxes) == ("removed", {})

    simulate(scenario)


def test_a_failed_restart_can_be_repeated() -> None:
    async def scenario(backend: FakeBackend) -> None:
        async with Sandbox.create(backend=backend) as box:
            backend.inject(Fault("restart", "fail"))
            with pytest.raises(StartTimeout):
                await box.restart()
            assert box.state == "unhealthy"
            with pytest.raises(SandboxLost):
                await box.exec("true")
            await box.restart()
            assert (await box.exec("true")).ok

    simulate(scenario)


async def _inject_fault(backend: FakeBackend, rng: random.Random, boxes: list[Sandbox]) -> None:
    """Inject a random fault."""
    present = list(backend.boxes)
    if not present:
        return
    id = rng.choice(present)
    acts: list[Callable[[], object]] = [
        lambda: backend.die(id),
        lambda: backend.oom(id),
        lambda: backend.cut(id),
        lambda: backend.forget(id),
        lambda: backend.freeze(id),
        lambda: backend.mute(id),
        lambda: backend.slow(id, rng.uniform(0, 3)),
        lambda: backend.engine_down(kill=rng.random() < 0.5),
        backend.engine_up,
        lambda: backend.inject(Fault("*", rng.choice(["fail", "slow", "hang", "die"]), seconds=rng.uniform(0, 2))),
    ]
    rng.choice(acts)()
    await asyncio.sleep(rng.uniform(0, 1))


async def _do_something(box: Sandbox, rng: random.Random) -> None:
    work: Callable[[], Coroutine[Any, Any, object]] = rng.choice(
        [
            lambda: box.exec("sleep 0.5", timeout=rng.choice([0.2, 5])),
            lambda: box.files.write("x", "1"),
            lambda: box.restart(),
            lambda: box.pause(),
            lambda: box.resume(),
            lambda: box.extend(20),
        ]
    )
    await work()


async def _use(backend: FakeBackend, rng: random.Random, boxes: list[Sandbox]) -> None:
    """Use sandboxes; only typed errors may occur."""
    for _ in range(6):
        try:
            box = await Sandbox.create(backend=backend, ttl=rng.choice([5, 50, None]))
        except SandboxError:
            await asyncio.sleep(1)
            continue
        boxes.append(box)
        for _ in range(4):
            try:
                await asyncio.wait_for(_do_something(box, rng), rng.choice([0.1, 1, 1000]))
            except (AgentkitError, asyncio.TimeoutError):
                await asyncio.sleep(rng.uniform(0, 1))


def random_faults(seed: int) -> list[tuple[float, str]]:
    """Run users and faults at the same time; return the calls that reached the back end."""

    async def main() -> list[tuple[float, str]]:
        rng = random.Random(seed)
        backend = FakeBackend(seed)
        await backend.start()
        boxes: list[Sandbox] = []
        users = [asyncio.ensure_future(_use(backend, random.Random(rng.random()), boxes)) for _ in range(3)]
        while not all(user.done() for user in users):
            await _inject_fault(backend, rng, boxes)
            await asyncio.sleep(rng.uniform(0, 2))
        for user in users:
            user.result()
        backend.engine_up()
        for fault in backend.rules.faults:
            fault.times = 0
        for box in boxes:
            # A removal that began while the engine hung fails with it; the next one succeeds.
            with contextlib.suppress(EngineUnavailable):
                await box.close()
            await box.close()
            assert box.state == "removed"
        assert backend.boxes == {}
        return [(call.time, call.op) for call in backend.calls]

    return virtual_time.run(main(), limit=100_000)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_faults_leave_nothing_and_raise_only_documented_errors(first: int) -> None:
    for seed in range(first, first + 10):
        random_faults(seed)


def test_the_same_seed_gives_the_same_calls() -> None:
    assert random_faults(3) == random_faults(3)


@pytest.mark.slow
def test_random_faults_over_a_thousand_seeds() -> None:
    for seed in range(1000):
        random_faults(seed)
