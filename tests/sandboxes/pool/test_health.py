"""Slowness is relative, persistent and capped; watermarks have hysteresis."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.errors import ConfigError
from agentkit.sandboxes.pool.health import (
    HealthPolicy,
    HostUsage,
    SlownessTracker,
    exhausted,
    local_host,
    pressure,
    slow_peers,
)
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Stats

POLICY = HealthPolicy(slow_windows=3)


def window(peers: SlownessTracker, now: float, **latencies: float) -> list[tuple[str, str]]:
    for id, latency in latencies.items():
        peers.observe(id, latency)
    return [(verdict.id, verdict.kind) for verdict in peers.judge(now)]


def test_hung_sandbox_is_detected_within_five_seconds():
    assert POLICY.detection <= 5


def test_sandbox_that_is_slow_for_three_windows_is_set_aside_and_restored():
    peers = SlownessTracker(POLICY)
    fine = {f"b{i}": 0.001 for i in range(7)}
    assert window(peers, 0, slow=2.0, **fine) == []
    assert window(peers, 5, slow=2.0, **fine) == []
    assert window(peers, 10, slow=2.0, **fine) == [("slow", "eject")]
    for step in range(3, 8):
        assert window(peers, 5 * step, slow=0.001, **fine) == []
    assert window(peers, 40, slow=0.001, **fine) == [("slow", "restore")]
    # The second probation is twice as long, and a sandbox that is still slow at its end is replaced.
    verdicts = [(5 * step, *verdict) for step in range(9, 30) for verdict in window(peers, 5 * step, slow=2.0, **fine)]
    assert [kind for _, _, kind in verdicts][:2] == ["eject", "replace"]
    assert verdicts[1][0] - verdicts[0][0] == 60


def test_single_slow_ping_has_no_effect():
    peers = SlownessTracker(POLICY)
    fine = {f"b{i}": 0.001 for i in range(7)}
    for now in range(0, 300, 5):
        assert window(peers, now, hiccup=1.0 if now % 25 == 0 else 0.001, **fine) == []


def test_slow_host_has_no_effect():
    peers = SlownessTracker(POLICY)
    for now in range(0, 100, 5):
        assert window(peers, now, a=2.0, b=1.5, c=1.9, d=1.0) == []


def test_latency_below_the_floor_is_never_slow():
    assert slow_peers({"a": 0.0001, "b": 0.0001, "c": 0.2}, "abc", POLICY) == set()
    assert slow_peers({"c": 9.0}, "c", POLICY) == set()  # no peers


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.floats(0.0001, 3), min_size=12, max_size=12), max_size=40), st.integers(1, 12))
def test_ejections_are_capped(rounds, size):
    peers = SlownessTracker(POLICY)
    for index, latencies in enumerate(rounds):
        window(peers, index * 5, **{f"b{i}": latencies[i] for i in range(size)})
        assert len(peers.ejected()) <= max(1, size // 5)


def test_pressure_starts_at_the_watermark_and_ends_below_it():
    assert pressure(HostUsage(0.5, 0.5), POLICY.watermarks, already=False) is None
    assert "memory" in (pressure(HostUsage(0.91, 0.5), POLICY.watermarks, already=False) or "")
    assert "disk" in (pressure(HostUsage(0.5, 0.99), POLICY.watermarks, already=False) or "")
    assert pressure(HostUsage(0.87, 0.5), POLICY.watermarks, already=False) is None
    assert pressure(HostUsage(0.87, 0.5), POLICY.watermarks, already=True) is not None
    assert pressure(HostUsage(0.84, 0.5), POLICY.watermarks, already=True) is None


def test_pressure_names_the_limit_and_ends_below_small_watermarks():
    for watermark in (0.9, 0.05, 0.01):
        text = pressure(HostUsage(0.99 * watermark, 0.0), {"memory": watermark}, already=True)
        assert f"the limit of {watermark:.0%}" in (text or "")
        assert pressure(HostUsage(0.0, 0.0), {"memory": watermark}, already=True) is None


def test_local_host_is_measured():
    usage = local_host()
    assert 0 < usage.memory < 1
    assert 0 < usage.disk <= 1


def test_sandbox_with_all_its_resources_in_use_is_exhausted():
    spec = SandboxSpec()
    idle = Stats(
        memory=10, memory_limit=100, cpu_seconds=0, processes=2, oom_kills=0, workspace_used=1, workspace_size=9
    )
    assert exhausted(idle, spec, POLICY) is None
    assert "memory" in (exhausted(Stats(96, 100, 0, 2, 0), spec, POLICY) or "")
    assert "pids" in (exhausted(Stats(1, 100, 0, 256, 0), spec, POLICY) or "")
    assert "workspace" in (exhausted(Stats(1, 100, 0, 2, 0, 99, 100), spec, POLICY) or "")
    assert exhausted(Stats(None, None, None, None, None), spec, POLICY) is None


def test_thresholds_out_of_range_are_errors():
    for name, value in (("ping_interval", 0.0), ("ping_failures", 0), ("eject", 2.0), ("watermark", -0.5)):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            HealthPolicy(**{name: value})  # pyright: ignore[reportArgumentType]
