"""Reading of attention maps while a model computes: blocks of rows go to a function, no map is held.

Invariant: the maps are what the model's own eager attention returns (after softmax, one per query head), computed in
float32 for every ``dtype``. At most ``MAX_SCORES`` numbers of one layer exist at once, times a few copies. The model
computes what it always computes; its attention implementation is the same afterwards as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentkit.errors import LearnerError

Read = Callable[[int, int, Tensor], None]
"""``read(layer, first, maps)``: rows from ``first`` on, ``[B, heads, rows, columns]``; columns after the last row are
left out, because they are 0."""

MAX_SCORES = 2**26
"""Numbers of one block of maps (256 MiB)."""
_NAME = "agentkit_maps"


@dataclass(frozen=True, slots=True)
class _Reading:
    layers: Collection[int]
    read: Read
    fused: bool
    """Whether torch's fused attention computes the other layers."""
    max_scores: int


_active: ContextVar[_Reading] = ContextVar("reading")


@contextmanager
def reading(
    model: PreTrainedModel, layers: Collection[int], read: Read, *, max_scores: int | None = None
) -> Iterator[None]:
    """Call ``read`` with the attention maps of ``layers`` for each forward pass of ``model`` in this context.

    The model may be wrapped by a back end; call the wrapper. There must be no cache and no dropout. ``max_scores``
    replaces ``MAX_SCORES``.
    """
    previous = model.config._attn_implementation or "eager"
    token = _active.set(_Reading(layers, read, previous != "eager" and model._supports_sdpa, max_scores or MAX_SCORES))
    try:
        model.set_attn_implementation(_NAME)
        yield
    finally:
        model.set_attn_implementation(previous)
        _active.reset(token)


@torch.no_grad()
def check_readable(model: PreTrainedModel, layers: Collection[int]) -> None:
    """Read the maps of a short text. Raises ``LearnerError`` with the reason if ``model`` does not let them be read."""
    name, config, found = type(model).__name__, model.config.get_text_config(), []
    ids = torch.arange(12, device=model.device)[None] % config.vocab_size
    five_rows = 5 * ids.numel() * getattr(config, "num_attention_heads", 1)

    def hidden_states() -> Tensor:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state.float()

    expected = hidden_states()
    try:
        with reading(model, layers, lambda layer, first, maps: found.append((layer, maps)), max_scores=five_rows):
            actual = hidden_states()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(f"the attention of {name} cannot be replaced ({error})") from error
    missing = sorted(set(layers) - {layer for layer, _ in found})
    if missing:
        numbers = ", ".join(map(str, missing))
        raise _unreadable(
            f"layers {numbers} of {name} compute no softmax attention through the interface of transformers "
            "(state-space and linear attention have no maps)"
        )
    difference = (actual - expected).norm() / expected.norm()
    tolerance = 1e-4 if model.dtype == torch.float32 else 2e-2
    if not difference <= tolerance or any(not torch.isfinite(maps).all() for _, maps in found):
        raise _unreadable(
            f"{name} computes something else with the eager attention of transformers, block by block, than with its "
            f"own ({difference:.1e} apart)"
        )


def _unreadable(reason: str) -> LearnerError:
    return LearnerError(
        f"algorithm.credit needs attention maps, and {reason}: set algorithm.credit=none, or choose a model with "
        "softmax attention"
    )


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it, in blocks of rows that are read.

    ``query`` ``[B, heads, T, width]``; ``key`` and ``value`` with their own number of heads.
    """
    active, layer = _active.get(), int(module.layer_idx)  # type: ignore[arg-type]
    if layer not in active.layers and active.fused:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    batch, heads, length, _ = query.shape
    rows = max(1, active.max_scores // (batch * heads * length))
    outputs = []
    with torch.autocast(query.device.type, enabled=False):
        keys, values = key.float(), value.float()
        for first in range(0, length, rows):
            last = min(first + rows, length)
            mask = _additive_mask(attention_mask, first, last, query.device)
            block = query[:, :, first:last].float()
            output, maps = eager(module, block, keys[:, :, :last], values[:, :, :last], mask, **options)
            if layer in active.layers:
                active.read(layer, first, maps)
            outputs.append(output)
    return torch.cat(outputs, dim=1).to(value.dtype), None


def _additive_mask(mask: Tensor | None, first: int, last: int, device: torch.device) -> Tensor:
    """Rows ``first`` to ``last`` of a mask as eager attention adds it, float32; None is the causal one."""
    if mask is None:
        positions = torch.arange(last, device=device)
        part = (positions[first:, None] >= positions)[None, None]
    else:
        part = mask[:, :, first:last, :last]
    if part.dtype != torch.bool:
        return part.float()
    return torch.zeros(part.shape, device=device).masked_fill(~part, torch.finfo(torch.float32).min)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)
