"""Snapshots of containers: the root file system as an image if it is writable, the tmpfs as a tar file of the host.

Invariant: a snapshot is complete or absent, and its owner is recorded on its image and beside its archive.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from agentkit.errors import SandboxError
from agentkit.sandboxes.agent.channel import AgentChannel
from agentkit.sandboxes.backends.docker.engine import DockerEngine, EngineRefused
from agentkit.sandboxes.images import archives
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.tasks import finished
from agentkit.sandboxes.threads import in_thread
from agentkit.sandboxes.types import Observed, Snapshot

REPOSITORY = "agentkit/snapshot"
_COMMIT_TIMEOUT = 300.0
_OWNER_LABEL = "agentkit.snapshot"
"""Label of an image: the labels of its owner, as JSON."""


async def take(
    engine: DockerEngine, channel: AgentChannel, id: str, name: str, spec: SandboxSpec, found: dict[str, Any]
) -> Snapshot:
    """Take snapshot ``name`` of container ``found``. Raises ``SandboxError`` if the name is in use."""
    owner = archives.begin("docker", name)
    try:
        image = found["Image"] if spec.readonly_root else await _commit(engine, id, name, found, owner)
        archive = await archives.store(channel, spec, directories(spec), name)
    except BaseException:
        with contextlib.suppress(SandboxError):  # the reaper removes what the engine keeps
            await finished(discard(engine, Snapshot(name, "docker", f"{REPOSITORY}:{name}", None)))
        raise
    return Snapshot(id=name, backend="docker", image=image, archive=str(archive))


def directories(spec: SandboxSpec) -> list[str]:
    """Return the writable directories whose content a snapshot archives."""
    return [spec.workdir, "/tmp"]


async def owned(engine: DockerEngine) -> list[Observed]:
    """Return the snapshots that this host has recorded and all images of snapshots, with the labels of their owners."""
    images = await engine.call(
        "list snapshots", lambda client: client.images(REPOSITORY, filters={"label": [_OWNER_LABEL]}), queue="removal"
    )
    found: dict[str, Observed] = {}
    for image in images:
        labels = json.loads(image["Labels"][_OWNER_LABEL])
        for tag in image.get("RepoTags") or ():
            name = tag.removeprefix(f"{REPOSITORY}:")
            found[name] = Observed(name, "exited", labels)
    recorded = await in_thread(archives.owned, "docker")
    return [*(found | {observed.id: observed for observed in recorded}).values()]


async def discard(engine: DockerEngine, snapshot: Snapshot) -> None:
    """Remove a snapshot if it exists."""
    archives.discard(snapshot.id)
    try:
        # Always tried: a reaper knows only the name. Without force, which would only untag an image that is in use.
        await engine.call(
            f"discard {snapshot.id}",
            lambda client: client.remove_image(f"{REPOSITORY}:{snapshot.id}"),
            queue="removal",
            changes=True,
        )
    except EngineRefused as error:
        if error.status == 409:  # in use: the reaper removes it after the last sandbox made from it
            archives.give_up("docker", snapshot.id)
            return
        if error.status != 404:
            raise
    archives.forget(snapshot.id)


async def _commit(engine: DockerEngine, id: str, name: str, found: dict[str, Any], owner: Mapping[str, str]) -> str:
    """Commit the root file system. The labels are emptied: a sandbox made from the image must not get them."""
    labels = {**dict.fromkeys(found["Config"]["Labels"] or {}, ""), _OWNER_LABEL: json.dumps(dict(owner))}

    def commit(client: Any) -> None:
        client.commit(id, repository=REPOSITORY, tag=name, conf={"Labels": labels})

    await engine.call(f"snapshot {id}", commit, timeout=_COMMIT_TIMEOUT, changes=True)
    return f"{REPOSITORY}:{name}"
