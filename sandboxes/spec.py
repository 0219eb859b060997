"""Specification of a sandbox, the same for every back end.

Invariant: the defaults are the most restrictive values, and ``loosened`` lists the fields that weaken them. Sizes are
bytes once validated. All tmpfs together take at most half of the memory limit, since files there count as memory.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from agentkit.config import Strict
from agentkit.sandboxes.egress.allowlist import parse_domain, parse_range
from agentkit.sandboxes.egress.forward import parse_address

DEFAULT_IMAGE = "agentkit/base"
"""Built by ``agentkit sandbox build``: a minimal Debian with Python, a shell and an unprivileged user."""

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_size(value: Any) -> Any:
    """Convert text such as ``"256m"`` (binary units b, k, m, g, t) to bytes; raises ``ValueError`` for other text."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?\s*", value.lower())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write bytes, or a number with k, m, g or t such as 256m")
    return int(float(match[1]) * _UNITS[match[2]])


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""Bytes; text such as ``256m`` is accepted."""


def command_words(cmd: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command: a string is run by ``/bin/sh -c``, a sequence directly."""
    return ("/bin/sh", "-c", cmd) if isinstance(cmd, str) else tuple(cmd)


class Spec(Strict):
    """Base of the parts of a specification. Immutable; lists are accepted for tuples."""

    @field_validator("*", mode="before")
    @classmethod
    def _accept_lists(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Resources(Spec):
    """Resource limits of one sandbox. Swap is never available."""

    cpus: float = Field(default=1.0, gt=0)
    """Processors."""
    memory: Size = parse_size("1g")
    """Memory of all processes, tmpfs included."""
    pids: int = Field(default=256, ge=16)
    """Processes and threads."""
    nofile: int = Field(default=4096, ge=64)
    """Open files per process."""
    tmp: Size = parse_size("128m")
    """tmpfs at /tmp."""
    workspace: Size = parse_size("256m")
    """tmpfs at the working directory."""
    shm: Size = parse_size("64m")
    """tmpfs at /dev/shm."""
    gpus: int | None = Field(default=None, ge=1)
    """Number of GPUs; none by default."""

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
    """Network access: none, everything (``bridge``), listed hosts through a proxy (``allow``), or one server
    (``forward``).

    Use ``Network.none()``, ``Network.bridge()``, ``Network.allow(domains=…)`` or ``Network.forward(address)``.
    """

    mode: Literal["none", "bridge", "allow", "forward"] = "none"
    domains: tuple[str, ...] = ()
    """With ``allow``: host names; ``*.example.org`` matches every name below ``example.org``, but not that name itself.
    Ports 80 and 443, unless the entry has a port: ``example.org:8080`` allows 8080 only. Names may resolve to public
    addresses and to those in ``cidrs``."""
    cidrs: tuple[str, ...] = ()
    """With ``allow``: address ranges that programs may connect to by address; names need an entry in ``domains``. Ports
    as above: ``10.0.0.0/8:5432``, ``[fd00::/8]:5432``. Private, loopback and link-local addresses need an explicit
    range: ``0.0.0.0/0`` does not include them, ``10.1.0.0/16`` does."""
    address: str | None = None
    """With ``forward``: the server, as ``host:port`` for the machine that runs the sandbox."""

    @field_validator("domains")
    @classmethod
    def _names_exist(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_domain(domain)) for domain in domains)

    @field_validator("cidrs")
    @classmethod
    def _ranges_exist(cls, cidrs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_range(cidr)) for cidr in cidrs)

    @field_validator("address")
    @classmethod
    def _server_exists(cls, address: str | None) -> str | None:
        if address is not None:
            parse_address(address)
        return address

    @model_validator(mode="after")
    def _lists_belong_to_allow(self) -> Network:
        if (self.mode == "allow") != bool(self.domains or self.cidrs):
            raise ValueError(
                "domains and cidrs belong to mode='allow', which needs one of them; use Network.allow(domains=…)"
            )
        if (self.mode == "forward") != (self.address is not None):
            raise ValueError("address belongs to mode='forward', which needs it; use Network.forward('host:port')")
        return self

    @classmethod
    def none(cls) -> Network:
        """No network."""
        return cls()

    @classmethod
    def bridge(cls) -> Network:
        """The engine's default network, without restrictions."""
        return cls(mode="bridge")

    @classmethod
    def allow(cls, domains: tuple[str, ...] = (), cidrs: tuple[str, ...] = ()) -> Network:
        """Only these hosts and ranges, through the proxy."""
        return cls(mode="allow", domains=tuple(domains), cidrs=tuple(cidrs))

    @classmethod
    def forward(cls, address: str) -> Network:
        """Only one server, for any protocol over TCP: port 3128 of 127.0.0.1 in the sandbox leads to ``address``."""
        return cls(mode="forward", address=address)


class Mount(Spec):
    """A directory or file of the host that is mounted in the sandbox."""

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
    """Specification of a sandbox: image, limits, network, timeouts. Immutable and validated.

    Equal specifications have equal digests.
    """

    image: str = Field(default=DEFAULT_IMAGE, min_length=1)
    """Container image; ignored by back ends without images."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every command. The host's environment is not passed on."""
    workdir: str = "/workspace"
    """Working directory of commands, empty and writable at the start."""
    user: str = "65534:65534"
    """User of the commands: ``uid:gid``."""
    resources: Resources = Resources()
    network: Network = Network()
    mounts: tuple[Mount, ...] = ()
    readonly_root: bool = True
    """Make everything but the tmpfs read-only."""
    cap_add: tuple[str, ...] = ()
    """Linux capabilities to add; all are dropped by default."""
    runtime: str | None = None
    """Container runtime such as ``runsc``; null: the engine's default."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for ``Sandbox.list``."""
    avoid_hosts: tuple[str, ...] = ()
    """Hosts (``Backend.host_of``) to use only if no other host has room, such as that of the sandbox that this one may
    have to replace. Ignored by back ends with one host."""
    ttl: float | None = Field(default=3600.0, gt=0)
    """Seconds until the sandbox is removed (``Sandbox.extend`` changes it); null: never."""
    idle_timeout: float | None = Field(default=600.0, gt=0)
    """Seconds without contact to its host until the sandbox ends; null: never."""
    pull: Literal["never", "missing", "always"] = "missing"
    """When to pull the image."""
    pull_timeout: float = Field(default=900.0, gt=0)
    """Seconds."""
    start_timeout: float = Field(default=60.0, gt=0)
    """Seconds until the sandbox must be ready, without the pull."""
    exec_timeout: float = Field(default=60.0, gt=0)
    """Default timeout of commands in seconds."""
    output_limit: Size = parse_size("10m")
    """Bytes kept of each output stream of a command: its beginning and its end."""
    ready: tuple[str, ...] = ()
    """Command that is repeated until it succeeds; the sandbox is ready then. A string is run by ``/bin/sh``."""
    setup: tuple[str, ...] = ()
    """Command that runs once after each start, before ``ready``. A string is run by ``/bin/sh``."""

    @field_validator("ready", "setup", mode="before")
    @classmethod
    def _accept_strings(cls, cmd: Any) -> Any:
        return command_words(cmd) if isinstance(cmd, str) else cmd

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or path.rstrip("/") in ("", "/tmp", "/dev", "/proc", "/sys", "/run"):
            raise ValueError(
                f"workdir {path!r} must be an absolute path other than a system directory, such as /workspace"
            )
        return path.rstrip("/")

    @field_validator("user")
    @classmethod
    def _numeric(cls, user: str) -> str:
        if re.fullmatch(r"\d+:\d+", user) is None:
            raise ValueError(f"user {user!r} must be uid:gid in numbers, such as 1000:1000")
        return user

    @classmethod
    def of(cls, spec: SandboxSpec | str | None = None, **fields: Any) -> SandboxSpec:
        """Return ``spec`` (a specification, an image, or the defaults) with some fields replaced, validated."""
        if isinstance(spec, str):
            return cls(image=spec, **fields)
        if not isinstance(spec, SandboxSpec | None):
            raise TypeError(f"spec must be a SandboxSpec or an image, not {type(spec).__name__}; give fields by name")
        if spec is None or not fields:
            return spec or cls(**fields)
        return cls(**{**{name: getattr(spec, name) for name in spec.model_fields_set}, **fields})

    @property
    def digest(self) -> str:
        """Hexadecimal digest, the same in every process."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def loosened(self) -> tuple[str, ...]:
        """Return the fields that weaken isolation compared to the defaults."""
        weaker = {
            "user": self.user.split(":")[0] == "0",
            f"network={self.network.mode}": self.network.mode != "none",
            "mounts": bool(self.mounts),
            "readonly_root": not self.readonly_root,
            "cap_add": bool(self.cap_add),
        }
        return tuple(name for name, is_weaker in weaker.items() if is_weaker)
