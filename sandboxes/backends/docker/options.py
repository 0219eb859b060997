"""Translation of a specification to the request that creates a container. Nothing here calls the engine.

Invariant: the hardening depends on the specification only through the fields that weaken it by name: no capabilities,
no new privileges, no root user, a read-only root with bounded tmpfs, limits for memory (no swap), processes,
processors, open files and logs, private IPC and PID namespaces, the engine's default seccomp profile, and no network.
No path of the caller is the working directory of the main process. The agent is process 1: an init process of the
engine would run as the user of the programs, who could trace it and send it signals.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from agentkit.errors import UnsupportedFeature
from agentkit.sandboxes.agent import launch
from agentkit.sandboxes.paths import BUNDLES, MOUNT
from agentkit.sandboxes.reaper.labels import CREATED, ID, MANAGED, SPEC, user_labels
from agentkit.sandboxes.spec import SandboxSpec

DEFINITION = "agentkit.definition"
"""The complete specification, with which another process can connect."""

MAIN = tuple(launch.bundled_command())
_PAGE = 4096
_RESERVED = ("/dev", "/proc", "/sys", MOUNT, BUNDLES)
_LOADER = ("LD_", "GLIBC_TUNABLES=")
"""Variables of an image that would change how the agent is loaded."""


def check(spec: SandboxSpec, runtimes: Iterable[str], cpus: int) -> None:
    """Raise ``UnsupportedFeature`` for what an engine with these ``runtimes`` and ``cpus`` cannot provide."""
    if spec.runtime is not None and spec.runtime not in set(runtimes):
        raise UnsupportedFeature(
            f"the engine has no runtime {spec.runtime!r}, only {', '.join(sorted(runtimes))}; install it and add it to "
            "/etc/docker/daemon.json"
        )
    if spec.resources.cpus > cpus:
        raise UnsupportedFeature(f"resources.cpus={spec.resources.cpus:g}, but the machine has {cpus}")
    for name, path in (("workdir", spec.workdir), *(("mounts", mount.target) for mount in spec.mounts)):
        clean = posixpath.normpath(path)
        if clean != path.rstrip("/") or clean == "/" or any(within(clean, place) for place in _RESERVED):
            raise UnsupportedFeature(
                f"{name}: {path!r} must be a plain path outside {', '.join(_RESERVED)} to be mounted in a sandbox"
            )


def check_mounts(spec: SandboxSpec, secrets: Mapping[str, str]) -> None:
    """Raise ``UnsupportedFeature`` if a mount would give a sandbox control of the host.

    Args:
        spec: the specification.
        secrets: for each path that must not be visible, its description.
    """
    for mount in spec.mounts:
        source = os.path.realpath(mount.source)
        for path, description in secrets.items():
            real = os.path.realpath(path)
            if within(real, source) or within(source, real):
                raise UnsupportedFeature(
                    f"mounts: {mount.source} contains {description} ({real}), which controls the host; mount another "
                    "directory"
                )


def loader_variables(environment: Iterable[str]) -> dict[str, str]:
    """Return the variables of an image that commands get, but the agent must not be started with."""
    return dict(entry.split("=", 1) for entry in environment if entry.startswith(_LOADER) and "=" in entry)


def labels(id: str, spec: SandboxSpec, created: float, given: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a container; those of agentkit replace equal ones in ``given``."""
    return {
        CREATED: f"{created:.3f}",
        **user_labels(spec.labels),
        **given,
        MANAGED: "1",
        ID: id,
        SPEC: spec.digest,
        DEFINITION: spec.model_dump_json(),
    }


def definition(labels: Mapping[str, str]) -> SandboxSpec:
    """Return the specification of a container. Raises ``ValueError`` if its labels contain no valid one."""
    return SandboxSpec.model_validate_json(labels.get(DEFINITION, ""))


def container(
    spec: SandboxSpec,
    image: str,
    directory: str,
    labels: Mapping[str, str],
    runtime: str,
    volumes: Iterable[str] = (),
    environment: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the body of the request that creates a container.

    Args:
        spec: the specification.
        image: id of the image.
        directory: the sandbox's directory on the host.
        labels: labels of the container.
        runtime: name of the volume with the agent's interpreter.
        volumes: paths that the image declares as volumes; the engine would create them as unbounded writable folders
            on the host.
        environment: the environment of the image.
    """
    return {
        "Image": image,
        "Entrypoint": list(MAIN),
        "Cmd": [],
        "User": spec.user,
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Env": ["HOME=/tmp", *(f"{name}=" for name in loader_variables(environment))],
        "Labels": dict(labels),
        "Tty": False,
        "OpenStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "HostConfig": _host_config(spec, directory, runtime, volumes),
    }


def _host_config(spec: SandboxSpec, directory: str, runtime: str, volumes: Iterable[str]) -> dict[str, Any]:
    resources = spec.resources
    config: dict[str, Any] = {
        "Init": False,
        "NetworkMode": "bridge" if spec.network.mode == "bridge" else "none",
        "IpcMode": "private",
        "Privileged": False,
        "ReadonlyRootfs": spec.readonly_root,
        "CapDrop": ["ALL"],
        "CapAdd": capabilities(spec),
        "SecurityOpt": ["no-new-privileges"],
        "Memory": resources.memory,
        "MemorySwap": resources.memory,
        "NanoCpus": round(resources.cpus * 1e9),
        "PidsLimit": resources.pids,
        "OomScoreAdj": 500,
        "ShmSize": max(resources.shm, _PAGE),
        "Ulimits": [
            {"Name": "nofile", "Soft": resources.nofile, "Hard": resources.nofile},
            {"Name": "core", "Soft": 0, "Hard": 0},
        ],
        "Tmpfs": tmpfs(spec),
        "Mounts": _mounts(spec, directory, runtime, volumes),
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m", "max-file": "2"}},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }
    if spec.runtime is not None:
        config["Runtime"] = spec.runtime
    if resources.gpus is not None:
        config["DeviceRequests"] = [{"Count": resources.gpus, "Capabilities": [["gpu"]]}]
    return config


def capabilities(spec: SandboxSpec) -> list[str]:
    """Return the capabilities of a sandbox, with the engine's names."""
    return [name.upper().removeprefix("CAP_") for name in spec.cap_add]


def tmpfs(spec: SandboxSpec) -> dict[str, str]:
    """Return the mount options of the writable directories. The user owns them, so snapshots can be restored."""
    uid, gid = spec.user.split(":")
    sizes = {"/tmp": ("1777", spec.resources.tmp), spec.workdir: ("0755", spec.resources.workspace)}
    return {  # size=0 would mean no limit
        path: f"rw,exec,nosuid,nodev,size={max(size, _PAGE)},mode={mode},uid={uid},gid={gid}"
        for path, (mode, size) in sizes.items()
    }


def _mounts(spec: SandboxSpec, directory: str, runtime: str, volumes: Iterable[str]) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"Type": "bind", "Source": directory, "Target": MOUNT, "ReadOnly": True},
        {"Type": "volume", "Source": runtime, "Target": BUNDLES, "ReadOnly": True, "VolumeOptions": {"NoCopy": True}},
    ]
    for mount in spec.mounts:
        mounts.append({"Type": "bind", "Source": mount.source, "Target": mount.target, "ReadOnly": mount.read_only})
    if spec.readonly_root:
        taken = {*tmpfs(spec), *(posixpath.normpath(mount.target) for mount in spec.mounts)}
        # Empty tmpfs hide the content of the image there: the engine has no anonymous read-only volumes.
        mounts += [
            {"Type": "tmpfs", "Target": path, "ReadOnly": True, "TmpfsOptions": {"SizeBytes": _PAGE, "Mode": 0o555}}
            for path in sorted({posixpath.normpath(path) for path in volumes} - taken)
        ]
    return mounts


def within(path: str, place: str) -> bool:
    """Return whether ``path`` is ``place`` or below it; both must be absolute and normalized."""
    return path == place or path.startswith(place.rstrip("/") + "/")
