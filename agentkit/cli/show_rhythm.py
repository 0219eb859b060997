"""``agentkit show --episode N --rhythm``: attention rhythm over the tokens of an episode.

Invariant: the token ids are the recorded ones, and the model is the newest checkpoint's, also for episodes of earlier
steps. Imports torch only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentkit.dashboard.readings import Drawing
    from agentkit.records import EpisodeRow
    from agentkit.run_directory import RunDirectory
    from agentkit.types import Trajectory

_BAR = 12
"""Width of a full bar."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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
    from agentkit.dashboard.readings import draw, newest_checkpoint

    checkpoint = newest_checkpoint(directory, row, trajectory)
    return lines_of(row, draw(directory.config(), checkpoint, trajectory), text_of)


def lines_of(row: EpisodeRow, drawing: Drawing, text_of: Callable[[list[int]], str] | None) -> list[str]:
    """Return the drawing as text: a legend, then one line per action token."""
    import numpy as np

    from agentkit.dashboard.readings import letters
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


def bar(value: float, largest: float) -> str:
    """Return a bar of ``_BAR`` characters, in eighths of one; empty for NaN."""
    if not value > 0 or not largest > 0:
        return " " * _BAR
    eighths = round(min(value / largest, 1.0) * _BAR * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + _EIGHTHS[rest]).strip().ljust(_BAR)[:_BAR]


def _names(heads: list[tuple[int, int]]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)
