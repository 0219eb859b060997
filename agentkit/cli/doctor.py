"""``agentkit doctor``: what works on this machine, and what to do about what does not.

Invariant: it looks without loading (versions come from package metadata), everything that it starts has a time limit,
and it never fails because what it looks at is broken.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

Status = Literal["ok", "optional", "problem"]
"""``optional``: it is not there, and only what needs it does not work."""

_COMMAND_TIMEOUT_S = 15.0
_TORCH_TIMEOUT_S = 90.0
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``remedy`` is empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def doctor() -> None:
    """Report what works on this machine, with a remedy for what does not."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from agentkit.cli.heartbeat import watched

    marks = {"ok": "[green]ok", "optional": "[yellow]not here", "problem": "[red]problem"}
    table = Table(box=None, header_style="bold", show_header=False, padding=(0, 2, 0, 0))
    with watched("examining this machine"):
        findings = list(examine())
    for finding in findings:
        remedy = f"\n[dim]→ {escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(finding.name, marks[finding.status], escape(finding.detail) + remedy)
    Console().print(table)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, in the order of the report."""
    gpus = _gpus()
    checks: Sequence[Callable[[], Finding]] = (
        python,
        lambda: package("agentkit", "agentkit-rl", "problem", "pip install agentkit-rl"),
        lambda: torch(gpus),
        lambda: package("transformers", "transformers", "problem", "pip install 'transformers>=4.56'"),
        lambda: gpu(gpus),
        docker,
        local_sandboxes,
        lambda: package("LoRA", "peft", "optional", "pip install 'agentkit-rl[lora]'"),
        lambda: package("vLLM", "vllm", "optional", "pip install 'agentkit-rl[vllm]', in an environment of its own"),
        lambda: package("Ray", "ray", "optional", "pip install ray; only for more than one machine"),
        lambda: package("DeepSpeed", "deepspeed", "optional", "pip install deepspeed; only for models beyond one GPU"),
        lambda: package("TensorBoard", "tensorboard", "optional", "pip install 'agentkit-rl[tensorboard]'"),
        lambda: package("W&B", "wandb", "optional", "pip install 'agentkit-rl[wandb]'"),
        cpus,
        memory,
        disk,
    )
    for check in checks:
        yield check()


def python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def package(name: str, distribution: str, status: Status, remedy: str) -> Finding:
    """Whether a distribution is installed, by its metadata alone."""
    try:
        return Finding(name, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, status, "not installed", remedy)


def torch(gpus: list[str]) -> Finding:
    """Torch, and whether it can use the GPUs that are there; it is loaded in another process, if at all."""
    found = package("torch", "torch", "problem", "pip install torch")
    if found.status != "ok" or not gpus:
        return found
    script = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
    output, error = _output([sys.executable, "-c", script], _TORCH_TIMEOUT_S)
    if error:
        return Finding("torch", "problem", f"{found.detail} does not load: {error}", "install torch again")
    if output.endswith(" 0"):
        remedy = "install the build for your CUDA: https://pytorch.org/get-started/locally"
        return Finding("torch", "problem", f"{found.detail} does not see the GPU", remedy)
    return Finding("torch", "ok", f"{found.detail}, CUDA {output.split()[0]}, sees {output.split()[1]} GPU")


def gpu(gpus: list[str]) -> Finding:
    if gpus:
        return Finding("GPU", "ok", "; ".join(gpus))
    return Finding("GPU", "optional", "none found (nvidia-smi)", "small models train on the CPU; larger ones need one")


def docker() -> Finding:
    """The client, the daemon, and the right to talk to it."""
    if shutil.which("docker") is None:
        return Finding(
            "Docker", "optional", "not installed", "https://docs.docker.com/engine/install; only for sandboxes"
        )
    output, error = _output(["docker", "version", "--format", "{{.Server.Version}}"], _COMMAND_TIMEOUT_S)
    if not error:
        _, missing = _output(["docker", "image", "inspect", "--format", "{{.Id}}", "agentkit/base"], _COMMAND_TIMEOUT_S)
        return Finding("Docker", "ok", output, "agentkit sandbox build makes the images" if missing else "")
    if "permission denied" in error.lower():
        remedy = "sudo usermod -aG docker $USER, then log in again"
    else:
        remedy = "start the daemon: sudo systemctl start docker"
    return Finding("Docker", "optional", f"the daemon does not answer: {error}", remedy)


def local_sandboxes() -> Finding:
    """What sandboxes without Docker run behind, by trial."""
    from agentkit.sandboxes.backends.local_cages import Bubblewrap, Namespaces

    name = "local sandboxes"
    problem = Bubblewrap().problem()
    if not problem:
        return Finding(name, "ok", "behind bubblewrap")
    if not Namespaces().problem():
        return Finding(name, "ok", "behind name spaces", f"with bubblewrap they would start faster: {problem}")
    remedy = "apt-get install bubblewrap, and let users make name spaces (sysctl user.max_user_namespaces)"
    return Finding(name, "optional", problem, remedy)


def cpus() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("CPU", "ok", f"{usable} cores")


def memory() -> Finding:
    import psutil

    seen = psutil.virtual_memory()
    total, available = seen.total, seen.available
    limit = _cgroup_memory_limit()
    if limit is not None and limit < total:
        total, available = limit, min(available, limit)
    detail = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    if available < 2 * _GIB:
        return Finding("memory", "problem", detail, "close something: the smallest run needs about 2 GiB")
    return Finding("memory", "ok", detail)


def disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    detail = f"{free / _GIB:.1f} GiB free here"
    if free < 2 * _GIB:
        return Finding("disk", "problem", detail, "make room, or put runs elsewhere by `dir=…`")
    return Finding("disk", "ok", detail)


def _cgroup_memory_limit() -> int | None:
    """Bytes that the container may use (cgroup v2); None without a limit."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    output, error = _output(query, _COMMAND_TIMEOUT_S)
    return [] if error else output.splitlines()


def _output(command: list[str], timeout: float) -> tuple[str, str]:
    """Standard output, and why there is none: both stripped, the latter empty on success."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer in {timeout:.0f} s"
    except OSError as error:
        return "", str(error)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        return "", lines[-1]
    return result.stdout.strip(), ""
