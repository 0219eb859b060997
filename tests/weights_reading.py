"""Published weights as a state dict."""

from __future__ import annotations

from torch import Tensor

from agentkit.trainers.weights.base import Receiver, Weights
from agentkit.trainers.weights.tensors import spec_of


def state_of(weights: Weights, receiver: Receiver | None = None) -> dict[str, Tensor]:
    """Return a copy of all tensors, after checking that they are those that ``weights`` announces."""
    receiver = receiver or Receiver()
    read = [(name, tensor.clone()) for bucket in weights.buckets(receiver) for name, tensor in bucket]
    assert tuple(spec_of(name, tensor) for name, tensor in read) == weights.tensors
    return dict(read)
