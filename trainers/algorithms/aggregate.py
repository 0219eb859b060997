"""Aggregation of token losses, with denominators of the whole optimiser step.

Invariant: a denominator counts the action tokens or sequences of all micro-batches on all ranks and is passed in.
Summing ``aggregate`` over any way of splitting a batch (by whole sequences) gives the same result.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from agentkit.plugins import Aggregation


def denominator(kind: Aggregation, action_counts: np.ndarray, constant_length: int = 1) -> float:
    """Divisor of an optimiser step whose sequences have ``action_counts`` action tokens, ``[S]``.

    ``token_mean``: the tokens; ``sequence_mean``: the sequences that have any; ``constant``: those times
    ``constant_length`` (Dr.GRPO). At least 1, so that an empty step is zero rather than undefined.
    """
    sequences = int(np.count_nonzero(action_counts))
    if kind == "token_mean":
        return float(max(int(action_counts.sum()), 1))
    if kind == "sequence_mean":
        return float(max(sequences, 1))
    return float(max(sequences, 1) * constant_length)


def aggregate(kind: Aggregation, token_loss: Tensor, mask: Tensor, sequence_ids: Tensor, divisor: float) -> Tensor:
    """This part's share of the step's loss, a scalar.

    ``token_loss``, ``mask`` (bool) and ``sequence_ids`` (int64, from 0) have one shape; every sequence is whole.
    """
    kept = torch.where(mask, token_loss, torch.zeros_like(token_loss))
    if kind == "sequence_mean":
        counts = torch.bincount(sequence_ids[mask], minlength=int(sequence_ids.max()) + 1 if mask.numel() else 0)
        kept = kept / counts[sequence_ids].clamp(min=1)
    return kept.sum() / divisor
