"""Assignment of sequences to micro-batches and ranks.

Invariant: a plan depends only on lengths, so every rank computes the same plan. Each sequence is in
exactly one micro-batch that counts, whole; all ranks have equally many micro-batches (those short of one repeat a
sequence with weight zero), because a collective that one rank skips hangs the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentkit.trainers.batch import Batch

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass."""

    sequences: Indices
    filler: bool = False
    """A filler keeps the ranks in step; its tokens have weight zero."""
    most_actions: int = 0
    """Action tokens of the rank that has most of them in the same forward pass."""
    packed: bool = False
    """Whether the sequences stand one after the other in one row, instead of padded in a row each."""


def plan(
    lengths: Indices, sequences: Indices, ranks: int, max_tokens: int, *, packed: bool = False
) -> list[list[MicroBatch]]:
    """Deal ``sequences`` to ranks and cut each rank's share into micro-batches.

    ``lengths``: tokens of every sequence of the batch, ``[S]``; ``sequences``: indices of those to compute. A
    micro-batch holds at most ``max_tokens`` tokens, padding included, or a single longer sequence. Sequences are sorted
    by length, which reduces padding, and each goes to the rank with the least work so far.
    """
    if not len(sequences):
        return [[] for _ in range(ranks)]
    longest_first = sequences[np.argsort(-lengths[sequences], kind="stable")]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks, np.int64)
    for index in longest_first:
        rank = int(load.argmin())
        shares[rank].append(int(index))
        load[rank] += lengths[index]

    planned = [
        [MicroBatch(np.array(chunk, np.int64), packed=packed) for chunk in _cut(share, lengths, max_tokens, packed)]
        for share in shares
    ]
    most = max(len(share) for share in planned)
    filler = MicroBatch(longest_first[-1:], filler=True, packed=packed)
    return [share + [filler] * (most - len(share)) for share in planned]


def share(
    batch: Batch, sequences: Indices, rank: int, ranks: int, max_tokens: int, *, packed: bool = False
) -> list[MicroBatch]:
    """Return the micro-batches of one rank, each with what the others compute at the same time."""
    plans = plan(batch.lengths, sequences, ranks, max_tokens, packed=packed)
    actions = [[int(batch.action_counts[micro.sequences].sum()) for micro in of_rank] for of_rank in plans]
    return [replace(micro, most_actions=max(column)) for micro, *column in zip(plans[rank], *actions, strict=True)]


def _cut(longest_first: list[int], lengths: Indices, max_tokens: int, packed: bool) -> Iterator[list[int]]:
    chunk: list[int] = []
    for index in longest_first:
        longer = [*chunk, index]
        tokens = lengths[longer].sum() if packed else len(longer) * lengths[longer[0]]
        if chunk and tokens > max_tokens:
            yield chunk
            longer = [index]
        chunk = longer
    if chunk:
        yield chunk


@dataclass(frozen=True)
class Layout:
    """One micro-batch of ``S`` sequences as tensors; ``n`` of their tokens are actions.

    Padded: ``B = S`` rows of at most ``T`` tokens. Packed: one row of all tokens.
    """

    ids: Tensor
    """int64 ``[B, T]``. Padding follows the text, so that a causal model needs no attention mask."""
    position_ids: Tensor | None
    """Packed: int64 ``[1, T]``, from 0 in each sequence. This tells transformers to keep the sequences apart."""
    sequences: Tensor
    """int64 ``[n]``: which of the ``S`` sequences each action token belongs to."""
    rows: Tensor
    columns: Tensor
    """int64 ``[n]``: where the output stands that chose each action token: one position before it."""
    targets: Tensor
    """int64 ``[n]``: the action tokens."""
    positions: Tensor
    """int64 ``[n]``, on the CPU: indices of the action tokens in the flat batch."""
    mask: Tensor
    """bool ``[n]``: all True, or all False for a filler."""
    last_rows: Tensor
    last_columns: Tensor
    """int64 ``[S]``: where each sequence's last token stands."""
    last_positions: Tensor
    """int64 ``[S]``, on the CPU: indices of the last tokens in the flat batch."""
    most_actions: int
    """Maximum of ``n`` over the ranks."""


def lay_out(batch: Batch, micro: MicroBatch, device: torch.device) -> Layout:
    """Pad or pack one micro-batch and find its action tokens."""
    lengths = batch.lengths[micro.sequences]
    starts = batch.cu_seqlens[micro.sequences]
    longest = int(lengths.max())
    real = np.arange(longest) < lengths[:, None]
    flat = (starts[:, None] + np.arange(longest))[real]
    sequences, offsets = np.nonzero(real)  # of each token
    if micro.packed:
        rows, columns = np.zeros_like(sequences), np.arange(len(flat))
        ids = batch.tokens[flat].astype(np.int64)[None]
    else:
        rows, columns = sequences, offsets
        ids = np.zeros(real.shape, np.int64)
        ids[real] = batch.tokens[flat]
    action = batch.mask[flat]
    last = np.cumsum(lengths) - 1

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Layout(
        ids=on_device(ids),
        position_ids=on_device(offsets[None]) if micro.packed else None,
        sequences=on_device(sequences[action]),
        rows=on_device(rows[action]),
        columns=on_device(columns[action] - 1),
        targets=on_device(batch.tokens[flat[action]].astype(np.int64)),
        positions=torch.from_numpy(flat[action]),
        mask=on_device(np.full(int(action.sum()), not micro.filler)),
        last_rows=on_device(rows[last]),
        last_columns=on_device(columns[last]),
        last_positions=torch.from_numpy(starts + lengths - 1),
        most_actions=max(int(action.sum()), micro.most_actions),
    )
