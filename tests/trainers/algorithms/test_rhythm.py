"""Scores and factors of attention-rhythm credit: plain loops, closed forms, and what must not matter."""

from __future__ import annotations

import numpy as np
import pytest
import rhythm_loops
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.trainers.algorithms import rhythm
from agentkit.trainers.batch import Batch, flatten
from agentkit.types import Group, Trajectory, Turn


def batch_of(*episodes: list[tuple[int, int]], after: int = 0, rerendered: bool = False) -> Batch:
    """One sequence per episode, whose turns are numbers of prompt and action tokens; ``after``: last observations;
    ``rerendered``: with a context for each turn."""

    def turn(prompt: int, action: int) -> Turn:
        return Turn(np.ones(prompt, np.int32), np.ones(action, np.int32), np.zeros(action, np.float32), ((0, action),))

    members = [
        Trajectory(0, member, "test", 0, 0, [turn(*each) for each in turns], np.ones(after, np.int32), "truncated")
        for member, turns in enumerate(episodes)
    ]
    for member in members:
        member.rerendered = rerendered
    return flatten([Group(0, 0, 0, members)])


def expected_factors(batch: Batch, waad, fai_sums, credit, share=0.4) -> np.ndarray:
    result = np.ones(batch.num_tokens)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        mask = batch.mask[start:end]
        at = [int(t) for t in np.flatnonzero(mask)]
        counts = {s: len(rhythm_loops.fai_rows(mask, s)) for s in at}
        factors = rhythm_loops.gamma(
            {t: float(waad[start + t]) for t in at},
            {s: float(fai_sums[start + s]) / counts[s] for s in at if counts[s]},
            {t: int(batch.turn_ids[start + t]) for t in at},
            credit,
            share=share,
        )
        for t, factor in factors.items():
            result[start + t] = factor
    return result


turns = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 25)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(turns, min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 6, 10**6]),
    st.sampled_from([0.05, 0.4, 1.0]),
    st.integers(0, 5),
)
def test_factors_are_those_of_plain_loops(episodes, seed, values, share, after):
    """With few ``values`` there are many ties. What stands at other tokens has no effect."""
    batch, rng = batch_of(*episodes, after=after), np.random.default_rng(seed)
    waad, fai = (rng.integers(0, values, batch.num_tokens).astype(np.float32) for _ in range(2))
    garbage = np.where(rng.random(batch.num_tokens) < 0.5, np.nan, np.inf).astype(np.float32)
    waad, fai = (np.where(batch.mask, scores, garbage) for scores in (waad, fai))
    marks = rhythm.rhythm(batch, waad, fai, share)
    for credit in ("local", "global", "coupled"):
        expected = expected_factors(batch, waad, fai, credit, share)
        np.testing.assert_allclose(rhythm.factors(marks, credit, 1.5), expected, rtol=1e-6)


def test_a_free_anchor_that_introduces_another_gets_both():
    """Loops above reach this case too; here it is written out. WAAD falls at token 8, then stays low."""
    batch = batch_of([(1, 40)])
    waad, fai = np.zeros(41, np.float32), np.zeros(41, np.float32)
    waad[1:9], waad[9:] = 5.0, 1.0
    fai[[8, 10]] = 10.0
    marks = rhythm.rhythm(batch, waad, fai, 0.4)
    gamma = rhythm.factors(marks, "coupled", 1.5)
    assert np.flatnonzero(marks.local).tolist() == [8]
    assert gamma[8] == pytest.approx(1.7)
    assert gamma[10] == pytest.approx(1.3)
    assert np.flatnonzero(gamma != 1).tolist() == [8, 10]


def reduced(maps: np.ndarray, mask: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans, WAAD and sums of FAI ``[T]`` of one map, in blocks of ``rows`` without the columns that are zero."""
    spans, waad, fai = [], [], np.zeros(len(mask))
    for first in range(0, len(mask), rows):
        last = min(first + rows, len(mask))
        block = torch.from_numpy(maps[first:last, :last])
        spans.append(rhythm.row_spans(block, first))
        waad.append(rhythm.row_waad(block, first))
        fai[:last] += rhythm.column_fai(block, first, torch.from_numpy(mask[first:last])).numpy()
    return torch.cat(spans).numpy(), torch.cat(waad).numpy(), fai


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_reductions_are_those_of_plain_loops(rows):
    rng = np.random.default_rng(rows)
    maps = np.tril(rng.random((130, 130)))
    maps /= maps.sum(1, keepdims=True)
    mask = rng.random(130) < 0.6
    spans, waad, fai = reduced(maps, mask, rows)
    assert spans[mask].sum() == pytest.approx(rhythm_loops.span_sums(maps[None], mask)[0])
    np.testing.assert_allclose(waad, [rhythm_loops.waad(maps, t) for t in range(130)])
    expected = [sum(maps[t, s] for t in rhythm_loops.fai_rows(mask, s)) for s in range(130)]
    np.testing.assert_allclose(fai, expected, atol=1e-12)


def marks_of(maps: np.ndarray, batch: Batch) -> rhythm.Rhythm:
    _, waad, fai = reduced(maps, batch.mask, 16)
    return rhythm.rhythm(batch, waad.astype(np.float32), fai.astype(np.float32), 0.4)


def test_uniform_attention():
    """``A[t, s] = 1 / (t + 1)``: spans are t / 2; later rows attend less, so the earliest tokens are anchors."""
    maps = np.tril(np.ones((60, 60))) / np.arange(1, 61)[:, None]
    spans, waad, _ = reduced(maps, np.ones(60, bool), 13)
    np.testing.assert_allclose(spans, np.arange(60) / 2)
    np.testing.assert_allclose(waad[20], (sum(range(11)) + 10 * 10) / 21)
    marks = marks_of(maps, batch_of([(5, 55)]))
    assert marks.fai[5] == pytest.approx(np.mean([1 / (t + 1) for t in range(15, 60)]))
    assert np.flatnonzero(~np.isnan(marks.fai)).tolist() == list(range(5, 50))
    assert np.flatnonzero(marks.anchors).tolist() == list(range(5, 5 + 18))  # floor(0.4 * 45)


def test_diagonal_attention_marks_nothing():
    marks = marks_of(np.eye(60), batch_of([(5, 55)]))
    assert not marks.waad[5:].any()
    assert not np.nan_to_num(marks.fai).any()
    for credit in ("local", "global", "coupled"):
        assert (rhythm.factors(marks, credit, 1.5) == 1).all()


def test_single_anchor_attention():
    """Every row attends to token 12 alone, or to itself before it."""
    maps = np.eye(60)
    maps[12:] = 0
    maps[12:, 12] = 1
    marks = marks_of(maps, batch_of([(5, 55)]))
    np.testing.assert_array_equal(marks.waad[5:], np.minimum(np.maximum(np.arange(5, 60) - 12, 0), 10))
    assert np.flatnonzero(marks.anchors).tolist() == [12]
    assert marks.fai[12] == 1
    assert np.flatnonzero(marks.local).tolist() == list(range(12, 22))
    assert np.flatnonzero(rhythm.factors(marks, "coupled", 1.5) != 1).tolist() == [12]


def test_layers_of_the_middle_third():
    known = {28: [9, 11, 13, 15, 18], 30: [10, 12, 15, 17, 20], 6: [2, 3, 4], 5: [1, 2, 3], 4: [1, 2], 3: [1, 2]}
    known |= {2: [0, 1], 1: [0]}
    for count, layers in known.items():
        assert rhythm.middle_layers(count) == layers
    assert all(rhythm.middle_layers(count) == rhythm_loops.middle_layers(count) for count in range(1, 200))


def test_head_sets():
    assert rhythm.head_sets(np.array([2.0, 1.0, 1.0, 5.0, 5.0, 3.0, 4.0])) == ([1, 2], [3, 4])
    assert rhythm.head_sets(np.array([2.0])) == ([0], [0])
    rng = np.random.default_rng(0)
    for count in range(1, 60):
        spans = rng.integers(0, 9, count).astype(float)
        assert rhythm.head_sets(spans) == rhythm_loops.head_sets(spans.tolist())


@settings(deadline=None, max_examples=30)
@given(st.lists(turns, min_size=1, max_size=3), st.integers(0, 2**32 - 1))
def test_attention_ends_with_the_context(episodes, seed):
    """The scores of a turn with a context of its own are those of an episode of that turn alone."""
    apart = batch_of(*episodes, rerendered=True)
    alone = batch_of(*([turn] for episode in episodes for turn in episode))
    assert np.array_equal(apart.mask, alone.mask)
    waad, fai_sums = np.random.default_rng(seed).random((2, apart.num_tokens)).astype(np.float32)
    found, expected = (rhythm.rhythm(batch, waad, fai_sums, 0.4) for batch in (apart, alone))
    for name in ("waad", "change", "fai"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
