"""A critic: a separate value model, its optimiser, and its step.

Invariant: the critic's loss is a token mean over all ranks of the whole step, like the policy's; its targets are the
estimator's returns and never depend on the values that it is about to learn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentkit.config import CriticConfig, LearnerConfig, ModelConfig
from agentkit.errors import LearnerError
from agentkit.trainers.algorithms.aggregate import aggregate, denominator
from agentkit.trainers.algorithms.losses import value_loss
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.microbatches import Layout, MicroBatch, lay_out
from agentkit.trainers.learner.optimizer import apply_step, build_optimizer, to_cpu
from agentkit.trainers.learner.policy import PolicyModel
from agentkit.trainers.learner.ranks import Ranks
from agentkit.trainers.models.load import load_policy
from agentkit.types import FloatArray


class ValueModel(nn.Module):
    """The trunk of a causal language model and one linear output, which starts at zero."""

    def __init__(self, trunk: nn.Module, hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.trunk = trunk
        self.output = nn.Linear(hidden_size, 1, device=next(trunk.parameters()).device)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Value of the state after each token of the right-padded ``ids`` ``[B, T]``: float32 ``[B, T]``."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        return self.output(hidden.float())[..., 0]


class Critic:
    """One value model with its optimiser. Starts from ``config.path``, or from the policy as it is now."""

    def __init__(self, config: CriticConfig, learner: LearnerConfig, policy: PolicyModel, seed: int):
        self.config, self.learner = config, learner
        if config.path is None:
            causal_lm = policy.plain_copy()
        else:
            causal_lm = load_policy(ModelConfig(path=config.path, device=str(policy.device)), seed)
        hidden_size = causal_lm.config.get_text_config().hidden_size
        self.model = ValueModel(causal_lm.base_model, hidden_size, policy.dtype).requires_grad_(True)
        self.optimizer = build_optimizer(self.model, learner)

    @torch.no_grad()
    def values_at(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Positions in the flat batch, and the values there: the states of all action tokens, and the last states."""
        values = self.model(layout.ids)
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
        ranks: Ranks,
    ) -> dict[str, float]:
        """One optimiser step towards ``returns`` ``[N]``; ``old_values`` ``[N]`` are those of each token's state.

        Raises ``LearnerError`` when the loss is not finite.
        """
        divisor = denominator("token_mean", batch.action_counts[sequences])
        device = self.model.output.weight.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for micro in micro_batches:
            layout = lay_out(batch, micro, device)
            values = self.model(layout.ids)[layout.rows, layout.columns]
            old, target = old_values[layout.positions].to(device), returns[layout.positions].to(device)
            losses = value_loss(values, old, target, layout.mask, self.config.value_clip)
            loss = aggregate("token_mean", losses, layout.mask, layout.rows, divisor)
            loss.backward()
            total += loss.detach()
        ranks.sum_gradients(list(self.model.parameters()))
        mean = ranks.sum_metrics({"loss": total.item()})["loss"]
        norm = apply_step(
            self.optimizer, loss=mean, lr=self.config.lr, grad_clip=self.learner.grad_clip, what="critic's"
        )
        return {"loss": mean, "grad_norm": norm}

    def state(self) -> dict[str, Any]:
        """Return the state for ``restore``, on the CPU."""
        return {"model": to_cpu(self.model.state_dict()), "optimizer": to_cpu(self.optimizer.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Raises ``LearnerError`` for the state of another model."""
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise LearnerError(f"the saved critic is of another model: {error}") from error
        self.optimizer.load_state_dict(state["optimizer"])


def explained_variance(values: FloatArray, returns: FloatArray, mask: np.ndarray) -> float:
    """``1 - Var(R - V) / Var(R)`` over the action tokens; ``values`` ``[N]`` are those of each token's state."""
    variance = float(returns[mask].var()) if mask.any() else 0.0
    return 1.0 - float((returns - values)[mask].var()) / variance if variance > 0 else 0.0
