"""Preparation of a transformers model for the embedded engine, with a check of its results.

Invariant: a model that passes ``prepare`` gives, token by token through the row cache, the logits of its plain forward
pass. Other models are refused with an ``EngineError`` before any request.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from agentkit.errors import EngineError
from agentkit.trainers.inference.cache import ATTENTION, KeyValueShape, Piece, RowCache, Step

_REMEDY = "use engine.kind=vllm for it, or another model"
_PROBE_LENGTHS = (13, 7)
_TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 0.3}
"""Largest difference of log-probabilities between two orders of the same sums, at the magnitudes of language models."""


def prepare(model: Any, max_context: int) -> tuple[Any, KeyValueShape]:
    """Return a view of ``model`` that attends through ``RowCache``, and the shape of its keys and values.

    The view shares the parameters in place: training or loading ``model`` changes what it computes. Raises
    ``EngineError`` for a model that cannot be served token by token with per-row positions.
    """
    name = type(model).__name__
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_context > longest:
        raise EngineError(
            f"engine.max_context={max_context} is beyond the {longest} positions of {name}: "
            f"set engine.max_context to at most {longest}"
        )
    shape = _key_value_shape(model, max_context)
    view = _view(model, _own_attention(model.config))
    try:
        difference = _probe(model, view, shape)
    except Exception as error:
        raise EngineError(f"{name} cannot be served by the hf engine ({error}): {_REMEDY}") from error
    tolerance = _TOLERANCE.get(model.dtype, 0.3)
    if not difference < tolerance:
        raise EngineError(
            f"{name} cannot be served by the hf engine: its log-probabilities token by token differ by "
            f"{difference:.2g} (more than {tolerance}) from those of its plain forward pass, so that its attention is "
            f"not of the standard kind: {_REMEDY}"
        )
    return view, shape


def vocabulary_size(model: Any) -> int:
    """Return the number of ids that the model embeds, including padding."""
    return model.get_input_embeddings().weight.shape[0]


def _view(module: Any, config: Any) -> Any:
    """Return a copy of the module tree in evaluation mode that shares all parameters and buffers but not ``config``."""
    view = copy.copy(module)
    view.__dict__["_modules"] = {
        name: None if child is None else _view(child, config) for name, child in module._modules.items()
    }
    view.__dict__["training"] = False
    if hasattr(module, "config"):
        view.__dict__["config"] = config
    return view


def _own_attention(config: Any) -> Any:
    config = copy.deepcopy(config)
    config._attn_implementation = ATTENTION
    return config


@torch.no_grad()
def _key_value_shape(model: Any, max_context: int) -> KeyValueShape:
    """Return the shape of the model's cache. Refuses all but one key and one value per token in every layer."""
    name = type(model).__name__
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if isinstance(rope, dict) and rope.get("rope_type") in ("dynamic", "longrope"):
        raise EngineError(
            f"{name} has {rope['rope_type']} rotary positions, which change with the longest sequence of a batch; "
            f"{_REMEDY}"
        )
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    try:
        past = model(input_ids=ids, use_cache=True).past_key_values
    except Exception as error:
        raise EngineError(f"{name} does not run as a causal language model ({error}): {_REMEDY}") from error
    layers = list(getattr(past, "layers", []))
    if not isinstance(past, Cache) or not layers or not all(isinstance(layer, DynamicLayer) for layer in layers):
        raise EngineError(f"{name} keeps other state than keys and values of attention: {_REMEDY}")
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    if any(window is not None and window < max_context for window in windows):
        raise EngineError(
            f"{name} attends within a sliding window of {min(w for w in windows if w is not None)} tokens, fewer than "
            f"engine.max_context={max_context}: lower engine.max_context, or {_REMEDY}"
        )
    shapes = {(k.shape[1], k.shape[3], v.shape[1], v.shape[3]) for k, v in ((la.keys, la.values) for la in layers)}
    if len(shapes) != 1 or layers[0].keys.shape[2] != 2:
        raise EngineError(f"{name} has layers whose keys differ in shape: {_REMEDY}")
    return KeyValueShape(len(layers), *shapes.pop())


@torch.no_grad()
def _probe(model: Any, view: Any, shape: KeyValueShape) -> float:
    """Return the largest difference of log-probabilities between a plain pass per sequence and a row cache fed in
    pieces."""
    device, vocabulary = model.device, vocabulary_size(model)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocabulary, (length,), generator=generator).to(device) for length in _PROBE_LENGTHS]
    plain = torch.stack([model(input_ids=ids[None]).logits[0, -1].float() for ids in sequences])
    cache = RowCache(shape, len(sequences), max(_PROBE_LENGTHS), dtype=model.dtype, device=device)
    starts, logits = [0] * len(sequences), plain
    for back in (4, 1, 0):
        ends = [length - back for length in _PROBE_LENGTHS]
        logits = _feed(cache, view, sequences, starts, ends)
        starts = ends
    return float((plain.log_softmax(-1) - logits.log_softmax(-1)).abs().max())


def _feed(cache: RowCache, view: Any, sequences: list[Any], starts: list[int], ends: list[int]) -> torch.Tensor:
    """Feed ``sequences[row][start:end]`` to every row in one pass; return the logits of each row's last token."""
    pieces: list[Piece] = []
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        pieces.append(cache.piece(row, start, end, pieces[-1].segment.last_token if pieces else 0))
    outputs = torch.tensor([piece.segment.last_token - 1 for piece in pieces], device=cache.keys.device)
    step = Step(torch.cat([piece.places for piece in pieces]), [piece.segment for piece in pieces], outputs)
    ids = torch.cat([sequence[start:end] for sequence, start, end in zip(sequences, starts, ends, strict=True)])
    return cache.run(view, ids, torch.cat([piece.positions for piece in pieces]), step)
