"""Sandboxes for tasks of Harbor: images, limits, capabilities.

Invariant: the root file system is the image's and writable, because tasks install packages and write anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentkit.sandboxes.images import dockerfiles
from agentkit.sandboxes.images.dockerfiles import User
from agentkit.sandboxes.spec import Network, Resources, SandboxSpec

IMAGES = "agentkit/harbor"
"""Images that are built from the Dockerfiles of tasks; the tag is a digest of the folder."""
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETUID")
"""Capabilities of root, a part of those that a container of Docker has: package managers need them."""
_SCRATCH = "/var/lib/agentkit"
"""Working directory of sandboxes, which is empty at the start: another one would hide files of the image."""


def image_of(docker_image: str | None, folder: Path, timeout: float, *, again: bool = False) -> str:
    """Return the image of a task; builds it if the task does not name one. Blocks.

    Args:
        docker_image: the image that the task names.
        folder: the folder with its Dockerfile, if it names none.
        timeout: seconds that the build may take.
        again: build it although it exists.

    Raises:
        ImageError: the image cannot be built.
        EngineUnavailable: the engine does not answer.
    """
    return docker_image or dockerfiles.build_image(folder, IMAGES, timeout, again=again)


def spec_of(
    image: str,
    user: User,
    env: Mapping[str, str],
    resources: Resources,
    network: Network,
    *,
    setup: tuple[str, ...] = (),
    ready: str = "",
    patience: float = 0.0,
) -> SandboxSpec:
    """Return the specification of a sandbox for a task.

    Args:
        image: the image of the task.
        user: the user of its commands.
        env: variables of its commands.
        resources: its limits.
        network: its network.
        setup: a command that runs at its start.
        ready: a command that succeeds when the sandbox is ready.
        patience: seconds that this may take in addition.
    """
    return SandboxSpec(
        image=image,
        user=f"{user.uid}:{user.gid}",
        env={"HOME": user.home, **env},
        workdir=_SCRATCH,
        resources=resources,
        network=network,
        readonly_root=False,
        cap_add=_CAPABILITIES if user.uid == 0 else (),
        setup=setup,
        ready=("/bin/sh", "-c", ready) if ready else (),
        pull="never" if image.startswith(IMAGES) else "missing",
        ttl=None,
        idle_timeout=3600.0,
        start_timeout=300.0 + patience,
    )
