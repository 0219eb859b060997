"""A flat batch holds exactly the token records of its episodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.errors import LearnerError
from agentkit.trainers.batch import flatten
from agentkit.types import Group, Trajectory, Turn

FEW = settings(max_examples=20, deadline=None)


def turn(prompt: list[int], action: list[int], reward: float = 0.0) -> Turn:
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        action_ids=np.array(action, np.int32),
        action_logprobs=-np.arange(1, len(action) + 1, dtype=np.float32),
        versions=((7, len(action)),),
        reward=reward,
    )


def episode(*turns: Turn, **kwargs) -> Trajectory:
    return Trajectory(3, 1, "test", 0, 0, list(turns), **kwargs)


def test_every_column_of_a_small_batch():
    first = episode(turn([1, 2], [3, 4], 0.5), turn([5], [6], -1.0), final_ids=np.array([9], np.int32))
    first.outcome, first.reason = "truncated", "max_turns"
    second = episode(turn([8], [7, 7]), final_ids=np.array([9], np.int32))
    batch = flatten([Group(3, 0, 0, [first, second])])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 8, 7, 7]  # a terminated episode has no final_ids
    assert batch.cu_seqlens.tolist() == [0, 7, 10]
    assert batch.mask.tolist() == [False, False, True, True, False, True, False, False, True, True]
    assert batch.logprobs.tolist() == [0, 0, -1, -2, 0, -1, 0, 0, -1, -2]
    assert batch.rewards.tolist() == [0, 0, 0, 0.5, 0, -1, 0, 0, 0, 0]
    assert batch.turn_ids.tolist() == [0, 0, 0, 0, 1, 1, 2, 0, 0, 0]
    assert batch.versions.tolist() == [-1, -1, 7, 7, -1, 7, -1, -1, 7, 7]
    assert batch.states.tolist() == [0, 0, 0, 0, 0, 0, -1, 0, 0, 0]
    assert batch.group_ids.tolist() == [3, 3]
    assert batch.members.tolist() == [1, 1]
    assert batch.bootstraps.tolist() == [True, False]
    assert batch.lengths.tolist() == [7, 3]
    assert batch.action_counts.tolist() == [3, 2]
    dtypes = [column.dtype for column in (batch.tokens, batch.logprobs, batch.rewards, batch.turn_ids, batch.versions)]
    assert dtypes == [np.int32, np.float32, np.float32, np.int32, np.int32]


def test_final_observations_can_be_left_out():
    silent = episode(outcome="truncated", final_ids=np.array([9, 9], np.int32))
    cut = episode(turn([1, 2], [3], 0.5), outcome="truncated", final_ids=np.array([9], np.int32))
    batch = flatten([Group(3, 0, 0, [silent, cut])], final_states=False)
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 0, 3]
    assert batch.cu_contexts.tolist() == [0, 3]
    assert batch.bootstraps.tolist() == [False, False]
    assert batch.turn_ids.tolist() == [0, 0, 0]
    assert batch.action_counts.tolist() == [0, 1]
    assert flatten([Group(3, 0, 0, [silent, cut])]).bootstraps.tolist() == [True, True]


def test_a_state_is_the_last_observation_of_the_environment():
    """An answer without a valid format does not change the environment, so the reply is not a new state."""
    shown = ["a", "b", "No valid format.\nb", "No valid format.\nb", "a", "c"]
    turns = [turn([1], [2]) for _ in shown]
    for one, text, moved in zip(turns, shown, (True, False, False, True, True, True), strict=True):
        one.observation, one.actions = text, ("go",) if moved else ()
    trajectory = episode(*turns, outcome="truncated", final_ids=np.array([1], np.int32))
    assert trajectory.states == ["a", "b", "b", "b", "a", "c"]
    other = turn([1], [2])
    other.observation = "c"
    batch = flatten([Group(3, 0, 0, [trajectory]), Group(4, 0, 0, [episode(other)])])
    assert batch.states.tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 2, 2, -1, 2, 2]


@FEW
@given(st.integers(0, 2**32 - 1))
def test_sequences_are_the_concatenated_turns(make_groups, seed):
    groups = make_groups(seed)
    batch = flatten(groups)
    episodes = [trajectory for group in groups for trajectory in group.members]
    for index, trajectory in enumerate(episodes):
        part = slice(batch.cu_seqlens[index], batch.cu_seqlens[index + 1])
        pieces = [ids for t in trajectory.turns for ids in (t.prompt_ids, t.action_ids)] + [trajectory.final_ids]
        assert batch.tokens[part].tolist() == np.concatenate(pieces).tolist()
        actions = np.concatenate([t.action_ids for t in trajectory.turns])
        assert batch.tokens[part][batch.mask[part]].tolist() == actions.tolist()
        assert batch.rewards[part].sum() == pytest.approx(trajectory.reward, abs=1e-6)
    assert not batch.rewards[~batch.mask].any()


def test_reward_of_a_turn_without_tokens_goes_to_the_action_before():
    batch = flatten([Group(0, 0, 0, [episode(turn([1], [2], 1.0), turn([3], [], 0.25))])])
    assert batch.rewards.tolist() == [0, 1.25, 0]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "without episodes"),
        ([Group(0, 0, 0, [])], "without episodes"),
        ([Group(0, 0, 0, [episode(turn([1], [2]), outcome="voided", reason="crash")])], "voided"),
        ([Group(0, 0, 0, [episode(turn([], [2]))])], "begins with an action"),
        ([Group(0, 0, 0, [episode(turn([1], [2], float("nan")))])], "not finite"),
        ([Group(0, 0, 0, [episode(turn([1], [], 1.0))])], "no action token"),
    ],
)
def test_untrainable_batches_are_refused(groups, message):
    with pytest.raises(LearnerError, match=message):
        flatten(groups)


def test_records_of_unequal_lengths_are_refused():
    broken = turn([1], [2, 3])
    broken.versions = ((0, 1),)
    with pytest.raises(LearnerError, match="turn 0: 2 action ids, 2 log-probabilities and versions for 1"):
        flatten([Group(0, 0, 0, [episode(broken)])])
