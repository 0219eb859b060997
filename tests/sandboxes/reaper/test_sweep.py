"""What a sweep removes and what it never touches."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from agentkit.sandboxes import paths
from agentkit.sandboxes.backends.docker.backend import DockerBackend
from agentkit.sandboxes.reaper import heartbeat, records
from agentkit.sandboxes.reaper import labels as label
from agentkit.sandboxes.reaper.heartbeat import HeartbeatState
from agentkit.sandboxes.reaper.owner import Owner, boot_id, host_id
from agentkit.sandboxes.reaper.sweep import Evidence, owner_of, sweep, verdict
from agentkit.sandboxes.types import Observed

ID = "ak-0123456789abcdef"
OWNER = f"{boot_id()}:1:2:3"
RUN = str(uuid.UUID(int=1))
MARKS = {
    label.MANAGED: "1",
    label.ID: ID,
    label.OWNER: OWNER,
    label.RUN: RUN,
    label.HOST: host_id(),
}


def observed(state: str = "running", **changed: str) -> Observed:
    return Observed(ID, state, {**MARKS, **{f"agentkit.{name}": value for name, value in changed.items()}})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("alive", "heartbeat_state", "expected"),
    [
        (True, "held", "keep"),
        (True, "free", "keep"),
        (True, "absent", "keep"),
        (True, "stale", "owner stopped renewing"),
        (None, "held", "keep"),
        (None, "stale", "owner stopped renewing"),
        (None, "free", "orphan"),
        (None, "absent", "keep"),
        (False, "held", "orphan"),
        (False, "free", "orphan"),
        (False, "absent", "orphan"),
    ],
)
def test_verdict_depends_on_the_owners_state(
    alive: bool | None, heartbeat_state: HeartbeatState, expected: str
) -> None:
    assert verdict(observed(), Evidence(alive, heartbeat_state)) == expected


def test_a_time_that_has_ended_decides_first() -> None:
    assert verdict(observed(), Evidence(True, "held", due=True)) == "expired"


def test_after_a_reboot_only_what_does_not_run_is_removed() -> None:
    assert verdict(observed("exited"), Evidence(None, "absent", rebooted=True)) == "orphan"
    assert verdict(observed("running"), Evidence(None, "absent", rebooted=True)) == "keep"
    assert verdict(observed("exited"), Evidence(None, "absent")) == "keep"
    assert verdict(observed("exited"), Evidence(None, "held", rebooted=True)) == "keep"


def test_a_sandbox_with_all_labels_has_an_owner() -> None:
    assert owner_of(observed()) == Owner.parse(OWNER)


@pytest.mark.parametrize(
    "changed",
    [
        {"managed": "true"},
        {"managed": ""},
        {"id": "ak-fedcba9876543210"},
        {"owner": "me"},
        {"owner": ""},
        {"run": "../../etc"},
        {"run": "A" * 36},
        {"run": ""},
    ],
)
def test_anything_else_is_foreign(changed: dict[str, str]) -> None:
    assert owner_of(observed(**changed)) is None


def test_a_name_that_is_not_ours_is_foreign() -> None:
    assert owner_of(Observed("web-1", "running", {**MARKS, label.ID: "web-1"})) is None
    assert owner_of(Observed("web-1", "running", MARKS)) is None


def dead_owner() -> Owner:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = Owner.of(child.pid)
    child.kill()
    child.communicate()
    assert owner is not None
    return owner


@pytest.mark.docker
async def test_foreign_containers_are_left_alone(docker_backend: DockerBackend, tmp_path: Path) -> None:
    """Containers with our label, of other tools and of snapshots' images, and those of a living owner."""
    dead = str(dead_owner())
    run = str(uuid.uuid4())
    marks = {label.MANAGED: "1", label.OWNER: dead, label.RUN: run}
    mine = heartbeat.current()
    cases = {
        "e-test-label-only": {label.MANAGED: "1"},
        "e-test-copied-labels": {**marks, label.ID: paths.new_id()},
        "e-test-own-name": {**marks, label.ID: "e-test-own-name"},
        (living := paths.new_id()): dict(mine.labels(living)),
        (elsewhere := paths.new_id()): {**marks, label.ID: elsewhere, label.OWNER: f"{boot_id()}:7:7:7"},
        (orphan := paths.new_id()): {**marks, label.ID: orphan},
    }
    records.register(mine, living, "docker", None)
    try:
        for name, labels in cases.items():
            words = [word for label, value in labels.items() for word in ("--label", f"{label}={value}")]
            docker("create", "--name", name, *words, "agentkit/base", "sleep", "60")
        report = await sweep(docker_backend)
        assert report.removed.keys() & cases.keys() == {orphan}
        there = set(docker("ps", "-a", "--format", "{{.Names}}").split())
        assert cases.keys() - there == {orphan}
        assert living in report.kept
        assert elsewhere in report.kept
    finally:
        for name in cases:
            docker("rm", "-f", name)
        records.forget(living)


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120, check=True).stdout
