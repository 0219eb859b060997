"""Snapshots of containers: the root as an image if it could be written to, the tmpfs as a tar file of the host's.

Invariant: a snapshot is whole or absent, and its owner is written on its image and beside its archive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from agentkit.errors import SandboxError
from agentkit.sandboxes.aio import finished
from agentkit.sandboxes.backends import archives
from agentkit.sandboxes.backends.docker_engine import Engine, Refused
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Observed, Snapshot

REPOSITORY = "agentkit/snapshot"
_COMMIT_TIMEOUT = 300.0
_SNAPSHOT = "agentkit.snapshot"
"""Label of an image: the labels of its owner, as JSON."""


async def take(
    engine: Engine, channel: archives.Packer, id: str, name: str, spec: SandboxSpec, found: dict[str, Any]
) -> Snapshot:
    """Snapshot ``name`` of container ``found``. Raises ``SandboxError`` if there is one of that name."""
    archive, (hidden, owner) = archives.path_of(name), archives.begin("docker", name)
    try:
        await archives.store(channel, spec, _places(spec), hidden)
        image = found["Image"] if spec.readonly_root else await _commit(engine, id, name, found, owner)
        os.replace(hidden, archive)
    except BaseException:
        with contextlib.suppress(SandboxError):  # the reaper removes what the engine keeps
            await finished(discard(engine, Snapshot(name, "docker", f"{REPOSITORY}:{name}", None)))
        raise
    return Snapshot(id=name, backend="docker", image=image, archive=str(archive))


async def owned(engine: Engine) -> list[Observed]:
    """All snapshots that this host has written down, and all images of snapshots, with their owners' labels."""
    images = await engine.call(
        "list snapshots", lambda client: client.images(REPOSITORY, filters={"label": [_SNAPSHOT]}), lane="removal"
    )
    found: dict[str, Observed] = {}
    for image in images:
        labels = json.loads(image["Labels"][_SNAPSHOT])
        for tag in image.get("RepoTags") or ():
            name = tag.removeprefix(f"{REPOSITORY}:")
            found[name] = Observed(name, "exited", labels)
    for written in await asyncio.to_thread(archives.owned, "docker"):
        found[written.id] = written
    return [*found.values()]


async def put_back(channel: archives.Packer, spec: SandboxSpec, snapshot: Snapshot) -> None:
    """Put a snapshot's tmpfs in place of a sandbox's."""
    await archives.put_back(channel, _places(spec), snapshot)


async def discard(engine: Engine, snapshot: Snapshot) -> None:
    """Remove what a snapshot holds; nothing there is fine."""
    archives.discard(snapshot.id)
    try:
        # Whether it has an image of its own is not asked: a reaper knows no more than its name. Without force: with it,
        # an image that is in use would only lose its name, and stay for good.
        await engine.call(
            f"discard {snapshot.id}",
            lambda client: client.remove_image(f"{REPOSITORY}:{snapshot.id}"),
            lane="removal",
            changes=True,
        )
    except Refused as error:
        if error.status == 409:  # sandboxes made from it still run: it goes after the last of them
            archives.give_up("docker", snapshot.id)
            return
        if error.status != 404:
            raise
    archives.forget(snapshot.id)


async def _commit(engine: Engine, id: str, name: str, found: dict[str, Any], owner: Mapping[str, str]) -> str:
    """The root as an image. Its labels are emptied: a sandbox made from it must not pass for the first one."""
    labels = {**dict.fromkeys(found["Config"]["Labels"] or {}, ""), _SNAPSHOT: json.dumps(dict(owner))}

    def commit(client: Any) -> None:
        client.commit(id, repository=REPOSITORY, tag=name, conf={"Labels": labels})

    await engine.call(f"snapshot {id}", commit, timeout=_COMMIT_TIMEOUT, changes=True)
    return f"{REPOSITORY}:{name}"


def _places(spec: SandboxSpec) -> list[str]:
    return [spec.workdir, "/tmp"]
