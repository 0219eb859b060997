"""Flat batches of complete groups: the only form in which episodes reach the learner.

Invariant: ``tokens`` of a sequence is the concatenation of its turns' ``prompt_ids`` and ``action_ids`` (and then of
``final_ids``), unpadded and in order, and ``mask`` is True for the action ids alone. Everything else per token is
meaningful only where ``mask`` is True; values elsewhere must have no effect.

A sequence is an episode, for advantages, losses and denominators. The model reads it in one or several contexts: one,
or one for each turn if the history was rendered again. A context never depends on another one's tokens.

This module imports only numpy, because a batch is sent to the learner's process or ranks unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentkit.errors import LearnerError
from agentkit.types import FloatArray, Group, IntArray, Trajectory

_NO_IDS: IntArray = np.empty(0, np.int32)


@dataclass(frozen=True)
class Batch:
    """``S`` episodes with ``N`` tokens in all; sequence ``i`` is the slice ``cu_seqlens[i]:cu_seqlens[i + 1]``."""

    tokens: IntArray
    """int32 ``[N]``."""
    cu_seqlens: NDArray[np.int64]
    """Cumulative lengths, int64 ``[S + 1]``, from 0 to ``N``."""
    cu_contexts: NDArray[np.int64]
    """Cumulative lengths of the contexts, int64 ``[C + 1]``, from 0 to ``N``. Each start of a sequence that has tokens
    is a start of a context."""
    mask: NDArray[np.bool_]
    """bool ``[N]``: True where the policy chose the token."""
    logprobs: FloatArray
    """float32 ``[N]``: of the behaviour policy, as the engine recorded them; 0 where ``mask`` is False."""
    rewards: FloatArray
    """float32 ``[N]``: a turn's reward is at its last action token."""
    turn_ids: IntArray
    """int32 ``[N]``: index of the turn within its episode; ``final_ids`` count as one more turn."""
    versions: IntArray
    """int32 ``[N]``: the policy version that produced the token; -1 where ``mask`` is False."""
    states: IntArray
    """int32 ``[N]``: number of the state in which the token's turn was taken. Two turns have the same number exactly
    if the environment had said the same text (``Trajectory.states``); -1 for ``final_ids``, where no turn is taken."""
    group_ids: NDArray[np.int64]
    """int64 ``[S]``."""
    members: NDArray[np.int64]
    """int64 ``[S]``: index of the episode within its group."""
    bootstraps: NDArray[np.bool_]
    """bool ``[S]``: the episode ends with ``final_ids``, because it was truncated before an answer; a critic's value
    there replaces the rest."""

    @property
    def num_sequences(self) -> int:
        return len(self.group_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, int64 ``[S]``."""
        return np.diff(self.cu_seqlens)

    @cached_property
    def sequence_ids(self) -> NDArray[np.int64]:
        """Sequence of each token, int64 ``[N]``."""
        return np.repeat(np.arange(self.num_sequences), self.lengths)

    @property
    def num_contexts(self) -> int:
        return len(self.cu_contexts) - 1

    @cached_property
    def context_lengths(self) -> NDArray[np.int64]:
        """Tokens of each context, int64 ``[C]``; at least 1."""
        return np.diff(self.cu_contexts)

    @cached_property
    def context_ids(self) -> NDArray[np.int64]:
        """Context of each token, int64 ``[N]``."""
        return np.repeat(np.arange(self.num_contexts), self.context_lengths)

    @cached_property
    def context_sequences(self) -> NDArray[np.int64]:
        """Sequence of each context, int64 ``[C]``."""
        return self.sequence_ids[self.cu_contexts[:-1]]

    @cached_property
    def context_action_counts(self) -> NDArray[np.int64]:
        """Action tokens of each context, int64 ``[C]``."""
        return np.bincount(self.context_ids, weights=self.mask, minlength=self.num_contexts).astype(np.int64)

    @cached_property
    def action_counts(self) -> NDArray[np.int64]:
        """Action tokens of each sequence, int64 ``[S]``."""
        return np.bincount(self.sequence_ids, weights=self.mask, minlength=self.num_sequences).astype(np.int64)


def flatten(groups: Sequence[Group], *, final_states: bool = True) -> Batch:
    """Concatenate the members of the groups in the given order.

    Args:
        groups: complete groups.
        final_states: keep the ``final_ids`` of truncated episodes, which only critics read. Without them, the policy's
            passes do not compute them.

    Raises ``LearnerError`` for input that cannot be trained on: no episodes, a voided episode, a context that starts
    with an action token (it has no state), records of unequal lengths, a reward that is not finite, or a reward without
    an action token.
    """
    episodes = [trajectory for group in groups for trajectory in group.members]
    if not episodes:
        raise LearnerError("a batch without episodes: pass at least one group that has members")
    numbers: dict[str, int] = {}
    finals = [_final_ids(trajectory) if final_states else _NO_IDS for trajectory in episodes]
    parts = [_columns(trajectory, final, numbers) for trajectory, final in zip(episodes, finals, strict=True)]
    lengths = [len(part[0]) for part in parts]
    contexts = [
        length
        for trajectory, final in zip(episodes, finals, strict=True)
        for length in _context_lengths(trajectory, final)
    ]
    tokens, mask, logprobs, rewards, turn_ids, versions, states = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    return Batch(
        tokens=tokens,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        cu_contexts=np.concatenate([[0], np.cumsum(contexts)]).astype(np.int64),
        mask=mask,
        logprobs=logprobs,
        rewards=rewards,
        turn_ids=turn_ids,
        versions=versions,
        states=states,
        group_ids=np.array([trajectory.group_id for trajectory in episodes], np.int64),
        members=np.array([trajectory.member for trajectory in episodes], np.int64),
        bootstraps=np.array([len(final) > 0 for final in finals], np.bool_),
    )


def per_episode(batch: Batch, columns: Mapping[str, FloatArray]) -> list[dict[str, FloatArray]]:
    """Divide columns with a value for each action token of a batch, ``[action tokens]``, among its episodes."""
    ends = np.cumsum(batch.action_counts)[:-1]
    divided = {name: np.split(column, ends) for name, column in columns.items()}
    return [{name: parts[index] for name, parts in divided.items()} for index in range(batch.num_sequences)]


def _final_ids(trajectory: Trajectory) -> IntArray:
    """Return the ids after the last turn that belong to the sequence."""
    return trajectory.final_ids if trajectory.outcome == "truncated" else _NO_IDS


def _context_lengths(trajectory: Trajectory, final: IntArray) -> list[int]:
    lengths = [len(turn.prompt_ids) + len(turn.action_ids) for turn in trajectory.turns]
    lengths.append(len(final))
    if not trajectory.rerendered:
        lengths = [sum(lengths)]
    return [length for length in lengths if length]


def _columns(trajectory: Trajectory, final: IntArray, numbers: dict[str, int]) -> tuple[np.ndarray, ...]:
    """Return the per-token columns of one episode: tokens, mask, logprobs, rewards, turn ids, versions, states.

    ``final``: the ids after the last turn. ``numbers`` maps the states seen so far to their numbers; new states are
    added.
    """
    where = f"episode {trajectory.group_id}/{trajectory.member}"
    if trajectory.outcome == "voided":
        raise LearnerError(f"{where} is voided ({trajectory.reason}): leave it out of the batch")
    pieces: list[tuple[IntArray, bool, int]] = []
    for index, turn in enumerate(trajectory.turns):
        _check_turn(turn.action_ids, turn.action_logprobs, turn.versions, f"{where}, turn {index}")
        pieces += [(turn.prompt_ids, False, index), (turn.action_ids, True, index)]
    pieces.append((final, False, len(trajectory.turns)))

    sizes = [len(ids) for ids, _, _ in pieces]
    tokens = np.concatenate([ids for ids, _, _ in pieces] or [np.empty(0, np.int32)]).astype(np.int32)
    mask = np.repeat(np.array([is_action for _, is_action, _ in pieces], np.bool_), sizes)
    turn_ids = np.repeat(np.array([index for _, _, index in pieces], np.int32), sizes)
    starts = np.cumsum([0, *_context_lengths(trajectory, final)])[:-1]
    if mask[starts].any():
        raise LearnerError(f"{where} begins with an action token: the first turn needs prompt_ids to act on")

    logprobs = np.zeros(len(tokens), np.float32)
    versions = np.full(len(tokens), -1, np.int32)
    if mask.any():
        logprobs[mask] = np.concatenate([turn.action_logprobs for turn in trajectory.turns])
        versions[mask] = np.concatenate(
            [np.repeat(version, count) for turn in trajectory.turns for version, count in turn.versions]
        )
    met = [numbers.setdefault(state, len(numbers)) for state in trajectory.states]
    states = np.array([*met, -1], np.int32)[turn_ids]
    return tokens, mask, logprobs, _rewards(trajectory, mask, turn_ids, where), turn_ids, versions, states


def _check_turn(ids: IntArray, logprobs: FloatArray, versions: Sequence[tuple[int, int]], where: str) -> None:
    counted = sum(count for _, count in versions)
    if not len(ids) == len(logprobs) == counted:
        raise LearnerError(
            f"{where}: {len(ids)} action ids, {len(logprobs)} log-probabilities and versions for {counted} tokens; "
            "the engine must record one of each for every token"
        )


def _rewards(trajectory: Trajectory, mask: np.ndarray, turn_ids: np.ndarray, where: str) -> FloatArray:
    """Add each turn's reward to its last action token, or to the last one before it if the turn has none."""
    rewards = np.zeros(len(mask), np.float64)
    for index, turn in enumerate(trajectory.turns):
        if not np.isfinite(turn.reward):
            raise LearnerError(f"{where}, turn {index}: the reward {turn.reward} is not finite; void such episodes")
        if turn.reward == 0:
            continue
        carriers = np.flatnonzero(mask & (turn_ids <= index))
        if not len(carriers):
            raise LearnerError(f"{where}, turn {index}: reward {turn.reward} but no action token before it")
        rewards[carriers[-1]] += turn.reward
    return rewards.astype(np.float32)
