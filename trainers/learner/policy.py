"""The policy in the learner: its trainable weights (adapters or all), and exports of them.

Invariant: published weights, exports and copies are plain causal language models with the names of the state dict;
adapters are merged into a copy, never into the trained weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from agentkit.config import ModelConfig
from agentkit.trainers.learner.adapter import PEFT_NAME, add_adapters
from agentkit.trainers.learner.forward import Scorer
from agentkit.trainers.models.load import load_policy

Whole = Callable[[Tensor], Tensor]


class PolicyModel:
    """A causal language model with its trainable parameters.

    Fully trained weights are float32 for every ``config.dtype`` (small updates vanish in bfloat16); they are computed
    and published in that type. Under LoRA the frozen weights have ``config.dtype``, the adapters float32.
    """

    def __init__(self, config: ModelConfig, seed: int):
        loaded = config if config.lora else config.model_copy(update={"dtype": "float32"})
        self.causal_lm: PreTrainedModel = load_policy(loaded, seed)
        self.adapter = add_adapters(self.causal_lm, config, seed) if config.lora else None
        self.config, self._seed = loaded, seed
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.dropout = config.lora is not None and config.lora.dropout > 0
        self.scorer = Scorer(self.causal_lm, self.dtype)
        self.size = sum(p.numel() for p in self.scorer.parameters())
        """Parameters of the whole model, and how many of them are trained."""
        self.trained_size = sum(p.numel() for p in self.scorer.parameters() if p.requires_grad)

    def train_mode(self, training: bool) -> None:
        """Dropout is on only for adapters that ask for it; everything else always computes as the engine does."""
        self.scorer.train(training and self.dropout)

    @torch.no_grad()
    def plain_tensors(self, whole: Whole, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the plain model, one at a time: adapters merged, aliases of tied weights left out.

        Args:
            whole: gathers one tensor from all ranks, as ``Backend.whole``; all ranks iterate.
            dtype: type of the floating-point tensors; the configured type by default.
        """
        modules: Any = self.causal_lm.named_modules()
        adapted = {f"{name}.base_layer.weight": module for name, module in modules if hasattr(module, "lora_A")}
        seen: set[int] = set()
        for name, value in self.causal_lm.state_dict(keep_vars=True).items():
            if ".lora_" in name or id(value) in seen:
                continue
            seen.add(id(value))
            tensor = whole(value).detach()
            if name in adapted:
                tensor = (tensor.float() + _merged_adapter(adapted[name], whole).float()).to(tensor.dtype)
            yield (
                name.replace(".base_layer.", "."),
                tensor.to(dtype or self.dtype) if tensor.is_floating_point() else tensor,
            )

    def buckets(self, limit: int, whole: Whole) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield ``plain_tensors`` in lists of at most ``limit`` bytes each (one tensor at least)."""
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self.plain_tensors(whole):
            if bucket and size + tensor.nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket

    @torch.no_grad()
    def plain_copy(self, whole: Whole) -> PreTrainedModel:
        """A copy of the model as it is now, adapters merged, in float32. All ranks call it."""
        with torch.random.fork_rng():
            fresh = load_policy(self.config, self._seed).float()
        state = fresh.state_dict()
        for name, tensor in self.plain_tensors(whole, torch.float32):
            state[name].copy_(tensor)
        return fresh


class _Delta(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer: Any = layer

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight(PEFT_NAME)


def _merged_adapter(layer: nn.Module, whole: Whole) -> Tensor:
    """What the adapter of ``layer`` adds to its weight."""
    parameters = {f"layer.{name}": whole(p) for name, p in layer.named_parameters() if "lora_" in name}
    return functional_call(_Delta(layer), parameters, ())
