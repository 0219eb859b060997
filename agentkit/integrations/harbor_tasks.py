"""Read task directories of Harbor 0.25: instruction, environment, tests and solution.

Invariant: reading runs no code of a task and asks no engine. What agentkit cannot run as Harbor does is named, and
never left out silently.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from agentkit.envs.task_files import Split, part_of
from agentkit.errors import ConfigError
from agentkit.sandboxes.spec import Network, Resources, parse_size

CONFIG, INSTRUCTION, TEST, SOLUTION = "task.toml", "instruction.md", "tests/test.sh", "solution/solve.sh"
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_ROOT = (None, "root", 0, "0")
_MEMORY = 2 << 30
"""Bytes of memory of a task that sets no limit."""

NetworkMode = Literal["public", "no-network", "allowlist"]


class Healthcheck(BaseModel):
    """When a container is ready: the fields of Docker's ``HEALTHCHECK``."""

    command: str
    interval_sec: float = Field(default=5.0, ge=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    start_interval_sec: float = Field(default=5.0, ge=0)
    retries: int = Field(default=3, ge=1)


class Phase(BaseModel):
    """Access to the network while the agent works, or while the tests run. None: that of the environment."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    user: str | int | None = None


class Agent(Phase):
    """The table ``[agent]``."""

    timeout_sec: float | None = Field(default=None, gt=0)


class Verifier(Phase):
    """The table ``[verifier]``."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[Any] = Field(default_factory=list)


class Solution(BaseModel):
    """The table ``[solution]``."""

    env: dict[str, str] = Field(default_factory=dict)


class Environment(BaseModel):
    """The table ``[environment]``."""

    docker_image: str | None = None
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: NetworkMode = "public"
    allowed_hosts: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_old_names(cls, data: Any) -> Any:
        """Translate ``memory = "2G"`` and ``allow_internet``, which older tasks have."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if isinstance(data.get("memory"), str):
            data.setdefault("memory_mb", parse_size(data["memory"]) >> 20)
        if data.get("allow_internet") is False and data.get("allowed_hosts") is None:
            data.setdefault("network_mode", "no-network")
        return data


class Config(BaseModel):
    """A ``task.toml``. As in Harbor, unknown fields are ignored."""

    task: dict[str, Any] = Field(default_factory=dict)
    agent: Agent = Field(default_factory=Agent)
    verifier: Verifier = Field(default_factory=Verifier)
    environment: Environment = Field(default_factory=Environment)
    solution: Solution = Field(default_factory=Solution)
    steps: list[Any] | None = None


@dataclass(frozen=True)
class Task:
    """A task directory."""

    folder: Path
    config: Config
    instruction: str

    @property
    def id(self) -> str:
        """The name in ``[task]``, otherwise the name of the directory."""
        return str(self.config.task.get("name") or self.folder.name)

    @property
    def split(self) -> Split:
        """The part that the task belongs to."""
        return part_of(self.instruction)

    @property
    def build_folder(self) -> Path | None:
        """The folder with the Dockerfile; None if the task names an image."""
        return None if self.config.environment.docker_image else self.folder / "environment"

    def files(self, part: Literal["tests", "solution"]) -> dict[str, Path]:
        """Return the files of a part by their paths below it, sorted.

        Raises:
            ConfigError: a link leads out of the task directory.
        """
        top, home = self.folder / part, self.folder.resolve()
        found: dict[str, Path] = {}
        for path in sorted(top.rglob("*")):
            if not path.resolve().is_relative_to(home):
                raise ConfigError(f"{path} leads out of the task directory {self.folder}; replace it by a file")
            if path.is_file():
                found[path.relative_to(top).as_posix()] = path
        return found


def load(path: str | Path) -> tuple[Task, ...]:
    """Return the tasks of a directory: the directory itself, or those directly below it, sorted by name.

    Tasks that need what agentkit does not have are left out with a warning.

    Raises:
        ConfigError: there is no such directory, a task is malformed, two have one name, or none is left.
    """
    top = Path(path).expanduser()
    if not top.is_dir():
        raise ConfigError(f"there is no directory {top}, which harbor:{path} names")
    single = (top / CONFIG).exists()
    folders = [top] if single else sorted(file.parent for file in top.glob(f"*/{CONFIG}"))
    if not folders:
        raise ConfigError(f"neither {top} nor a directory in it has a {CONFIG}; name the tasks, as in harbor:tasks")
    tasks: dict[str, Task] = {}
    refused: list[str] = []
    for folder in folders:
        config = read_config(folder / CONFIG)
        if problem := unsupported(folder, config):
            refused.append(f"{folder.name} ({problem})")
            continue
        task = Task(folder, config, without_canary(_text(folder / INSTRUCTION)))
        if task.id in tasks:
            raise ConfigError(f"{folder} and {tasks[task.id].folder} have the same name {task.id!r}; rename one")
        _check(task)
        tasks[task.id] = task
    if refused and not tasks:
        raise ConfigError(f"agentkit cannot run the tasks of {top}: {'; '.join(refused)}")
    if refused:
        warnings.warn(f"{len(refused)} tasks of {top} are left out: {'; '.join(refused)}", stacklevel=3)
    return tuple(tasks[name] for name in sorted(tasks))


def read_config(file: Path) -> Config:
    """Return a ``task.toml``. Raises ``ConfigError``."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        return Config.model_validate(toml.loads(_text(file)))
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"{file}: {told}") from None
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{file}: {error}") from None


def unsupported(folder: Path, config: Config) -> str | None:
    """Return what a task needs and agentkit does not have; None if agentkit can run it."""
    environment, verifier = config.environment, config.verifier
    needs = {
        "several steps": bool(config.steps),
        f"the operating system {environment.os}": environment.os.lower() != "linux",
        "several containers": any((folder / "environment").glob("docker-compose.y*ml")),
        "MCP servers": bool(environment.mcp_servers),
        "a TPU": environment.tpu is not None,
        "an earlier conversation": (folder / "trajectory.json").exists(),
        "a separate container for its tests": verifier.environment_mode == "separate" or bool(verifier.environment),
        "commands between the agent and the tests": bool(verifier.collect),
        f"tests as user {verifier.user!r} instead of root": verifier.user not in _ROOT,
    }
    missing = [need for need, is_needed in needs.items() if is_needed]
    return f"it needs {', '.join(missing)}" if missing else None


def without_canary(text: str) -> str:
    """Return an instruction without the leading lines that mark benchmarks for filters of training data."""
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def variables(task: Task, given: Mapping[str, str], host: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    """Return environment variables of a task, with ``${NAME}`` and ``${NAME:-default}`` replaced.

    Args:
        task: the task.
        given: variables as its ``task.toml`` has them.
        host: variables of this machine.
        allowed: names of those that tasks may read.

    Raises:
        ConfigError: a value needs a variable that does not exist, or that tasks may not read.
    """
    values: dict[str, str] = {}
    for name, value in given.items():
        match = _VARIABLE.fullmatch(value)
        if match is None:
            values[name] = value
        elif match[1] in allowed and match[1] in host:
            values[name] = host[match[1]]
        elif match[2] is not None:
            values[name] = match[2]
        else:
            remedy = "set it" if match[1] in allowed else f"if it may have it, add host_env=[{match[1]!r}]"
            raise ConfigError(f"{task.id} needs the variable {match[1]} of this machine; {remedy}")
    return values


def network_of(environment: Environment, phase: Phase) -> Network:
    """Return the network of a phase."""
    mode = phase.network_mode or environment.network_mode
    hosts = (phase if phase.network_mode else environment).allowed_hosts
    if mode == "allowlist":
        if not hosts:
            return Network.none()
        ranges = tuple(host for host in hosts if re.fullmatch(r"[\d./]+|.*:.*", host))
        return Network.allow(tuple(host for host in hosts if host not in ranges), ranges)
    return Network.none() if mode == "no-network" else Network.bridge()


def resources_of(environment: Environment, other: Mapping[str, Any]) -> Resources:
    """Return the limits of a task's containers; ``other`` replaces some. Raises ``TypeError``, ``ValueError``."""
    memory = parse_size(other.get("memory", _MEMORY if environment.memory_mb is None else environment.memory_mb << 20))
    tmpfs = {"tmp": memory // 4, "workspace": memory // 16, "shm": min(64 << 20, memory // 8)}
    named = {"cpus": environment.cpus, "gpus": environment.gpus or None}
    limits = {**tmpfs, "pids": 1024, **{name: value for name, value in named.items() if value is not None}}
    return Resources(**{**limits, **other, "memory": memory})


def ready_of(healthcheck: Healthcheck | None) -> tuple[str, float]:
    """Return the command that succeeds when a container is ready, and the seconds that this may take."""
    if healthcheck is None:
        return "", 0.0
    attempts = healthcheck.retries * (healthcheck.timeout_sec + healthcheck.interval_sec)
    return healthcheck.command, healthcheck.start_period_sec + attempts


def _check(task: Task) -> None:
    """Raise ``ConfigError`` if a task lacks a file that it needs, or a setting contradicts itself."""
    if task.build_folder is not None and not (task.build_folder / "Dockerfile").is_file():
        raise ConfigError(f"{task.folder} has neither environment/Dockerfile nor docker_image in its {CONFIG}")
    if not (task.folder / TEST).is_file():
        raise ConfigError(f"{task.folder} has no {TEST}, which decides about success")
    environment = task.config.environment
    for phase in (task.config.agent, task.config.verifier):
        try:
            network_of(environment, phase)
        except ValueError as error:
            raise ConfigError(f"{task.folder / CONFIG}: allowed_hosts: {error}") from None
    if environment.cpus is not None and not math.isfinite(environment.cpus):
        raise ConfigError(f"{task.folder / CONFIG}: cpus = {environment.cpus} is not a number of processors")
    for part in ("tests", "solution"):
        task.files(part)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
