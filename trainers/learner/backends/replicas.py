"""Every rank holds the whole model; gradients are summed once per step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from agentkit.config import LearnerConfig
from agentkit.errors import LearnerError
from agentkit.trainers.learner.backends.base import Backend, Snapshot
from agentkit.trainers.learner.optimizer import apply_step, build_optimizer, clear_state, to_cpu
from agentkit.trainers.learner.ranks import Ranks


class Replicas(Backend):
    """The module as it is, on every rank."""

    def __init__(self, module: nn.Module, learner: LearnerConfig, ranks: Ranks, what: str):
        super().__init__(learner, ranks, what)
        self.module = module
        self.optimizer = build_optimizer(module, learner)
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def step(self, *, loss: float, lr: float) -> float:
        self.ranks.sum_gradients(list(self._parameters.values()))
        return apply_step(self.optimizer, loss=loss, lr=lr, grad_clip=self.learner.grad_clip, what=self.what)

    def trainable(self) -> dict[str, Tensor]:
        return dict(self._parameters)

    def forget(self) -> None:
        clear_state(self.optimizer)

    def _swap(self, other: Snapshot) -> None:
        for name, parameter in self._parameters.items():  # without copying
            parameter.data, other[name] = other[name], parameter.data

    def state(self) -> dict[str, Any]:
        return {"weights": to_cpu(self.snapshot()), "optimizer": to_cpu(self.optimizer.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        saved, parameters = state["weights"], self._parameters
        wrong = sorted(saved.keys() ^ parameters.keys()) or [
            name for name, parameter in parameters.items() if parameter.shape != saved[name].shape
        ]
        if wrong:
            raise LearnerError(f"the saved weights are of another model: {len(wrong)} tensors differ, {wrong[0]} first")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])
        self.optimizer.load_state_dict(state["optimizer"])
