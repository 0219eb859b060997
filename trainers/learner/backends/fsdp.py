"""Parameters, gradients and optimiser state sharded over the ranks with torch's FSDP2 (``fully_shard``).

Invariant: a rank holds whole parameters only of the blocks that it computes at the moment. Every micro-batch's gradient
is reduced at once, so gradients are never held whole either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from agentkit.config import LearnerConfig
from agentkit.trainers.learner.backends.base import Snapshot
from agentkit.trainers.learner.backends.replicas import Replicas
from agentkit.trainers.learner.blocks import blocks
from agentkit.trainers.learner.ranks import Ranks


class FSDP(Replicas):
    """The module sharded over all ranks, or over groups of ``learner.shard_size`` that replicate each other.

    In bfloat16, parameters are gathered in that type; their shards and the sums of gradients are float32.
    """

    def __init__(self, module: nn.Module, learner: LearnerConfig, ranks: Ranks, what: str):
        _shard(module, learner.shard_size or ranks.size, ranks)
        super().__init__(module, learner, ranks, what)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _sum_gradients(self) -> None:
        """FSDP has summed them in the backward passes."""

    def _like(self, whole: Tensor, parameter: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return super()._like(whole, parameter)
        # Every rank has the same whole tensor and cuts out its own part.
        whole = whole.to(parameter.device, parameter.dtype)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)

    @torch.no_grad()
    def _swap(self, other: Snapshot) -> None:
        # FSDP gathers from the memory of the shards, so their content is exchanged.
        for name, parameter in self.parameters.items():
            mine, theirs = _local(parameter), _local(other[name])
            kept = mine.clone()
            mine.copy_(theirs)
            theirs.copy_(kept)


def _shard(module: nn.Module, shard_size: int, ranks: Ranks) -> None:
    """Shard each block of the model, then the rest as one unit, which contains both ends of tied weights."""
    device = ranks.device.type
    if shard_size == ranks.size:
        mesh = init_device_mesh(device, (ranks.size,))
    else:
        mesh = init_device_mesh(device, (ranks.size // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if getattr(module, "dtype", None) == torch.bfloat16 else MixedPrecisionPolicy()
    for block in blocks(module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    for name in getattr(module, "full_precision", ()):
        fully_shard(module.get_submodule(name), mesh=mesh)
    # A root that stays gathered after a forward pass would not see weights that change before the next one.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)  # Gloo has no other way to sum instead of averaging
            unit.set_gradient_divide_factor(1.0)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local()
