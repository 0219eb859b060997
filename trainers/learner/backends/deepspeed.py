"""Optimiser state, gradients and parameters partitioned by DeepSpeed ZeRO, with optional offload of the optimiser.

Invariant: the module is only called through DeepSpeed's engine, whose hooks gather parameters. Losses are multiplied by
the number of ranks, because DeepSpeed averages gradients. Stage 0 is `Replicas`: DeepSpeed would apply NaN there.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from agentkit.config import LearnerConfig
from agentkit.extras import require_deepspeed
from agentkit.trainers.learner.backends.base import Backend, Snapshot
from agentkit.trainers.learner.optimizer import build_optimizer, not_finite
from agentkit.trainers.learner.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW, besides the count of steps."""


class DeepSpeed(Backend):
    """The module in a DeepSpeed engine of stage 1, 2 or 3."""

    def __init__(self, module: nn.Module, learner: LearnerConfig, ranks: Ranks, what: str):
        super().__init__(learner, ranks, what)
        self._api = _import_deepspeed(ranks)
        self._stage = learner.zero
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._engine, self._zero, *_ = self._api.initialize(
            model=module,
            optimizer=build_optimizer(module, learner),
            dist_init_required=False,
            config=_settings(learner, ranks),
        )
        self.module = self._engine
        self.optimizer = self._adamw = cast(AdamW, self._zero.optimizer)
        self._has_gradient = False

    def backward(self, loss: Tensor, *, last: bool) -> None:
        # A loss that is not finite must make the gradient so: that is what DeepSpeed checks before it steps.
        factor = torch.where(torch.isfinite(loss.detach()), float(self.ranks.size), math.nan)
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * factor)
        self._has_gradient = True

    def step(self, *, loss: float, lr: float) -> float:
        if not self._has_gradient:
            return 0.0
        self._has_gradient = False
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        if self._zero.overflow:  # DeepSpeed has skipped the step
            raise not_finite(self.what, loss, math.nan)
        return float(self._engine.get_global_grad_norm())

    def forget(self) -> None:
        for state in self._adamw.state.values():
            for value in state.values():
                value.zero_()

    def whole(self, tensor: Tensor) -> Tensor:
        if not hasattr(tensor, "ds_id"):
            return tensor
        with self._api.zero.GatheredParameters([tensor], modifier_rank=None):
            return tensor.data.clone()

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        self._release()
        part = self._part(self.parameters[name])
        part.copy_(self._cut(self.parameters[name], whole))

    def _weights_assigned(self) -> None:
        for parameter in self.parameters.values():
            if self._stage == 3:
                self._api.utils.safe_set_local_fp32_param(parameter, self._part(parameter))
            else:
                self._api.utils.safe_set_full_fp32_param(parameter, parameter.data)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        if not self._adamw.state:
            return
        self._link_states()
        steps = next(iter(self._adamw.state.values()))["step"]
        for name, parameter in self.parameters.items():
            for key in MOMENTS:
                yield f"{key}/{name}", self._api.utils.safe_get_full_optimizer_state(parameter, key)
            yield f"step/{name}", steps.clone()

    @torch.no_grad()
    def assign_moment(self, key: str, name: str, whole: Tensor) -> None:
        for flat in self._flat_parameters():
            if not self._adamw.state[flat]:
                zeros = {moment: torch.zeros_like(flat) for moment in MOMENTS}
                self._adamw.state[flat] = {"step": torch.zeros(()), **zeros}
        self._link_states()
        parameter = self.parameters[name]
        if key == "step":  # the same for all parameters
            for state in self._adamw.state.values():
                state["step"].copy_(whole)
        elif self._stage == 3:
            self._api.utils.safe_set_local_optimizer_state(parameter, self._cut(parameter, whole), key)
        else:
            self._api.utils.safe_set_full_optimizer_state(parameter, whole.to(parameter.device), key)

    def snapshot(self) -> Snapshot:
        return {name: self._part(parameter).clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def _swap(self, other: Snapshot) -> None:
        # DeepSpeed holds views of this memory, so its content is exchanged.
        self._release()
        for name, parameter in self.parameters.items():
            part = self._part(parameter)
            kept = part.clone()
            part.copy_(other[name])
            other[name].copy_(kept)

    def _release(self) -> None:
        """Free parameters that stayed gathered after a forward pass, which would not see new weights."""
        if self._stage == 3:
            self._zero.empty_partition_cache()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self.parameters.items()}

    def _part(self, parameter: Any) -> Tensor:
        """What this rank holds of a parameter: in stage 3 a flat piece, padded to the same size on all ranks."""
        return parameter.ds_tensor.data if self._stage == 3 else parameter.data

    def _cut(self, parameter: Any, whole: Tensor) -> Tensor:
        if self._stage != 3:
            return whole.to(parameter.device)
        size = parameter.ds_tensor.numel()
        padded = torch.zeros(size * self.ranks.size, dtype=whole.dtype)
        padded[: whole.numel()] = whole.flatten()
        return padded[size * self.ranks.rank :][:size].to(parameter.ds_tensor.device)

    def _flat_parameters(self) -> list[Tensor]:
        """The float32 weights that AdamW sees."""
        zero = self._zero
        return zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups

    def _link_states(self) -> None:
        """Give the parameters access to AdamW's state (DeepSpeed links only groups that have one at the first step)."""
        if self._stage == 3:
            return
        zero = self._zero
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            self._api.utils.lazy_init_hp_params_optimizer_state(group, flat, self._adamw.state)


def _import_deepspeed(ranks: Ranks) -> Any:
    require_deepspeed()
    ranks.ensure_group()
    local = ranks.device.index or 0
    for variable, value in (("RANK", ranks.rank), ("WORLD_SIZE", ranks.size), ("LOCAL_RANK", local)):
        os.environ[variable] = str(value)
    if ranks.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops
    import deepspeed.utils

    # It calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Otherwise it compiles a communication library for CPUs, for minutes, when the first engine starts.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _settings(learner: LearnerConfig, ranks: Ranks) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": learner.zero, "stage3_param_persistence_threshold": 0}
    if learner.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": ranks.device.type == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # `backward` says where a step ends
        "gradient_clipping": learner.grad_clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
