"""The policy's forward pass: log-probabilities and entropies of the action tokens of one micro-batch.

Invariant: log-probabilities are those of the full vocabulary at the rollout temperature, in float32, so the same
weights give the values that the engine recorded. Logits are computed for action tokens only, in chunks. All ranks call
the same modules equally often.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentkit.trainers.learner.microbatches import Layout

MAX_LOGITS = 2**26
"""Maximum logits held at once (256 MiB in float32); with more, chunks are recomputed in the backward pass."""


class Scorer(nn.Module):
    """A causal language model that scores action tokens. Back ends wrap this module; it is always called whole."""

    def __init__(self, causal_lm: PreTrainedModel, dtype: torch.dtype):
        super().__init__()
        self.causal_lm = causal_lm
        self.dtype = dtype
        self.head_is_last = self._head_is_last()

    def forward(self, layout: Layout, temperature: float, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each action token and the entropy of its distribution.

        Both float32 ``[n]``; the entropy has a gradient only if ``entropy_gradient``.
        """
        with self._autocast(layout.ids.device):
            if not self.head_is_last:
                logits = self.causal_lm(input_ids=layout.ids, use_cache=False).logits[layout.rows, layout.columns]
                return _distribution(logits, layout.targets, temperature, entropy_gradient)
            hidden = self._hidden_states(layout.ids)[layout.rows, layout.columns]

            def head(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
                return _distribution(self._head(hidden), targets, temperature, entropy_gradient)

            rows = max(1, MAX_LOGITS // self.causal_lm.config.get_text_config().vocab_size)
            if max(len(hidden), layout.most_actions) <= rows:
                return head(hidden, layout.targets)
            chunks = list(zip(hidden.split(rows), layout.targets.split(rows), strict=True))
            chunks += [(hidden[:0], layout.targets[:0])] * (-(-layout.most_actions // rows) - len(chunks))
            parts: list[Any] = [checkpoint(head, *chunk, use_reentrant=False) for chunk in chunks]
            return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _autocast(self, device: torch.device) -> torch.autocast:
        """Compute in the configured type."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _hidden_states(self, ids: Tensor) -> Tensor:
        """Output of the trunk for right-padded ``ids`` ``[B, T]``: ``[B, T, hidden]``."""
        return self.causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of the hidden states ``[n, hidden]``: ``[n, vocabulary]``."""
        output: Any = self.causal_lm.get_output_embeddings()
        return output(hidden)

    @torch.no_grad()
    def _head_is_last(self) -> bool:
        """Whether logits are exactly ``head(hidden_states)``; some models scale or cap them afterwards."""
        ids = torch.arange(8, device=self.causal_lm.device)[None]
        with self._autocast(ids.device):
            whole = self.causal_lm(input_ids=ids, use_cache=False).logits
            split = self._head(self._hidden_states(ids))
        return torch.allclose(whole.float(), split.float(), rtol=1e-3, atol=1e-4)


def _distribution(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A token of probability 0 (a logit of -inf) adds 0 to the entropy.
        entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=-1)
    return -functional.nll_loss(log_probs, targets, reduction="none"), entropy
