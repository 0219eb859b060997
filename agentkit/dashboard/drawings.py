"""Pictures and pages of the states of a recorded episode, drawn by its environment.

Invariant: an episode is drawn only while the replayed environment says what the record says; from the first difference
on, nothing is drawn.
"""

from __future__ import annotations

import base64
import inspect
import struct
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentkit import records, registry
from agentkit.config import RunConfig
from agentkit.errors import AgentkitError
from agentkit.run_directory import RunDirectory
from agentkit.types import Trajectory

_MODE = "rgb_array"
_MOST_PIXELS = 4_000_000
_PNG = b"\x89PNG\r\n\x1a\n"


class Drawing(NamedTuple):
    """What an environment draws of an episode: of the state before each turn, and after the last one."""

    pictures: list[str | None]
    """PNGs as ``data:`` addresses."""
    pages: list[str]
    """HTML of environments with web pages. It is not trusted."""
    note: str
    """Why something is missing; empty if the environment draws nothing."""


def draw_episode(path: Path, number: int) -> dict[str, Any]:
    """Return ``pictures``, the number of ``pages``, and the ``note`` of a ``Drawing``."""
    drawing = drawing_of(path, number)
    return {"pictures": drawing.pictures, "pages": len(drawing.pages), "note": drawing.note}


def drawing_of(path: Path, number: int) -> Drawing:
    """Draw an episode: its environment repeats the actions from the seed, in this process.

    Only deterministic environments that draw pictures or pages are replayed, and none that the run kept in a sandbox.

    Args:
        path: the run.
        number: id of the episode.

    Raises:
        RunDirectoryError: the run has no such episode.
    """
    row, _ = records.read_episode(RunDirectory.open(path).episodes_file, number)
    return _drawing(path, row)


@lru_cache(maxsize=4)
def _drawing(path: Path, row: records.EpisodeRow) -> Drawing:
    run = RunDirectory.open(path)
    _, trajectory = records.read_episode(run.episodes_file, row.id)
    try:
        config = run.config()
        if config.env.sandbox != "none" or not _draws(config.env.id) or trajectory.env_id != config.env.id:
            return Drawing([], [], "")
        return _replayed(config, trajectory, evaluated=row.ending == records.EVALUATION)
    except AgentkitError as error:
        return Drawing([], [], f"The environment cannot draw the episode: {error}")


def _draws(id: str) -> bool:
    kind = registry.env_class(id)
    return (
        (_draws_pictures(kind) or hasattr(kind, "page"))
        and kind.deterministic is True
        and not inspect.iscoroutinefunction(kind.step)
    )


def _draws_pictures(kind: Any) -> bool:
    return _MODE in getattr(kind, "metadata", {}).get("render_modes", [])


def _replayed(config: RunConfig, trajectory: Trajectory, *, evaluated: bool) -> Drawing:
    kwargs = {**config.env.kwargs, **(config.evaluation.kwargs if evaluated else {})}
    if paints := _draws_pictures(registry.env_class(config.env.id)):
        kwargs["render_mode"] = _MODE
    env, drawing = registry.make(config.env.id, **kwargs), Drawing([], [], "")

    def draw() -> None:
        if paints:
            drawing.pictures.append(png(env.render()))
        else:
            drawing.pages.append(str(env.page()))

    try:
        said, over = env.reset(seed=trajectory.seed)[0], False
        for number, (turn, state) in enumerate(zip(trajectory.turns, trajectory.states, strict=True), 1):
            if said not in state:
                note = f"From turn {number} on, the environment says something else than the record."
                return drawing._replace(note=note)
            draw()
            for action in turn.actions:
                if not over:
                    said, _, terminated, truncated, _ = env.step(action)
                    over = terminated or truncated
        draw()
    except AgentkitError:
        raise
    except Exception as error:  # of the environment's code
        return drawing._replace(note=f"The environment failed: {type(error).__name__}: {error}")
    finally:
        env.close()
    return drawing


def png(picture: Any) -> str | None:
    """Return a picture as the ``data:`` address of a PNG (RFC 2083); None if it is none, or too large.

    Args:
        picture: uint8 ``[height, width, 3 or 4]``.
    """
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3:
        return None
    height, width, channels = picture.shape
    if channels not in (3, 4) or not 0 < height * width <= _MOST_PIXELS:
        return None
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 6, 0, 0, 0)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)  # filter 0
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    content = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(_PNG + content).decode()}"
