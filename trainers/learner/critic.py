"""A critic: a separate value model, its optimiser, and its step.

Invariant: the critic's loss is a token mean over all ranks of the whole step, like the policy's, but over the episodes
that it trains on; its targets are the estimator's returns and never depend on the values that it is about to learn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentkit.config import CriticConfig, LearnerConfig, ModelConfig
from agentkit.trainers.algorithms.aggregate import aggregate, denominator
from agentkit.trainers.algorithms.losses import value_loss
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.backends.base import Backend
from agentkit.trainers.learner.backends.choose import build_backend
from agentkit.trainers.learner.forward import check_packing, inputs_of, why_not_shared
from agentkit.trainers.learner.microbatches import Layout, MicroBatch, lay_out
from agentkit.trainers.learner.policy import PolicyModel
from agentkit.trainers.models.load import load_policy, resolve_device
from agentkit.trainers.models.quickstart import critic_config, fresh_model

SEED_STRIDE = 2**20
"""Distance between the seeds of two critics, so that runs with neighbouring seeds do not share them."""


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

    def forward(self, layout: Layout) -> Tensor:
        """Value of the state after each token of ``layout.ids`` ``[B, T]``: float32 ``[B, T]``."""
        with torch.autocast(layout.ids.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            hidden = self.trunk(**inputs_of(layout)).last_hidden_state
        return self.output(hidden.float())


class Critic:
    """One of ``config.count`` value models, with its optimiser.

    Critics start from ``config.path``, as fresh models, or from the policy as it is now. Fresh ones differ in their
    weights, the others only in what they train on. All values are 0 at first, so critics agree until their first step.

    ``backend`` is the policy's; ``seed`` is the run's.
    """

    def __init__(
        self, config: CriticConfig, learner: LearnerConfig, policy: PolicyModel, backend: Backend, seed: int, index: int
    ):
        self.config, self.ranks, self.device = config, backend.ranks, backend.ranks.device
        causal_lm = _initial_model(config, policy, backend, seed + index * SEED_STRIDE)
        if learner.packing:
            check_packing(causal_lm)
        self.why_not_shared = why_not_shared(causal_lm, learner.attention)
        hidden_size = causal_lm.config.get_text_config().hidden_size
        self.model = ValueModel(causal_lm.base_model, hidden_size, policy.dtype).requires_grad_(True)
        what = "critic's" if config.count == 1 else f"critic {index}'s"
        self.backend = build_backend(self.model, learner, self.ranks, what)

    @torch.no_grad()
    def values_at(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Positions in the flat batch, and the values there: the states of all action tokens, and the last states."""
        values = self.backend.module(layout)
        positions = torch.cat([layout.positions - 1, layout.last_positions])
        states, last = values[layout.rows, layout.columns], values[layout.last_rows, layout.last_columns]
        return positions, torch.cat([states, last])

    def step(
        self,
        batch: Batch,
        micro_batches: Sequence[MicroBatch],
        sequences: np.ndarray,
        returns: Tensor,
        old_values: Tensor,
        lr: float,
    ) -> dict[str, float]:
        """One optimiser step on ``sequences``, of which this rank computes ``micro_batches``.

        Args:
            batch: the global batch.
            micro_batches: this rank's share.
            sequences: those of all ranks.
            returns: targets ``[N]``.
            old_values: values of each token's state ``[N]``, by this critic, before the batch.
            lr: learning rate.

        Raises:
            LearnerError: the loss is not finite.
        """
        divisor = denominator("token_mean", batch.action_counts[sequences])
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro in enumerate(micro_batches):
            layout = lay_out(batch, micro, self.device)
            values = self.backend.module(layout)[layout.rows, layout.columns]
            old, target = old_values[layout.positions].to(self.device), returns[layout.positions].to(self.device)
            losses = value_loss(values, old, target, layout.mask, self.config.value_clip)
            loss = aggregate("token_mean", losses, layout.mask, layout.sequences, divisor)
            self.backend.backward(loss, last=index == len(micro_batches) - 1)
            total += loss.detach()
        mean = self.ranks.sum_metrics({"loss": total.item()})["loss"]
        return {"loss": mean, "grad_norm": self.backend.step(loss=mean, lr=lr), "lr": lr}


def _initial_model(config: CriticConfig, policy: PolicyModel, backend: Backend, seed: int) -> PreTrainedModel:
    """The causal language model whose trunk a critic takes over. All ranks call it."""
    if config.path is not None:
        return load_policy(ModelConfig(path=config.path, device=policy.config.device), seed)
    if config.fresh is None:
        return policy.plain_copy(backend.whole)
    fresh = fresh_model(critic_config(policy.causal_lm.config.get_text_config().vocab_size, *config.fresh), seed)
    return fresh.to(resolve_device(policy.config.device))  # type: ignore[arg-type]
