"""Several critics of one policy: which episodes each trains on, and what their disagreement masks.

AsyPPO (arXiv:2510.01656) trains small critics on disjoint parts of every group. Where they agree, there is little to
learn; where they disagree most, the state is unlike those that they know, and exploring there is of little use.
Formulas: ``docs/algorithms.md``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentkit.trainers.algorithms.quantiles import highest, lowest


def deal(group_ids: NDArray[np.int64], members: NDArray[np.int64], critics: int) -> NDArray[np.int64]:
    """Return the critic that trains on each sequence, ``[S]``.

    The members of a group, sorted by index, are dealt out to the critics in turn, the first one always to critic 0. So
    every critic trains on every group that has a member for it. Sequences of one member stay together.
    """
    episodes, episode = np.unique(np.stack([group_ids, members]), axis=1, return_inverse=True)
    _, first, group = np.unique(episodes[0], return_index=True, return_inverse=True)
    place = np.arange(episodes.shape[1]) - first[group.reshape(-1)]
    return (place % critics)[episode.reshape(-1)]


def disagreement(values: np.ndarray) -> NDArray[np.float64]:
    """Population standard deviation over the critics: ``values`` ``[M, n]`` to ``[n]``; exactly 0 where they agree."""
    values = values.astype(np.float64)
    return (values - values[:1]).std(axis=0)


def masks(
    disagreement: np.ndarray, advantage_share: float, entropy_share: float
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which tokens keep their policy loss, and which keep their entropy bonus.

    Args:
        disagreement: of the critics in the states in which all action tokens of the batch were chosen, ``[n]``.
        advantage_share: share of the tokens with the lowest disagreement, which lose their policy loss.
        entropy_share: share of the tokens with the highest disagreement, which lose their entropy bonus.

    Critics that agree everywhere, such as a single one, mask nothing.
    """
    if not disagreement.any():
        everything = np.ones(len(disagreement), np.bool_)
        return everything, everything
    return ~lowest(disagreement, advantage_share), ~highest(disagreement, entropy_share)
