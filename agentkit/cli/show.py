"""``agentkit show``: list the episodes of a run, or print one with its tokens. Loads torch only for ``--rhythm``.

Invariant: texts of environments and models are printed such that control characters and markup have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentkit.cli.show_rhythm import rhythm_lines
from agentkit.cli.show_sandboxes import sandbox_lines
from agentkit.text import printable

if TYPE_CHECKING:
    from agentkit.records import EpisodeRow
    from agentkit.types import Trajectory, Turn

_LONGEST_REASON = 160
"""Maximum number of characters of an error in a list; `--episode` shows it completely."""


class Ending(str, Enum):
    """Use of an episode."""

    trained = "trained"
    dropped = "dropped"
    cancelled = "cancelled"
    voided = "voided"
    eval = "eval"


class Outcome(str, Enum):
    """How an episode ended, as ``agentkit.types.Outcome``."""

    terminated = "terminated"
    truncated = "truncated"
    voided = "voided"


class Order(str, Enum):
    """Sort key, as ``agentkit.records.Order``."""

    recorded = "recorded"
    reward = "reward"
    turns = "turns"
    tokens = "tokens"
    duration = "duration"


def show(
    run: Annotated[Path, typer.Argument(help="Run directory, or a directory written by `agentkit eval --out`.")],
    episode: Annotated[int | None, typer.Option(help="Print this episode completely.", show_default=False)] = None,
    rhythm: Annotated[
        bool, typer.Option("--rhythm", help="With --episode: draw the attention rhythm over its tokens.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --episode: write it to this file, as one page that opens in a browser.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="With --episode: repeat its actions in a sandbox and compare; status 1 if something differs.",
        ),
    ] = False,
    last: Annotated[int, typer.Option(min=1, help="Number of episodes to list, from the end of the order.")] = 20,
    ending: Annotated[Ending | None, typer.Option(help="Only episodes with this use.", show_default=False)] = None,
    step: Annotated[int | None, typer.Option(help="Only episodes of this training step.", show_default=False)] = None,
    env: Annotated[str | None, typer.Option(help="Only episodes of this environment.", show_default=False)] = None,
    outcome: Annotated[
        Outcome | None, typer.Option(help="Only episodes with this outcome.", show_default=False)
    ] = None,
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only episodes whose environment failed with an error that contains this text.",
            show_default=False,
        ),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Only episodes with at least this return.", show_default=False)
    ] = None,
    max_reward: Annotated[
        float | None, typer.Option(help="Only episodes with at most this return.", show_default=False)
    ] = None,
    sort: Annotated[Order, typer.Option(help="Sort key, in ascending order.")] = Order.recorded,
    reverse: Annotated[bool, typer.Option("--reverse", help="Sort in descending order.")] = False,
    sandboxes: Annotated[
        bool, typer.Option("--sandboxes", help="Show what happened to the run's sandboxes, instead of episodes.")
    ] = False,
) -> None:
    """List the episodes of a run, or print one with tokens, log-probabilities, rewards and policy versions."""
    from agentkit import records
    from agentkit.dashboard.queries import token_texts
    from agentkit.jsonl import read_jsonl
    from agentkit.run_directory import RunDirectory

    if rhythm and (episode is None or sandboxes):
        raise typer.BadParameter("--rhythm draws one episode: add --episode N, without --sandboxes")
    if html is not None and (episode is None or sandboxes or rhythm):
        raise typer.BadParameter("--html writes one episode: add --episode N, without --rhythm and --sandboxes")
    if replay and (episode is None or sandboxes or rhythm or html is not None):
        raise typer.BadParameter("--replay repeats one episode: add --episode N, without --html, --rhythm, --sandboxes")
    directory = RunDirectory.open(run)
    if replay and episode is not None:
        _replay(run, episode)
        return
    if html is not None and episode is not None:
        from agentkit.dashboard.episode_page import write_episode_page

        write_episode_page(run, episode, html)
        typer.echo(printable(f"episode {episode} in {html}"))
        return
    if sandboxes:
        lines = sandbox_lines(read_jsonl(directory.metrics_file), read_jsonl(directory.events_file), last)
    elif episode is None:
        wanted = records.Filter(
            ending=ending and ending.value,
            step=step,
            env_id=env,
            outcome=outcome and outcome.value,
            error=error,
            min_reward=min_reward,
            max_reward=max_reward,
        )
        file = directory.episodes_file
        lines = list_lines(records.list_episodes(file, wanted, order=sort.value, reverse=reverse, last=last))
    else:
        row, trajectory = records.read_episode(directory.episodes_file, episode)
        lines = (
            rhythm_lines(directory, row, trajectory, token_texts(directory))
            if rhythm
            else episode_lines(row, trajectory, token_texts(directory))
        )
    for line in lines:
        typer.echo(line)


def _replay(run: Path, episode: int) -> None:
    """Print the comparison of an episode with its replay. Raises ``typer.Exit`` with status 1 if they differ."""
    import asyncio

    from agentkit.cli.heartbeat import watched
    from agentkit.dashboard.replay import replay, replay_lines

    with watched("replaying"):
        found = asyncio.run(replay(run, episode))
    for line in replay_lines(found):
        typer.echo(printable(line))
    if found["difference"] is not None:
        raise typer.Exit(1)


def list_lines(rows: list[EpisodeRow]) -> list[str]:
    """Return a header and one line per episode."""
    if not rows:
        return ["no matching episodes"]
    names = ("id", "step", "group", "member", "seed", "version", "turns", "tokens", "return", "success")
    lines = ["  ".join(f"{name:>7}" for name in names) + "  ended"]
    for row in rows:
        numbers = (row.id, row.step, row.group_id, row.member, row.seed, row.version_started, row.turns, row.tokens)
        cells = (*map(str, numbers), f"{row.reward:.3f}", "yes" if row.success else "no")
        ended = " ".join(filter(None, (row.ending, row.ending_reason, row.outcome, _shortened(row.reason))))
        lines.append("  ".join(f"{cell:>7}" for cell in cells) + f"  {ended}")
    return lines


def _shortened(text: str) -> str:
    """Return one line of at most ``_LONGEST_REASON`` characters."""
    line = " ".join(text.split())
    return printable(line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…")


def episode_lines(row: EpisodeRow, trajectory: Trajectory, text_of: Callable[[list[int]], str] | None) -> list[str]:
    """Return an episode as text: a summary, then observation, answer and reward of each turn.

    Args:
        row: summary of the episode.
        trajectory: the episode.
        text_of: decodes token ids, including special tokens; None if the tokenizer is unknown.
    """
    ended = " ".join(filter(None, (row.ending, row.ending_reason, "·", trajectory.outcome, trajectory.reason)))
    lines = [
        f"episode {row.id}: {trajectory.env_id}, seed {trajectory.seed}, group {trajectory.group_id}, "
        f"member {trajectory.member}, attempt {trajectory.attempt + 1}",
        f"step {row.step}, started with version {trajectory.version_started}, {printable(ended)}",
        f"return {trajectory.reward:.4f}, {'solved' if trajectory.success else 'not solved'}, "
        f"{len(trajectory.turns)} turns, {trajectory.num_tokens} tokens ({trajectory.num_action_tokens} of actions), "
        f"{trajectory.duration_s:.2f} s",
    ]
    if trajectory.metrics:
        lines.append(printable("  ".join(f"{name}={value:g}" for name, value in trajectory.metrics.items())))
    lines += _system_lines(trajectory, text_of)
    for number, turn in enumerate(trajectory.turns, 1):
        prompt = "whole prompt: " if trajectory.rerendered else ""
        lines += _turn_lines(number, turn, prompt, text_of)
    if len(trajectory.final_ids):
        ids = trajectory.final_ids.tolist()
        lines += ["", f"last observation ({len(ids)} tokens):"]
        if text_of:
            lines += _quoted(text_of(ids))
        lines.append(f"  ids {ids}")
    return lines


def _system_lines(trajectory: Trajectory, text_of: Callable[[list[int]], str] | None) -> list[str]:
    """Return the system message. For old records, which have none, return the start of the first prompt."""
    if trajectory.system:
        return ["", "system message:", *_quoted(trajectory.system)]
    if not trajectory.turns or text_of is None or not len(trajectory.turns[0].prompt_ids):
        return []
    first = trajectory.turns[0]
    prompt = text_of(first.prompt_ids.tolist())
    before = prompt.rpartition(first.observation)[0] if first.observation in prompt else prompt
    return ["", "start of the prompt (the system message, rendered with the chat template):", *_quoted(before)]


def _turn_lines(number: int, turn: Turn, prompt: str, text_of: Callable[[list[int]], str] | None) -> list[str]:
    versions = ", ".join(f"{count} by version {version}" for version, count in turn.versions)
    lines = [
        "",
        f"── turn {number}: reward {turn.reward:g}, {'valid' if turn.valid else 'invalid'}, "
        f"actions {list(turn.actions)}, generated in {turn.generate_s:.3f} s, environment {turn.env_s:.3f} s",
        f"observation ({prompt}{len(turn.prompt_ids)} tokens):",
        *_quoted(turn.observation),
        f"  ids {turn.prompt_ids.tolist()}",
        f"answer ({len(turn.action_ids)} tokens: {versions}; ended by {turn.finish_reason}):",
        *_quoted(turn.response),
        f"  {'id':>8}  {'log-prob':>9}  text" if text_of else f"  {'id':>8}  {'log-prob':>9}",
    ]
    for token, logprob in zip(turn.action_ids.tolist(), turn.action_logprobs.tolist(), strict=True):
        lines.append(f"  {token:>8}  {logprob:>9.4f}" + (f"  {text_of([token])!r}" if text_of else ""))
    return lines


def _quoted(text: str) -> list[str]:
    """Indented lines."""
    return [f"  {line}" for line in printable(text).split("\n")]
