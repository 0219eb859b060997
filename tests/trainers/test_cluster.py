"""Roles behave equally in this process and as actors, and an actor that dies leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from cluster_roles import PickyError
from processes import gone, runs

from agentkit.errors import ConfigError, EngineError, RoleError
from agentkit.trainers.cluster import place
from agentkit.trainers.cluster.placement import RolePlan
from agentkit.trainers.inference.base import Sampling

# A busy machine needs minutes to start Ray and the processes of its actors.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

Place = Callable[..., Awaitable[Any]]

PROBE, TORCH = "cluster_roles:Probe", "cluster_roles:Torch"


@pytest.fixture(scope="module")
def limits(ray_cluster: Any) -> Any:
    """The module with the time limits of roles."""
    from agentkit.trainers.cluster import ranks

    return ranks


@contextlib.asynccontextmanager
async def placing(ray_cluster: Any) -> AsyncIterator[Place]:
    """``place`` in actors; roles are closed at the end, and their processes must have ended."""
    proxies: list[Any] = []
    async with contextlib.AsyncExitStack() as reserved:

        async def as_actor(factory: str = PROBE, ranks: int = 1, **kwargs: Any) -> Any:
            plan = RolePlan("probe", ({"CPU": 0.01},) * ranks, "ranks")
            slots = await reserved.enter_async_context(ray_cluster.reserve_plans([plan]))
            proxy: Any = await place(factory, slots=slots["probe"], name="probe", **kwargs)
            proxies.append(proxy)
            return proxy

        try:
            yield as_actor
        finally:
            for proxy in proxies:
                await proxy.close()
                assert not proxy.alive()
                for pid in proxy.pids:
                    assert not psutil.pid_exists(pid)


@pytest_asyncio.fixture(loop_scope="module")
async def placed(ray_cluster: Any) -> AsyncIterator[Place]:
    async with placing(ray_cluster) as as_actor:
        yield as_actor


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_probe(ray_cluster: Any) -> AsyncIterator[Any]:
    async with placing(ray_cluster) as as_actor:
        yield await as_actor()


@pytest_asyncio.fixture(params=["inline", "actor"], loop_scope="module")
async def probe(request: pytest.FixtureRequest, shared_probe: Any) -> Any:
    """A role without history; the actor is the same one for all tests."""
    if request.param == "inline":
        return await place(PROBE)
    await shared_probe.reset()
    return shared_probe


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


class TestBothPlacements:
    async def test_arguments_and_results_are_those_of_the_call(self, probe: Any) -> None:
        sampling = Sampling(max_tokens=3, stop_ids=(1, 2))
        assert await probe.echo(1, "é", None, sampling=sampling) == ((1, "é", None), {"sampling": sampling})

    async def test_thousands_of_calls_are_inside_at_the_same_time(self, probe: Any) -> None:
        assert set(await asyncio.gather(*(probe.meet(3000) for _ in range(3000)))) == {3000}

    async def test_calls_begin_in_the_order_in_which_they_were_made(self, probe: Any) -> None:
        delays = np.random.default_rng(0).uniform(0, 0.02, 300)

        async def burst(start: int) -> None:
            await asyncio.sleep(start / 1e5)  # several batches
            await asyncio.gather(*(probe.note(start + i, float(delay)) for i, delay in enumerate(delays)))

        await asyncio.gather(*(burst(300 * number) for number in range(5)))
        assert await probe.notes() == list(range(1500))

    async def test_cancelling_a_call_cancels_the_coroutine(self, probe: Any) -> None:
        tasks = [asyncio.create_task(probe.wait_for_cancel()) for _ in range(3)]
        await asyncio.sleep(0)
        assert await probe.notes() == ["waiting"] * 3
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        # The next call already sees the effect.
        assert await probe.notes() == ["waiting"] * 3 + ["cancelled"]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(probe.wait_for_cancel(), 0.05)
        assert (await probe.notes()).count("cancelled") == 2
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (await probe.notes()).count("cancelled") == 4

    async def test_a_call_cancelled_before_it_is_sent_does_no_harm(self, probe: Any) -> None:
        task = asyncio.create_task(probe.wait_for_cancel())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await probe.notes()).count("waiting") == (await probe.notes()).count("cancelled")

    async def test_errors_of_the_package_keep_type_and_attributes(self, probe: Any) -> None:
        with pytest.raises(PickyError, match="code 42") as picky:
            await probe.fail("picky")
        assert picky.value.code == 42
        with pytest.raises(EngineError, match="too long") as engine:
            await probe.fail("engine")
        assert engine.value.retryable
        with pytest.raises(EngineError, match="has a lambda"):
            await probe.fail("unpicklable")
        assert await probe.echo() == ((), {}), "an error ends a call, not the role"

    @pytest.mark.parametrize("shape", [(0,), (7,), (33_000,), (1200, 1300)])
    async def test_arrays_of_any_size_arrive_equal_and_writable(self, probe: Any, shape: tuple[int, ...]) -> None:
        array = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
        (args, kwargs) = await probe.echo(array, other={"ids": array.view(np.int32)})
        np.testing.assert_array_equal(args[0], array)
        np.testing.assert_array_equal(kwargs["other"]["ids"], array.view(np.int32))
        assert args[0].flags.writeable

    async def test_a_method_that_does_not_exist_is_an_attribute_error(self, probe: Any) -> None:
        with pytest.raises(AttributeError):
            probe.generat  # noqa: B018
        assert not hasattr(probe, "missing")

    async def test_a_wrong_argument_fails_only_its_call(self, probe: Any) -> None:
        with pytest.raises((TypeError, RoleError), match="unexpected keyword argument 'nope'"):
            await probe.meet(1, nope=2)
        assert await probe.meet(1) == 1


class TestActor:
    async def test_only_public_coroutine_methods_exist(self, shared_probe: Any) -> None:
        for name in ("helper", "_private", "kind", "__len__"):
            assert not hasattr(shared_probe, name)

    async def test_other_errors_become_role_errors_with_the_whole_traceback(self, shared_probe: Any) -> None:
        with pytest.raises(RoleError, match="ValueError: outer") as error:
            await shared_probe.fail("other")
        for part in (str(shared_probe.pids[0]), "KeyError: 'inner'", "cluster_roles.py", "in fail"):
            assert part in str(error.value)

    async def test_a_role_that_cancels_itself_does_not_cancel_its_caller(self, shared_probe: Any) -> None:
        with pytest.raises(RoleError, match="cancelled its own call of fail"):
            await shared_probe.fail("cancel")

    async def test_unpicklable_values_fail_only_their_call(self, shared_probe: Any) -> None:
        await shared_probe.reset()
        waiting = asyncio.create_task(shared_probe.meet(2))
        with pytest.raises(Exception, match="lambda"):
            await shared_probe.echo(lambda: None)
        with pytest.raises(RoleError, match="result of unpicklable cannot be sent"):
            await shared_probe.unpicklable()
        assert await shared_probe.meet(2) == 2
        assert await waiting == 2

    async def test_ctrl_c_does_not_reach_the_role(self, shared_probe: Any) -> None:
        assert os.getpgid(shared_probe.pids[0]) != os.getpgid(0)

    async def test_kill_9_fails_pending_and_later_calls_with_the_whole_story(self, placed: Place) -> None:
        probe = await placed()
        grandchild = await probe.spawn()
        await probe.say("last words")
        calls = [asyncio.create_task(probe.wait_for_cancel()) for _ in range(50)]
        await probe.notes()
        (pid,) = probe.pids
        os.kill(pid, signal.SIGKILL)
        for result in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30):
            assert isinstance(result, RoleError)
            for part in ("probe", str(pid), "unexpectedly exits", "50 call(s) of wait_for_cancel", "last words"):
                assert part in str(result)
        assert not psutil.pid_exists(pid)
        for _ in range(2):
            with pytest.raises(RoleError, match="unexpectedly exits"):
                await probe.notes()
            await probe.close()
        await until(lambda: not runs(grandchild))

    @pytest.mark.parametrize("how", ["blocked", "frozen"])
    async def test_a_process_that_hangs_is_found_by_its_silence(
        self, placed: Place, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        from agentkit.trainers.cluster import channel
        from agentkit.trainers.cluster.host import HEARTBEAT_S

        monkeypatch.setattr(channel, "SILENCE_S", HEARTBEAT_S + 3)
        probe = await placed()
        assert await probe.echo() == ((), {})
        calls = [asyncio.create_task(probe.wait_for_cancel())]
        if how == "blocked":
            calls.append(asyncio.create_task(probe.block(600)))
        else:
            os.kill(probe.pids[0], signal.SIGSTOP)
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, RoleError)
            assert f"gave no sign of life for 8 s during {len(calls)} call(s) of" in str(result)
        assert not probe.alive()
        assert not psutil.pid_exists(probe.pids[0])

    async def test_an_error_of_a_constructor_is_raised_and_leaves_nothing(
        self, placed: Place, limits: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = _hosts()
        with pytest.raises(PickyError, match="code 7"):
            await placed(spoil="agentkit")
        with pytest.raises(RoleError, match=r"has ended[\s\S]*no such driver"):
            await placed(spoil="exit")
        with pytest.raises(RoleError, match="Nothing"):
            await placed("cluster_roles:Nothing")
        monkeypatch.setattr(limits, "START_S", 5)
        with pytest.raises(RoleError, match="was not constructed within 5 s"):
            await placed(spoil="hang")
        end = time.monotonic() + 20
        while left := _hosts() - before:
            assert time.monotonic() < end, left
            await asyncio.sleep(0.2)


def _hosts() -> set[int]:
    """Return the process ids of the actors of this process's cluster."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::Host" in " ".join(process.cmdline()[:1]):
                found.add(process.pid)
    return found


class TestClose:
    async def test_close_calls_the_roles_close_once(self, placed: Place, tmp_path: Path) -> None:
        probe = await placed()
        await probe.prepare_close(str(tmp_path / "closed"))
        pending = asyncio.create_task(probe.wait_for_cancel())
        await asyncio.gather(*(probe.close() for _ in range(5)))
        await probe.close()
        assert (tmp_path / "closed").read_text() == "closed\n"
        for call in (pending, probe.echo()):
            with pytest.raises(RoleError, match="probe is closed"):
                await call

    async def test_a_role_that_hangs_is_killed_at_once(self, placed: Place) -> None:
        probe = await placed()
        hanging = asyncio.create_task(probe.block(600))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        await probe.kill()
        assert time.monotonic() - began < 20
        assert not runs(probe.pids[0])
        with pytest.raises(RoleError, match="probe was killed"):
            await hanging
        assert not probe.lost.done(), "the caller wanted it"

    async def test_a_close_that_hangs_or_raises_ends_the_process_all_the_same(
        self, placed: Place, limits: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(limits, "CLOSE_S", 0.2)
        probe = await placed()
        await probe.prepare_close("hang")
        await probe.close()
        assert "did not close within 0.2 s" in caplog.text
        assert not runs(probe.pids[0])
        monkeypatch.undo()
        probe = await placed()
        await probe.prepare_close("raise")
        with pytest.raises(PickyError, match="code 1"):
            await probe.close()
        assert not runs(probe.pids[0])


class TestRanks:
    async def test_ranks_form_a_group_that_works_and_a_cancelled_call_keeps(self, placed: Place) -> None:
        role = await placed(TORCH, ranks=2)
        assert len(set(role.pids)) == 2
        assert await role.total(10.0) == 30.0
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(role.wait(), 0.2)
        assert await role.total(1.0) == 3.0
        assert await role.mean_of(np.ones(100_000)) == 1.0, "arguments in the object store"

    @pytest.mark.parametrize(
        ("rank", "what", "error"), [(1, "raise", PickyError), (1, "die", RoleError), (0, "die", RoleError)]
    )
    async def test_one_failing_rank_ends_the_group_though_others_are_stuck(
        self, placed: Place, limits: Any, monkeypatch: pytest.MonkeyPatch, rank: int, what: str, error: type[Exception]
    ) -> None:
        monkeypatch.setattr(limits, "GRACE_S", 0.3)
        probe = await placed(ranks=2)
        identity = await probe.identity()
        assert (identity["rank"], identity["world_size"], identity["pid"]) == (0, 2, probe.pids[0])
        with pytest.raises(error, match=f"code {rank}" if what == "raise" else f"rank {rank} .*has ended"):
            await probe.only_rank(rank, what)
        assert not any(runs(pid) for pid in probe.pids), "the error comes when the group has ended"
        with pytest.raises(RoleError, match=f"rank {rank}"):
            await probe.identity()

    async def test_a_rank_that_dies_between_calls_ends_the_group(self, placed: Place) -> None:
        probe = await placed(ranks=2)
        os.kill(probe.pids[1], signal.SIGKILL)
        await until(lambda: not any(runs(pid) for pid in probe.pids))
        with pytest.raises(RoleError, match=r"rank 1 .*unexpectedly exits"):
            await probe.identity()


class TestReservation:
    async def test_a_plan_that_does_not_fit_is_refused_at_once(self, ray_cluster: Any) -> None:
        started = time.monotonic()
        plan = RolePlan("engine", ({"CPU": 0.01, "gpu_like": 1.0},) * 3, "engine")
        with pytest.raises(ConfigError, match=r"needs 3 gpu_like .* the cluster has 0 on 1 node"):
            async with ray_cluster.reserve_plans([plan]):
                pass
        assert time.monotonic() - started < 2

    async def test_what_others_use_is_named_and_nothing_stays_reserved(
        self, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        large = RolePlan("learner", ({"CPU": 1.5},), "learner.ranks")
        small = RolePlan("engine", ({"CPU": 0.25},), "engine")
        async with ray_cluster.reserve_plans([large]):
            monkeypatch.setattr(ray_cluster, "RESERVE_S", 1.0)
            with pytest.raises(ConfigError, match=r"needs 1\.75 CPU \(free: [01]\.\d+\).*within 1 s"):
                async with ray_cluster.reserve_plans([small, large]):
                    pass
        monkeypatch.undo()
        async with ray_cluster.reserve_plans([small, large]) as slots:
            assert [len(slots[role]) for role in ("engine", "learner")] == [1, 1]


class TestDeathOfTheDriver:
    SCRIPT = textwrap.dedent("""
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[1])
        from agentkit.trainers.cluster import place, ray_cluster
        from agentkit.trainers.cluster.placement import RolePlan
        import ray

        async def main():
            async with ray_cluster.reserve_plans([RolePlan("probe", ({"CPU": 0.5},) * 2, "ranks")]) as slots:
                probe = await place("cluster_roles:Probe", slots=slots["probe"])
                child = await probe.spawn()
                directory = ray._private.worker._global_node.get_temp_dir_path()
                print(directory, child, *probe.pids, flush=True)
                if sys.argv[2] == "busy":
                    await probe.block(600)
                await asyncio.sleep(600)

        with ray_cluster.local_cluster(2):
            asyncio.run(main())
    """)

    @pytest.mark.parametrize("state", ["idle", "busy"])
    async def test_nothing_remains_after_30_seconds(self, state: str) -> None:
        driver = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", self.SCRIPT, str(Path(__file__).parent), state), stdout=subprocess.PIPE
        )
        try:
            assert driver.stdout is not None
            directory, *pids = (await asyncio.wait_for(driver.stdout.readline(), 600)).decode().split()
            started = {*map(int, pids), *(p.pid for p in psutil.Process(driver.pid).children(recursive=True))}
            assert len(started) > 6, "actors and Ray's own processes"
            await asyncio.sleep(0.5)
            driver.kill()
            await driver.wait()
            deadline = time.monotonic() + 30
            for pid in started:
                assert gone(pid, within=max(0.0, deadline - time.monotonic())), psutil.Process(pid)
            await until(lambda: not Path(directory).exists())
        finally:
            with contextlib.suppress(ProcessLookupError):
                driver.kill()
