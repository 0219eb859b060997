"""Plans contain each complete sequence once, within the budget, with equal numbers of micro-batches on all ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.trainers.learner.microbatches import MicroBatch, lay_out, plan


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=30),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 400),
    packed=st.booleans(),
    data=st.data(),
)
def test_plan(lengths, ranks, max_tokens, packed, data):
    chosen = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    lengths, sequences = np.array(lengths), np.array(sorted(chosen))
    plans = plan(lengths, sequences, ranks, max_tokens, packed=packed)
    assert len(plans) == ranks
    assert len({len(share) for share in plans}) == 1
    counted = [int(i) for share in plans for micro in share if not micro.filler for i in micro.contexts]
    assert sorted(counted) == sequences.tolist()
    for share in plans:
        for micro in share:
            held = lengths[micro.contexts]
            tokens = held.sum() if packed else len(held) * held.max()
            assert tokens <= max_tokens or len(held) == 1
            assert micro.packed == packed
    loads = [sum(lengths[m.contexts].sum() for m in share if not m.filler) for share in plans]
    assert max(loads) - min(loads) <= lengths[sequences].max()


def test_nothing_to_plan():
    assert plan(np.array([3, 4]), np.array([], np.int64), 2, 64) == [[], []]


def test_layout_points_at_the_output_before_each_action(make_batch):
    batch = make_batch(0)
    micro = MicroBatch(np.array([5, 0, 7]))
    layout = lay_out(batch, micro, torch.device("cpu"))
    at = 0
    for row, sequence in enumerate(micro.contexts):
        start, end = batch.cu_seqlens[sequence : sequence + 2]
        assert layout.ids[row, : end - start].tolist() == batch.tokens[start:end].tolist()
        assert not layout.ids[row, end - start :].any()
        assert layout.last_columns[row] == end - start - 1
        assert layout.last_positions[row] == end - 1
        for position in range(start, end):
            if batch.mask[position]:
                found = (layout.rows[at], layout.columns[at], layout.targets[at], layout.positions[at])
                assert [int(x) for x in found] == [row, position - start - 1, batch.tokens[position], position]
                assert layout.sequences[at] == row
                at += 1
    assert at == len(layout.rows)
    assert layout.mask.all()
    assert not lay_out(batch, MicroBatch(micro.contexts, filler=True), torch.device("cpu")).mask.any()


def test_packed_layout_points_at_the_same_tokens(make_batch):
    batch = make_batch(0)
    chosen = np.array([5, 0, 7])
    padded = lay_out(batch, MicroBatch(chosen), torch.device("cpu"))
    packed = lay_out(batch, MicroBatch(chosen, packed=True), torch.device("cpu"))
    assert packed.position_ids is not None
    expected = [(token, k) for s in chosen for k, token in enumerate(batch.tokens[slice(*batch.cu_seqlens[s : s + 2])])]
    assert list(zip(packed.ids[0].tolist(), packed.position_ids[0].tolist(), strict=True)) == expected
    for name in ("sequences", "targets", "positions", "mask", "last_positions"):
        assert torch.equal(getattr(packed, name), getattr(padded, name)), name
    for rows, columns in (("rows", "columns"), ("last_rows", "last_columns")):
        assert torch.equal(
            packed.ids[getattr(packed, rows), getattr(packed, columns)],
            padded.ids[getattr(padded, rows), getattr(padded, columns)],
        )
