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

from agentkit.errors import LearnerError
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

    def forward(
        self, layout: Layout, temperature: float, *, entropy_gradient: bool = False, trunk_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each action token and the entropy of its distribution.

        Both float32 ``[n]``; the entropy has a gradient only if ``entropy_gradient``. With ``trunk_only``, compute no
        logits and return two empty tensors: for a pass that reads something inside the model.
        """
        with self._autocast(layout.ids.device):
            if trunk_only:
                nothing = self.causal_lm.base_model(**inputs_of(layout)).last_hidden_state.new_empty(0)
                return nothing, nothing
            if not self.head_is_last:
                logits = self.causal_lm(**inputs_of(layout)).logits[layout.rows, layout.columns]
                return _distribution(logits, layout.targets, temperature, entropy_gradient)
            hidden = self.causal_lm.base_model(**inputs_of(layout)).last_hidden_state[layout.rows, layout.columns]

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
            split = self._head(self.causal_lm.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return torch.allclose(whole.float(), split.float(), rtol=1e-3, atol=1e-4)


def inputs_of(layout: Layout) -> dict[str, Any]:
    """Arguments of a transformers model."""
    optional = {"position_ids": layout.position_ids, "attention_mask": layout.visible}
    given = {name: value for name, value in optional.items() if value is not None}
    return {"input_ids": layout.ids, "use_cache": False, **given}


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise ``LearnerError`` if ``model`` does not keep packed sequences apart."""
    ids = _some_ids(model)
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None].to(model.device)
    apart = torch.cat([_hidden(model, ids[:, :8]), _hidden(model, ids[:, 8:])], 1)
    difference = _relative(_hidden(model, ids, position_ids=positions), apart)
    if not difference <= _tolerance(model):
        raise LearnerError(
            f"learner.packing=true: {type(model).__name__} does not keep packed sequences apart (its output differs by "
            f"{difference:.1e}): set learner.packing=false"
        )


@torch.no_grad()
def why_not_shared(model: PreTrainedModel, attention: str | None) -> str | None:
    """Return why ``model`` cannot compute the common prefix of several contexts once; None if it can.

    ``attention``: the implementation that replaces the model's own.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    attention = attention or model.config._attn_implementation
    if attention != "sdpa":
        return f"{name} computes attention with {attention}, not with sdpa"
    kinds = getattr(config, "layer_types", None) or ["sliding" if getattr(config, "sliding_window", None) else "full"]
    if not all(kind.startswith("full") for kind in kinds):
        return f"{name} has layers without full attention"
    ids = _some_ids(model)  # 6 shared tokens, then 4 of one context and 4 of the other
    positions = torch.cat([torch.arange(10), torch.arange(6, 10)])[None].to(model.device)
    visible = torch.ones(14, 14, dtype=torch.bool, device=model.device).tril()
    visible[10:, 6:10] = False
    other = torch.cat([ids[:, :6], ids[:, 10:]], 1)
    apart = torch.cat([_hidden(model, ids[:, :10]), _hidden(model, other)[:, 6:]], 1)
    try:
        shared = _hidden(model, ids, position_ids=positions, attention_mask=visible[None, None])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"{name} does not accept a mask of its attention ({error})"
    difference = _relative(shared, apart)
    return None if difference <= _tolerance(model) else f"the output of {name} differs by {difference:.1e}"


def _some_ids(model: PreTrainedModel) -> Tensor:
    return torch.arange(14, device=model.device)[None] % model.config.get_text_config().vocab_size


def _hidden(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return model.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state.float()


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def _tolerance(model: PreTrainedModel) -> float:
    return 1e-4 if model.dtype == torch.float32 else 2e-2


def _distribution(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A token of probability 0 (a logit of -inf) adds 0 to the entropy.
        entropy = -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(dim=-1)
    return -functional.nll_loss(log_probs, targets, reduction="none"), entropy
