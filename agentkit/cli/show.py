"""``agentkit show``: the episodes of a run, and one of them token by token. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentkit.records import EpisodeRow
    from agentkit.run_directory import RunDirectory
    from agentkit.types import Trajectory, Turn


def show(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    episode: Annotated[int | None, typer.Option(help="Print this episode, whole.", show_default=False)] = None,
    last: Annotated[int, typer.Option(min=1, help="How many of the latest episodes to list.")] = 20,
    ending: Annotated[
        str | None,
        typer.Option(help="Only those that ended so: trained, dropped, cancelled, voided.", show_default=False),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Only those of this training step.", show_default=False)] = None,
) -> None:
    """List the episodes of a run, or print one with its tokens, log-probabilities, rewards and policy versions."""
    from agentkit import records
    from agentkit.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    if episode is None:
        rows = records.list_episodes(directory.episodes_file, ending=ending, step=step, last=last)
        lines = list_lines(rows)
    else:
        row, trajectory = records.read_episode(directory.episodes_file, episode)
        lines = episode_lines(row, trajectory, token_texts(directory))
    for line in lines:
        typer.echo(line)


def list_lines(rows: list[EpisodeRow]) -> list[str]:
    """A header and one line an episode."""
    if not rows:
        return ["no such episode"]
    names = ("id", "step", "group", "member", "seed", "version", "turns", "tokens", "return", "success")
    lines = ["  ".join(f"{name:>7}" for name in names) + "  ended"]
    for row in rows:
        numbers = (row.id, row.step, row.group_id, row.member, row.seed, row.version_started, row.turns, row.tokens)
        cells = (*map(str, numbers), f"{row.reward:.3f}", "yes" if row.success else "no")
        ended = " ".join(filter(None, (row.ending, row.ending_reason, row.outcome, row.reason)))
        lines.append("  ".join(f"{cell:>7}" for cell in cells) + f"  {ended}")
    return lines


def episode_lines(row: EpisodeRow, trajectory: Trajectory, text_of: Callable[[int], str] | None) -> list[str]:
    """An episode as text: its facts, then turn by turn what was seen, said and earned."""
    ended = " ".join(filter(None, (row.ending, row.ending_reason, "·", trajectory.outcome, trajectory.reason)))
    lines = [
        f"episode {row.id}: {trajectory.env_id}, seed {trajectory.seed}, group {trajectory.group_id}, "
        f"member {trajectory.member}, attempt {trajectory.attempt + 1}",
        f"step {row.step}, began under version {trajectory.version_started}, {ended}",
        f"return {trajectory.reward:.4f}, {'solved' if trajectory.success else 'not solved'}, "
        f"{len(trajectory.turns)} turns, {trajectory.num_tokens} tokens ({trajectory.num_action_tokens} of actions), "
        f"{trajectory.duration_s:.2f} s",
    ]
    if trajectory.metrics:
        lines.append("  ".join(f"{name}={value:g}" for name, value in trajectory.metrics.items()))
    for number, turn in enumerate(trajectory.turns, 1):
        lines += _turn_lines(number, turn, text_of)
    if len(trajectory.final_ids):
        lines += ["", f"last observation: {len(trajectory.final_ids)} tokens  {trajectory.final_ids.tolist()}"]
    return lines


def _turn_lines(number: int, turn: Turn, text_of: Callable[[int], str] | None) -> list[str]:
    versions = ", ".join(f"{count} by version {version}" for version, count in turn.versions)
    lines = [
        "",
        f"── turn {number}: reward {turn.reward:g}, {'valid' if turn.valid else 'invalid'}, "
        f"actions {list(turn.actions)}, generated in {turn.generate_s:.3f} s, environment {turn.env_s:.3f} s",
        f"observation ({len(turn.prompt_ids)} tokens):",
        *_quoted(turn.observation),
        f"  ids {turn.prompt_ids.tolist()}",
        f"answer ({len(turn.action_ids)} tokens: {versions}; ended by {turn.finish_reason}):",
        *_quoted(turn.response),
        f"  {'id':>8}  {'log-prob':>9}  text" if text_of else f"  {'id':>8}  {'log-prob':>9}",
    ]
    for token, logprob in zip(turn.action_ids.tolist(), turn.action_logprobs.tolist(), strict=True):
        lines.append(f"  {token:>8}  {logprob:>9.4f}" + (f"  {text_of(token)!r}" if text_of else ""))
    return lines


def _quoted(text: str) -> list[str]:
    """Indented lines that cannot command the terminal: a model may well write escape sequences."""
    visible = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return [f"  {line}" for line in visible.split("\n")]


def token_texts(directory: RunDirectory) -> Callable[[int], str] | None:
    """Text of a token id by the tokenizer that the run has exported; None before it has."""
    files = [*directory.path.glob("model/tokenizer.json"), *directory.path.glob("checkpoints/*/model/tokenizer.json")]
    if not files:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files[0]))
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)
