"""Assignment of contexts to micro-batches and ranks.

Invariant: a plan depends only on lengths, so every rank computes the same plan. Each context is in
exactly one micro-batch that counts, whole; all ranks have equally many micro-batches (those short of one repeat a
context with weight zero), because a collective that one rank skips hangs the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.prefixes import Indices, Row, merge, merged_rows
from agentkit.types import IntArray


@dataclass(frozen=True)
class MicroBatch:
    """Contexts of one forward pass."""

    contexts: Indices
    shared_rows: Indices | None = None
    """The row of each context, in ascending order, where contexts with a common prefix share a row; None: a row each.
    """
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
    shared: Sequence[Row] | None = None,
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
        shared: the rows that contexts share; not with ``packed`` or ``together``.
    """
    if not len(contexts):
        return [[] for _ in range(ranks)]
    if shared is not None:
        units = [_Unit(row.contexts, 1, row.nodes, row.nodes) for row in shared]
    else:
        of_sequences = _split(contexts, contexts if together is None else together[contexts])
        units = [_Unit(part, len(part), int(lengths[part].max()), int(lengths[part].sum())) for part in of_sequences]
    longest_first = sorted(units, key=lambda unit: -unit.longest)
    shares: list[list[_Unit]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks, np.int64)
    for unit in longest_first:
        rank = int(load.argmin())
        shares[rank].append(unit)
        load[rank] += unit.total

    def micro_batch(chunk: Sequence[_Unit], *, filler: bool = False) -> MicroBatch:
        rows = None if shared is None else np.repeat(np.arange(len(chunk)), [len(unit.contexts) for unit in chunk])
        return MicroBatch(np.concatenate([unit.contexts for unit in chunk]), rows, filler=filler, packed=packed)

    planned = [[micro_batch(chunk) for chunk in _cut(share, max_tokens, packed)] for share in shares]
    most = max(len(share) for share in planned)
    filler = micro_batch(longest_first[-1:], filler=True)
    return [share + [filler] * (most - len(share)) for share in planned]


def share(
    batch: Batch,
    sequences: Indices,
    rank: int,
    ranks: int,
    max_tokens: int,
    *,
    packed: bool = False,
    share_prefixes_of: int | None = None,
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
        share_prefixes_of: hidden size of a model that computes the prefix of several contexts once, unless ``whole``
            prevents it; None: every context is computed alone.
        whole: keep the contexts of a sequence in one micro-batch.
        states: compute contexts without action tokens, too: those of final states.
    """
    wanted = np.isin(batch.context_sequences, sequences)
    if not states:
        wanted &= batch.context_action_counts > 0
    contexts = np.flatnonzero(wanted)
    together = shared = None
    if whole and batch.num_contexts > batch.num_sequences:
        together = batch.context_sequences
    elif share_prefixes_of is not None:
        shared = merged_rows(batch, contexts, max_tokens, share_prefixes_of)
    plans = plan(batch.context_lengths, contexts, ranks, max_tokens, packed=packed, together=together, shared=shared)
    actions = [[int(batch.context_action_counts[micro.contexts].sum()) for micro in of_rank] for of_rank in plans]
    return [replace(micro, most_actions=max(column)) for micro, *column in zip(plans[rank], *actions, strict=True)]


@dataclass(frozen=True)
class _Unit:
    """Contexts that must be in the same micro-batch."""

    contexts: Indices
    rows: int
    longest: int
    """Tokens of the longest row."""
    total: int
    """Tokens of all rows, without padding."""


def _split(contexts: Indices, sequences: Indices) -> list[Indices]:
    """Split ``contexts`` by their sequences."""
    order = np.argsort(sequences, kind="stable")
    return np.split(contexts[order], np.flatnonzero(np.diff(sequences[order])) + 1)


def _cut(longest_first: list[_Unit], max_tokens: int, packed: bool) -> Iterator[list[_Unit]]:
    chunk: list[_Unit] = []
    for unit in longest_first:
        added = [*chunk, unit]
        rows, total = sum(each.rows for each in added), sum(each.total for each in added)
        if chunk and (total if packed else rows * chunk[0].longest) > max_tokens:
            yield chunk
            added = [unit]
        chunk = added
    if chunk:
        yield chunk


@dataclass(frozen=True)
class Layout:
    """One micro-batch of ``C`` contexts as tensors; ``n`` of their tokens are actions.

    Padded: ``B = C`` rows of at most ``T`` tokens. Packed: one row of all tokens. With shared rows, a row is the prefix
    tree of its contexts, and a token of a shared prefix stands there once.
    """

    ids: Tensor
    """int64 ``[B, T]``. Padding follows the text, so that a causal model needs no attention mask."""
    position_ids: Tensor | None
    """Packed: int64 ``[1, T]``, from 0 in each context. This tells transformers to keep the contexts apart. With shared
    rows: int64 ``[B, T]``, the tokens before each one in its context."""
    visible: Tensor | None
    """With shared rows: bool ``[B, 1, T, T]``, the tokens that each token attends to. Otherwise None: all before it."""
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
    position_ids = visible = None
    if micro.shared_rows is not None and micro.shared_rows[-1] < len(micro.contexts) - 1:
        rows = micro.shared_rows[contexts]
        columns, ids, position_ids, visible = _lay_out_trees(
            np.split(batch.tokens[flat], np.cumsum(lengths)[:-1]), micro.shared_rows
        )
    elif micro.packed:
        rows, columns = np.zeros_like(contexts), np.arange(len(flat))
        ids, position_ids = batch.tokens[flat].astype(np.int64)[None], offsets[None]
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
        position_ids=None if position_ids is None else on_device(position_ids),
        visible=None if visible is None else on_device(visible),
        sequences=on_device(_numbered(batch.context_sequences[micro.contexts])[contexts[action]]),
        rows=on_device(rows[action]),
        columns=on_device(np.roll(columns, 1)[action]),
        targets=on_device(batch.tokens[flat[action]].astype(np.int64)),
        positions=torch.from_numpy(flat[action]),
        mask=on_device(np.full(int(action.sum()), not micro.filler)),
        last_rows=on_device(rows[last]),
        last_columns=on_device(columns[last]),
        last_positions=torch.from_numpy(starts + lengths - 1),
        most_actions=max(int(action.sum()), micro.most_actions),
        filler=micro.filler,
    )


def _lay_out_trees(contexts: list[IntArray], rows: Indices) -> tuple[Indices, Indices, Indices, NDArray[np.bool_]]:
    """Put the prefix tree of the contexts of each row into that row.

    Returns the column of each token of all contexts, the ids ``[B, T]``, their positions ``[B, T]``, and which tokens
    they attend to ``[B, 1, T, T]``. Padding attends to itself, because a softmax over nothing is undefined.
    """
    trees = [merge([contexts[index] for index in np.flatnonzero(rows == row)]) for row in range(rows[-1] + 1)]
    count, width = len(trees), max(len(tree.ids) for tree in trees)
    ids, positions = np.zeros((2, count, width), np.int64)
    visible = np.tile(np.eye(width, dtype=np.bool_), (count, 1, 1, 1))
    for row, tree in enumerate(trees):
        nodes = len(tree.ids)
        ids[row, :nodes], positions[row, :nodes], visible[row, 0, :nodes, :nodes] = tree.ids, tree.depths, tree.visible
    return np.concatenate([path for tree in trees for path in tree.paths]), ids, positions, visible


def _numbered(values: Indices) -> Indices:
    """Number equal values from 0, in the order of their first occurrence."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
