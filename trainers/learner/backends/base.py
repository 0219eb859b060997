"""The interface of learner back ends: one model with its optimiser, spread over the learner's ranks.

Invariant: gradients are *summed* over ranks, because every loss already has the denominators of the whole step. All
ranks call the same methods in the same order, and the module equally often.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from agentkit.config import LearnerConfig
from agentkit.trainers.learner.optimizer import Optimizer
from agentkit.trainers.learner.ranks import Ranks

Snapshot = dict[str, Tensor]
"""A copy of this rank's part of each trainable tensor."""


class Backend(ABC):
    """A module with its optimiser on this rank."""

    module: nn.Module
    """Call it whole: parameters may be gathered only while its forward runs."""
    optimizer: Optimizer

    def __init__(self, learner: LearnerConfig, ranks: Ranks, what: str):
        self.learner, self.ranks, self.what = learner, ranks, what

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of one micro-batch's loss; ``last`` marks the last micro-batch of the step."""

    @abstractmethod
    def step(self, *, loss: float, lr: float) -> float:
        """Apply the summed gradient, clipped to ``learner.grad_clip``, and clear it; return its norm before clipping.

        ``loss`` is that of the whole step, over all ranks. Raises ``LearnerError`` on every rank, with nothing
        applied, when the loss or the gradient is not finite.
        """

    @abstractmethod
    def trainable(self) -> dict[str, Tensor]:
        """This rank's part of each trainable tensor; writing to it changes the weights."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the optimiser's state, as if no step had been made."""

    def snapshot(self) -> Snapshot:
        """A copy of this rank's trainable weights."""
        return {name: part.detach().clone() for name, part in self.trainable().items()}

    @contextmanager
    def swapped(self, other: Snapshot) -> Iterator[None]:
        """Compute with the weights of ``other`` (the reference policy) inside this context, without gradients."""
        self._swap(other)
        try:
            yield
        finally:
            self._swap(other)

    @torch.no_grad()
    def _swap(self, other: Snapshot) -> None:
        for name, part in self.trainable().items():
            kept = part.clone()
            part.copy_(other[name])
            other[name].copy_(kept)

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return weights and optimiser state for ``restore``, on the CPU."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Raises ``LearnerError`` when it is of another model."""
