"""The doctor on machines that lack something or have something broken."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agentkit.cli import doctor


def command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, besides that of the system's shell."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_docker_is_not_installed(path: Path) -> None:
    assert (doctor.docker().status, "docs.docker.com" in doctor.docker().remedy) == ("optional", True)


@pytest.mark.parametrize(
    ("script", "status", "detail", "remedy"),
    [
        ("echo 28.1", "ok", "28.1", ""),
        ("echo 'permission denied while trying to connect' >&2; exit 1", "optional", "permission denied", "usermod"),
        ("echo 'Cannot connect to the Docker daemon' >&2; exit 1", "optional", "Cannot connect", "systemctl start"),
        ("exit 3", "optional", "exit status 3", "systemctl start"),
    ],
)
def test_docker_answers_or_not(path: Path, script: str, status: str, detail: str, remedy: str) -> None:
    command(path, "docker", script)
    found = doctor.docker()
    assert found.status == status
    assert detail in found.detail
    assert remedy in found.remedy


def test_a_hanging_command_times_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_COMMAND_TIMEOUT_S", 0.2)
    command(path, "docker", "exec /bin/sleep 60")
    assert "no answer" in doctor.docker().detail


def test_a_gpu_that_torch_cannot_see(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(path, "nvidia-smi", "echo 'NVIDIA H200, 143771 MiB, 570.1'")
    gpus = doctor._gpus()
    assert gpus == ["NVIDIA H200, 143771 MiB, 570.1"]
    command(path, "python", "echo None 0")
    monkeypatch.setattr(doctor.sys, "executable", str(path / "python"))
    found = doctor.torch(gpus)
    assert (found.status, "pytorch.org" in found.remedy) == ("problem", True)
    command(path, "python", "echo 13.0 1")
    assert (doctor.torch(gpus).status, "CUDA 13.0, sees 1 GPU" in doctor.torch(gpus).detail) == ("ok", True)


def test_missing_packages_name_a_remedy() -> None:
    found = doctor.package("X", "no-such-distribution", "optional", "pip install x")
    assert (found.status, found.detail, found.remedy) == ("optional", "not installed", "pip install x")
