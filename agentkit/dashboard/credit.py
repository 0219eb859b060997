"""What the learner gave the tokens of a recorded episode: as recorded, or estimated again from its batch."""

from __future__ import annotations

from collections.abc import Mapping
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
from agentkit.types import FloatArray, Group

_MARKS = "LADI"
"""Letters of the marks of attention-rhythm credit, from the lowest bit (``rhythm.mark_bits``)."""


def token_credit(path: Path, number: int) -> dict[str, Any]:
    """Return what the learner gave each action token of an episode when it was trained on.

    Runs record it. For a run of an older version, the advantages are estimated again: the batch of a step is exactly
    the episodes that were trained on in it. What the learner adds with a model (a penalty in the reward, a factor for
    each token) is then missing.

    Args:
        path: the run.
        number: id of the episode.

    Returns:
        Lists with a number for each action token in order, or None: ``advantages`` and ``policy_weight``, and of
        recorded ones ``disagreement``, ``waad``, ``fai``, ``factor`` and the letters ``marks``; ``values``, a list
        for each critic; ``note``: where they come from, or why they are missing.
    """
    run = RunDirectory.open(path)
    row, _ = records.read_episode(run.episodes_file, number)
    if row.ending != records.TRAINED:
        return _missing(f"The episode was not trained on (it is {row.ending}), so it has no advantages.")
    if (recorded := records.read_credit(run.episodes_file, row)) is not None:
        return _recorded(recorded, row.step)
    if run.in_use() and row.step > max((line["step"] for line in read_jsonl(run.metrics_file)), default=0):
        return _missing("The step is in progress, so its batch may be incomplete.")
    rows = records.list_episodes(run.episodes_file, records.Filter(ending=records.TRAINED, step=row.step))
    estimate = _estimate(path, tuple(rows))
    if isinstance(estimate, str):
        return _missing(estimate)
    advantages, policy_weight = estimate.columns[number]
    return _missing(estimate.note) | {"advantages": advantages, "policy_weight": policy_weight}


def _recorded(columns: Mapping[str, FloatArray], step: int) -> dict[str, Any]:
    lists = {name: column.tolist() for name, column in columns.items()}
    marks = lists.get("marks")
    critics = sum(name.startswith("value_") for name in lists)
    note = f"Advantages are those that the learner used in step {step}."
    if critics:
        note += " Values of the critics are those before this step, for the state in which the token was chosen."
    return {
        "advantages": lists["advantage"],
        "policy_weight": lists["weight"],
        "values": [lists[f"value_{index}"] for index in range(critics)],
        **{name: lists.get(name) for name in ("disagreement", "waad", "fai", "factor")},
        "marks": marks and [_letters(int(bits)) for bits in marks],
        "note": note,
    }


def _letters(bits: int) -> str:
    return "".join(letter for bit, letter in enumerate(_MARKS) if bits >> bit & 1)


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
            return f"{algorithm.advantage} uses values of a critic, which this run has not recorded."
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
    names = ("advantages", "policy_weight", "disagreement", "waad", "fai", "factor", "marks")
    return dict.fromkeys(names) | {"values": [], "note": note}
