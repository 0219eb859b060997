"""Published weights as a state dict."""

from __future__ import annotations

from torch import Tensor

from agentkit.trainers.weights.base import Weights
from agentkit.trainers.weights.tensors import tensor_of


def state_of(weights: Weights) -> dict[str, Tensor]:
    """Return a copy of all tensors, after checking that they are those that ``weights`` announces."""
    read = [(spec, tensor_of(spec, data).clone()) for bucket in weights.buckets() for spec, data in bucket]
    assert tuple(spec for spec, _ in read) == weights.tensors
    return {spec.name: tensor for spec, tensor in read}
