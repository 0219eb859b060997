"""Key/value memory of the embedded engine, and attention over it.

Invariant: a forward pass sees a flat list of tokens ``[1, T]`` of many sequences; each token attends to exactly the
positions of its own row that are not after its own. Other content of a row (an older sequence, columns of a longer row)
always has weight zero.

One row of the pool holds one running sequence. Everything outside attention is token-wise, so decoding rows and prompts
of any length share one pass without padding; attention runs once per ``Segment``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION = "agentkit_rows"
"""Name of this attention in transformers."""

_COLUMN_STEP = 16
"""Row lengths are multiples of this; masked attention kernels need aligned strides."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one attention call: one token of each of many adjacent rows, or many tokens of one row."""

    first_token: int
    last_token: int
    first_row: int
    last_row: int
    length: int
    """Number of leading keys that are attended to."""
    mask: torch.Tensor | None
    """Added to the scores: ``[rows, 1, 1, length]`` or ``[1, 1, tokens, length]``; None where every key is seen."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of new tokens of one sequence: positions and places int64 ``[t]``, and how they attend."""

    positions: torch.Tensor
    places: torch.Tensor
    segment: Segment


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: places of its tokens, their attention, and the tokens whose logits are needed."""

    places: torch.Tensor
    """``row * columns + position`` of each token, int64 ``[T]``."""
    segments: Sequence[Segment]
    outputs: torch.Tensor
    """Indices into the tokens, int64."""


@dataclass(frozen=True, slots=True)
class KeyValueShape:
    """Shape of one token in each layer: heads and widths of keys and values."""

    layers: int
    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def numbers_per_token(self) -> int:
        return self.layers * (self.key_heads * self.key_width + self.value_heads * self.value_width)


class RowCache(Cache):
    """A transformers cache over a pool of rows ``[layers, rows, columns, heads, width]`` for keys and for values."""

    def __init__(
        self, shape: KeyValueShape, rows: int, length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``rows`` sequences of at most ``length`` tokens. Raises ``torch.OutOfMemoryError`` or ``RuntimeError``."""
        super().__init__(layers=[])
        self.columns = -(-length // _COLUMN_STEP) * _COLUMN_STEP
        size = (shape.layers, rows, self.columns)
        # Zeros, not uninitialised memory: a masked key has weight zero, but zero times an arbitrary value may be NaN.
        self.keys = torch.zeros(*size, shape.key_heads, shape.key_width, dtype=dtype, device=device)
        self.values = torch.zeros(*size, shape.value_heads, shape.value_width, dtype=dtype, device=device)
        self._flat_keys = [layer.flatten(0, 1) for layer in self.keys]
        self._flat_values = [layer.flatten(0, 1) for layer in self.values]
        self._range = torch.arange(self.columns, device=device)
        self._places: torch.Tensor = torch.empty(0, dtype=torch.int64, device=device)

    def run(self, model: Any, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """Forward ``ids [T]`` at ``positions [T]``; return float32 logits ``[len(step.outputs), vocabulary]``."""
        self._places = step.places
        _current.segments = step.segments
        try:
            logits = model(
                input_ids=ids[None],
                position_ids=positions[None],
                past_key_values=self,
                use_cache=True,
                attention_mask=_NO_MASK,
                logits_to_keep=step.outputs,
            ).logits
        finally:
            _current.segments = None
        return logits[0].float()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values ``[1, heads, T, width]`` to their places; return the layer's whole pool."""
        self._flat_keys[layer_idx].index_copy_(0, self._places, key_states[0].transpose(0, 1))
        self._flat_values[layer_idx].index_copy_(0, self._places, value_states[0].transpose(0, 1))
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given explicitly."""
        return 0

    def piece(self, row: int, start: int, end: int, first_token: int) -> Piece:
        """Where tokens ``start … end-1`` of the sequence in ``row`` go, when they follow ``first_token`` others."""
        positions = self._range[start:end]
        mask = None
        if end - start > 1:
            mask = self.keys.new_full((end - start, end), -math.inf).triu_(start + 1)[None, None]
        segment = Segment(first_token, first_token + end - start, row, row + 1, end, mask)
        return Piece(positions, row * self.columns + positions, segment)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` columns of row ``source`` to row ``target``."""
        self.keys[:, target, :length] = self.keys[:, source, :length]
        self.values[:, target, :length] = self.values[:, source, :length]

    def extract(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of the first ``length`` columns of ``row``, ``[layers, length, heads, width]`` each."""
        return self.keys[:, row, :length].clone(), self.values[:, row, :length].clone()

    def insert(self, row: int, stored: tuple[torch.Tensor, torch.Tensor], length: int) -> None:
        """Put the first ``length`` columns of an extract into ``row``."""
        self.keys[:, row, :length] = stored[0][:, :length]
        self.values[:, row, :length] = stored[1][:, :length]

    def wipe(self, row: int) -> None:
        """Zero a row that contains non-finite numbers; masked columns of later sequences must be finite."""
        self.keys[:, row] = 0
        self.values[:, row] = 0

    def aligned(self, length: int) -> int:
        """Return ``length`` rounded up to the alignment of attention kernels, within the row."""
        return min(-(-length // _COLUMN_STEP) * _COLUMN_STEP, self.columns)


_NO_MASK = torch.zeros(1, 1, 1, 1)
"""Placeholder: transformers passes a mask with four dimensions through; the segments hold the real masks."""

_current = threading.local()
"""Segments of this thread's forward pass; transformers has no other way to pass them to attention."""


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query [1, heads, T, width]`` over pool layers ``[rows, columns, heads, width]``.

    Returns ``[1, T, heads, width]``. Raises ``NotImplementedError`` for terms beyond plain softmax attention.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    heads, tokens, width = query.shape[1:]
    groups, repeats = key.shape[2], heads // key.shape[2]
    query = query[0].transpose(0, 1)
    result = query.new_empty(tokens, heads, value.shape[-1])
    for segment in _current.segments:
        first, last, rows = segment.first_token, segment.last_token, segment.last_row - segment.first_row
        each = (last - first) // rows
        keys = key[segment.first_row : segment.last_row, : segment.length].transpose(1, 2)
        values = value[segment.first_row : segment.last_row, : segment.length].transpose(1, 2)
        asked = query[first:last]
        # Key heads are not repeated for the query heads that share them: among decoding rows these are further queries,
        # within a prompt further heads over the same memory.
        if each == 1:
            answer = F.scaled_dot_product_attention(
                asked.reshape(rows, groups, repeats, width), keys, values, attn_mask=segment.mask, scale=scaling
            )
            result[first:last] = answer.reshape(last - first, heads, -1)
        else:
            answer = F.scaled_dot_product_attention(
                asked.view(each, groups, repeats, width).permute(1, 2, 0, 3),
                keys[0, :, None].expand(-1, repeats, -1, -1),
                values[0, :, None].expand(-1, repeats, -1, -1),
                attn_mask=segment.mask,
                scale=scaling,
            )
            result[first:last] = answer.permute(2, 0, 1, 3).reshape(last - first, heads, -1)
    return result[None], None


AttentionInterface.register(ATTENTION, rows_attention)
