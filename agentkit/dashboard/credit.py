"""Advantages of the tokens of a recorded episode, estimated again from the batch that contained it."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentkit import records
from agentkit.errors import AgentkitError
from agentkit.jsonl import read_jsonl
from agentkit.plugins import ADVANTAGE
from agentkit.run_directory import RunDirectory
from agentkit.types import Group

TRAINED = "trained"


def token_advantages(path: Path, number: int) -> dict[str, Any]:
    """Return the advantages of an episode's action tokens, as the learner estimated them.

    The batch of a step is exactly the episodes that were trained on in it, so the estimate can be repeated. What the
    learner adds with a model (a penalty in the reward, a factor for each token) is not included.

    Args:
        path: the run.
        number: id of the episode.

    Returns:
        ``advantages`` and ``policy_weight``, one for each action token in order, or None; ``note``: why they are
        missing, or what they do not contain.
    """
    run = RunDirectory.open(path)
    row, _ = records.read_episode(run.episodes_file, number)
    if row.ending != TRAINED:
        return _missing(f"The episode was not trained on (it is {row.ending}), so it has no advantages.")
    if run.in_use() and row.step > max((line["step"] for line in read_jsonl(run.metrics_file)), default=0):
        return _missing("The step is in progress, so its batch may be incomplete.")
    rows = records.list_episodes(run.episodes_file, records.Filter(ending=TRAINED, step=row.step))
    estimate = _estimate(path, tuple(rows))
    if isinstance(estimate, str):
        return _missing(estimate)
    advantages, policy_weight = estimate.columns[number]
    return {"advantages": advantages, "policy_weight": policy_weight, "note": estimate.note}


class _Estimate(NamedTuple):
    columns: dict[int, tuple[list[float], list[float]]]
    """Advantage and weight of each action token, by id of the episode."""
    note: str


@lru_cache(maxsize=4)
def _estimate(path: Path, rows: tuple[records.EpisodeRow, ...]) -> _Estimate | str:
    """Return the estimate of one batch, or why there is none."""
    run = RunDirectory.open(path)
    try:
        algorithm = run.config().algorithm
        if ADVANTAGE.traits(algorithm.advantage).needs_critic:
            return f"{algorithm.advantage} uses values of a critic, which runs do not record."
        from agentkit.trainers.algorithms.advantages import estimate
        from agentkit.trainers.batch import flatten

        episodes = [records.read_episode(run.episodes_file, row.id) for row in rows]
        groups = [
            Group(group, 0, 0, [trajectory for _, trajectory in members])
            for group, members in groupby(episodes, lambda one: one[0].group_id)
        ]
        batch = flatten(groups)
        estimated = estimate(batch, np.zeros((0, batch.num_tokens), np.float32), algorithm)
    except AgentkitError as error:
        return f"The advantages cannot be estimated: {error}"
    notes = []
    if algorithm.kl_in == "reward" and algorithm.kl != "none":
        notes.append("The penalty for leaving the reference model is not included.")
    if algorithm.credit != "none":
        notes.append(f"The factor of each token (credit {algorithm.credit}) is not included.")
    own = [batch.mask & (batch.sequence_ids == place) for place in range(len(rows))]
    columns = {
        row.id: (estimated.advantages[mask].tolist(), estimated.policy_weight[mask].tolist())
        for row, mask in zip(rows, own, strict=True)
    }
    return _Estimate(columns, " ".join(notes))


def _missing(note: str) -> dict[str, Any]:
    return {"advantages": None, "policy_weight": None, "note": note}
