"""From the configuration to the way of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from agentkit.config import RunConfig
from agentkit.errors import ConfigError
from agentkit.trainers.weights.base import Bucket, Staging, Weights
from agentkit.trainers.weights.object_store import StoredStaging
from agentkit.trainers.weights.sender import Sender
from agentkit.trainers.weights.shared_memory import SharedStaging

Transfer = Literal["shared_memory", "object_store", "nccl", "gloo", "ipc"]


def transfer_of(config: RunConfig) -> Transfer:
    """Return what ``engine.weights`` asks for; ``auto`` is the object store in a cluster, else shared memory."""
    wanted = config.engine.weights
    if wanted == "auto":
        return "shared_memory" if config.cluster is None else "object_store"
    return wanted


def staging_of(config: RunConfig, *, rank: int, ranks: int, device: str) -> Staging:
    """Return one rank's end of the transfer. Raises ``ConfigError`` if ``device`` does not have it."""
    transfer = transfer_of(config)
    if transfer == "nccl" and not device.startswith("cuda"):
        raise ConfigError(f"engine.weights=nccl needs GPUs, and the learner is on {device}: set engine.weights=gloo")
    if transfer in ("nccl", "gloo", "ipc"):
        device = "cpu" if transfer == "gloo" else device
        return Sender(transfer, rank=rank, ranks=ranks, device=device, workers=config.engine.tensor_parallel)
    if rank > 0:
        return Gathering()
    return SharedStaging() if transfer == "shared_memory" else StoredStaging()


class Gathering:
    """A rank that takes part in gathering what rank 0 stages. Implements ``Staging``."""

    def stage(self, version: int, buckets: Iterable[Bucket]) -> Weights:
        for _ in buckets:
            pass
        return None  # type: ignore[return-value]  # the caller gets rank 0's

    def release(self) -> None:
        """Do nothing."""
