"""The back end that ``learner.backend`` names."""

from __future__ import annotations

from torch import nn

from agentkit.config import LearnerConfig
from agentkit.trainers.learner.backends.base import Backend
from agentkit.trainers.learner.backends.replicas import Replicas
from agentkit.trainers.learner.blocks import configure_blocks
from agentkit.trainers.learner.ranks import Ranks


def build_backend(module: nn.Module, learner: LearnerConfig, ranks: Ranks, what: str) -> Backend:
    """Wrap ``module`` and build its optimiser; ``what`` names it in errors. Call ``Backend.module``, not ``module``.

    Raises ``LearnerError`` when ``learner.attention`` cannot be used.
    """
    configure_blocks(module, learner)
    if learner.backend == "fsdp" and ranks.size > 1:
        from agentkit.trainers.learner.backends.fsdp import FSDP

        return FSDP(module, learner, ranks, what)
    if learner.zero > 0:
        from agentkit.trainers.learner.backends.deepspeed import DeepSpeed

        return DeepSpeed(module, learner, ranks, what)
    return Replicas(module, learner, ranks, what)  # also ZeRO 0, and one rank that would hold all shards
