"""Every rank holds the whole model; gradients are summed once per step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from agentkit.config import LearnerConfig
from agentkit.trainers.learner.backends.base import Backend, Snapshot
from agentkit.trainers.learner.optimizer import apply_step, build_optimizer, optimizers
from agentkit.trainers.learner.ranks import Ranks


class Replicas(Backend):
    """The module as it is, on every rank, with an optimiser of torch."""

    def __init__(self, module: nn.Module, learner: LearnerConfig, ranks: Ranks, what: str):
        super().__init__(learner, ranks, what)
        self.module = module
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(module, learner)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, *, loss: float, lr: float) -> float:
        self._sum_gradients()
        return apply_step(self.optimizer, loss=loss, lr=lr, grad_clip=self.learner.grad_clip, what=self.what)

    def forget(self) -> None:
        for part in optimizers(self.optimizer):
            part.state.clear()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        self.parameters[name].copy_(self._like(whole, self.parameters[name]))

    def _weights_assigned(self) -> None:
        """The optimiser has no other copy."""

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            for part in optimizers(self.optimizer):
                for key, value in part.state.get(parameter, {}).items():
                    yield f"{key}/{name}", self.whole(value)

    def assign_moment(self, key: str, name: str, whole: Tensor) -> None:
        parameter = self.parameters[name]
        for part in optimizers(self.optimizer):
            if any(parameter is each for group in part.param_groups for each in group["params"]):
                # Counts of steps are scalars, and stay on the CPU.
                part.state[parameter][key] = self._like(whole, parameter) if whole.ndim else whole.cpu()

    def snapshot(self) -> Snapshot:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def _swap(self, other: Snapshot) -> None:
        for name, parameter in self.parameters.items():  # without copying
            parameter.data, other[name] = other[name], parameter.data

    def _sum_gradients(self) -> None:
        self.ranks.sum_gradients(list(self.parameters.values()))

    def _like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's part of a whole tensor, placed as ``parameter`` is."""
        return whole.to(parameter.device, parameter.dtype)
