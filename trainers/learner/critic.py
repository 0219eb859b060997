"""A critic: a separate value model, its optimiser, and its step.

Invariant: the critic's loss is a token mean over all ranks of the whole step, like the policy's; its targets are the
estimator's returns and never depend on the values that it is about to learn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from agentkit.config import CriticConfig, LearnerConfig, ModelConfig
from agentkit.trainers.algorithms.aggregate import aggregate, denominator
from agentkit.trainers.algorithms.losses import value_loss
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.backends.base import Backend
from agentkit.trainers.learner.backends.choose import build_backend
from agentkit.trainers.learner.microbatches import Layout, MicroBatch, lay_out
from agentkit.trainers.learner.policy import PolicyModel
from agentkit.trainers.models.load import load_policy
from agentkit.types import FloatArray


class ValueHead(nn.Linear):
    """One number per position."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[..., 0].clone()  # back ends wrap modules and need an output that is no view


class ValueModel(nn.Module):
    """The trunk of a causal language model and one linear output, which starts at zero."""

    full_precision = ("output",)
    """Computed in float32 for every ``dtype``."""

    def __init__(self, trunk: nn.Module, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.trunk = trunk
        self.output = ValueHead(hidden_size, 1, device=next(trunk.parameters()).device)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Value of the state after each token of the right-padded ``ids`` ``[B, T]``: float32 ``[B, T]``."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        return self.output(hidden.float())


class Critic:
    """One value model with its optimiser. Starts from ``config.path``, or from the policy as it is now.

    ``backend`` is the policy's.
    """

    def __init__(self, config: CriticConfig, learner: LearnerConfig, policy: PolicyModel, backend: Backend, seed: int):
        self.config, self.ranks, self.device = config, backend.ranks, backend.ranks.device
        if config.path is None:
            causal_lm = policy.plain_copy(backend.whole)
        else:
            causal_lm = load_policy(ModelConfig(path=config.path, device=policy.config.device), seed)
        hidden_size = causal_lm.config.get_text_config().hidden_size
        self.model = ValueModel(causal_lm.base_model, hidden_size, policy.dtype).requires_grad_(True)
        self.backend = build_backend(self.model, learner, self.ranks, "critic's")

    @torch.no_grad()
    def values_at(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Positions in the flat batch, and the values there: the states of all action tokens, and the last states."""
        values = self.backend.module(layout.ids)
        positions = torch.cat([layout.positions - 1, layout.last_positions])
        rows = torch.arange(len(layout.ids), device=values.device)
        return positions, torch.cat([values[layout.rows, layout.columns], values[rows, layout.last_columns]])

    def step(
        self,
        batch: Batch,
        micro_batches: Sequence[MicroBatch],
        sequences: np.ndarray,
        returns: Tensor,
        old_values: Tensor,
    ) -> dict[str, float]:
        """One optimiser step towards ``returns`` ``[N]``; ``old_values`` ``[N]`` are those of each token's state.

        Raises ``LearnerError`` when the loss is not finite.
        """
        divisor = denominator("token_mean", batch.action_counts[sequences])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro in enumerate(micro_batches):
            layout = lay_out(batch, micro, self.device)
            values = self.backend.module(layout.ids)[layout.rows, layout.columns]
            old, target = old_values[layout.positions].to(self.device), returns[layout.positions].to(self.device)
            losses = value_loss(values, old, target, layout.mask, self.config.value_clip)
            loss = aggregate("token_mean", losses, layout.mask, layout.rows, divisor)
            self.backend.backward(loss, last=index == len(micro_batches) - 1)
            total += loss.detach()
        mean = self.ranks.sum_metrics({"loss": total.item()})["loss"]
        return {"loss": mean, "grad_norm": self.backend.step(loss=mean, lr=self.config.lr)}


def explained_variance(values: FloatArray, returns: FloatArray, mask: np.ndarray) -> float:
    """``1 - Var(R - V) / Var(R)`` over the action tokens; ``values`` ``[N]`` are those of each token's state."""
    variance = float(returns[mask].var()) if mask.any() else 0.0
    return 1.0 - float((returns - values)[mask].var()) / variance if variance > 0 else 0.0
