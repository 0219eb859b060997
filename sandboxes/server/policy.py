"""What clients of a sandbox server may request, and how much.

Pure except that it resolves the paths of mounts. Everything that weakens isolation, names a resource of the host or is
large is refused unless the operator has listed it; nothing in a request can extend the list.
"""

from __future__ import annotations

import fnmatch
import os

from pydantic import Field

from agentkit.errors import AccessDenied, QuotaExceeded
from agentkit.sandboxes.spec import DEFAULT_IMAGE, Mount, SandboxSpec, Size, Spec, parse_size

_SNAPSHOTS = "agentkit/snapshot"
"""Images of snapshots, which may be those of another tenant: a client uses its own by their names on the server."""
_SLOWEST_TRANSFER = 100_000
"""Lowest allowed transfer rate of a client, in bytes per second."""


class Policy(Spec):
    """What one request to a sandbox server may ask for. The defaults allow nothing that weakens a sandbox."""

    images: tuple[str, ...] = (DEFAULT_IMAGE, f"{DEFAULT_IMAGE}:*", "agentkit/env", "agentkit/env:*")
    """Allowed images: shell patterns such as ``registry.example.org/team/*``. By default those of agentkit itself."""
    mounts: tuple[str, ...] = ()
    """Directories of the server that may be mounted read-only, including everything below them."""
    writable_mounts: tuple[str, ...] = ()
    """Directories of the server that may also be mounted for writing."""
    cap_add: tuple[str, ...] = ()
    """Allowed Linux capabilities, such as ``NET_ADMIN``."""
    runtimes: tuple[str, ...] = ()
    """Allowed container runtimes, such as ``runsc``."""
    networks: tuple[str, ...] = ("none",)
    """Allowed network modes, out of ``none``, ``bridge``, ``allow`` and ``forward``."""
    root: bool = False
    """Allow user or group 0."""
    writable_root: bool = False
    """Allow ``readonly_root=False``."""
    gpus: int = Field(default=0, ge=0)
    """Largest number of GPUs of one sandbox."""
    cpus: float = Field(default=4.0, gt=0)
    """Largest number of processors of one sandbox."""
    memory: Size = parse_size("8g")
    """Largest memory limit of one sandbox, in bytes."""
    pids: int = Field(default=4096, ge=16)
    """Largest number of processes of one sandbox."""
    nofile: int = Field(default=65536, ge=64)
    """Largest number of open files of one process."""
    output: Size = parse_size("64m")
    """Largest ``output_limit`` of one command, in bytes."""
    file: Size = parse_size("1g")
    """Largest file that one call may read, in bytes; it is streamed."""


class Watermarks(Spec):
    """Shares of the server's machine in use from which it creates no more sandboxes, until 5 % less are in use."""

    memory: float = Field(default=0.9, gt=0, le=1)
    """Memory that cannot be freed."""
    disk: float = Field(default=0.9, gt=0, le=1)
    """Space on the disk of the engine's data."""
    cpu: float | None = Field(default=None, gt=0, le=1)
    """Processors, averaged over about ten seconds. None: no limit, because busy processors only delay sandboxes."""

    def shares(self) -> dict[str, float]:
        """Return the limits by name."""
        return self.model_dump(exclude_none=True)


class Quota(Spec):
    """Limits that all clients of a sandbox server share."""

    sandboxes: int = Field(default=256, ge=1)
    """Largest number of sandboxes."""
    cpus: float | None = Field(default=None, gt=0)
    """Largest sum of the processors of all sandboxes. None: no limit."""
    memory: Size | None = None
    """Largest sum of the memory limits of all sandboxes, in bytes. None: no limit."""
    snapshots: int = Field(default=64, ge=0)
    """Largest number of snapshots."""
    requests: int = Field(default=2048, ge=1)
    """Concurrent requests, including event streams; twice as many connections are accepted."""
    body: Size = parse_size("64m")
    """Largest request body, in bytes."""
    bodies: Size = parse_size("256m")
    """Total size of the bodies of all requests in progress, in bytes."""
    responses: Size = parse_size("1g")
    """Total size of all buffered responses that clients have not yet read, in bytes; files and running commands are
    streamed and do not count."""
    header_seconds: float = Field(default=10.0, gt=0)
    """Time in which a client must send the header of a request."""
    body_seconds: float = Field(default=10.0, gt=0)
    """Time in which a client must send a body or read a response, plus one second per 100 kB."""
    disconnected_seconds: float = Field(default=600.0, gt=0)
    """Time after which the sandboxes and snapshots of a disconnected client are removed."""

    def transfer_seconds(self, length: int) -> float:
        """Return the time in which ``length`` bytes must be transferred."""
        return self.body_seconds + length / _SLOWEST_TRANSFER


class TenantQuota(Spec):
    """Limits of one tenant, in addition to its share of ``Quota``. None: no limit of its own."""

    sandboxes: int | None = Field(default=None, ge=0)
    """Largest number of sandboxes."""
    snapshots: int | None = Field(default=None, ge=0)
    """Largest number of snapshots."""
    cpus: float | None = Field(default=None, gt=0)
    """Largest sum of the processors of its sandboxes."""
    memory: Size | None = None
    """Largest sum of the memory limits of its sandboxes, in bytes."""
    requests: int | None = Field(default=None, ge=1)
    """Concurrent requests, including event streams."""
    bodies: Size | None = None
    """Total size of the bodies of its requests in progress, in bytes."""
    responses: Size | None = None
    """Total size of its buffered responses that are not read yet, in bytes."""


def permitted(policy: Policy, spec: SandboxSpec, *, check_image: bool = True) -> SandboxSpec:
    """Return ``spec`` with the sources of its mounts resolved.

    Args:
        policy: the rules.
        spec: what a client requested.
        check_image: False for a sandbox that is created from a snapshot.

    Raises:
        AccessDenied: the policy does not allow a field of ``spec``.
        QuotaExceeded: an amount is larger than the policy allows.
    """
    if check_image:
        check_image_name(policy, spec.image)
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


def check_image_name(policy: Policy, image: str) -> None:
    """Raise ``AccessDenied`` if the policy does not allow an image."""
    listed = any(fnmatch.fnmatchcase(image, pattern) for pattern in policy.images)
    if image.startswith(_SNAPSHOTS) or not listed:
        raise _denied("image", image)


def check_amount(policy: Policy, name: str, requested: float) -> None:
    """Raise ``QuotaExceeded`` if ``requested`` is larger than the field ``name`` of the policy."""
    if requested > getattr(policy, name):
        raise over_limit(f"{name}={requested:g} is larger than the server's limit of {getattr(policy, name):g}")


def over_limit(message: str) -> QuotaExceeded:
    """Return an error that a retry cannot resolve."""
    error = QuotaExceeded(message)
    error.retryable = False
    return error


def _resolved(policy: Policy, mount: Mount) -> Mount:
    # The client's path may contain links or dots: mount exactly the path that is checked.
    source = os.path.realpath(mount.source)
    allowed = policy.writable_mounts + (policy.mounts if mount.read_only else ())
    if not any(os.path.commonpath([source, root]) == root for root in map(os.path.realpath, allowed)):
        raise _denied("mounts", mount.source)
    return mount.model_copy(update={"source": source})


def _denied(field: str, value: object) -> AccessDenied:
    return AccessDenied(f"this server does not allow {field}={value!r}; add it to the server's policy", field=field)
