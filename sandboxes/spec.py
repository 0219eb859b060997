"""What a sandbox is allowed to be: one frozen, validated description, the same for every back end.

Invariant: the defaults are the hardened ones, and every field that was loosened can be named (``loosened``). Sizes are
bytes once validated; all tmpfs together take at most half of the memory limit, since a full tmpfs counts as memory and
would otherwise starve the processes that have to clean it up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from agentkit.config import Strict
from agentkit.sandboxes.allowlist import parse_domain, parse_range

DEFAULT_IMAGE = "agentkit/base"
"""What ``agentkit sandbox build`` makes: a minimal Debian with Python, a shell and a user of no rights."""

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(value: Any) -> Any:
    """``"256m"`` as bytes (binary units b, k, m, g, t); an int is bytes already. Other text raises ``ValueError``."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", value.lower())
    if match is None:
        raise ValueError(f"{value!r} is no size: write bytes, or a number with k, m, g or t such as 256m")
    return int(float(match[1]) * _UNITS[match[2]])


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""Bytes; text such as ``256m`` is accepted."""


class Spec(Strict):
    """Base of the parts of a specification: sequences may be given as lists."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Resources(Spec):
    """Limits of one sandbox. There is never any swap."""

    cpus: float = Field(default=1.0, gt=0)
    """Processors."""
    memory: Size = parse_size("1g")
    """All memory of all processes, tmpfs included."""
    pids: int = Field(default=256, ge=16)
    """Processes and threads."""
    nofile: int = Field(default=4096, ge=64)
    """Open files of one process."""
    tmp: Size = parse_size("128m")
    """tmpfs at /tmp."""
    workspace: Size = parse_size("256m")
    """tmpfs at the working directory."""
    shm: Size = parse_size("64m")
    """tmpfs at /dev/shm."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs handed through; none by default."""

    @model_validator(mode="after")
    def _tmpfs_leaves_memory_for_processes(self) -> Resources:
        tmpfs = self.tmp + self.workspace + self.shm
        if tmpfs * 2 > self.memory:
            raise ValueError(
                f"tmp + workspace + shm = {tmpfs} bytes is more than half of memory = {self.memory}: files there count "
                "as memory; raise memory or lower them"
            )
        return self


class Network(Spec):
    """What a sandbox may reach: nothing, everything, or named places through a proxy on the host."""

    mode: Literal["none", "bridge", "allow"] = "none"
    domains: tuple[str, ...] = ()
    """With ``allow``: host names; ``*.example.org`` stands for every name below ``example.org``, not for that itself.
    Ports 80 and 443, unless the entry names one: ``example.org:8080`` allows 8080 alone. A name leads only to public
    addresses, and to those that ``cidrs`` opens."""
    cidrs: tuple[str, ...] = ()
    """With ``allow``: address ranges, which may be connected to by address; names are allowed by ``domains`` alone.
    Ports as above: ``10.0.0.0/8:5432``, ``[fd00::/8]:5432``. Private, loopback and link-local addresses must be named
    on purpose: ``0.0.0.0/0`` does not open them, ``10.1.0.0/16`` does."""

    @field_validator("domains")
    @classmethod
    def _names_exist(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_domain(domain)) for domain in domains)

    @field_validator("cidrs")
    @classmethod
    def _ranges_exist(cls, cidrs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_range(cidr)) for cidr in cidrs)

    @model_validator(mode="after")
    def _lists_belong_to_allow(self) -> Network:
        if (self.mode == "allow") != bool(self.domains or self.cidrs):
            raise ValueError(
                "domains or cidrs are what mode='allow' lists, and only they: use Network.allow(domains=…)"
            )
        return self

    @classmethod
    def none(cls) -> Network:
        return cls()

    @classmethod
    def bridge(cls) -> Network:
        return cls(mode="bridge")

    @classmethod
    def allow(cls, domains: tuple[str, ...] = (), cidrs: tuple[str, ...] = ()) -> Network:
        return cls(mode="allow", domains=tuple(domains), cidrs=tuple(cidrs))


class Mount(Spec):
    """A directory or file of the host inside the sandbox."""

    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path in the sandbox."""
    read_only: bool = True

    @field_validator("source", "target")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"{path!r} is not an absolute path")
        return path


class SandboxSpec(Spec):
    """Everything about a sandbox but where it runs. Immutable; equal specifications have an equal ``digest``."""

    image: str = Field(default=DEFAULT_IMAGE, min_length=1)
    """Container image; back ends without images ignore it."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every command. Nothing of the host's environment is passed on."""
    workdir: str = "/workspace"
    """Working directory of commands, empty and writable at the start."""
    user: str = "65534:65534"
    """Who commands run as: ``uid:gid``."""
    resources: Resources = Resources()
    network: Network = Network()
    mounts: tuple[Mount, ...] = ()
    readonly_root: bool = True
    """Whether everything but the tmpfs is read-only."""
    cap_add: tuple[str, ...] = ()
    """Linux capabilities; all are dropped by default."""
    runtime: str | None = None
    """Container runtime such as ``runsc``; null is the engine's default."""
    labels: dict[str, str] = Field(default_factory=dict)
    """The owner's own labels, to find sandboxes by."""
    ttl: float | None = Field(default=3600.0, gt=0)
    """Seconds after which the sandbox is removed whatever it does (``extend`` moves it); null never."""
    idle_timeout: float | None = Field(default=600.0, gt=0)
    """Seconds without contact with its host after which the agent ends the sandbox; null never."""
    pull: Literal["never", "missing", "always"] = "missing"
    pull_timeout: float = Field(default=900.0, gt=0)
    start_timeout: float = Field(default=60.0, gt=0)
    exec_timeout: float = Field(default=60.0, gt=0)
    """Timeout of a command that names none."""
    output_limit: Size = parse_size("10m")
    """Bytes that are kept of each output stream of a command: its beginning and its end."""
    ready: tuple[str, ...] = ()
    """A command that must succeed before the sandbox is handed out; none by default."""
    setup: tuple[str, ...] = ()
    """A command that is run once after each start, before ``ready``."""

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or path.rstrip("/") in ("", "/tmp", "/dev", "/proc", "/sys", "/run"):
            raise ValueError(f"workdir {path!r} must be an absolute path of its own, such as /workspace")
        return path.rstrip("/")

    @field_validator("user")
    @classmethod
    def _numeric(cls, user: str) -> str:
        if re.fullmatch(r"\d+:\d+", user) is None:
            raise ValueError(f"user {user!r} must be uid:gid in numbers, such as 1000:1000")
        return user

    @property
    def digest(self) -> str:
        """Hexadecimal name of this specification, the same in every process."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def loosened(self) -> Iterator[str]:
        """The fields that weaken isolation compared to the defaults."""
        if self.user.split(":")[0] == "0":
            yield "user"
        if self.network.mode != "none":
            yield f"network={self.network.mode}"
        if self.mounts:
            yield "mounts"
        if not self.readonly_root:
            yield "readonly_root"
        if self.cap_add:
            yield "cap_add"
