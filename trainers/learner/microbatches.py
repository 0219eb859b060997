"""Assignment of contexts to micro-batches and ranks.

Invariant: a plan depends only on lengths, so every rank computes the same plan. Each context is in
exactly one micro-batch that counts, whole; all ranks have equally many micro-batches (those short of one repeat a
context with weight zero), because a collective that one rank skips hangs the others.
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
    """Contexts of one forward pass."""

    contexts: Indices
    filler: bool = False
    """A filler keeps the ranks in step; its tokens have weight zero."""
    most_actions: int = 0
    """Action tokens of the rank that has most of them in the same forward pass."""
    packed: bool = False
    """Whether the contexts stand one after the other in one row, instead of padded in a row each."""


def plan(
    lengths: Indices,
    contexts: Indices,
    ranks: int,
    max_tokens: int,
    *,
    packed: bool = False,
    together: Indices | None = None,
) -> list[list[MicroBatch]]:
    """Deal ``contexts`` to ranks and cut each rank's share into micro-batches.

    A micro-batch holds at most ``max_tokens`` tokens, padding included, or a single longer context (or sequence, with
    ``together``). Contexts are sorted by length, which reduces padding, and each goes to the rank with the least work
    so far.

    Args:
        lengths: tokens of every context of the batch, ``[C]``.
        contexts: indices of those to compute.
        ranks: number of ranks.
        max_tokens: the limit.
        packed: contexts stand one after the other, without padding.
        together: the sequence of every context ``[C]``, if contexts of one sequence must not be separated.
    """
    if not len(contexts):
        return [[] for _ in range(ranks)]
    units = _units(contexts, contexts if together is None else together[contexts])
    longest_first = sorted(units, key=lambda unit: -int(lengths[unit].max()))
    shares: list[list[Indices]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks, np.int64)
    for unit in longest_first:
        rank = int(load.argmin())
        shares[rank].append(unit)
        load[rank] += lengths[unit].sum()

    planned = [
        [MicroBatch(np.concatenate(chunk), packed=packed) for chunk in _cut(share, lengths, max_tokens, packed)]
        for share in shares
    ]
    most = max(len(share) for share in planned)
    filler = MicroBatch(longest_first[-1], filler=True, packed=packed)
    return [share + [filler] * (most - len(share)) for share in planned]


def share(
    batch: Batch,
    sequences: Indices,
    rank: int,
    ranks: int,
    max_tokens: int,
    *,
    packed: bool = False,
    whole: bool = False,
    states: bool = False,
) -> list[MicroBatch]:
    """Return the micro-batches of one rank, each with what the others compute at the same time.

    Args:
        batch: the whole batch.
        sequences: indices of those to compute.
        rank: the rank.
        ranks: number of ranks.
        max_tokens: as in ``plan``.
        packed: as in ``plan``.
        whole: keep the contexts of a sequence in one micro-batch.
        states: compute contexts without action tokens, too: those of final states.
    """
    wanted = np.isin(batch.context_sequences, sequences)
    if not states:
        wanted &= batch.context_action_counts > 0
    together = batch.context_sequences if whole else None
    plans = plan(batch.context_lengths, np.flatnonzero(wanted), ranks, max_tokens, packed=packed, together=together)
    actions = [[int(batch.context_action_counts[micro.contexts].sum()) for micro in of_rank] for of_rank in plans]
    return [replace(micro, most_actions=max(column)) for micro, *column in zip(plans[rank], *actions, strict=True)]


def _units(contexts: Indices, sequences: Indices) -> list[Indices]:
    """Split ``contexts`` by their sequences."""
    order = np.argsort(sequences, kind="stable")
    return np.split(contexts[order], np.flatnonzero(np.diff(sequences[order])) + 1)


def _cut(longest_first: list[Indices], lengths: Indices, max_tokens: int, packed: bool) -> Iterator[list[Indices]]:
    chunk: list[Indices] = []
    count = total = longest = 0
    for unit in longest_first:
        count, total, longest = count + len(unit), total + int(lengths[unit].sum()), longest or int(lengths[unit].max())
        if chunk and (total if packed else count * longest) > max_tokens:
            yield chunk
            chunk, count, total, longest = [], len(unit), int(lengths[unit].sum()), int(lengths[unit].max())
        chunk.append(unit)
    if chunk:
        yield chunk


@dataclass(frozen=True)
class Layout:
    """One micro-batch of ``C`` contexts as tensors; ``n`` of their tokens are actions.

    Padded: ``B = C`` rows of at most ``T`` tokens. Packed: one row of all tokens.
    """

    ids: Tensor
    """int64 ``[B, T]``. Padding follows the text, so that a causal model needs no attention mask."""
    position_ids: Tensor | None
    """Packed: int64 ``[1, T]``, from 0 in each context. This tells transformers to keep the contexts apart."""
    sequences: Tensor
    """int64 ``[n]``: the sequence of each action token, numbered from 0 in the order of the first contexts."""
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
    """int64 ``[C]``: where each context's last token stands."""
    last_positions: Tensor
    """int64 ``[C]``, on the CPU: indices of the last tokens in the flat batch."""
    most_actions: int
    """Maximum of ``n`` over the ranks."""
    filler: bool


def lay_out(batch: Batch, micro: MicroBatch, device: torch.device) -> Layout:
    """Pad or pack one micro-batch and find its action tokens."""
    lengths = batch.context_lengths[micro.contexts]
    starts = batch.cu_contexts[micro.contexts]
    longest = int(lengths.max())
    real = np.arange(longest) < lengths[:, None]
    flat = (starts[:, None] + np.arange(longest))[real]
    contexts, offsets = np.nonzero(real)  # of each token
    if micro.packed:
        rows, columns = np.zeros_like(contexts), np.arange(len(flat))
        ids = batch.tokens[flat].astype(np.int64)[None]
    else:
        rows, columns = contexts, offsets
        ids = np.zeros(real.shape, np.int64)
        ids[real] = batch.tokens[flat]
    action = batch.mask[flat]
    last = np.cumsum(lengths) - 1

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Layout(
        ids=on_device(ids),
        position_ids=on_device(offsets[None]) if micro.packed else None,
        sequences=on_device(_numbered(batch.context_sequences[micro.contexts])[contexts[action]]),
        rows=on_device(rows[action]),
        columns=on_device(columns[action] - 1),
        targets=on_device(batch.tokens[flat[action]].astype(np.int64)),
        positions=torch.from_numpy(flat[action]),
        mask=on_device(np.full(int(action.sum()), not micro.filler)),
        last_rows=on_device(rows[last]),
        last_columns=on_device(columns[last]),
        last_positions=torch.from_numpy(starts + lengths - 1),
        most_actions=max(int(action.sum()), micro.most_actions),
        filler=micro.filler,
    )


def _numbered(values: Indices) -> Indices:
    """Number equal values from 0, in the order of their first occurrence."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
