"""agentkit's environments, by ``agentkit.make_vec``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import docker
import numpy as np
import psutil

import agentkit
from agentkit.errors import EnvError
from agentkit.sandboxes.lease import OWNER
from agentkit.sandboxes.owner import Owner
from benchmarks.environments.measure import Failed


class Ours:
    def __init__(self, count: int, id: str, mode: str, kwargs: dict[str, Any]) -> None:
        self._vector = agentkit.make_vec(id, count, mode=mode, autoreset_mode="Disabled", **kwargs)
        self._nobody = [False] * count

    def reset(self, chosen: Sequence[int], tasks: Sequence[int]) -> None:
        seeds: list[int | None] = [None] * self._vector.num_envs
        for k, seed in zip(chosen, tasks, strict=True):
            seeds[k] = seed
        mask = np.isin(np.arange(self._vector.num_envs), chosen)
        try:
            self._vector.reset(seed=seeds, options={"reset_mask": mask})
        except EnvError as error:
            raise Failed(f"{type(error).__name__}: {error}") from error

    def step(self, actions: Sequence[str]) -> tuple[Sequence[bool], Sequence[bool], Sequence[bool]]:
        _, _, terminated, truncated, infos = self._vector.step(actions)
        return terminated | truncated, infos.get("success", self._nobody), infos.get("_failure", self._nobody)

    def close(self) -> None:
        self._vector.close()


def players(count: int, **arguments: Any) -> Ours:
    return Ours(count, **arguments)


def elsewhere() -> set[int]:
    """The engine's shims of the containers that this process, or one that it started, has."""
    try:
        client = docker.from_env(timeout=60).api
    except docker.errors.DockerException:
        return set()
    me = psutil.Process()
    owners = [Owner.of(process.pid) for process in (me, *me.children(recursive=True))]
    boxes = [box for owner in owners for box in client.containers(filters={"label": f"{OWNER}={owner}"})]
    return {psutil.Process(client.inspect_container(box["Id"])["State"]["Pid"]).ppid() for box in boxes}
