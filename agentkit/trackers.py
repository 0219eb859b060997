"""Trackers: TensorBoard and Weights & Biases.

Invariant: importing this module needs neither. A tracker that cannot start raises before the run starts.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentkit.config import RunConfig
from agentkit.errors import ConfigError
from agentkit.run_directory import RunDirectory
from agentkit.text import printable
from agentkit.types import Trajectory

_LONGEST_TEXT = 10_000
"""Characters of an episode that trackers receive; the page and `agentkit show` have the complete text."""


class Tracker(Protocol):
    """Receiver of metrics and sample episodes. Called from one thread, in the order of steps."""

    name: str

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        """Show a few episodes of the evaluation after ``step`` as text."""
        ...

    def log_samples(self, step: int, samples: Sequence[tuple[int, Trajectory]]) -> None:
        """Show a few episodes on which ``step`` has trained, with their ids, as a table (``SAMPLE_COLUMNS``)."""
        ...

    def rollback(self, step: int) -> None:
        """Hide metrics logged after ``step`` by an earlier process. Called at most once, before the first ``log``."""
        ...

    def close(self) -> None: ...


def open_trackers(config: RunConfig, directory: RunDirectory) -> list[Tracker]:
    """Open the trackers in ``config.trackers``. Raises ``ConfigError`` if one is not installed or cannot start."""
    makers = {"tensorboard": TensorBoardTracker, "wandb": WandbTracker}
    trackers: list[Tracker] = []
    try:
        for name in config.trackers:
            trackers.append(makers[name](config, directory))
    except BaseException:
        for tracker in trackers:
            tracker.close()
        raise
    return trackers


def episode_text(episode: Trajectory) -> str:
    """Return observations, answers and rewards of an episode as text with control characters as escapes."""
    solved = "solved" if episode.success else "not solved"
    parts = [f"{episode.env_id}, seed {episode.seed}: return {episode.reward:g}, {solved}, {episode.outcome}"]
    for number, turn in enumerate(episode.turns, 1):
        parts += [f"--- turn {number}: observation", turn.observation]
        parts += [f"--- turn {number}: answer, reward {turn.reward:g}", turn.response]
    return _shown("\n".join(parts))


SAMPLE_COLUMNS = ("step", "episode", "reward", "outcome", "prompt", "answer")


def sample_row(step: int, id: int, episode: Trajectory) -> tuple[int, int, float, str, str, str]:
    """Return an episode as a row of ``SAMPLE_COLUMNS``, with control characters as escapes.

    The prompt is the system message and the first observation; the answer is all that follows, turn by turn.
    """
    prompt = [part for part in (episode.system, *(turn.observation for turn in episode.turns[:1])) if part]
    answer = [turn.response for turn in episode.turns[:1]]
    for number, turn in enumerate(episode.turns[1:], 2):
        answer += [f"--- turn {number}: observation", turn.observation]
        answer += [f"--- turn {number}: answer", turn.response]
    reason = f": {episode.reason}" if episode.reason else ""
    ended = f"{'solved' if episode.success else 'not solved'}, {episode.outcome}{reason}"
    return step, id, episode.reward, _shown(ended), _shown("\n\n".join(prompt)), _shown("\n".join(answer))


def markdown_table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows of ``SAMPLE_COLUMNS`` as a table in Markdown, in which markup of texts has no effect."""
    lines = [SAMPLE_COLUMNS, ["---"] * len(SAMPLE_COLUMNS), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # A character reference is neither markup of HTML nor of Markdown.
    safe = re.sub(r"[^\w\s.,:;]", lambda match: f"&#{ord(match[0])};", text)
    return re.sub(r"\r?\n", "<br>", safe).replace("_", "&#95;").replace("  ", "&nbsp; ")


def _shown(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _not_installed(name: str) -> ConfigError:
    return ConfigError(f"trackers: {name} is not installed; `pip install 'agentkit-rl[{name}]'`, or remove it")


class TensorBoardTracker:
    """Writes event files to ``logs/tensorboard``; view them with ``tensorboard --logdir RUN/logs/tensorboard``."""

    name = "tensorboard"

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise _not_installed(self.name) from None
        self._make = SummaryWriter
        self._folder = str(directory.logs / "tensorboard")
        self._purge_step: int | None = None
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=self._purge_step)
        # All of imitation happens before the first training step; its own count of updates is its axis.
        axis = int(metrics.get("imitation/updates", step))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, axis)
        self._writer.flush()

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        # TensorBoard renders Markdown, in which indented lines are code: markup in them has no effect.
        texts = ("\n".join(f"    {line}" for line in episode_text(one).splitlines()) for one in episodes)
        self._writer.add_text("eval/episodes", "\n\n---\n\n".join(texts), step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[tuple[int, Trajectory]]) -> None:
        rows = [sample_row(step, id, episode) for id, episode in samples]
        self._writer.add_text("rollout/samples", markdown_table(rows), step)
        self._writer.flush()

    def rollback(self, step: int) -> None:
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandbTracker:
    """A Weights & Biases run. ``WANDB_MODE=offline`` keeps it on this machine; ``WANDB_PROJECT`` names the project."""

    name = "wandb"

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        try:
            import wandb
        except ImportError:
            raise _not_installed(self.name) from None
        id_file = directory.logs / "wandb.id"
        run_id = id_file.read_text() if id_file.exists() else secrets.token_hex(8)
        id_file.write_text(run_id)
        try:
            self._run = wandb.init(
                project=wandb.setup().settings.project or "agentkit",
                name=config.name,
                id=run_id,
                resume="allow",
                dir=str(directory.logs),
                config=config.model_dump(mode="json"),
            )
        except Exception as error:
            raise ConfigError(
                f"trackers: Weights & Biases cannot start ({error}); log in by `wandb login`, set "
                "WANDB_MODE=offline, or leave it out of trackers"
            ) from error
        # An axis of our own: after a roll-back steps come twice, which W&B's internal one would silently drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("imitation/*", step_metric="imitation/updates")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        import wandb

        rows: list[Any] = [[one.seed, one.reward, one.success, len(one.turns), episode_text(one)] for one in episodes]
        table = wandb.Table(columns=["seed", "return", "success", "turns", "episode"], data=rows)
        self._run.log({"step": step, "eval/episodes": table})

    def log_samples(self, step: int, samples: Sequence[tuple[int, Trajectory]]) -> None:
        import wandb

        rows: list[Any] = [list(sample_row(step, id, episode)) for id, episode in samples]
        self._run.log({"step": step, "rollout/samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows)})

    def rollback(self, step: int) -> None:
        """Do nothing: W&B keeps what it received; repeated steps appear beside it on the axis ``step``."""

    def close(self) -> None:
        self._run.finish()
