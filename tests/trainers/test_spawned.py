"""Roles behave equally in this process and in separate processes, and a process that dies leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cluster_roles import PickyError, Probe, Torch
from processes import runs

from agentkit.errors import ConfigError, EngineError, RoleError
from agentkit.trainers.cluster import spawned as cluster
from agentkit.trainers.cluster.spawned import RemoteRole, place
from agentkit.trainers.inference.base import Sampling

Place = Callable[..., Awaitable[Any]]


@pytest.fixture
async def spawned() -> AsyncIterator[Place]:
    """``place`` in a process; roles are closed after the test, and their processes must have ended."""
    proxies: list[RemoteRole] = []

    async def in_process(factory: Any = Probe, **kwargs: Any) -> Any:
        proxy: Any = await place(factory, placement="process", name="probe", **kwargs)
        assert isinstance(proxy, RemoteRole)
        proxies.append(proxy)
        return proxy

    yield in_process
    for proxy in proxies:
        await proxy.close()
        assert not proxy.alive()
        for pid in proxy.pids:
            assert not psutil.pid_exists(pid)


@pytest.fixture(params=["inline", "process"])
async def probe(request: pytest.FixtureRequest, spawned: Place) -> Any:
    return await place(Probe) if request.param == "inline" else await spawned()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
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
        await asyncio.gather(*(probe.note(i, float(delay)) for i, delay in enumerate(delays)))
        assert await probe.notes() == list(range(300))

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

    @pytest.mark.parametrize("placement", ["inline", "process"])
    async def test_a_factory_may_be_named(self, spawned: Place, placement: str) -> None:
        name = "cluster_roles:Probe"
        probe: Any = await (place(name) if placement == "inline" else spawned(name))
        assert await probe.meet(1) == 1
        with pytest.raises((ImportError, AttributeError, RoleError), match="Nothing"):
            await (place("cluster_roles:Nothing") if placement == "inline" else spawned("cluster_roles:Nothing"))

    async def test_a_method_that_does_not_exist_is_an_attribute_error(self, probe: Any) -> None:
        with pytest.raises(AttributeError):
            probe.generat  # noqa: B018
        assert not hasattr(probe, "missing")

    async def test_a_wrong_argument_fails_only_its_call(self, probe: Any) -> None:
        with pytest.raises((TypeError, RoleError), match="unexpected keyword argument 'nope'"):
            await probe.meet(1, nope=2)
        assert await probe.meet(1) == 1

    async def test_close_calls_the_roles_close(self, probe: Any, tmp_path: Path) -> None:
        await probe.prepare_close(str(tmp_path / "closed"))
        await probe.close()
        assert (tmp_path / "closed").read_text() == "closed\n"


class TestProcess:
    async def test_only_public_coroutine_methods_exist(self, spawned: Place) -> None:
        probe = await spawned()
        for name in ("helper", "_private", "kind", "__len__"):
            assert not hasattr(probe, name)

    async def test_other_errors_become_role_errors_with_the_whole_traceback(self, spawned: Place) -> None:
        probe = await spawned()
        with pytest.raises(RoleError, match="ValueError: outer") as error:
            await probe.fail("other")
        for part in (str(probe.pids[0]), "KeyError: 'inner'", "cluster_roles.py", "in fail"):
            assert part in str(error.value)

    async def test_a_role_that_cancels_itself_does_not_cancel_its_caller(self, spawned: Place) -> None:
        probe = await spawned()
        with pytest.raises(RoleError, match="cancelled its own call of fail"):
            await probe.fail("cancel")

    async def test_unpicklable_values_fail_only_their_call(self, spawned: Place) -> None:
        probe = await spawned()
        waiting = asyncio.create_task(probe.meet(2))
        with pytest.raises(Exception, match="lambda"):
            await probe.echo(lambda: None)
        with pytest.raises(RoleError, match="result of unpicklable cannot be sent"):
            await probe.unpicklable()
        assert await probe.meet(2) == 2
        assert await waiting == 2

    async def test_kill_9_fails_pending_and_later_calls_with_the_whole_story(self, spawned: Place) -> None:
        probe = await spawned()
        calls = [asyncio.create_task(probe.wait_for_cancel()) for _ in range(50)]
        await probe.notes()
        (pid,) = probe.pids
        os.kill(pid, signal.SIGKILL)
        for result in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5):
            assert isinstance(result, RoleError)
            for part in ("probe", str(pid), "SIGKILL", "50 call(s) of wait_for_cancel"):
                assert part in str(result)
        assert not psutil.pid_exists(pid)
        with pytest.raises(RoleError, match="SIGKILL"):
            await probe.notes()
        await probe.close()
        with pytest.raises(RoleError, match="SIGKILL"):
            await probe.notes()

    @pytest.mark.parametrize("with_log", [False, True])
    async def test_an_exit_reports_its_code_and_the_last_output(
        self, spawned: Place, tmp_path: Path, with_log: bool
    ) -> None:
        log = tmp_path / "logs" / "probe.log"
        probe = await spawned(log=log if with_log else None)
        with pytest.raises(RoleError, match=r"exited with code 3[\s\S]*last words"):
            await probe.die(3)
        assert log.exists() == with_log
        assert not with_log or "last words" in log.read_text()

    async def test_a_hung_process_is_found_by_the_call_timeout(self, spawned: Place) -> None:
        probe = await spawned(call_timeout=0.5)
        assert await probe.echo() == ((), {})
        other = asyncio.create_task(probe.wait_for_cancel())
        started = time.monotonic()
        with pytest.raises(RoleError, match=r"did not answer \w+ within 0.5 s"):
            await probe.block(60)
        assert time.monotonic() - started < 3
        with pytest.raises(RoleError):
            await other
        assert not probe.alive()

    async def test_an_error_of_a_constructor_is_raised_and_leaves_nothing(self) -> None:
        before = set(psutil.Process().children(recursive=True))
        with pytest.raises(PickyError, match="code 7"):
            await place(Probe, placement="process", spoil="agentkit")
        with pytest.raises(RoleError, match="ValueError: a bad day"):
            await place(Probe, placement="process", spoil="other")
        with pytest.raises(RoleError, match=r"exited with code 5[\s\S]*no such driver"):
            await place(Probe, placement="process", spoil="exit")
        with pytest.raises(RoleError, match="was not constructed within 1 s"):
            await place(Probe, placement="process", spoil="hang", start_timeout=1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(place(Probe, placement="process", spoil="hang"), 1)
        assert set(psutil.Process().children(recursive=True)) == before

    async def test_a_factory_that_no_other_process_can_import_is_refused(self) -> None:
        class Local(Probe): ...

        for factory in (Local, lambda: Probe()):
            with pytest.raises(ConfigError, match="cannot be imported by name"):
                await place(factory, placement="process")

    async def test_ranks_need_processes(self) -> None:
        with pytest.raises(ConfigError, match="2 ranks need placement 'process'"):
            await place(Probe, ranks=2)

    async def test_ctrl_c_does_not_reach_the_role(self, spawned: Place) -> None:
        probe = await spawned()
        (pid,) = probe.pids
        assert os.getsid(pid) == pid != os.getsid(0)
        for _ in range(3):
            os.kill(pid, signal.SIGINT)
        assert await probe.echo() == ((), {})

    async def test_threads_are_set_before_anything_is_imported(self, spawned: Place) -> None:
        variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        probe = await spawned(threads=3)
        assert await probe.variables(*variables) == ["3"] * 3
        role = await spawned(Torch, threads=3)
        assert await role.threads() == 3

    async def test_threads_inline_are_those_of_this_process(self) -> None:
        import torch

        before = torch.get_num_threads()
        try:
            role = await place(Torch, threads=before + 1)
            assert await role.threads() == torch.get_num_threads() == before + 1
        finally:
            torch.set_num_threads(before)


class TestClose:
    async def test_close_is_idempotent_also_at_the_same_time(self, spawned: Place, tmp_path: Path) -> None:
        probe = await spawned()
        await probe.prepare_close(str(tmp_path / "closed"))
        pending = asyncio.create_task(probe.wait_for_cancel())
        await asyncio.gather(*(probe.close() for _ in range(5)))
        await probe.close()
        assert (tmp_path / "closed").read_text() == "closed\n"
        for call in (pending, probe.echo()):
            with pytest.raises(RoleError, match="probe is closed"):
                await call

    async def test_a_close_that_hangs_or_raises_ends_the_process_all_the_same(
        self, spawned: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(cluster, "CLOSE_S", 0.2)
        probe = await spawned()
        await probe.prepare_close("hang")
        await probe.close()
        assert "did not close within 0.2 s" in caplog.text
        assert not runs(probe.pids[0])
        probe = await spawned()
        await probe.prepare_close("raise")
        with pytest.raises(PickyError, match="code 1"):
            await probe.close()
        assert not runs(probe.pids[0])

    @pytest.mark.parametrize("how", ["close", "kill"])
    async def test_child_processes_end_with_the_role(self, spawned: Place, how: str) -> None:
        probe = await spawned()
        grandchild = await probe.spawn()
        assert runs(grandchild)
        if how == "kill":
            os.kill(probe.pids[0], signal.SIGKILL)
        else:
            await probe.close()
        await until(lambda: not runs(grandchild))

    async def test_nothing_leaks(self, spawned: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cluster, "GRACE_S", 0.1)

        def resources() -> tuple[int, int, int]:
            process = psutil.Process()
            return process.num_fds(), threading.active_count(), len(process.children(recursive=True))

        async def cycle(end: str, **kwargs: Any) -> None:
            probe = await spawned(**kwargs)
            await probe.echo(np.zeros(100_000))
            if end == "kill":
                os.kill(probe.pids[0], signal.SIGKILL)
                with pytest.raises(RoleError):
                    await probe.wait_for_cancel()
                await until(lambda: probe._guard is None)
            else:
                await probe.close()

        await cycle("close")
        before = resources()
        for _ in range(2):
            await cycle("close")
            await cycle("kill")
            await cycle("close", ranks=2)
            await cycle("kill", ranks=2)
        assert resources() == before


class TestDeathOfTheParent:
    SCRIPT = textwrap.dedent("""
        import asyncio, sys
        sys.path.insert(0, sys.argv[1])
        from agentkit.trainers.cluster.spawned import place
        from cluster_roles import Probe

        async def main():
            probe = await place(Probe, placement="process", ranks=2)
            await probe.spawn()
            identity = await probe.identity()
            print(*probe.pids, probe._guard.pid, identity["init_method"].removeprefix("file://"), flush=True)
            if sys.argv[2] == "busy":
                await probe.block(600)
            if sys.argv[2] == "idle":
                await asyncio.sleep(600)

        asyncio.run(main())
        if sys.argv[2] == "raise":
            raise SystemExit(3)
    """)

    @pytest.mark.parametrize("state", ["idle", "busy", "return", "raise"])
    async def test_no_process_survives(self, state: str) -> None:
        parent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", self.SCRIPT, str(Path(__file__).parent), state), stdout=subprocess.PIPE
        )
        try:
            assert parent.stdout is not None
            *pids, store = (await asyncio.wait_for(parent.stdout.readline(), 60)).decode().split()
            session = [int(pid) for pid in pids]
            members = {p.pid for p in psutil.process_iter() if _group(p.pid) in session}
            if state in ("idle", "busy"):
                assert len(members) == 5, "two ranks, what each started, and the guard"
                await asyncio.sleep(0.1)
                parent.kill()
            await asyncio.wait_for(parent.wait(), 30)
            await until(lambda: not any(runs(pid) for pid in {*session, *members}))
            await until(lambda: not Path(store).parent.exists())
        finally:
            with contextlib.suppress(ProcessLookupError):
                parent.kill()


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


class TestRanks:
    async def test_every_rank_is_constructed_and_called_and_rank_0_answers(self, spawned: Place) -> None:
        probe = await spawned(ranks=3)
        identity = await probe.identity()
        assert identity["pid"] == probe.pids[0]
        assert (identity["rank"], identity["world_size"]) == (0, 3)
        assert len(set(probe.pids)) == 3
        store = Path(identity["init_method"].removeprefix("file://"))
        assert store.parent.stat().st_mode & 0o777 == 0o700
        await probe.close()
        assert not store.parent.exists()

    async def test_logs_are_one_a_rank(self, spawned: Place, tmp_path: Path) -> None:
        probe = await spawned(ranks=2, log=tmp_path / "learner.log")
        await probe.close()
        assert set(os.listdir(tmp_path)) == {"learner.log", "learner-rank1.log"}

    async def test_a_collective_over_gloo(self, spawned: Place) -> None:
        role = await spawned(Torch, ranks=2, threads=1)
        assert await role.total(10.0) == 30.0

    @pytest.mark.parametrize(("what", "error"), [("raise", PickyError), ("die", RoleError)])
    @pytest.mark.parametrize("rank", [0, 1])
    async def test_one_failing_rank_ends_the_group_though_others_are_stuck(
        self, spawned: Place, monkeypatch: pytest.MonkeyPatch, rank: int, what: str, error: type[Exception]
    ) -> None:
        monkeypatch.setattr(cluster, "GRACE_S", 0.3)
        probe = await spawned(ranks=2)
        started = time.monotonic()
        with pytest.raises(error, match=f"code {rank}" if what == "raise" else f"rank {rank} .*exited with code 9"):
            await probe.only_rank(rank, what)
        assert time.monotonic() - started < 3
        assert not any(runs(pid) for pid in probe.pids), "the error comes when the group has ended"
        with pytest.raises(RoleError, match=f"rank {rank}"):
            await probe.identity()

    async def test_a_rank_that_dies_between_calls_ends_the_group(self, spawned: Place) -> None:
        probe = await spawned(ranks=2)
        os.kill(probe.pids[1], signal.SIGKILL)
        await until(lambda: not any(runs(pid) for pid in probe.pids))
        with pytest.raises(RoleError, match=r"rank 1 .*SIGKILL"):
            await probe.identity()

    async def test_cancelling_reaches_every_rank_and_keeps_the_group(self, spawned: Place) -> None:
        probe = await spawned(ranks=2)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(probe.wait_for_cancel(), 0.2)
        assert await probe.notes() == ["waiting", "cancelled"]
        assert probe.alive()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_throughput_of_small_calls(spawned: Place) -> None:
    probe = await spawned()
    ids = np.arange(64, dtype=np.int32)
    sampling = Sampling(max_tokens=8)

    async def caller(number: int) -> None:
        for _ in range(10):
            await probe.echo(ids, sampling, session=str(number))

    await probe.echo()
    rates, costs = [], []
    for _ in range(3):
        started, used = time.perf_counter(), cpu_seconds(probe.pids[0])
        await asyncio.gather(*(caller(number) for number in range(1000)))
        rates.append(10_000 / (time.perf_counter() - started))
        costs.append((cpu_seconds(probe.pids[0]) - used) / 10_000)
    print(
        f"\n{max(rates):,.0f} calls/s from 1,000 concurrent callers, 64 ids each way; "
        f"{min(costs) * 1e6:.0f} µs of CPU a call, both processes together (best of 3)"
    )
    # The rate is for the reader: on a machine that others keep busy it says little.
    assert min(costs) < 500e-6


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of this process and of ``pid``."""
    times = psutil.Process(pid).cpu_times()
    return time.process_time() + times.user + times.system
