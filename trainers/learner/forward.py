"""The policy's forward pass: log-probabilities and entropies of the action tokens of one micro-batch.

Invariant: log-probabilities are those of the full vocabulary at the rollout temperature, in float32, so the same
weights give the values that the engine recorded. Logits are computed for action tokens only, in chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agentkit.trainers.learner.microbatches import Layout
from agentkit.trainers.learner.policy import PolicyModel

MAX_LOGITS = 2**26
"""Maximum logits held at once (256 MiB in float32); with more, chunks are recomputed in the backward pass."""


def action_logprobs(
    policy: PolicyModel, layout: Layout, temperature: float, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each action token and the entropy of its distribution.

    Both float32 ``[n]``; the entropy has a gradient only if ``entropy_gradient``.
    """
    with policy.autocast():
        if not policy.head_is_last:
            logits = policy.causal_lm(input_ids=layout.ids, use_cache=False).logits[layout.rows, layout.columns]
            return _distribution(logits, layout.targets, temperature, entropy_gradient)
        hidden = policy.hidden_states(layout.ids)[layout.rows, layout.columns]

        def head(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return _distribution(policy.head(hidden), targets, temperature, entropy_gradient)

        rows = max(1, MAX_LOGITS // policy.causal_lm.config.vocab_size)
        if len(hidden) <= rows:
            return head(hidden, layout.targets)
        parts = [
            checkpoint(head, *chunk, use_reentrant=False)
            for chunk in zip(hidden.split(rows), layout.targets.split(rows), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _distribution(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A token of probability 0 (a logit of -inf) adds 0 to the entropy.
        entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=-1)
    return -functional.nll_loss(log_probs, targets, reduction="none"), entropy
