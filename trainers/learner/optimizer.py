"""Optimisers, and the only function that changes weights.

Invariant: weights change only after the loss and the gradient of the whole step, over all ranks, are known to be
finite; otherwise ``LearnerError`` is raised on every rank and the weights stay unchanged.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from agentkit.config import LearnerConfig
from agentkit.errors import LearnerError


class MuonAdamW:
    """Muon for the matrices of the linear layers inside the model, AdamW for the rest, stepping as one optimiser.

    Muon (Jordan et al. 2024) applies the orthogonalised momentum of a matrix; scaled to AdamW's size of update (Liu et
    al., Moonlight, arXiv:2502.16982, eq. 4), so that one learning rate serves both. Embeddings, heads and vectors do
    not map between hidden states and use AdamW.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], config: LearnerConfig) -> None:
        muon = getattr(torch.optim, "Muon", None)
        if muon is None:
            raise LearnerError(
                f"learner.optimizer=muon needs torch 2.9 or newer, but this is {torch.__version__}: use adamw"
            )
        self.parts: list[torch.optim.Optimizer] = [
            muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            _adamw(others, config),
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(part.param_groups for part in self.parts))

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


Optimizer = AdamW | MuonAdamW


def build_optimizer(model: nn.Module, config: LearnerConfig) -> Optimizer:
    """Return the configured optimiser of the model's trainable parameters. The learning rate is set at each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inside = _hidden_matrices(model) if config.optimizer == "muon" else set()
    matrices = [p for p in parameters if id(p) in inside]
    if not matrices:
        return _adamw(parameters, config)
    return MuonAdamW(matrices, [p for p in parameters if id(p) not in inside], config)


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Return the ids of the weights of the linear layers between the embeddings and the output, adapters included."""
    modules = list(model.modules())
    linear = (m.weight for m in modules if isinstance(m, (nn.Linear, Conv1D)))
    inside = {id(weight) for weight in linear if weight.ndim == 2 and min(weight.shape) > 1}
    for module in modules:
        if isinstance(module, nn.Embedding):
            inside -= {id(p) for p in module.parameters()}
        if isinstance(module, PreTrainedModel):
            for end in (module.get_input_embeddings(), module.get_output_embeddings()):
                inside -= {id(p) for p in end.parameters()} if isinstance(end, nn.Module) else set()
    return inside


def _adamw(parameters: list[nn.Parameter], config: LearnerConfig) -> AdamW:
    """AdamW without weight decay for vectors (norms, biases)."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=config.lr, betas=config.betas)


def apply_step(optimizer: Optimizer, *, loss: float, lr: float, grad_clip: float, what: str) -> float:
    """Clip the gradient's global norm, step, clear the gradients; returns the norm before clipping.

    ``loss`` and the gradients must be those of the whole step. Raises ``LearnerError``, with nothing applied, when
    either is not finite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    total: Any = nn.utils.clip_grad_norm_(parameters, grad_clip)
    norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)  # sharded gradients: over all ranks
    if not (math.isfinite(loss) and math.isfinite(norm)):
        optimizer.zero_grad(set_to_none=True)
        raise not_finite(what, loss, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def not_finite(what: str, loss: float, norm: float) -> LearnerError:
    """The error of a step that was not applied."""
    return LearnerError(
        f"the {what} loss is {loss} and its gradient norm is {norm}; the step was not applied. Lower the learning "
        "rate, tighten the clips, or look for extreme rewards among the last episodes"
    )


def optimizers(optimizer: Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimisers of torch that step as this one."""
    return optimizer.parts if isinstance(optimizer, MuonAdamW) else [optimizer]
