"""What the clients of a sandbox server may ask for, and how much of it: a token is not root.

Invariant: pure but for the resolving of mounts' paths. Whatever loosens isolation, names something of the host or is
large is refused unless the server's owner has listed it; nothing a client sends widens the list.
"""

from __future__ import annotations

import fnmatch
import os

from pydantic import Field

from agentkit.errors import AccessDenied, QuotaExceeded
from agentkit.sandboxes.spec import DEFAULT_IMAGE, Mount, SandboxSpec, Size, Spec, parse_size

_SLOWEST = 100_000
"""Bytes a second that a client must send, or take."""


class Policy(Spec):
    """The server's allow-list. The defaults allow nothing that weakens a sandbox."""

    images: tuple[str, ...] = (DEFAULT_IMAGE, f"{DEFAULT_IMAGE}:*")
    """Patterns such as ``registry.example.org/team/*``; ``*`` stands for any text."""
    mounts: tuple[str, ...] = ()
    """Directories of the server that may be mounted, with all below them, read-only."""
    writable_mounts: tuple[str, ...] = ()
    """Those that may be mounted for writing too."""
    cap_add: tuple[str, ...] = ()
    runtimes: tuple[str, ...] = ()
    networks: tuple[str, ...] = ("none",)
    """Of ``none``, ``bridge``, ``allow``."""
    root: bool = False
    """Whether user or group 0 may be asked for."""
    writable_root: bool = False
    gpus: int = Field(default=0, ge=0)
    cpus: float = Field(default=4.0, gt=0)
    memory: Size = parse_size("8g")
    pids: int = Field(default=4096, ge=16)
    nofile: int = Field(default=65536, ge=64)
    output: Size = parse_size("64m")
    """Bytes of output that one command may have kept."""
    file: Size = parse_size("1g")
    """Bytes of a file that one call may read; it is passed on in pieces."""


class Limits(Spec):
    """What all clients of a server get together."""

    sandboxes: int = Field(default=256, ge=1)
    snapshots: int = Field(default=64, ge=0)
    requests: int = Field(default=2048, ge=1)
    """Calls that run at once, event streams included; twice as many connections."""
    body: Size = parse_size("64m")
    """Bytes of one request."""
    bodies: Size = parse_size("256m")
    """Bytes of all requests that are read or worked on at once."""
    answers: Size = parse_size("1g")
    """Bytes of all answers that wait for their clients to take them; files and running commands wait for none."""
    header_seconds: float = Field(default=10.0, gt=0)
    """The time that a client has to send a request's header."""
    body_seconds: float = Field(default=10.0, gt=0)
    """The time for a request's body, and one second more for each 100 kB; likewise for an answer."""
    lease: float = Field(default=600.0, gt=0)
    """Seconds for which a sandbox stays after its last client went away; its time to live may end before."""

    def seconds(self, length: int) -> float:
        """The time in which ``length`` bytes must pass between the server and a client."""
        return self.body_seconds + length / _SLOWEST


def permitted(policy: Policy, spec: SandboxSpec, *, image: bool = True) -> SandboxSpec:
    """``spec`` as it may be made: mounts name what their sources really are.

    ``image=False`` leaves the image unchecked (a snapshot's). Raises ``AccessDenied``, ``QuotaExceeded``.
    """
    if image and not any(fnmatch.fnmatchcase(spec.image, pattern) for pattern in policy.images):
        raise _denied("image", spec.image)
    if spec.network.mode not in policy.networks:
        raise _denied("network", spec.network.mode)
    if spec.runtime is not None and spec.runtime not in policy.runtimes:
        raise _denied("runtime", spec.runtime)
    for capability in spec.cap_add:
        if capability not in policy.cap_add:
            raise _denied("cap_add", capability)
    if not policy.root and 0 in map(int, spec.user.split(":")):
        raise _denied("user", spec.user)
    if not policy.writable_root and not spec.readonly_root:
        raise _denied("readonly_root", False)
    for name in ("gpus", "cpus", "memory", "pids", "nofile"):
        check_amount(policy, name, getattr(spec.resources, name) or 0)
    check_amount(policy, "output", spec.output_limit)
    return spec.model_copy(update={"mounts": tuple(_resolved(policy, mount) for mount in spec.mounts)})


def check_amount(policy: Policy, name: str, asked: float) -> None:
    """Raises ``QuotaExceeded``."""
    if asked > getattr(policy, name):
        error = QuotaExceeded(f"{name}={asked:g} is more than the {getattr(policy, name):g} that this server gives")
        error.retryable = False
        raise error


def _resolved(policy: Policy, mount: Mount) -> Mount:
    # What the client named may lead elsewhere by links or dots; what is mounted is what was checked.
    source = os.path.realpath(mount.source)
    allowed = policy.writable_mounts + (policy.mounts if mount.read_only else ())
    if not any(os.path.commonpath([source, root]) == root for root in map(os.path.realpath, allowed)):
        raise _denied("mounts", mount.source)
    return mount.model_copy(update={"source": source})


def _denied(field: str, value: object) -> AccessDenied:
    return AccessDenied(
        f"this server does not allow {field}={value!r}: its owner can add it to the server's policy", field=field
    )
