"""Snapshots of containers: the root as an image if it could be written to, the tmpfs as a tar file of the host's.

Invariant: a snapshot is whole or absent.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from agentkit.errors import SandboxError
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backends import archives
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Snapshot

REPOSITORY = "agentkit/snapshot"
_COMMIT_TIMEOUT = 300.0


async def take(
    engine: Engine, channel: archives.Packer, id: str, name: str, spec: SandboxSpec, found: dict[str, Any]
) -> Snapshot:
    """Snapshot ``name`` of container ``found``. Raises ``SandboxError`` if there is one of that name."""
    archive, hidden = archives.path_of(name), archives.begin(name)
    try:
        await archives.store(channel, spec, _places(spec), hidden)
        image = found["Image"] if spec.readonly_root else await _commit(engine, id, name, found)
        os.replace(hidden, archive)
    finally:
        hidden.unlink(missing_ok=True)
    return Snapshot(id=name, backend="docker", image=image, archive=str(archive))


async def put_back(channel: archives.Packer, spec: SandboxSpec, snapshot: Snapshot) -> None:
    """Put a snapshot's tmpfs in place of a sandbox's."""
    await archives.put_back(channel, _places(spec), snapshot)


async def discard(engine: Engine, snapshot: Snapshot) -> None:
    """Remove what a snapshot holds; nothing there is fine."""
    if snapshot.archive is not None:
        archives.path_of(snapshot.id).unlink(missing_ok=True)
    if snapshot.image.startswith(f"{REPOSITORY}:"):
        try:
            await engine.call(
                f"discard {snapshot.id}",
                lambda client: client.remove_image(snapshot.image, force=True),
                lane="removal",
                changes=True,
            )
        except Refused as error:
            # 409: sandboxes made from it still run; what they need goes with the last of them.
            if error.status not in (404, 409):
                raise


async def _commit(engine: Engine, id: str, name: str, found: dict[str, Any]) -> str:
    """The root as an image. Its labels are emptied: a sandbox made from it must not pass for the first one."""
    labels = dict.fromkeys(found["Config"]["Labels"] or {}, "")

    def commit(client: Any) -> None:
        client.commit(id, repository=REPOSITORY, tag=name, conf={"Labels": labels})

    try:
        await engine.call(f"snapshot {id}", commit, timeout=_COMMIT_TIMEOUT, changes=True)
    except BaseException:
        with contextlib.suppress(SandboxError):
            await finished(discard(engine, Snapshot(name, "docker", f"{REPOSITORY}:{name}", None)))
        raise
    return f"{REPOSITORY}:{name}"


def _places(spec: SandboxSpec) -> list[str]:
    return [spec.workdir, "/tmp"]
