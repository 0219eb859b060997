"""Estimators equal slow implementations of their formulas, and ignore masked values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rerendering import rerendered

from agentkit.config import AlgorithmConfig
from agentkit.errors import LearnerError
from agentkit.plugins import ADVANTAGE
from agentkit.trainers.algorithms.advantages import ESTIMATORS, estimate
from agentkit.trainers.algorithms.shaping import length_penalty
from agentkit.trainers.algorithms.signal import carries_signal, missing_signal
from agentkit.trainers.batch import flatten
from agentkit.types import Group, Trajectory, Turn

FEW = settings(max_examples=20, deadline=None)
MANY = settings(max_examples=100, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
DISCOUNTS = st.sampled_from([1.0, 0.9, 0.5])


def configured(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def values_for(batch, seed, critics=2):
    return np.random.default_rng(seed).normal(size=(critics, batch.num_tokens)).astype(np.float32)


def per_episode(groups, formula):
    """``formula(returns of the group, index)`` for every episode, repeated over its action tokens."""
    expected = []
    for group in groups:
        returns = [trajectory.reward for trajectory in group.members]
        for index, trajectory in enumerate(group.members):
            expected += [formula(returns, index)] * trajectory.num_action_tokens
    return np.array(expected)


def whitened(x):
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return np.array([(value - mean) / (variance + 1e-8) ** 0.5 for value in x])


def token_rewards(trajectory):
    rewards = []
    for turn in trajectory.turns:
        rewards += [0.0] * (len(turn.action_ids) - 1) + [turn.reward]
    return rewards


def replace_turn(turn, *, tokens, reward):
    versions = ((0, tokens),)
    ids, logprobs = turn.action_ids[:tokens], turn.action_logprobs[:tokens]
    return replace(turn, action_ids=ids, action_logprobs=logprobs, versions=versions, reward=reward)


def grpo(returns, index):
    if len(returns) == 1:
        return 0.0
    mean = sum(returns) / len(returns)
    std = (sum((r - mean) ** 2 for r in returns) / (len(returns) - 1)) ** 0.5
    return (returns[index] - mean) / (std + 1e-6)


def dr_grpo(returns, index):
    return returns[index] - sum(returns) / len(returns)


def rloo(returns, index):
    others = returns[:index] + returns[index + 1 :]
    return returns[index] - sum(others) / len(others) if others else 0.0


def slow_reinforce(groups, gamma):
    expected = []
    for group in groups:
        for trajectory in group.members:
            for k, turn in enumerate(trajectory.turns):
                to_go = sum(gamma ** (j - k) * trajectory.turns[j].reward for j in range(k, len(trajectory.turns)))
                expected += [to_go] * len(turn.action_ids)
    return np.array(expected)


def wander(seed):
    """Groups whose episodes walk among few states, and by member, the state in which each turn was taken.

    As in a rollout, the first prompt of an episode has the rules before its observation, the prompt after an answer
    without a valid format has a complaint before it (the state is the same), and a truncated episode ends with the
    prompt of one more state, in which no turn is taken.
    """
    rng = np.random.default_rng(seed)
    groups, states = [], {}

    def prompt(before, state):
        return np.array([*before, 100 + state], np.int32)

    for group_id in range(rng.integers(1, 4)):
        start = int(rng.integers(3))  # groups share states: their turns must not be compared all the same
        members = []
        for member in range(rng.integers(1, 5)):
            state, turns, visited, complaint = start, [], [], ""
            before = [1, 2, 3]
            for _ in range(rng.integers(1, 6)):
                invalid = bool(rng.random() < 0.25)
                action = rng.integers(0, 50, rng.integers(1, 4)).astype(np.int32)
                turns.append(
                    Turn(
                        prompt(before, state),
                        action,
                        -np.ones(len(action), np.float32),
                        ((0, len(action)),),
                        reward=float(rng.choice([0.0, 0.0, 1.0, -0.5])),
                        observation=f"{complaint}state {state}",
                        actions=() if invalid else ("go",),
                    )
                )
                visited.append(state)
                before, complaint = ([4, 5], "no valid format. ") if invalid else ([4], "")
                state = state if invalid else int(rng.integers(3))
            trajectory = Trajectory(group_id, member, "test", 0, 0, turns)
            if rng.random() < 0.5:
                trajectory.outcome, trajectory.final_ids = "truncated", prompt(before, state)
            members.append(trajectory)
            states[group_id, member] = visited
        groups.append(Group(group_id, 0, 0, members))
    return groups, states


def slow_gigpo(groups, states, gamma):
    """GRPO plus, turn by turn, GRPO's formula over all turns of the group that were taken in the same state."""
    expected = []
    for group in groups:
        returns = [trajectory.reward for trajectory in group.members]
        turns = [(i, k) for i, trajectory in enumerate(group.members) for k in range(len(trajectory.turns))]

        def to_go(turn, members=group.members):
            rewards = [later.reward for later in members[turn[0]].turns[turn[1] :]]
            return sum(gamma**j * reward for j, reward in enumerate(rewards))

        for i, k in turns:
            here = states[group.group_id, i][k]
            peers = [(j, n) for j, n in turns if states[group.group_id, j][n] == here]
            step = grpo([to_go(peer) for peer in peers], peers.index((i, k)))
            expected += [grpo(returns, i) + step] * len(group.members[i].turns[k].action_ids)
    return np.array(expected)


def plain_groups(rewards, *, success=False, valid=True):
    """Groups of one-turn episodes with these rewards, one list a group."""

    def member(group_id, index, reward):
        ids = np.array([1], np.int32)
        turn = Turn(ids, ids, np.zeros(1, np.float32), ((0, 1),), reward=reward, valid=valid, actions=("go",))
        return Trajectory(group_id, index, "test", 0, 0, [turn], success=success)

    return [[member(g, i, reward) for i, reward in enumerate(of)] for g, of in enumerate(rewards)]


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (plain_groups([[0, 0], [0, 1]]), None),
        (plain_groups([[0, 0], [0, 0]]), "all 4 episodes earned 0 and none succeeded: easier tasks, imitation"),
        (plain_groups([[1, 1], [1, 1]], success=True), "all 4 episodes earned 1 and succeeded: harder tasks"),
        (plain_groups([[-0.1, -0.1]], valid=False), "no answer was valid"),
        (plain_groups([[0, 0], [1, 1]]), "the members of each group earned the same"),
        (plain_groups([[-1, 0]]), "no episode earned more than 0, and raft learns from positive returns alone"),
    ],
)
def test_a_batch_without_signal_is_explained(groups, reason):
    advantage = "raft" if "raft" in (reason or "") else "grpo"
    found = missing_signal(groups, configured(advantage=advantage))
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(
    ("advantage", "rewards", "teaches"),
    [
        ("grpo", [[1, 1], [0, 0]], False),
        ("gigpo", [[1, 1], [0, 0]], False),
        ("reinforce_pp_baseline", [[1, 1], [0, 0]], False),
        ("reinforce", [[1, 1]], True),
        ("reinforce", [[0, 0]], False),
        ("reinforce_pp", [[1, 1], [0, 0]], True),
        ("reinforce_pp", [[1, 1], [1, 1]], False),
        ("raft", [[-1, 0], [0, 0]], False),
        ("raft", [[-1, 1]], True),
        ("chunk_returns", [[-1, -1]], True),
        ("chunk_returns", [[0, 0]], False),
        ("batch_mean", [[1, 1], [0, 0]], True),
        ("batch_mean", [[1, 1], [1, 1]], False),
        ("gae", [[1, 1]], True),
        ("gae", [[0, 0]], False),
        ("bilevel_gae", [[1, 1]], True),
        ("bilevel_gae", [[0, 0]], False),
    ],
)
def test_whether_a_batch_has_signal_depends_on_the_advantage(advantage, rewards, teaches):
    groups = plain_groups(rewards)
    assert (missing_signal(groups, configured(advantage=advantage)) is None) == teaches
    if advantage not in ("gae", "bilevel_gae"):
        batch = flatten([Group(g, 0, 0, members) for g, members in enumerate(groups)])
        advantages = estimate(batch, values_for(batch, 0, 0), configured(advantage=advantage)).advantages
        assert advantages.any() == teaches


def slow_token_returns(groups, gamma):
    expected = []
    for group in groups:
        for trajectory in group.members:
            rewards = token_rewards(trajectory)
            expected += [
                sum(gamma ** (j - t) * rewards[j] for j in range(t, len(rewards))) for t in range(len(rewards))
            ]
    return np.array(expected)


def slow_gae(groups, values, gamma, lam, critic_lam):
    """Advantages and returns over the compressed sequence of action tokens, by the explicit sums of deltas."""
    advantages, returns, start = [], [], 0
    mean = values.astype(np.float64).mean(axis=0)
    for group in groups:
        for trajectory in group.members:
            states, position = [], start
            for turn in trajectory.turns:
                position += len(turn.prompt_ids)
                states += [mean[position + offset - 1] for offset in range(len(turn.action_ids))]
                position += len(turn.action_ids)
            cut_off = trajectory.outcome == "truncated" and len(trajectory.final_ids) > 0
            end = position + (len(trajectory.final_ids) if cut_off else 0)
            after = mean[end - 1] if cut_off else 0.0
            rewards, following = token_rewards(trajectory), [*states[1:], after]
            deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, states, strict=True)]
            own_lam = max(0.0, 1 - 1 / (1.5 * len(deltas))) if lam == "length" else lam
            for t in range(len(deltas)):
                advantages.append(sum((gamma * own_lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))))
                target = sum((gamma * critic_lam) ** (j - t) * deltas[j] for j in range(t, len(deltas)))
                returns.append(target + states[t])
            start = end
    return np.array(advantages), np.array(returns)


def slow_chunk_returns(groups, gamma):
    expected = []
    for trajectory in (trajectory for group in groups for trajectory in group.members):
        lengths = [len(turn.action_ids) for turn in trajectory.turns if len(turn.action_ids)]
        for k, length in enumerate(lengths):
            expected += [gamma ** (len(lengths) - 1 - k) * trajectory.reward] * length
    return np.array(expected)


def slow_bilevel_gae(groups, values, gamma, gamma_high, lam):
    """Two sums of deltas: over the last tokens of turns, then over the tokens of each turn."""
    advantages, returns, start = [], [], 0
    mean = values.astype(np.float64).mean(axis=0)
    for trajectory in (trajectory for group in groups for trajectory in group.members):
        states, position = [], start  # of each turn, the values of its tokens' states
        for turn in trajectory.turns:
            position += len(turn.prompt_ids)
            states.append([mean[position + offset - 1] for offset in range(len(turn.action_ids))])
            position += len(turn.action_ids)
        cut_off = trajectory.outcome == "truncated" and len(trajectory.final_ids) > 0
        start = position + (len(trajectory.final_ids) if cut_off else 0)
        ends = [of_turn[-1] for of_turn in states] + [mean[start - 1] if cut_off else 0.0]
        rewards = [turn.reward for turn in trajectory.turns]
        high = [r + gamma_high * ends[k + 1] - ends[k] for k, r in enumerate(rewards)]
        for k, of_turn in enumerate(states):
            turn_advantage = sum((gamma_high * lam) ** (j - k) * high[j] for j in range(k, len(high)))
            following = [*of_turn[1:], 0.0]
            token_rewards = [0.0] * (len(of_turn) - 1) + [turn_advantage + ends[k]]
            deltas = [r + gamma * n - v for r, n, v in zip(token_rewards, following, of_turn, strict=True)]
            for t, value in enumerate(of_turn):
                advantages.append(sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, len(deltas))))
                returns.append(advantages[-1] + value)
    return np.array(advantages), np.array(returns)


@pytest.mark.parametrize(("name", "formula"), [("grpo", grpo), ("dr_grpo", dr_grpo), ("rloo", rloo)])
@FEW
@given(seed=SEEDS)
def test_group_baselines(make_groups, name, formula, seed):
    groups = make_groups(seed)
    batch = flatten(groups)
    result = estimate(batch, values_for(batch, seed, 0), configured(advantage=name))
    np.testing.assert_allclose(result.advantages[batch.mask], per_episode(groups, formula), rtol=1e-4, atol=1e-5)
    expected_returns = per_episode(groups, lambda returns, index: returns[index])
    np.testing.assert_allclose(result.returns[batch.mask], expected_returns, rtol=1e-5, atol=1e-6)


@FEW
@given(seed=SEEDS, gamma=DISCOUNTS)
def test_reinforce_discounts_by_turn(make_groups, seed, gamma):
    groups = make_groups(seed)
    batch = flatten(groups)
    result = estimate(batch, values_for(batch, seed, 0), configured(advantage="reinforce", gamma=gamma))
    expected = slow_reinforce(groups, gamma)
    np.testing.assert_allclose(result.advantages[batch.mask], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.returns[batch.mask], expected, rtol=1e-5, atol=1e-6)


@FEW
@given(seed=SEEDS, gamma=DISCOUNTS)
def test_chunk_returns_discount_the_whole_return_by_chunk(make_groups, seed, gamma):
    groups = make_groups(seed)
    for trajectory in groups[0].members[:1]:  # turns without a token are no chunks
        trajectory.turns[-1:] = [replace_turn(trajectory.turns[-1], tokens=0, reward=0.0), trajectory.turns[-1]]
    batch = flatten(groups)
    result = estimate(batch, values_for(batch, seed, 0), configured(advantage="chunk_returns", gamma=gamma))
    expected = slow_chunk_returns(groups, gamma)
    np.testing.assert_allclose(result.advantages[batch.mask], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.returns[batch.mask], expected, rtol=1e-5, atol=1e-6)


@FEW
@given(seed=SEEDS)
def test_raft_and_the_mean_of_the_batch(make_groups, seed):
    groups = make_groups(seed)
    batch = flatten(groups)
    episodes = [trajectory for group in groups for trajectory in group.members]
    mean = sum(episode.reward for episode in episodes) / len(episodes)
    for name, formula in (("raft", lambda r: max(r, 0.0)), ("batch_mean", lambda r: r - mean)):
        advantages = estimate(batch, values_for(batch, seed, 0), configured(advantage=name)).advantages
        expected = np.concatenate([[formula(e.reward)] * e.num_action_tokens for e in episodes])
        np.testing.assert_allclose(advantages[batch.mask], expected, rtol=1e-5, atol=1e-6)


@FEW
@given(
    seed=SEEDS,
    longest=st.integers(1, 20),
    buffer=st.integers(1, 20),
    penalty=st.sampled_from([1.0, 0.5]),
    data=st.data(),
)
def test_overlong_episodes_are_penalised(make_groups, seed, longest, buffer, penalty, data):
    """DAPO's three cases; estimators see the penalty as a part of the last turn's reward."""
    buffer = min(buffer, longest)
    shaped = {"overlong_max": longest, "overlong_buffer": buffer, "overlong_penalty": penalty}
    name = data.draw(st.sampled_from(sorted(ESTIMATORS)))
    config, plain = configured(advantage=name, gamma=0.9, **shaped), configured(advantage=name, gamma=0.9)
    groups = make_groups(seed)
    batch = flatten(groups)
    actual = estimate(batch, values_for(batch, seed), config)
    for trajectory in (trajectory for group in groups for trajectory in group.members):
        n = trajectory.num_action_tokens
        if n <= longest - buffer:
            expected = 0.0
        elif n <= longest:
            expected = (longest - buffer - n) / buffer
        else:
            expected = -1.0
        assert length_penalty([n], config)[0] == pytest.approx(penalty * expected)
        trajectory.turns[-1].reward += penalty * expected
    penalised = flatten(groups)
    for one, other in zip(actual, estimate(penalised, values_for(batch, seed), plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@MANY
@given(seed=SEEDS, gamma=DISCOUNTS)
def test_gigpo_compares_turns_taken_in_the_same_state(seed, gamma):
    groups, states = wander(seed)
    batch = flatten(groups)
    result = estimate(batch, values_for(batch, seed, 0), configured(advantage="gigpo", gamma=gamma))
    expected = slow_gigpo(groups, states, gamma)
    np.testing.assert_allclose(result.advantages[batch.mask], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.returns[batch.mask], slow_reinforce(groups, gamma), rtol=1e-5, atol=1e-6)


def test_gigpo_by_hand():
    """Both members start in s; one returns to it at once and is truncated there, the other earns 1."""

    def turn(observation, reward, prompt):
        action = np.array([9], np.int32)
        prompt_ids = np.array(prompt, np.int32)
        return Turn(
            prompt_ids,
            action,
            np.zeros(1, np.float32),
            ((0, 1),),
            reward=reward,
            observation=observation,
            actions=("go",),
        )

    back = Trajectory(0, 0, "test", 0, 0, [turn("s", 0.0, [1, 2, 7]), turn("s", 0.0, [2, 7])])
    back.outcome, back.final_ids = "truncated", np.array([2, 7], np.int32)
    good = Trajectory(0, 1, "test", 0, 0, [turn("s", 1.0, [1, 2, 7])])
    batch = flatten([Group(0, 0, 0, [back, good])])
    advantages = estimate(batch, values_for(batch, 0, 0), configured(advantage="gigpo")).advantages[batch.mask]
    # Returns 0 and 1: mean 1/2, std 1/sqrt(2). In s, three turns with returns 0, 0 and 1: mean 1/3, std 1/sqrt(3).
    episode, step = 0.5**0.5, 1 / 3**0.5
    np.testing.assert_allclose(advantages, [-episode - step, -episode - step, episode + 2 * step], rtol=1e-5)


BY_GROUP = ["reinforce", "chunk_returns", "raft", "grpo", "gigpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", BY_GROUP)
@MANY
@given(seed=SEEDS, gamma=DISCOUNTS, scale=st.sampled_from([0.0, 1.0, -1.0]), longest=st.sampled_from([None, 8]))
def test_a_group_carries_signal_exactly_if_one_of_its_advantages_is_not_zero(name, seed, gamma, scale, longest):
    groups, _ = wander(seed)
    config = configured(advantage=name, gamma=gamma, overlong_max=longest, overlong_buffer=4)
    for group in groups:
        for turn in (turn for trajectory in group.members for turn in trajectory.turns):
            turn.reward *= scale
        batch = flatten([group])
        advantages = estimate(batch, values_for(batch, seed, 0), config).advantages
        assert carries_signal(group.members, config) == bool(np.abs(advantages).max() > 1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - BY_GROUP))
def test_batch_normalised_advantages_always_carry_signal(name):
    (group, *_), _ = wander(0)
    for turn in (turn for trajectory in group.members for turn in trajectory.turns):
        turn.reward = 0.0
    assert carries_signal(group.members, configured(advantage=name))


@FEW
@given(seed=SEEDS, gamma=DISCOUNTS)
def test_reinforce_pp_discounts_by_token_and_whitens(make_groups, seed, gamma):
    groups = make_groups(seed)
    batch = flatten(groups)
    result = estimate(batch, values_for(batch, seed, 0), configured(advantage="reinforce_pp", gamma=gamma))
    expected = slow_token_returns(groups, gamma)
    np.testing.assert_allclose(result.returns[batch.mask], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.advantages[batch.mask], whitened(expected), rtol=1e-3, atol=1e-3)


@FEW
@given(seed=SEEDS)
def test_reinforce_pp_baseline(make_groups, seed):
    groups = make_groups(seed)
    batch = flatten(groups)
    config = configured(advantage="reinforce_pp_baseline")
    result = estimate(batch, values_for(batch, seed, 0), config)
    expected = whitened(per_episode(groups, dr_grpo))
    np.testing.assert_allclose(result.advantages[batch.mask], expected, rtol=1e-3, atol=1e-3)


@FEW
@given(
    seed=SEEDS,
    gamma=DISCOUNTS,
    lam=st.sampled_from([1.0, 0.95, 0.0, "length"]),
    critic_lam=st.sampled_from([1.0, 0.9, 0.0]),
    critics=st.integers(1, 3),
)
def test_gae_skips_observations_and_bootstraps(make_groups, seed, gamma, lam, critic_lam, critics):
    groups = make_groups(seed)
    batch = flatten(groups)
    values = values_for(batch, seed, critics)
    result = estimate(batch, values, configured(advantage="gae", gamma=gamma, lam=lam, critic_lam=critic_lam))
    advantages, returns = slow_gae(groups, values, gamma, lam, critic_lam)
    np.testing.assert_allclose(result.returns[batch.mask], returns, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.advantages[batch.mask], whitened(advantages), rtol=1e-3, atol=1e-3)


@FEW
@given(
    seed=SEEDS,
    gamma=DISCOUNTS,
    gamma_high=DISCOUNTS,
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    critics=st.integers(1, 3),
)
def test_bilevel_gae(make_groups, seed, gamma, gamma_high, lam, critics):
    groups = make_groups(seed)
    batch = flatten(groups)
    values = values_for(batch, seed, critics)
    config = configured(advantage="bilevel_gae", gamma=gamma, gamma_high=gamma_high, lam=lam)
    result = estimate(batch, values, config)
    advantages, returns = slow_bilevel_gae(groups, values, gamma, gamma_high, lam)
    np.testing.assert_allclose(result.returns[batch.mask], returns, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(result.advantages[batch.mask], whitened(advantages), rtol=1e-3, atol=1e-3)


def test_every_estimator_is_listed():
    assert set(ESTIMATORS) == set(ADVANTAGE.built_in)
    assert set(BY_GROUP) == {name for name, traits in ADVANTAGE.built_in.items() if traits.signal != "always"}


@pytest.mark.parametrize("name", ESTIMATORS)
@FEW
@given(seed=SEEDS, garbage=st.sampled_from([np.nan, np.inf, -1e30]))
def test_garbage_where_masked_changes_nothing(make_groups, name, seed, garbage):
    batch = flatten(make_groups(seed))
    shaped = {"overlong_max": 6, "overlong_buffer": 4}
    values, config = values_for(batch, seed), configured(advantage=name, gamma=0.9, lam=0.95, **shaped)
    clean = estimate(batch, values, config)

    used = np.zeros(batch.num_tokens, bool)
    used[np.flatnonzero(batch.mask) - 1] = True  # the states in which an action token was chosen
    used[batch.cu_seqlens[1:][batch.bootstraps] - 1] = True  # the states after final_ids
    dirty_batch = replace(
        batch,
        rewards=np.where(batch.mask, batch.rewards, garbage).astype(np.float32),
        logprobs=np.where(batch.mask, batch.logprobs, garbage).astype(np.float32),
        tokens=np.where(batch.mask, batch.tokens, 49).astype(np.int32),
    )
    dirty = estimate(dirty_batch, np.where(used, values, garbage).astype(np.float32), config)
    for expected, actual in zip(clean, dirty, strict=True):
        assert np.array_equal(expected, actual)
        assert actual.dtype == np.float32
        assert not actual[~batch.mask].any()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@FEW
@given(seed=SEEDS, reward=st.floats(-5, 5, width=32))
def test_equal_returns_give_exactly_zero(make_groups, name, seed, reward):
    groups = make_groups(seed)
    for group in groups:
        for trajectory in group.members:
            for turn in trajectory.turns:
                turn.reward = 0.0
            trajectory.turns[-1].reward = reward
    batch = flatten(groups)
    assert not estimate(batch, values_for(batch, seed, 0), configured(advantage=name)).advantages.any()


def test_gae_by_hand():
    """Two turns; V(state of the second turn) is read at the end of its observation; the final state has value 0."""
    turns = [
        Turn(np.array([1], np.int32), np.array([2], np.int32), np.zeros(1, np.float32), ((0, 1),), reward=1.0),
        Turn(np.array([3, 4], np.int32), np.array([5], np.int32), np.zeros(1, np.float32), ((0, 1),), reward=2.0),
    ]
    batch = flatten([Group(0, 0, 0, [Trajectory(0, 0, "test", 0, 0, turns)])])
    values = np.array([[10.0, 99.0, 99.0, 20.0, 99.0]], np.float32)
    result = estimate(batch, values, configured(advantage="gae", gamma=0.5, lam=0.5, critic_lam=0.5))
    second = 2.0 - 20.0
    first = 1.0 + 0.5 * 20.0 - 10.0 + 0.25 * second
    assert result.returns[batch.mask].tolist() == [first + 10.0, second + 20.0]


@pytest.mark.parametrize("name", [name for name, traits in ADVANTAGE.built_in.items() if traits.needs_critic])
def test_gae_without_critic_is_an_error_with_the_remedy(make_groups, name):
    batch = flatten(make_groups(0))
    with pytest.raises(LearnerError, match="add a critic section"):
        estimate(batch, values_for(batch, 0, 0), configured(advantage=name))


@FEW
@given(seed=SEEDS)
def test_advantages_are_clipped(make_groups, seed):
    batch = flatten(make_groups(seed))
    config = configured(advantage="reinforce")
    free = estimate(batch, values_for(batch, seed, 0), config).advantages
    clipped = estimate(batch, values_for(batch, seed, 0), config.model_copy(update={"advantage_clip": 0.4})).advantages
    np.testing.assert_array_equal(clipped, np.clip(free, -0.4, 0.4))


@pytest.mark.parametrize("name", ESTIMATORS)
@FEW
@given(seed=SEEDS)
def test_order_of_groups_does_not_matter(make_groups, name, seed):
    groups = make_groups(seed)
    batch, backwards = flatten(groups), flatten(groups[::-1])
    config = configured(advantage=name)

    def by_episode(batch):
        values = np.stack([batch.tokens / 7, batch.tokens / 5]).astype(np.float32)
        columns = np.stack(estimate(batch, values, config), axis=1)
        parts = np.split(columns, batch.cu_seqlens[1:-1])
        keys = zip(batch.group_ids.tolist(), batch.members.tolist(), strict=True)
        return dict(zip(keys, parts, strict=True))

    expected, actual = by_episode(batch), by_episode(backwards)
    for key, part in expected.items():
        np.testing.assert_allclose(actual[key], part, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
@FEW
@given(seed=SEEDS)
def test_contexts_do_not_matter(name, seed):
    """An episode whose history is rendered again for each turn has the same advantages as an appended one."""
    groups, _ = wander(seed)
    appended, apart = flatten(groups), flatten(rerendered(groups))
    assert apart.num_sequences == appended.num_sequences
    shaped = {"overlong_max": 6, "overlong_buffer": 4}
    config = configured(advantage=name, gamma=0.9, lam="length", **shaped)
    values = values_for(appended, seed)
    moved = np.full((2, apart.num_tokens), np.nan, np.float32)
    moved[:, np.flatnonzero(apart.mask) - 1] = values[:, np.flatnonzero(appended.mask) - 1]
    there, here = (batch.cu_seqlens[1:][batch.bootstraps] - 1 for batch in (apart, appended))
    moved[:, there] = values[:, here]
    for expected, actual in zip(estimate(appended, values, config), estimate(apart, moved, config), strict=True):
        np.testing.assert_allclose(actual[apart.mask], expected[appended.mask], rtol=1e-6, atol=1e-7)
        assert not actual[~apart.mask].any()
