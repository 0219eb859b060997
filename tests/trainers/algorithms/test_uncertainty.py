"""Shares of several critics and their masks, against definitions in plain Python."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.config import AlgorithmConfig
from agentkit.trainers.algorithms.advantages import estimate, policy_lambda
from agentkit.trainers.algorithms.quantiles import highest, lowest
from agentkit.trainers.algorithms.uncertainty import deal, disagreement, masks
from agentkit.trainers.batch import flatten
from agentkit.types import Group, Trajectory, Turn

FEW = settings(max_examples=20, deadline=None)
MANY = settings(max_examples=200, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
SHARES = st.sampled_from([0.0, 0.05, 0.2, 0.29, 0.5, 0.99, 1.0])
TIED = st.lists(st.integers(0, 5).map(float), max_size=30)
DISTINCT = st.lists(st.floats(-1e6, 1e6), unique=True, max_size=30)


def left_out(scores, share):
    """Positions of the lowest share: those with at most ``c`` scores that are not higher, themselves included."""
    count = math.floor(share * len(scores) + 1e-9)
    return [i for i, score in enumerate(scores) if sum(other <= score for other in scores) <= count]


@MANY
@given(scores=TIED | DISTINCT, share=SHARES)
def test_a_share_is_what_the_definition_says_in_any_order(scores, share):
    array = np.array(scores)
    expected = left_out(scores, share)
    assert np.flatnonzero(lowest(array, share)).tolist() == expected
    assert np.flatnonzero(highest(-array, share)).tolist() == expected
    order = np.random.default_rng(len(scores)).permutation(len(scores))
    np.testing.assert_array_equal(lowest(array[order], share), lowest(array, share)[order])
    if len(set(scores)) == len(scores):
        assert len(expected) == math.floor(share * len(scores) + 1e-9)


def test_equal_scores_across_the_boundary_are_all_left_out():
    scores = np.array([1.0, 0.0, 1.0, 2.0, 1.0])
    assert lowest(scores, 0.4).tolist() == [False, True, False, False, False]  # two of five, but three are 1
    assert highest(scores, 0.4).tolist() == [False, False, False, True, False]
    assert lowest(scores, 0.2).tolist() == [False, True, False, False, False]
    assert not lowest(np.ones(5), 0.4).any()


@FEW
@given(seed=SEEDS, critics=st.integers(1, 4))
def test_disagreement_is_the_population_standard_deviation(seed, critics):
    values = np.random.default_rng(seed).normal(size=(critics, 7)).astype(np.float32)
    expected = [statistics.pstdev(map(float, column)) for column in values.T]
    np.testing.assert_allclose(disagreement(values), expected, rtol=1e-6, atol=1e-9)
    same = np.repeat(values[:1], 3, axis=0)
    assert not disagreement(same).any()
    kept = masks(disagreement(same), 0.99, 0.99)
    assert kept[0].all()
    assert kept[1].all()


def slow_deal(groups, critics):
    """By group and member: sort the members, deal them out like cards."""
    dealt = {}
    for group, members in groups.items():
        for place, member in enumerate(sorted(members)):
            dealt[group, member] = place % critics
    return dealt


@MANY
@given(
    groups=st.dictionaries(st.integers(-3, 40), st.sets(st.integers(0, 12), min_size=1), min_size=1, max_size=5),
    critics=st.integers(1, 4),
    seed=SEEDS,
)
def test_members_are_dealt_out_in_turn_whoever_is_missing(groups, critics, seed):
    pairs = [(group, member) for group, members in groups.items() for member in members]
    pairs += pairs[:1]  # an episode of two training sequences
    pairs = [pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))]
    dealt = deal(*np.array(pairs, np.int64).T, critics)
    expected = slow_deal(groups, critics)
    assert dealt.tolist() == [expected[pair] for pair in pairs]
    for group, members in groups.items():  # every critic sees every prompt
        seen = {critic for (g, _), critic in zip(pairs, dealt.tolist(), strict=True) if g == group}
        assert seen == set(range(min(critics, len(members))))


def slow_masks(batch, values, config):
    """Weights of the action tokens: the disagreement is that of the state before each token."""
    scores = [statistics.pstdev(map(float, values[:, t - 1])) for t in np.flatnonzero(batch.mask)]
    quiet, loud = left_out(scores, config.advantage_mask), left_out([-s for s in scores], config.entropy_mask)
    return [[float(i not in taken) for i in range(len(scores))] for taken in (quiet, loud)]


@MANY
@given(
    seed=SEEDS,
    name=st.sampled_from(["gae", "bilevel_gae"]),
    k=st.sampled_from([0.0, 0.2, 0.6]),
    h=st.sampled_from([0.0, 0.2, 0.7]),
    tied=st.booleans(),
)
def test_disagreement_masks_the_action_tokens_of_the_whole_batch(make_groups, seed, name, k, h, tied):
    batch = flatten(make_groups(seed))
    config = AlgorithmConfig(advantage=name, advantage_mask=k, entropy_mask=h)
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 3, (2, batch.num_tokens)) if tied else rng.normal(size=(2, batch.num_tokens))
    values = values.astype(np.float32)
    result = estimate(batch, values, config)
    for weight, expected in zip(result[2:], slow_masks(batch, values, config), strict=True):
        np.testing.assert_array_equal(weight[batch.mask], expected)
        assert not weight[~batch.mask].any()


@FEW
@given(seed=SEEDS, name=st.sampled_from(["gae", "bilevel_gae"]), critics=st.sampled_from([2, 4]))
def test_without_masks_it_is_ppo_with_the_mean_value_and_one_critic_is_ppo(make_groups, seed, name, critics):
    batch = flatten(make_groups(seed))
    eighths = np.random.default_rng(seed).integers(-20, 20, (critics, batch.num_tokens)) / 8
    values = eighths.astype(np.float32)  # their mean is exact
    plain = AlgorithmConfig(advantage=name, gamma=0.9, lam=0.9, advantage_mask=0.0, entropy_mask=0.0)
    masked = plain.model_copy(update={"advantage_mask": 0.3, "entropy_mask": 0.4})
    expected = estimate(batch, values.mean(axis=0, keepdims=True), plain)
    for result in (estimate(batch, values, plain), estimate(batch, values.mean(axis=0, keepdims=True), masked)):
        assert all(map(np.array_equal, result, expected))
    several = estimate(batch, values, masked)
    assert all(map(np.array_equal, several[:2], expected[:2]))  # whitening and targets include masked tokens


@pytest.mark.parametrize(("count", "expected"), [(1, 1 / 3), (2, 2 / 3), (10, 1 - 1 / 15)])
def test_lambda_by_length(count, expected):
    ids = np.arange(1, 1 + count, dtype=np.int32)
    turn = Turn(np.array([1], np.int32), ids, np.zeros(count, np.float32), ((0, count),))
    batch = flatten([Group(0, 0, 0, [Trajectory(0, 0, "test", 0, 0, [turn])])])
    assert policy_lambda(batch, AlgorithmConfig(lam="length")) == pytest.approx([expected])
    assert policy_lambda(batch, AlgorithmConfig(lam=1)).tolist() == [1.0]
