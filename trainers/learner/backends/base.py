"""The interface of learner back ends: one model with its optimiser, spread over the learner's ranks.

Invariant: gradients are *summed* over ranks, because every loss already has the denominators of the whole step. All
ranks call the same methods in the same order, and the module equally often. Saved files contain whole tensors, so they
do not depend on the back end or on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from agentkit.config import LearnerConfig
from agentkit.errors import LearnerError
from agentkit.trainers.learner.adapter import Adapter, adapter_name
from agentkit.trainers.learner.files import TensorFiles, write_tensors
from agentkit.trainers.learner.optimizer import Optimizer
from agentkit.trainers.learner.ranks import Ranks

Snapshot = dict[str, Tensor]
"""A copy of this rank's part of each trainable weight."""


class Backend(ABC):
    """A module with its optimiser on this rank."""

    module: nn.Module
    """Call it whole: parameters may be gathered only while its forward runs."""
    parameters: dict[str, nn.Parameter]
    """The trainable ones."""
    optimizer: Optimizer
    """Of this rank's part of the parameters."""

    def __init__(self, learner: LearnerConfig, ranks: Ranks, what: str):
        self.learner, self.ranks, self.what = learner, ranks, what
        self.adapter: Adapter | None = None
        """The format of weight files, if the trainable weights are adapters."""

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
    def forget(self) -> None:
        """Drop the optimiser's state, as if no step had been made."""

    @abstractmethod
    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a parameter or buffer of the module; all ranks call it in the same order."""

    @abstractmethod
    def assign(self, name: str, whole: Tensor) -> None:
        """Set a trainable weight from the whole tensor, which every rank passes."""

    @abstractmethod
    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """The optimiser's state as whole tensors, named ``KEY/PARAMETER``; all ranks iterate."""

    @abstractmethod
    def assign_moment(self, key: str, name: str, whole: Tensor) -> None:
        """Set one tensor of ``moments``."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """A copy of this rank's part of the trainable weights."""

    @abstractmethod
    def _swap(self, other: Snapshot) -> None:
        """Exchange the trainable weights with ``other``."""

    @contextmanager
    def swapped(self, other: Snapshot) -> Iterator[None]:
        """Compute with the weights of ``other`` (the reference policy) inside this context, without gradients."""
        self._swap(other)
        try:
            yield
        finally:
            self._swap(other)

    def save(self, directory: Path, weights: Path | None = None) -> None:
        """Write weights and optimiser state; rank 0 holds the files, all ranks take part.

        ``weights`` is the folder of the weights; by default one in ``directory``.
        """
        self.save_weights(weights or directory / "weights")
        write_tensors(directory / "moments", self.moments(), write=self.ranks.rank == 0)

    def load(self, directory: Path, weights: Path | None = None) -> None:
        """Restore what ``save`` wrote with any back end and number of ranks; only rank 0 reads files.

        Raises ``LearnerError`` when it is of another model, ``CheckpointError`` when it cannot be read.
        """
        self.load_weights(weights or directory / "weights")
        self._weights_assigned()
        self.forget()
        for full_name, whole in self._read(directory / "moments"):
            key, name = full_name.split("/", 1)
            self.assign_moment(key, name, whole)

    def save_weights(self, directory: Path) -> None:
        """Write the trainable weights."""
        weights = ((name, self.whole(parameter)) for name, parameter in self.parameters.items())
        write = write_tensors if self.adapter is None else self.adapter.write
        write(directory, weights, write=self.ranks.rank == 0)

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """Restore what ``save_weights`` wrote."""
        of_files = str if self.adapter is None else adapter_name
        names = {of_files(name): name for name in self.parameters}
        expected = {of_files(name): shape for name, shape in self._shapes().items()}
        saved = {name: shape for name, _, shape in self.ranks.from_first(lambda: TensorFiles(directory).specs())}
        wrong = sorted(saved.keys() ^ expected.keys()) or [name for name in expected if saved[name] != expected[name]]
        if wrong:
            raise LearnerError(f"the saved weights are of another model: {len(wrong)} tensors differ, {wrong[0]} first")
        for name, whole in self._read(directory):
            self.assign(names[name], whole)

    @abstractmethod
    def _weights_assigned(self) -> None:
        """Let the optimiser continue from the weights as they are now, if it has its own copy of them."""

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}

    def _read(self, directory: Path) -> Iterator[tuple[str, Tensor]]:
        """Tensors of rank 0's files, on every rank."""
        specs = self.ranks.from_first(lambda: TensorFiles(directory).specs())
        files = TensorFiles(directory) if self.ranks.rank == 0 else None
        for name, dtype, shape in specs:
            yield name, self.ranks.broadcast(files.read(name) if files else torch.empty(shape, dtype=dtype))
