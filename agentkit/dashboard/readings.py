"""What the newest checkpoint's models say about the tokens of an episode: attention rhythm and values of critics.

Invariant: the token ids are the recorded ones, and the models are the newest checkpoint's, also for episodes of earlier
steps. Imports torch only when it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit import records
from agentkit.errors import AgentkitError, CheckpointError, RunDirectoryError
from agentkit.extras import require_training
from agentkit.run_directory import RunDirectory

if TYPE_CHECKING:
    from agentkit.config import AlgorithmConfig, RunConfig
    from agentkit.records import EpisodeRow
    from agentkit.trainers.algorithms.rhythm import Rhythm
    from agentkit.trainers.batch import Batch
    from agentkit.trainers.checkpoint import Checkpoint
    from agentkit.trainers.learner.credit import Heads
    from agentkit.types import FloatArray, Trajectory


def token_readings(path: Path, number: int) -> dict[str, Any]:
    """Return what the models of the newest checkpoint say about an episode's action tokens.

    Args:
        path: the run.
        number: id of the episode.

    Returns:
        ``step`` of the checkpoint, and one number for each action token in order: ``waad``, ``fai``, ``factor`` and
        the letters ``marks`` (see ``agentkit.trainers.algorithms.rhythm``), None if the attention cannot be read;
        ``values``: a list for each critic, of the states in which the tokens were chosen; ``disagreement`` of several
        critics, or None; ``note``: what is missing.

    Raises:
        CheckpointError: the run has no checkpoint, or it cannot be read.
        MissingExtra: the extra ``train`` is not installed.
        RunDirectoryError: the run has no such episode, or the episode has no answer.
    """
    run = RunDirectory.open(path)
    row, trajectory = records.read_episode(run.episodes_file, number)
    checkpoint = newest_checkpoint(run, row, trajectory)
    from agentkit.trainers.algorithms.uncertainty import disagreement
    from agentkit.trainers.batch import flatten
    from agentkit.types import Group

    config, note = run.config(), ""
    batch = flatten([Group(0, 0, 0, [trajectory])])
    rhythm: dict[str, Any] = dict.fromkeys(("waad", "fai", "factor", "marks"))
    try:
        drawing = draw(config, checkpoint, trajectory)
    except AgentkitError as error:
        note = f"The attention cannot be read: {error}"
    else:
        marks, at = drawing.marks, batch.mask.nonzero()[0].tolist()
        rhythm = {name: column[batch.mask].tolist() for name, column in (("waad", marks.waad), ("fai", marks.fai))}
        rhythm |= {"factor": drawing.factors[batch.mask].tolist(), "marks": [letters(marks, place) for place in at]}
    values = critic_values(config, checkpoint, batch)
    apart = disagreement(values).tolist() if len(values) > 1 else None
    return {"step": checkpoint.step, "values": values.tolist(), "disagreement": apart, "note": note, **rhythm}


def newest_checkpoint(directory: RunDirectory, row: EpisodeRow, trajectory: Trajectory) -> Checkpoint:
    """Return the checkpoint whose models can read an episode.

    Raises:
        CheckpointError: the run has no checkpoint.
        MissingExtra: the extra ``train`` is not installed.
        RunDirectoryError: the episode was voided or has no action token.
    """
    require_training()
    from agentkit.trainers.checkpoint import list_checkpoints

    checkpoints = list_checkpoints(directory.checkpoints)
    if not checkpoints:
        raise CheckpointError(
            f"{directory.path} has no checkpoint, whose model would read the episode: a run writes one every "
            "`checkpoint.every` steps and at its end; evaluations keep none"
        )
    if trajectory.outcome == "voided" or not trajectory.num_action_tokens:
        raise RunDirectoryError(f"episode {row.id} was voided or has no answer, so there is no rhythm to draw")
    return checkpoints[-1]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What is drawn of one episode."""

    batch: Batch
    marks: Rhythm
    factors: FloatArray
    algorithm: AlgorithmConfig
    heads: Heads
    known: bool
    """Whether the heads are those of the run; otherwise they were classified on this episode."""
    model: Path


def draw(config: RunConfig, checkpoint: Checkpoint, trajectory: Trajectory) -> Drawing:
    """Read the attention of the checkpoint's model over one episode.

    The credit is that of the run; ``coupled``, if it has none.
    """
    import numpy as np
    import torch
    from transformers.utils.logging import disable_progress_bar

    from agentkit.config import ModelConfig
    from agentkit.trainers.algorithms import rhythm
    from agentkit.trainers.batch import flatten
    from agentkit.trainers.learner.credit import Credit
    from agentkit.trainers.learner.files import read_state
    from agentkit.trainers.learner.microbatches import MicroBatch, lay_out
    from agentkit.trainers.learner.ranks import Ranks
    from agentkit.trainers.models.load import load_policy
    from agentkit.types import Group

    disable_progress_bar()
    algorithm = config.algorithm
    if algorithm.credit == "none":
        algorithm = algorithm.model_copy(update={"credit": "coupled"})
    batch = flatten([Group(0, 0, 0, [trajectory])])
    place = ModelConfig(path=str(checkpoint.model), dtype=config.model.dtype, device="cpu")  # a GPU may be training
    model: Any = load_policy(place, config.seed)
    credit = Credit(algorithm, model, Ranks(0, 1, None, model.device))
    credit.restore(read_state(checkpoint.learner / "learner.pt").get("heads"))
    known, layout = credit.heads is not None, lay_out(batch, MicroBatch(np.arange(batch.num_contexts)), model.device)

    def forward(layout: Any) -> None:
        with torch.no_grad():
            model.base_model(input_ids=layout.ids, use_cache=False)

    credit.heads = credit.heads or credit.classified([layout], forward)
    waad, fai_sums = credit.read(batch, [layout], forward)
    marks = rhythm.rhythm(batch, waad, fai_sums, algorithm.credit_share)
    factors = rhythm.factors(marks, algorithm.credit, algorithm.credit_amplification)
    return Drawing(batch, marks, factors, algorithm, credit.heads, known, checkpoint.model)


def critic_values(config: RunConfig, checkpoint: Checkpoint, batch: Batch) -> FloatArray:
    """Return the values of the states in which the action tokens were chosen, ``[critics, action tokens]``.

    Raises:
        CheckpointError: the weights of a critic are missing or do not fit.
    """
    import numpy as np
    import torch

    from agentkit.config import ModelConfig
    from agentkit.trainers.learner.critic import ValueModel
    from agentkit.trainers.learner.files import TensorFiles
    from agentkit.trainers.learner.microbatches import MicroBatch, lay_out
    from agentkit.trainers.models.load import load_policy
    from agentkit.trainers.models.quickstart import critic_config, fresh_model

    if config.critic is None:
        return np.zeros((0, int(batch.mask.sum())), np.float32)
    layout = lay_out(batch, MicroBatch(np.arange(batch.num_contexts)), torch.device("cpu"))
    values = []
    for index in range(config.critic.count):
        files = TensorFiles(checkpoint.learner / f"critic-{index}" / "weights")
        if config.critic.path is None and config.critic.fresh is not None:
            vocabulary = next(shape[0] for name, _, shape in files.specs() if name == "trunk.embed_tokens.weight")
            causal_lm: Any = fresh_model(critic_config(vocabulary, *config.critic.fresh), config.seed)
        else:
            policy = checkpoint.whole_model if checkpoint.whole_model.is_dir() else config.model.path
            path = config.critic.path or str(policy)
            causal_lm = load_policy(ModelConfig(path=path, dtype="float32", device="cpu"), config.seed)
        model = ValueModel(causal_lm.base_model, causal_lm.config.get_text_config().hidden_size, torch.float32)
        try:
            model.load_state_dict({name: files.read(name) for name, _, _ in files.specs()})
        except RuntimeError as error:
            raise CheckpointError(f"critic {index} of {checkpoint.learner} does not fit: {error}") from error
        with torch.no_grad():
            values.append(model(layout)[layout.rows, layout.columns].numpy())
    return np.array(values, np.float32)


def letters(marks: Rhythm, position: int) -> str:
    """Return the marks of one token."""
    kinds = (("L", marks.local), ("A", marks.anchors), ("D", marks.dependent), ("I", marks.introducing))
    return "".join(letter for letter, marked in kinds if marked[position])
