"""What a sweep removes and what it never touches."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from agentkit.sandboxes import lease, paths, records
from agentkit.sandboxes.backends.docker import DockerBackend
from agentkit.sandboxes.lease import LeaseState
from agentkit.sandboxes.owner import Owner, boot_id, host_id
from agentkit.sandboxes.sweep import Evidence, owner_of, sweep, verdict
from agentkit.sandboxes.types import Observed

ID = "ak-0123456789abcdef"
OWNER = f"{boot_id()}:1:2:3"
RUN = str(uuid.UUID(int=1))
MARKS = {lease.MANAGED: "1", lease.ID: ID, lease.OWNER: OWNER, lease.RUN: RUN, lease.HOST: host_id()}


def observed(state: str = "running", **changed: str) -> Observed:
    return Observed(ID, state, {**MARKS, **{f"agentkit.{name}": value for name, value in changed.items()}})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("alive", "lease_state", "expected"),
    [
        (True, "held", "keep"),
        (True, "free", "keep"),
        (True, "absent", "keep"),
        (True, "stale", "lease ran out"),
        (None, "held", "keep"),
        (None, "stale", "lease ran out"),
        (None, "free", "orphan"),
        (None, "absent", "keep"),
        (False, "held", "orphan"),
        (False, "free", "orphan"),
        (False, "absent", "orphan"),
    ],
)
def test_an_owner_decides(alive: bool | None, lease_state: LeaseState, expected: str) -> None:
    assert verdict(observed(), Evidence(alive, lease_state)) == expected


def test_a_time_that_has_ended_decides_first() -> None:
    assert verdict(observed(), Evidence(True, "held", due=True)) == "expired"


def test_after_a_reboot_only_what_does_not_run_is_removed() -> None:
    assert verdict(observed("exited"), Evidence(None, "absent", rebooted=True)) == "orphan"
    assert verdict(observed("running"), Evidence(None, "absent", rebooted=True)) == "keep"
    assert verdict(observed("exited"), Evidence(None, "absent")) == "keep"
    assert verdict(observed("exited"), Evidence(None, "held", rebooted=True)) == "keep"


def test_all_marks_together_make_one_ours() -> None:
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
    assert owner_of(Observed("web-1", "running", {**MARKS, lease.ID: "web-1"})) is None
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
    marks = {lease.MANAGED: "1", lease.OWNER: dead, lease.RUN: run}
    mine = lease.current()
    cases = {
        "e-test-label-only": {lease.MANAGED: "1"},
        "e-test-copied-labels": {**marks, lease.ID: paths.new_id()},
        "e-test-own-name": {**marks, lease.ID: "e-test-own-name"},
        (living := paths.new_id()): dict(mine.labels(living)),
        (elsewhere := paths.new_id()): {**marks, lease.ID: elsewhere, lease.OWNER: f"{boot_id()}:7:7:7"},
        (orphan := paths.new_id()): {**marks, lease.ID: orphan},
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
