"""``agentkit show --episode N --rhythm``: attention rhythm over the tokens of an episode.

Invariant: the token ids are the recorded ones, and the model is the newest checkpoint's, whatever step the episode is
of. Imports torch only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentkit.errors import CheckpointError, RunDirectoryError
from agentkit.extras import require_training

if TYPE_CHECKING:
    from agentkit.config import AlgorithmConfig, RunConfig
    from agentkit.records import EpisodeRow
    from agentkit.run_directory import RunDirectory
    from agentkit.trainers.algorithms.rhythm import Rhythm
    from agentkit.trainers.batch import Batch
    from agentkit.trainers.checkpoint import Checkpoint
    from agentkit.trainers.learner.credit import Heads
    from agentkit.types import FloatArray, Trajectory

_BAR = 12
"""Width of a full bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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


def rhythm_lines(
    directory: RunDirectory, row: EpisodeRow, trajectory: Trajectory, text_of: Callable[[list[int]], str] | None
) -> list[str]:
    """Return an episode with WAAD, FAI and marks of each action token.

    Args:
        directory: the run.
        row: summary of the episode.
        trajectory: the episode.
        text_of: decodes token ids; None if the tokenizer is unknown.

    Raises:
        CheckpointError: the run has no checkpoint.
        RunDirectoryError: the episode was voided or has no action token.
        LearnerError: the attention of the model cannot be read.
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
    return lines_of(row, draw(directory.config(), checkpoints[-1], trajectory), text_of)


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
    model: Any = load_policy(ModelConfig(path=str(checkpoint.model), dtype=config.model.dtype), config.seed)
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


def lines_of(row: EpisodeRow, drawing: Drawing, text_of: Callable[[list[int]], str] | None) -> list[str]:
    """Return the drawing as text: a legend, then one line per action token."""
    import numpy as np

    from agentkit.trainers.algorithms.rhythm import HORIZON, WINDOW

    heads, batch, marks = drawing.heads, drawing.batch, drawing.marks
    largest = float(np.nanmax(marks.fai)) if not np.isnan(marks.fai).all() else 0.0
    of = "of the run" if drawing.known else "classified on this episode, because the run has none"
    lines = [
        f"episode {row.id} of step {row.step}: {row.env_id}, seed {row.seed}, return {row.reward:.4f}",
        f"attention of {drawing.model}, layers {', '.join(map(str, heads.layers))}; heads {of}:",
        f"  local {_names(heads.local)}; global {_names(heads.global_)}",
        f"credit {drawing.algorithm.credit}: mean factor {drawing.factors[batch.mask].mean():.3f}",
        "",
        f"WAAD  how far back a token looks, in tokens; a full bar is {WINDOW}",
        f"FAI   how much tokens {HORIZON[0]} to {HORIZON[1]} positions later look at it; a full bar is {largest:.4g}",
        "      L starts a local chunk, A anchor, D anchor that depends on a chunk's start, I introduces one",
    ]
    for turn in np.unique(batch.turn_ids[batch.mask]):
        of_turn = batch.turn_ids == turn
        observed, at = np.flatnonzero(of_turn & ~batch.mask), np.flatnonzero(of_turn & batch.mask)
        lines += [
            "",
            f"── turn {turn + 1}: after {len(observed)} tokens of prompt and observation",
            f"  {'position':>8}  {'WAAD':>6} {'':<{_BAR}}  {'FAI':>9} {'':<{_BAR}}  {'marks':<5}  factor"
            + ("  text" if text_of else "      id"),
        ]
        for position in at.tolist():
            waad, fai = float(marks.waad[position]), float(marks.fai[position])
            token = int(batch.tokens[position])
            shown = f"{fai:>9.3g}" if fai == fai else f"{'-':>9}"
            lines.append(
                f"  {position:>8}  {waad:>6.2f} {bar(waad, WINDOW)}  {shown} {bar(fai, largest)}  "
                f"{letters(marks, position):<5}  {drawing.factors[position]:>6.2f}"
                + (f"  {text_of([token])!r}" if text_of else f"  {token:>6}")
            )
    return lines


def letters(marks: Rhythm, position: int) -> str:
    """Return the marks of one token."""
    kinds = (("L", marks.local), ("A", marks.anchors), ("D", marks.dependent), ("I", marks.introducing))
    return "".join(letter for letter, marked in kinds if marked[position])


def bar(value: float, largest: float) -> str:
    """Return a bar of ``_BAR`` characters, in eighths of one; empty for NaN."""
    if not value > 0 or not largest > 0:
        return " " * _BAR
    eighths = round(min(value / largest, 1.0) * _BAR * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + _EIGHTHS[rest]).strip().ljust(_BAR)[:_BAR]


def _names(heads: list[tuple[int, int]]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)
