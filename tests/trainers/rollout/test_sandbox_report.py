"""Metrics and events of the sandboxes of a run."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
from requiring import require
from rollout_envs import Plain
from rollout_harness import Harness, configure

from agentkit import registry
from agentkit.cli.show_sandboxes import sandbox_lines
from agentkit.errors import EngineUnavailable
from agentkit.sandboxes import SandboxPool, telemetry
from agentkit.sandboxes.backends.local.backend import LocalBackend
from agentkit.sandboxes.backends.remote.backend import RemoteBackend
from agentkit.sandboxes.pool.health import HostUsage
from agentkit.sandboxes.recovery.record import Recovery, RecoveryLog
from agentkit.sandboxes.server.app import SandboxServer
from agentkit.sandboxes.testing import virtual_time
from agentkit.sandboxes.testing.fake import FakeBackend
from agentkit.trainers.rollout.sandbox_report import EventLimit, SandboxReport, host_metrics, incidents, name_of

TOKEN = "a-token-of-the-tests-alone"


def recovery(seconds: float, *, sandbox: str = "ak-1", by: Any = "spare") -> Recovery:
    return Recovery("exited", by, seconds, socket.gethostname(), sandbox)


class Events(list[dict[str, Any]]):
    """The events that were written."""

    def write(self, kind: str, **fields: Any) -> None:
        self.append({"event": kind, **fields})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self if event["event"] == kind]


@pytest.fixture
async def local_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    await backend.close()


async def test_a_sandbox_that_is_removed_during_its_episodes(local_sandboxes: None) -> None:
    registry.register("Plain-v0", Plain)
    settings = {"id": "Plain-v0", "sandbox": "local", "recovery": "replay", "spares": 1, "reset_timeout": 300.0}
    harness = Harness(configure({"length": 12}, settings=settings, rollout={"groups": 1}), latency=0.05)
    await harness.loop.start()
    try:
        await harness.step()
        first = harness.loop.metrics()
        (pool,) = telemetry.open_pools()
        assert isinstance(pool, SandboxPool)
        removed = [box.id for box in pool.sandboxes("busy")]
        await asyncio.sleep(0.2)
        for box in pool.sandboxes("busy"):
            await box.backend.remove(box.id)
        await harness.step()
        second = harness.loop.metrics()
    finally:
        await harness.loop.close()
    assert first["sandbox/busy"] >= 2  # one in use and the spare
    assert (first["sandbox/recoveries"], first["sandbox/lost_s"], first["sandbox/create_failures"]) == (0, 0, 0)
    assert second["sandbox/recoveries"] >= 1
    means = {name: value for name, value in second.items() if name.startswith("sandbox/recovered_by/")}
    assert sum(means.values()) == second["sandbox/recoveries"]
    assert 0 < second["sandbox/recovery_s_p50"] <= second["sandbox/recovery_s_max"] <= second["sandbox/lost_s"]
    assert second["sandbox/removed"] >= len(removed)
    recovered = [event for event in harness.events if event["event"] == "sandbox_recovered"]
    assert {event["sandbox"] for event in recovered} <= set(removed)
    assert sum(event["episodes"] for event in recovered) >= second["sandbox/recoveries"]
    lost = [event["sandbox"] for event in harness.events if event["event"] == "sandbox_lost"]
    assert sorted(lost) == sorted(set(lost))
    assert set(lost) <= set(removed)
    assert telemetry.open_pools() == []


async def test_a_run_without_sandboxes_has_no_metrics_of_them() -> None:
    harness = Harness(configure())
    await harness.run(1)
    assert not [name for name in harness.loop.metrics() if name.startswith("sandbox/")]
    assert harness.events == []


def test_pools_report_what_they_create_and_lose() -> None:
    async def scenario() -> tuple[dict[str, float], dict[str, float], Events]:
        fake, events = FakeBackend(), Events()
        report = SandboxReport(events.write, RecoveryLog(), lambda: 0)
        report.start()
        async with SandboxPool(backend=fake, min_idle=2, max_size=4) as pool:
            await pool.wait_filled()
            lease = await pool.acquire()
            fake.die(lease.box.id)
            await asyncio.sleep(3)
            lease.release()
            RecoveryLog().add(recovery(0.25, sandbox=lease.box.id))
            RecoveryLog().add(recovery(0.75, sandbox=lease.box.id))
            RecoveryLog().add(recovery(9.0, sandbox=""))  # outside of sandboxes
            (idle, *_) = pool.sandboxes("idle")
            fake.die(idle.id)
            await asyncio.sleep(3)
            first = report.metrics()
        second = report.metrics()
        await report.close()
        return first, second, events

    first, second, events = virtual_time.run(scenario())
    assert (first["sandbox/idle"], first["sandbox/busy"], first["sandbox/breakers_open"]) == (2, 0, 0)
    assert first["sandbox/created"] >= 4
    assert first["sandbox/removed/exited"] == 2
    assert first["sandbox/recoveries/exited"] == first["sandbox/recovered_by/spare"] == 2
    assert (first["sandbox/lost_s"], first["sandbox/recovery_s_p50"], first["sandbox/recovery_s_max"]) == (
        1.0,
        0.5,
        0.75,
    )
    here = f"sandbox/host/{socket.gethostname()}"
    assert (first[f"{here}/sandboxes"], first[f"{here}/recoveries"], first[f"{here}/up"]) == (2, 2, 1)
    assert second["sandbox/recoveries"] == second["sandbox/created"] == second["sandbox/idle"] == 0
    assert second["sandbox/removed/closed"] == 2
    assert sorted(event["in_use"] for event in events.of("sandbox_lost")) == [False, True]
    (recovered,) = events.of("sandbox_recovered")
    assert (recovered["episodes"], recovered["seconds"], recovered["host"]) == (2, 0.75, socket.gethostname())


async def test_several_hosts_of_which_one_drains() -> None:
    events = Events()
    report = SandboxReport(events.write, RecoveryLog(), lambda: 0)
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(SandboxServer(FakeBackend(create_seconds=0.01), token=TOKEN))
            for _ in range(2)
        ]
        hosts = [server.url.removeprefix("http://") for server in servers]
        remote = RemoteBackend([server.url for server in servers], TOKEN)
        await remote.start()
        stack.push_async_callback(remote.close)
        pool = await stack.enter_async_context(SandboxPool(backend=remote, min_idle=4, max_size=8))
        await pool.wait_filled()
        report.start()
        stack.push_async_callback(report.close)
        first = report.metrics()
        servers[0].tenants.drain(True)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if events:
                break
        second = report.metrics()
    assert [first[f"sandbox/host/{host}/up"] for host in hosts] == [1, 1]
    assert sum(first[f"sandbox/host/{host}/sandboxes"] for host in hosts) == first["sandbox/idle"] == 4
    assert all(0 < first[f"sandbox/host/{host}/memory"] < 1 for host in hosts)
    (change,) = events.of("sandbox_host")
    assert (change["host"], change["before"], change["state"]) == (hosts[0], "up", "unschedulable")
    assert "draining" in change["reason"]
    assert [second[f"sandbox/host/{host}/up"] for host in hosts] == [0, 1]


def test_a_crash_loop_does_not_fill_the_disk() -> None:
    async def scenario() -> tuple[dict[str, float], Events]:
        fake, events = FakeBackend(), Events()
        report = SandboxReport(events.write, RecoveryLog(), lambda: 0)
        report.start()
        for _ in range(100):
            for number in range(50):
                telemetry.report(telemetry.Retired(f"ak-{number}", "here", "exited", in_use=True))
            await asyncio.sleep(1)
        metrics = report.metrics()
        await report.close()
        await fake.close()
        return metrics, events

    metrics, events = virtual_time.run(scenario())
    lost, omitted = events.of("sandbox_lost"), events.of("sandbox_events_omitted")
    assert len(events) < 250
    assert len(lost) + sum(event["sandbox_lost"] for event in omitted) == 5000
    assert metrics["sandbox/removed/exited"] == 5000


def test_the_rate_of_events_recovers() -> None:
    events = Events()
    limit = EventLimit(events.write, at_once=2, per_s=1.0)
    for _ in range(5):
        limit.add("lost", {}, 10.0)
    assert len(events) == 2
    limit.add("lost", {}, 11.0)
    assert [event["event"] for event in events] == ["lost", "lost", "sandbox_events_omitted", "lost"]
    assert events[2]["lost"] == 3


def test_hosts_have_metrics_of_their_own() -> None:
    usage = {"a:1": HostUsage(memory=0.5, disk=0.25, cpu=0.75)}
    steps = {"a:1": [0.1] * 7, "b:1": [0.1, 0.2, 0.2, 0.3] * 2}
    metrics = host_metrics({"a:1": 3}, {"a:1": True, "b:1": False}, {"b:1": 2}, steps, usage)
    assert metrics["sandbox/host/a:1/sandboxes"] == 3
    assert (metrics["sandbox/host/b:1/up"], metrics["sandbox/host/b:1/recoveries"]) == (0, 2)
    assert metrics["sandbox/host/b:1/step_s"] == pytest.approx(0.2)
    assert "sandbox/host/a:1/step_s" not in metrics, "seven steps say little"
    used = [metrics[f"sandbox/host/a:1/{name}"] for name in ("cpu", "memory", "disk")]
    assert used == [0.75, 0.5, 0.25]
    assert "sandbox/host/b:1/cpu" not in metrics


def test_reasons_become_names() -> None:
    assert name_of("canary failed") == "canary_failed"
    assert name_of("memory: 95 of 100 in use while idle") == "memory"


def test_planned_removals_are_no_events() -> None:
    planned = [telemetry.Retired("ak-1", "here", reason, False) for reason in ("closed", "old", "surplus", "discarded")]
    assert incidents(planned) == []


def test_show_joins_a_failure_with_its_recoveries() -> None:
    when = {"time": 0.0, "host": "a:1", "sandbox": "ak-1", "cause": "exited"}
    events = [
        {"event": "start", "time": 0.0},
        {"event": "sandbox_recovered", **when, "by": "spare", "episodes": 3, "seconds": 0.5},
        {"event": "sandbox_lost", **when, "in_use": True},
        {"event": "sandbox_recovered", **when, "by": "new", "episodes": 1, "seconds": 1.25},
        {
            "event": "sandbox_host",
            "time": 1.0,
            "host": "b:1",
            "before": "up",
            "state": "down",
            "reason": "\x1b[31mrefused",
        },
    ]
    step = {"sandbox/created": 5.0, "sandbox/recoveries": 4.0, "sandbox/recoveries/exited": 4.0, "sandbox/lost_s": 2.5}
    lines = sandbox_lines([{"step": 1, **step}, {"step": 2, **step}], events, last=20)
    assert "10 sandboxes created" in lines[0]
    assert "8 environments recovered; after: exited 8" in lines[1]
    assert "5.0 s lost" in lines[2]
    (row,) = [line for line in lines if "ak-1" in line]
    assert "3 by spare, 1 by new" in row
    assert row.endswith("1.25")
    assert any("up → down: \\x1b[31mrefused" in line for line in lines)
    assert sandbox_lines([{"step": 1}], [], last=20) == [
        "this run has had no sandboxes, or has not finished a training step"
    ]
