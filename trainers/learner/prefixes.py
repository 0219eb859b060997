"""Contexts that start with the same tokens, merged into trees so that a model computes each shared prefix once.

Invariant: a node stands for one token after one particular history. A causal model that sees a node's ancestors alone
computes there what it computes in each of the merged contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentkit.trainers.batch import Batch
from agentkit.trainers.inference.sessions import common_prefix
from agentkit.types import IntArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Tree:
    """The prefix tree of some contexts, with ``n`` nodes."""

    ids: Indices
    """int64 ``[n]``: the token of each node."""
    depths: Indices
    """int64 ``[n]``: tokens before it."""
    visible: NDArray[np.bool_]
    """bool ``[n, n]``: True in row ``i`` and column ``j`` if ``j`` is ``i`` or an ancestor of it."""
    paths: list[Indices]
    """The nodes of each context, in the order of its tokens."""


@dataclass(frozen=True)
class Row:
    """Contexts that one row of a forward pass computes."""

    contexts: Indices
    nodes: int


def merge(contexts: Sequence[IntArray]) -> Tree:
    """Return the prefix tree of token sequences.

    Args:
        contexts: token ids, int32, each at least one.
    """
    paths: dict[int, Indices] = {}
    fresh: list[Indices] = []
    size, previous, path = 0, np.zeros(0, np.int32), np.zeros(0, np.int64)
    for index in _sorted(contexts):
        shared = common_prefix(previous, contexts[index])
        previous = contexts[index]
        fresh.append(np.arange(size, size + len(previous) - shared))
        size += len(fresh[-1])
        paths[index] = path = np.concatenate([path[:shared], fresh[-1]])
    ids, depths, visible = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros((size, size), np.bool_)
    for nodes, (index, path) in zip(fresh, paths.items(), strict=True):
        ids[path], depths[path] = contexts[index], np.arange(len(path))
        visible[np.ix_(nodes, path)] = np.arange(len(path)) <= depths[nodes, None]
    return Tree(ids, depths, visible, [paths[index] for index in range(len(contexts))])


def merged_rows(batch: Batch, contexts: Indices, max_tokens: int, hidden_size: int) -> list[Row]:
    """Deal contexts to rows: one joins a row if its prefix is there and this takes less computation than a new row.

    Args:
        batch: the whole batch.
        contexts: indices of those to compute.
        max_tokens: the most nodes of a row of several contexts.
        hidden_size: of the model.
    """
    tokens = [batch.tokens[batch.cu_contexts[index] : batch.cu_contexts[index + 1]] for index in contexts]
    rows: list[Row] = []
    previous = np.zeros(0, np.int32)
    for index in _sorted(tokens):
        length, shared = len(tokens[index]), common_prefix(previous, tokens[index])
        context, previous = contexts[index : index + 1], tokens[index]
        alone = Row(context, length)
        if shared:
            joined = Row(np.append(rows[-1].contexts, context), rows[-1].nodes + length - shared)
            apart = _operations(rows[-1], hidden_size) + _operations(alone, hidden_size)
            if joined.nodes <= max_tokens and _operations(joined, hidden_size) < apart:
                rows[-1] = joined
                continue
        rows.append(alone)
    return rows


def _operations(row: Row, hidden_size: int) -> int:
    """Multiply-adds of one layer, divided by the hidden size: 12 parameters per node and hidden unit, and attention.

    A row of several contexts computes the whole attention map, a single context half of it.
    """
    seen = row.nodes if len(row.contexts) > 1 else row.nodes // 2
    return row.nodes * (12 * hidden_size + 2 * seen)


def _sorted(contexts: Sequence[IntArray]) -> list[int]:
    """Order contexts so that the longest common prefix with all earlier ones is that with the one before.

    Bytes of integers of one width sort by tokens in some order of the vocabulary, and a prefix sorts before what it
    starts.
    """
    return sorted(range(len(contexts)), key=lambda index: contexts[index].tobytes())
