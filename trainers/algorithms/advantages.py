"""Advantage estimators: pure functions over the whole global batch, before it is sharded over ranks.

Invariant: only action tokens carry rewards, advantages and returns. Values at masked positions have no effect, and
advantages of groups with equal returns are exactly zero.

Shapes: a batch has ``N`` tokens in ``S`` sequences; ``values`` is ``[M, N]``, ``values[m, i]`` being critic ``m``'s
value of the state *after* token ``i`` (so the state in which token ``t`` was chosen has the value at ``t - 1``).
Formulas and sources: ``docs/algorithms.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentkit.config import AlgorithmConfig
from agentkit.errors import LearnerError
from agentkit.trainers.algorithms.plugin import estimate_columns
from agentkit.trainers.algorithms.shaping import with_length_penalty
from agentkit.trainers.algorithms.uncertainty import disagreement, masks
from agentkit.trainers.batch import Batch
from agentkit.types import FloatArray

Double = NDArray[np.float64]

STD_EPSILON = 1e-6
"""Added to a group's standard deviation in GRPO."""
WHITEN_EPSILON = 1e-8
"""Added to the variance when advantages are whitened over the batch."""


class Estimate(NamedTuple):
    """Result of an estimator; all arrays are float32 ``[N]`` and zero at masked positions."""

    advantages: FloatArray
    returns: FloatArray
    """Targets of the critics: the return from the state in which the token was chosen."""
    policy_weight: FloatArray
    """Factor of each token's policy loss; 0 takes it out (denominators still count it)."""
    entropy_weight: FloatArray
    """Factor of each token's entropy bonus."""


Estimator = Callable[[Batch, FloatArray, AlgorithmConfig], Estimate]


def estimate(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """Add the length penalty, run the configured estimator, and clip its advantages to ``±config.advantage_clip``.

    ``values`` is float32 ``[M, N]`` with ``M`` critics, possibly 0.
    """
    batch = with_length_penalty(batch, config)
    built_in = ESTIMATORS.get(config.advantage)
    result = built_in(batch, values, config) if built_in else Estimate(*estimate_columns(batch, values, config))
    if config.advantage_clip is not None:
        clipped = np.clip(result.advantages, -config.advantage_clip, config.advantage_clip)
        result = result._replace(advantages=clipped)
    return result


def episode_returns(batch: Batch) -> Double:
    """Undiscounted return of each sequence, ``[S]``."""
    rewards = _masked(batch, batch.rewards)
    return np.bincount(batch.sequence_ids, weights=rewards, minlength=batch.num_sequences).astype(np.float64)


def reinforce(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """Return to go, discounted once a turn: ``G_k = r_k + gamma * G_{k+1}``, the same for all tokens of turn ``k``."""
    turns = _turn_index(batch)
    to_go = _turn_returns(batch, turns, config.gamma)
    return _finish(batch, to_go[turns], to_go[turns])


def chunk_returns(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``G_k = gamma^(chunks after k) * R``, the same for all tokens of chunk ``k`` (IPA, arXiv:2512.24873).

    A chunk is a turn with an action token. The whole return ``R`` counts as earned at the end; no baseline.
    """
    turns = _turn_index(batch)
    acted = (np.bincount(turns, weights=batch.mask) > 0).astype(np.float64)
    last = batch.cu_seqlens[1:] - 1
    chunks_until = np.cumsum(acted)[turns]
    after = chunks_until[last][batch.sequence_ids] - chunks_until
    to_go = config.gamma**after * episode_returns(batch)[batch.sequence_ids]
    return _finish(batch, to_go, to_go)


def raft(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``max(R, 0)``: imitate episodes with a positive return, without baseline (RAFT, arXiv:2304.06767)."""
    returns = episode_returns(batch)
    return _per_episode(batch, np.maximum(returns, 0.0), returns)


def batch_mean(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``R - mean of the batch``: one baseline for all episodes (FlashREINFORCE, NVIDIA 2026). Episodes without an
    action token take no part."""
    returns, acted = episode_returns(batch), batch.action_counts > 0
    return _per_episode(batch, _deviations(returns, acted.astype(np.int64)), returns)


def gigpo(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``A_episode + A_turn`` (GiGPO, arXiv:2505.10978, eqs. 4 to 8, w = 1): credit for single turns without a critic.

    ``A_episode`` is GRPO's advantage. ``A_turn`` compares the discounted return to go of a turn (as in ``reinforce``)
    with those of all turns of the same group that were taken in the same state (``batch.states``), and is scaled like
    GRPO's; a state met once gives 0. Turns without an action token take no part.
    """
    episode = grpo(batch, values, config)
    turns = _turn_index(batch)
    to_go = _turn_returns(batch, turns, config.gamma)
    acted = np.bincount(turns, weights=batch.mask) > 0
    first = np.unique(turns, return_index=True)[1][acted]
    key = np.stack([batch.group_ids[batch.sequence_ids[first]], batch.states[first]])
    advantage = np.zeros(len(to_go))
    advantage[acted] = _standardised(to_go[acted], np.unique(key, axis=1, return_inverse=True)[1].reshape(-1))
    return _finish(batch, episode.advantages + advantage[turns], to_go[turns])


def grpo(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``(R - mean_G) / (std_G + 1e-6)`` with the unbiased standard deviation, the same for all tokens of an episode."""
    returns = episode_returns(batch)
    return _per_episode(batch, _standardised(returns, batch.group_ids), returns)


def dr_grpo(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``R - mean_G``: without GRPO's division, which favours tasks that are nearly solved or nearly hopeless."""
    returns = episode_returns(batch)
    return _per_episode(batch, _deviations(returns, batch.group_ids), returns)


def rloo(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``R - mean of the others' R``, which is ``n / (n - 1) * (R - mean_G)``."""
    returns = episode_returns(batch)
    _, group, size = _groups(batch.group_ids)
    scale = size / np.maximum(size - 1, 1)
    return _per_episode(batch, scale[group] * _deviations(returns, batch.group_ids), returns)


def reinforce_pp(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """Return to go, discounted once an action token, whitened over all action tokens of the batch."""
    dense = _Dense(batch)
    rewards = dense.gather(batch.rewards)
    to_go = np.zeros_like(rewards)
    following = np.zeros(batch.num_sequences)
    for t in range(dense.width - 1, -1, -1):
        following = np.where(dense.valid[:, t], rewards[:, t] + config.gamma * following, following)
        to_go[:, t] = following
    returns = dense.scatter(to_go)
    return _finish(batch, _whiten(returns, batch.mask), returns)


def reinforce_pp_baseline(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """``R - mean_G`` for every token, then whitened over all action tokens of the batch."""
    returns = episode_returns(batch)
    per_token = _deviations(returns, batch.group_ids)[batch.sequence_ids]
    return _finish(batch, _whiten(per_token, batch.mask), returns[batch.sequence_ids])


def bilevel_gae(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """GAE over turns, then over the tokens of each turn, whitened over the batch (RAGEN, arXiv:2504.20073).

    Over the last tokens ``e`` of turns: ``delta = r_e + gamma_high V(next e) - V(e)`` and ``A_e = delta + gamma_high
    lam A_(next e)``. Within a turn, GAE with ``gamma`` towards ``A_e + V(e)`` as the reward of its last token, after
    which the state has value 0. An episode that was cut off ends, and several critics mask tokens, as in ``gae``.
    """
    value = _mean_value(values)
    dense = _Dense(batch)
    rewards, state_values = dense.gather(batch.rewards), dense.gather(np.roll(value, 1))
    turn_ids = dense.gather(batch.turn_ids)
    ends = np.diff(np.where(dense.valid, turn_ids, -1), axis=1, append=-1) != 0
    following_end, lam = _final_values(batch, value), policy_lambda(batch, config)
    turn_advantage, advantage, next_value = (np.zeros(batch.num_sequences) for _ in range(3))
    advantages = np.zeros_like(rewards)
    for t in range(dense.width - 1, -1, -1):
        here, end, reward = state_values[:, t], dense.valid[:, t] & ends[:, t], rewards[:, t]
        turn_delta = reward + config.gamma_high * following_end - here
        turn_advantage = np.where(end, turn_delta + config.gamma_high * lam * turn_advantage, turn_advantage)
        delta = reward + config.gamma * next_value - here
        advantage = np.where(end, turn_advantage, delta + config.gamma * lam * advantage)
        following_end, next_value = np.where(end, here, following_end), here
        advantages[:, t] = advantage
    result = _finish(batch, _whiten(dense.scatter(advantages), batch.mask), dense.scatter(advantages + state_values))
    return _mask_tokens(result, dense, values, config)


def gae(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """Generalised advantage estimation over action tokens alone, whitened over the batch.

    Observation tokens are not transitions: from the last token of an action, the next state is the one in which the
    next action's first token is chosen. An episode that was cut off ends in the state after its ``final_ids``; any
    other one, also one without ``final_ids``, in a state of value 0. Several critics are averaged, and their
    disagreement masks tokens (AsyPPO, arXiv:2510.01656).
    """
    value = _mean_value(values)
    dense = _Dense(batch)
    rewards, state_values = dense.gather(batch.rewards), dense.gather(np.roll(value, 1))
    next_value = _final_values(batch, value)
    deltas = np.zeros_like(rewards)
    for t in range(dense.width - 1, -1, -1):
        deltas[:, t] = rewards[:, t] + config.gamma * next_value - state_values[:, t]
        next_value = np.where(dense.valid[:, t], state_values[:, t], next_value)
    advantages = dense.discounted_sums(deltas, config.gamma * policy_lambda(batch, config))
    returns = dense.discounted_sums(deltas, config.gamma * config.critic_lam) + state_values

    result = _finish(batch, _whiten(dense.scatter(advantages), batch.mask), dense.scatter(returns))
    return _mask_tokens(result, dense, values, config)


def _mask_tokens(result: Estimate, dense: _Dense, values: FloatArray, config: AlgorithmConfig) -> Estimate:
    """Mask action tokens by the critics' disagreement (AsyPPO, arXiv:2510.01656)."""
    uncertainty = disagreement(values[:, dense.positions - 1])
    policy_kept, entropy_kept = masks(uncertainty, config.advantage_mask, config.entropy_mask)
    result.policy_weight[dense.positions] = policy_kept
    result.entropy_weight[dense.positions] = entropy_kept
    return result


def policy_lambda(batch: Batch, config: AlgorithmConfig) -> Double:
    """GAE's lambda of each sequence, ``[S]``. ``length``: ``max(0, 1 - 1 / (1.5 n))`` with ``n`` action tokens (SAO,
    arXiv:2607.07508)."""
    if config.lam == "length":
        return np.maximum(0.0, 1 - 1 / (1.5 * np.maximum(batch.action_counts, 1)))
    return np.full(batch.num_sequences, config.lam)


ESTIMATORS: dict[str, Estimator] = {
    "reinforce": reinforce,
    "chunk_returns": chunk_returns,
    "raft": raft,
    "batch_mean": batch_mean,
    "gigpo": gigpo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "bilevel_gae": bilevel_gae,
}


class _Dense:
    """The action tokens alone, as a matrix ``[S, width]``: row = sequence, column = how many actions came before."""

    def __init__(self, batch: Batch):
        self.positions = np.flatnonzero(batch.mask)
        self.rows = batch.sequence_ids[self.positions]
        counts = batch.action_counts
        self.columns = np.arange(len(self.positions)) - (np.cumsum(counts) - counts)[self.rows]
        self.num_tokens = batch.num_tokens
        self.width = int(counts.max(initial=0))
        self.valid = np.arange(self.width) < counts[:, None]

    def gather(self, per_token: np.ndarray) -> Double:
        dense = np.zeros(self.valid.shape)
        dense[self.rows, self.columns] = per_token[self.positions]
        return dense

    def scatter(self, dense: Double) -> Double:
        per_token = np.zeros(self.num_tokens)
        per_token[self.positions] = dense[self.rows, self.columns]
        return per_token

    def discounted_sums(self, dense: Double, factor: Double | float) -> Double:
        """``x_t + factor * x_{t+1} + factor^2 * x_{t+2} + ...``, with one factor for all rows or one for each."""
        sums, following = np.zeros_like(dense), np.zeros(len(dense))
        for t in range(self.width - 1, -1, -1):
            following = np.where(self.valid[:, t], dense[:, t] + factor * following, following)
            sums[:, t] = following
        return sums


def _mean_value(values: FloatArray) -> Double:
    if len(values) == 0:
        raise LearnerError("this advantage needs the values of at least one critic: add a critic section")
    return values.astype(np.float64).mean(axis=0)


def _final_values(batch: Batch, value: Double) -> Double:
    """Value after the last token of episodes that were cut off, 0 for others; ``[S]``."""
    ends = np.maximum(batch.cu_seqlens[1:] - 1, 0)
    # np.where instead of a product, because the last position of another episode may contain any value.
    return np.where(batch.bootstraps, value[ends], 0.0)


def _masked(batch: Batch, per_token: np.ndarray) -> Double:
    return np.where(batch.mask, per_token, 0.0).astype(np.float64)


def _turn_index(batch: Batch) -> NDArray[np.int64]:
    """Number the turns of all sequences consecutively; ``[N]``."""
    key = np.stack([batch.sequence_ids, batch.turn_ids])
    return np.concatenate([[0], np.cumsum((key[:, 1:] != key[:, :-1]).any(axis=0))]).astype(np.int64)


def _turn_returns(batch: Batch, turns: NDArray[np.int64], gamma: float) -> Double:
    """``G_k = r_k + gamma * G_{k+1}`` for each turn of all sequences, numbered as ``turns`` numbers them."""
    rewards = np.bincount(turns, weights=_masked(batch, batch.rewards))
    sequence_of_turn = np.zeros(len(rewards), np.int64)
    sequence_of_turn[turns] = batch.sequence_ids
    to_go, following, sequence = np.zeros(len(rewards)), 0.0, -1
    for k in range(len(rewards) - 1, -1, -1):
        following = rewards[k] + (gamma * following if sequence_of_turn[k] == sequence else 0.0)
        to_go[k], sequence = following, sequence_of_turn[k]
    return to_go


def _groups(group_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """First item of each group, the group index of each item, and the size of each group."""
    _, first, group, size = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
    return first, group, size


def _deviations(returns: Double, group_ids: NDArray[np.int64]) -> Double:
    """``R - mean_G`` for each item; exactly 0 throughout a group of equal returns (or of one member)."""
    first, group, size = _groups(group_ids)
    from_first = returns - returns[first][group]
    return from_first - (np.bincount(group, weights=from_first) / size)[group]


def _standardised(returns: Double, group_ids: NDArray[np.int64]) -> Double:
    """``(R - mean_G) / (std_G + 1e-6)`` with the unbiased standard deviation."""
    deviations = _deviations(returns, group_ids)
    _, group, size = _groups(group_ids)
    variance = np.bincount(group, weights=deviations**2) / np.maximum(size - 1, 1)
    return deviations / (np.sqrt(variance)[group] + STD_EPSILON)


def _whiten(per_token: Double, mask: NDArray[np.bool_]) -> Double:
    """Zero mean and unit (population) variance over the action tokens of the whole batch."""
    kept = per_token[mask]
    if not len(kept):
        return per_token
    kept = kept - kept[0]
    whitened = np.zeros_like(per_token)
    whitened[mask] = (kept - kept.mean()) / np.sqrt(kept.var() + WHITEN_EPSILON)
    return whitened


def _per_episode(batch: Batch, advantages: Double, returns: Double) -> Estimate:
    return _finish(batch, advantages[batch.sequence_ids], returns[batch.sequence_ids])


def _finish(batch: Batch, advantages: Double, returns: Double) -> Estimate:
    return Estimate(
        _masked(batch, advantages).astype(np.float32),
        _masked(batch, returns).astype(np.float32),
        batch.mask.astype(np.float32),
        batch.mask.astype(np.float32),
    )
