"""The policy in the learner: its trainable weights (adapters or all), and exports of them.

Invariant: published weights, exports and copies are plain causal language models with the names of the state dict;
adapters are merged into a copy, never into the trained weights.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentkit.config import LoraConfig, ModelConfig
from agentkit.errors import LearnerError
from agentkit.trainers.learner.forward import Scorer
from agentkit.trainers.models.load import load_policy

ADAPTER = "default"
"""The name that peft gives to the only adapter."""


class PolicyModel:
    """A causal language model with its trainable parameters.

    Fully trained weights are float32 for every ``config.dtype`` (small updates vanish in bfloat16); they are computed
    and published in that type. Under LoRA the frozen weights have ``config.dtype``, the adapters float32.
    """

    def __init__(self, config: ModelConfig, seed: int):
        loaded = config if config.lora else config.model_copy(update={"dtype": "float32"})
        self.causal_lm: PreTrainedModel = load_policy(loaded, seed)
        self.adapters: Any = _adapted(self.causal_lm, config.lora) if config.lora else None
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = next(self.causal_lm.parameters()).device
        self.dropout = config.lora is not None and config.lora.dropout > 0
        self.scorer = Scorer(self.causal_lm, self.dtype)

    def train_mode(self, training: bool) -> None:
        """Dropout is on only for adapters that ask for it; everything else always computes as the engine does."""
        self.scorer.train(training and self.dropout)

    @torch.no_grad()
    def merged_state_dict(self) -> dict[str, Tensor]:
        """State dict of the plain model in the configured type: adapters merged, aliases of tied weights left out."""
        state = self.causal_lm.state_dict()
        if self.adapters is not None:
            state = {name: value for name, value in state.items() if ".lora_" not in name}
            named: Any = self.causal_lm.named_modules()
            for name, module in named:
                if hasattr(module, "lora_A"):
                    key = f"{name}.base_layer.weight"
                    merged = state[key].float() + module.get_delta_weight(ADAPTER).float()
                    state[key] = merged.to(state[key].dtype)
            state = {name.replace(".base_layer.", "."): value for name, value in state.items()}
        seen: set[int] = set()
        plain = {}
        for name, value in state.items():
            if value.data_ptr() not in seen or value.numel() == 0:
                plain[name] = value.to(self.dtype) if value.is_floating_point() else value
            seen.add(value.data_ptr())
        return plain

    def buckets(self, limit: int) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the tensors of ``merged_state_dict`` in lists of at most ``limit`` bytes each (one tensor at least).

        All ranks must iterate, in step.
        """
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self.merged_state_dict().items():
            if bucket and size + tensor.nbytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket

    def plain_copy(self) -> PreTrainedModel:
        """A deep copy of the model as it is now, adapters merged, in float32."""
        if self.adapters is None:
            return copy.deepcopy(self.causal_lm)
        return copy.deepcopy(self.adapters).merge_and_unload().float()


def _adapted(model: PreTrainedModel, config: LoraConfig) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise LearnerError("model.lora needs peft: pip install 'agentkit-rl[lora]'") from error
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    adapters = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # peft reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            return peft.get_peft_model(model, adapters).eval()
    except ValueError as error:
        raise LearnerError(f"model.lora does not fit the model ({error}): check model.lora.target_modules") from error
