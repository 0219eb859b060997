"""From a specification to what the engine is asked for. Pure: nothing here talks to an engine or reads the host.

Invariant: the hardening does not depend on the specification but for the fields that loosen it by name: no
capabilities, no new privileges, no root user, a read-only root with bounded tmpfs, limits on memory (swap is none),
processes, processors, open files and logs, an own IPC and PID namespace, the engine's default seccomp profile, and no
network. No path of the caller's becomes the main process's working directory. The agent itself is process 1: an init of
the engine's would run as the programs' user, who could trace it and send it signals.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from agentkit.errors import UnsupportedFeature
from agentkit.sandboxes import agent_config
from agentkit.sandboxes.paths import BUNDLES, MOUNT
from agentkit.sandboxes.spec import SandboxSpec

MANAGED = "agentkit.managed"
ID = "agentkit.id"
SPEC = "agentkit.spec"
CREATED = "agentkit.created"
DEFINITION = "agentkit.definition"
"""The whole specification, so that another process can connect."""
TRANSPORT = "agentkit.transport"
"""Of sandboxes that older versions made: ``exec`` if there is no agent in them."""

MAIN = tuple(agent_config.bundled_command())
_PAGE = 4096
_RESERVED = ("/dev", "/proc", "/sys", MOUNT, BUNDLES)
_LOADER = ("LD_", "GLIBC_TUNABLES=")
"""Variables of an image that would act on the agent's loader."""


def check(spec: SandboxSpec, runtimes: Iterable[str], cpus: int) -> None:
    """Raise ``UnsupportedFeature`` for what an engine with these ``runtimes`` and ``cpus`` cannot give."""
    if spec.runtime is not None and spec.runtime not in set(runtimes):
        raise UnsupportedFeature(
            f"runtime {spec.runtime!r} is not one of the engine's ({', '.join(sorted(runtimes))}); install it and name "
            "it in /etc/docker/daemon.json"
        )
    if spec.resources.cpus > cpus:
        raise UnsupportedFeature(f"resources.cpus={spec.resources.cpus:g}, but the engine's host has {cpus}")
    for name, path in (("workdir", spec.workdir), *(("mounts", mount.target) for mount in spec.mounts)):
        clean = posixpath.normpath(path)
        if clean != path.rstrip("/") or clean == "/" or any(within(clean, place) for place in _RESERVED):
            raise UnsupportedFeature(
                f"{name}: {path!r} must be a plain path outside {', '.join(_RESERVED)} to be mounted in a sandbox"
            )


def check_mounts(sources: Mapping[str, str], secrets: Mapping[str, str]) -> None:
    """Raise ``UnsupportedFeature`` if a mount would show a sandbox what makes it master of the host.

    ``sources`` are the mounts' sources as asked for → with links resolved; ``secrets`` real paths → what they are.
    """
    for source, real in sources.items():
        for path, what in secrets.items():
            if within(path, real) or within(real, path):
                raise UnsupportedFeature(f"mounts: {source} holds {what} ({path}): the sandbox would own the host")


def loader_variables(environment: Iterable[str]) -> dict[str, str]:
    """What of an image's environment the agent must not be started with, and hands to commands."""
    return dict(entry.split("=", 1) for entry in environment if entry.startswith(_LOADER) and "=" in entry)


def labels(id: str, spec: SandboxSpec, created: float, given: Mapping[str, str]) -> dict[str, str]:
    """The container's labels: ours win over those ``given``."""
    return {
        CREATED: f"{created:.3f}",
        **{f"agentkit.user.{key}": value for key, value in spec.labels.items()},
        **given,
        MANAGED: "1",
        ID: id,
        SPEC: spec.digest,
        DEFINITION: spec.model_dump_json(),
    }


def definition(labels: Mapping[str, str]) -> SandboxSpec:
    """The specification of a container. Raises ``ValueError`` if its labels hold none that we understand."""
    return SandboxSpec.model_validate_json(labels.get(DEFINITION, ""))


def container(
    spec: SandboxSpec,
    image: str,
    directory: str,
    labels: Mapping[str, str],
    bundle: str,
    volumes: Iterable[str] = (),
    environment: Iterable[str] = (),
) -> dict[str, Any]:
    """The body of the engine's request to create a container.

    ``image`` is its id; ``directory`` the sandbox's on the host; ``bundle`` the volume with the agent's interpreter;
    ``environment`` is the image's, and ``volumes`` the paths that it declares as such, which the engine would otherwise
    make as unbounded, writable folders on the host's disk.
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
        "HostConfig": _host_config(spec, directory, bundle, volumes),
    }


def _host_config(spec: SandboxSpec, directory: str, bundle: str, volumes: Iterable[str]) -> dict[str, Any]:
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
        "Mounts": _mounts(spec, directory, bundle, volumes),
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
    """What a sandbox is given, as the engine names it."""
    return [name.upper().removeprefix("CAP_") for name in spec.cap_add]


def tmpfs(spec: SandboxSpec) -> dict[str, str]:
    """Where the sandbox may write → mount options. They belong to its user, so that a snapshot can be put back."""
    uid, gid = spec.user.split(":")
    # size=0 would mean no limit at all.
    sizes = {"/tmp": spec.resources.tmp, spec.workdir: spec.resources.workspace}
    modes = {"/tmp": "1777", spec.workdir: "0755"}
    return {
        path: f"rw,exec,nosuid,nodev,size={max(size, _PAGE)},mode={modes[path]},uid={uid},gid={gid}"
        for path, size in sizes.items()
    }


def _mounts(spec: SandboxSpec, directory: str, bundle: str, volumes: Iterable[str]) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"Type": "bind", "Source": directory, "Target": MOUNT, "ReadOnly": True},
        {
            "Type": "volume",
            "Source": bundle,
            "Target": BUNDLES,
            "ReadOnly": True,
            "VolumeOptions": {"NoCopy": True},
        },
    ]
    for mount in spec.mounts:
        mounts.append({"Type": "bind", "Source": mount.source, "Target": mount.target, "ReadOnly": mount.read_only})
    if spec.readonly_root:
        taken = {*tmpfs(spec), *(posixpath.normpath(mount.target) for mount in spec.mounts)}
        # Nothing of what the image has there is seen: the engine knows no read-only volumes without a name.
        mounts += [
            {"Type": "tmpfs", "Target": path, "ReadOnly": True, "TmpfsOptions": {"SizeBytes": _PAGE, "Mode": 0o555}}
            for path in sorted({posixpath.normpath(path) for path in volumes} - taken)
        ]
    return mounts


def within(path: str, place: str) -> bool:
    """Whether ``path`` is ``place`` or lies below it; both absolute and normal."""
    return path == place or path.startswith(place.rstrip("/") + "/")
