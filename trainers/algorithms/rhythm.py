"""Attention-rhythm credit: which tokens a model's attention marks, and how much more their advantages count.

Invariant: only action tokens have scores, marks and factors; distances are differences of positions in the context,
observations included. Attention ends with the context; shares and medians are those of the whole sequence. A selection
depends on the values of scores alone, never on their order: equal scores at the boundary of a share are all left out.

Source: "Attention Illuminates LLM Reasoning", arXiv:2510.13554 (v2); readings of what it leaves open:
``docs/algorithms.md``. ``A[t, s]`` is the attention of the query whose input is token ``t`` to token ``s``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentkit.trainers.algorithms.quantiles import ROUNDING, highest
from agentkit.trainers.batch import Batch
from agentkit.types import FloatArray

Bools = NDArray[np.bool_]
Double = NDArray[np.float64]

LAYERS = 5
"""Layers of the middle third that are read, at most."""
HEAD_SHARE = 0.3
"""Share of all heads of these layers in the local set, and in the global set."""
WINDOW = 10
"""Distance at which WAAD stops to grow."""
HORIZON = (10, 100)
"""Nearest and farthest distance from which FAI looks back at a token."""
LOOKBACK = 3
"""Tokens before an anchor among which its introducing token is sought."""
HANDED_BACK = 0.4
"""Share of a dependent anchor's bonus that its introducing token gets (the authors' example: 50 % in 30 % and 20 %)."""


def middle_layers(count: int) -> list[int]:
    """Return evenly spaced layers of the middle third of ``count`` layers, from 0."""
    low, high = count // 3, min(2 * count // 3, count - 1)
    return sorted({low + i * (high - low) // (LAYERS - 1) for i in range(LAYERS)})


def row_spans(maps: Tensor, first: int) -> Tensor:
    """Return ``sum_s A[t, s] (t - s)`` for each row.

    Args:
        maps: rows ``first``, ``first + 1``, … of attention maps, with columns from 0: ``[..., rows, columns]``.
        first: position of the first row.

    Returns:
        ``[..., rows]``.
    """
    return (maps * _distances(maps, first)).sum(-1)


def row_waad(maps: Tensor, first: int) -> Tensor:
    """Return ``sum_s A[t, s] min(t - s, 10)`` for each row: windowed average attention distance. See ``row_spans``."""
    return (maps * _distances(maps, first).clamp(max=WINDOW)).sum(-1)


def column_fai(maps: Tensor, first: int, response: Tensor) -> Tensor:
    """Return what these rows add to the sum of the future attention influence of each column.

    Args:
        maps: as in ``row_spans``.
        first: position of the first row.
        response: bool ``[..., rows]``: rows of action tokens.

    Returns:
        ``[..., columns]``: ``sum A[t, s]`` over action tokens ``t`` with ``s + 10 <= t <= s + 100``.
    """
    distances = _distances(maps, first)
    seen = (distances >= HORIZON[0]) & (distances <= HORIZON[1])
    return (maps * (seen & response[..., None])).sum(-2)


def _distances(maps: Tensor, first: int) -> Tensor:
    rows, columns = maps.shape[-2:]
    positions = torch.arange(max(first + rows, columns), device=maps.device)
    return positions[first : first + rows, None] - positions[:columns]


def head_sets(spans: Double) -> tuple[list[int], list[int]]:
    """Return the heads with the smallest spans and those with the largest, each ``max(1, floor(0.3 heads))``.

    ``spans``: one number per head, layer by layer. Of equal spans the earlier head comes first.
    """
    count = max(1, math.floor(HEAD_SHARE * len(spans) + ROUNDING))
    return np.argsort(spans, kind="stable")[:count].tolist(), np.argsort(-spans, kind="stable")[:count].tolist()


class Rhythm(NamedTuple):
    """Scores and marks of the tokens of a batch, each ``[N]``. A score is NaN where it does not exist."""

    waad: Double
    change: Double
    """``|WAAD_t - WAAD_{t+1}|`` within a turn."""
    fai: Double
    local: Bools
    """Highest share of ``change`` in each sequence: the start of a local chunk."""
    anchors: Bools
    """Highest share of ``fai`` in each sequence."""
    dependent: Bools
    """Anchors inside a chunk: low WAAD, shortly after a token of ``local``."""
    introducing: Bools
    """The token with the largest change shortly before a dependent anchor."""


def rhythm(batch: Batch, waad: FloatArray, fai_sums: FloatArray, share: float) -> Rhythm:
    """Return scores and marks from what the attention maps gave for each action token.

    Args:
        batch: the tokens; values of the other arguments outside of ``batch.mask`` have no effect.
        waad: ``[N]``.
        fai_sums: sums of ``column_fai`` ``[N]``.
        share: of the tokens with a score, how many are marked.
    """
    at = np.flatnonzero(batch.mask)
    sequence, turn = batch.sequence_ids[at], _turns(batch, at)
    waads = waad[at].astype(np.float64)
    changes = np.full(len(at), np.nan)
    followed = turn[1:] == turn[:-1]
    changes[:-1][followed] = np.abs(np.diff(waads))[followed]
    counts = _later_action_tokens(batch, at).astype(np.float64)
    fai = fai_sums[at] / np.where(counts > 0, counts, np.nan)

    local, anchors = _highest(changes, sequence, share), _highest(fai, sequence, share)
    dependent, introducing = _dependences(anchors & (waads <= _medians(waads, sequence)), local, changes, turn)

    def spread(values: np.ndarray, missing: float | bool) -> np.ndarray:
        result = np.full(batch.num_tokens, missing, values.dtype)
        result[at] = values
        return result

    scores = (spread(values, np.nan) for values in (waads, changes, fai))
    return Rhythm(*scores, *(spread(marks, False) for marks in (local, anchors, dependent, introducing)))


def mark_bits(marks: Rhythm) -> FloatArray:
    """Return the marks of each token as one number, float32 ``[N]``.

    It is the sum of 1 for a token of ``local``, 2 for ``anchors``, 4 for ``dependent`` and 8 for ``introducing``.
    """
    kinds = (marks.local, marks.anchors, marks.dependent, marks.introducing)
    return np.stack(kinds, axis=1).astype(np.float32) @ np.array([1, 2, 4, 8], np.float32)


def factors(marks: Rhythm, credit: str, amplification: float) -> FloatArray:
    """Return the factor ``gamma`` of each token's advantage, float32 ``[N]``; 1 outside of action tokens.

    Args:
        marks: of the batch.
        credit: ``local``, ``global`` or ``coupled``.
        amplification: factor of a marked token.
    """
    if credit == "coupled":  # the terms add: a free anchor that also introduces another one gets both
        free = marks.anchors & ~marks.dependent
        weight = free + (1 - HANDED_BACK) * marks.dependent + HANDED_BACK * marks.introducing
    else:
        weight = {"local": marks.local, "global": marks.anchors}[credit].astype(np.float64)
    return (1 + (amplification - 1) * weight).astype(np.float32)


def _turns(batch: Batch, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the turns of the action tokens ``at``, over all sequences."""
    key = np.stack([batch.sequence_ids[at], batch.turn_ids[at]])
    return np.concatenate([[0], np.cumsum((key[:, 1:] != key[:, :-1]).any(axis=0))])[: len(at)]


def _later_action_tokens(batch: Batch, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the action tokens within the horizon after each position ``at``, in its context."""
    before = np.concatenate([[0], np.cumsum(batch.mask)])
    end = batch.cu_contexts[batch.context_ids[at] + 1]
    nearest, farthest = np.minimum(at + HORIZON[0], end), np.minimum(at + HORIZON[1] + 1, end)
    return before[farthest] - before[nearest]


def _highest(scores: Double, sequence: NDArray[np.int64], share: float) -> Bools:
    """Mark the highest ``share`` of the scores of each sequence; NaN is no score."""
    marked = np.zeros(len(scores), np.bool_)
    there = np.flatnonzero(~np.isnan(scores))
    for of_one in _split(there, sequence[there]):
        marked[of_one] = highest(scores[of_one], share)
    return marked


def _medians(values: Double, sequence: NDArray[np.int64]) -> Double:
    """Return for each token the (lower) median of its sequence: no value lies between it and the upper one."""
    medians = np.zeros(len(values))
    for of_one in _split(np.arange(len(values)), sequence):
        middle = (len(of_one) - 1) // 2
        medians[of_one] = np.partition(values[of_one], middle)[middle]
    return medians


def _split(items: NDArray[np.int64], sequence: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split ``items`` where ``sequence`` changes."""
    return [part for part in np.split(items, np.flatnonzero(np.diff(sequence)) + 1) if len(part)]


def _dependences(candidates: Bools, local: Bools, changes: Double, turn: NDArray[np.int64]) -> tuple[Bools, Bools]:
    """Return which candidates follow a local mark within ``LOOKBACK`` tokens of their turn, and which tokens introduce
    them."""
    count = len(candidates)
    follows = np.zeros(count, np.bool_)
    largest, introducer = np.full(count, -np.inf), np.zeros(count, np.int64)
    for lag in range(LOOKBACK, 0, -1):  # earliest first: a later token needs a larger change
        later = np.arange(lag, count)[turn[lag:] == turn[:-lag]]
        before = later - lag
        follows[later] |= local[before]
        larger = changes[before] > largest[later]
        largest[later[larger]], introducer[later[larger]] = changes[before[larger]], before[larger]
    dependent = candidates & follows
    introducing = np.zeros(count, np.bool_)
    introducing[introducer[dependent]] = True
    return dependent, introducing
