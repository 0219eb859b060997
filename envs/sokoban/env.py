"""The Sokoban environment: the text interface of ``game.Sokoban``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.sokoban import game, level, render
from agentkit.envs.sokoban.generator import Split, generate, split_of
from agentkit.envs.spaces import Text

ACTIONS = ("Up", "Down", "Left", "Right")
_CODES = {name.lower(): code for code, name in enumerate(ACTIONS)}
Vocabulary = Literal["symbols", "letters", "words"]
_MEANINGS = ("wall", "floor", "target", "box", "box on a target", "you", "you on a target")
VOCABULARIES: dict[str, tuple[str, ...]] = {
    "symbols": ("#", "_", "O", "X", "√", "P", "S"),
    "letters": ("W", ".", "G", "B", "C", "A", "@"),
    "words": ("wall", "floor", "target", "box", "box_on_target", "player", "player_on_target"),
}
"""Symbols of wall, floor, target, box, box on target, player, and player on target."""
_RULES = (
    "You are in a warehouse. Push every box onto a target. You can push one box at a time, and never pull.\n"
    "{legend}.\n"
    "Actions: Up, Down, Left, Right. A blocked move changes nothing."
)


_COORDINATES = "\nBelow the room: you, then the boxes, then the targets, each with its row and its column."


def _rules(vocabulary: str, coordinates: bool) -> str:
    named = zip(VOCABULARIES[vocabulary], _MEANINGS, strict=True)
    rules = _RULES.format(legend=", ".join(f"{symbol} is {meaning}" for symbol, meaning in named))
    return rules + _COORDINATES if coordinates else rules


class Sokoban(TextEnv):
    """Push all boxes onto targets.

    Action space: ``Up``, ``Down``, ``Left``, ``Right``. Other texts are invalid: they cost a move and change nothing.

    Observation space: the whole position, one symbol or word per cell; optionally also coordinates.

    Rewards: -0.1 for each move, +1 for a box pushed onto a target, -1 for a box pushed off a target, +10 when all
    boxes are on targets, which terminates the episode.

    Args:
        rows: height of generated rooms, including walls.
        columns: width of generated rooms, including walls.
        boxes: number of boxes in generated rooms.
        level: one fixed level as XSB text, instead of generated rooms.
        levels: path of a collection of XSB levels, such as a Boxoban file, instead of generated rooms.
        split: draw from the ``"train"`` or the ``"test"`` part, which share no room; None draws from both.
        vocabulary: how cells are written: ``"symbols"``, ``"letters"`` or ``"words"``.
        coordinates: also show rows and columns of the player, the boxes and the targets, counted from 0.
        render_mode: ``"ansi"``, ``"rgb_array"`` or None.

    Raises:
        ValueError: an argument is out of range, contradicts another, or is not a level.
        OSError: ``levels`` cannot be read.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = _rules("symbols", False)
    max_turns = 20
    actions_per_turn = 5
    concurrency = "inline"
    deterministic = True

    def __init__(
        self,
        *,
        rows: int = 6,
        columns: int = 6,
        boxes: int = 1,
        level: str | None = None,
        levels: str | os.PathLike[str] | None = None,
        split: Split | None = None,
        vocabulary: Vocabulary = "symbols",
        coordinates: bool = False,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if rows < 3 or columns < 3 or boxes < 1 or (rows - 2) * (columns - 2) < 2 * boxes + 1:
            raise ValueError(
                f"rows={rows}, columns={columns}, boxes={boxes}: a room holds at least one box, and inside its walls "
                "there must be a cell for the player, each box and each target"
            )
        if split not in (None, "train", "test"):
            raise ValueError(f"split={split!r} must be 'train', 'test' or None")
        if vocabulary not in VOCABULARIES:
            raise ValueError(f"vocabulary={vocabulary!r} must be one of {', '.join(VOCABULARIES)}")
        if level is not None and (levels is not None or split is not None):
            raise ValueError("level contradicts levels and split: one fixed level is drawn from nowhere; give one")
        self.rows, self.columns, self.boxes = rows, columns, boxes
        self.split: Split | None = split
        self.instructions = _rules(vocabulary, coordinates)
        self.coordinates = coordinates
        self.action_space = Text(examples=ACTIONS)
        self.game: game.Sokoban | None = None
        self._still: list[str] = []
        self._symbols = dict(zip("# .$*@+", VOCABULARIES[vocabulary], strict=True))
        self._fixed = _parsed(level, "level") if level is not None else None
        self._collection = Path(levels) if levels is not None else None
        if self._collection is not None:
            _collection(self._collection)  # fail now, not at the first reset

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        return _rules(kwargs.get("vocabulary", "symbols"), kwargs.get("coordinates", False))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        if self._fixed is not None:
            playing = game.Sokoban(self._fixed)
        elif self._collection is not None:
            playing = game.Sokoban(self._drawn(_collection(self._collection)))
        else:
            room = generate(self.rows, self.columns, self.boxes, self.np_random, self.split)
            playing = game.Sokoban(room.level, room.solution)
        self._begin(playing)
        return self._observe(playing), _info(False, True)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        playing = self.game
        if playing is None or playing.solved:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        code = _CODES.get(action.strip().lower())
        if code is None:
            return self._observe(playing), game.STEP_REWARD, False, False, _info(False, False)
        reward = playing.move(code)
        return self._observe(playing), reward, playing.solved, False, _info(playing.solved, True)

    def expert(self) -> Iterator[str]:
        """Yield moves that solve the room (the fewest in small rooms); none if it can no longer be solved."""
        if self.game is None:
            raise ResetNeeded("call reset() before expert()")
        return (ACTIONS[direction] for direction in self.game.plan())

    def render(self) -> Any:
        """Return the text (``ansi``) or a picture, uint8 ``[rows * 32, columns * 32, 3]`` (``rgb_array``)."""
        if self.game is None:
            raise ResetNeeded("call reset() before render()")
        if self.render_mode == "ansi":
            return self._observe(self.game)
        if self.render_mode == "rgb_array":
            return render.picture(self.game)
        return None

    def _drawn(self, texts: tuple[str, ...]) -> level.Level:
        """Draw a level of the collection from the chosen part."""
        for _ in range(10_000):
            drawn = _parsed(texts[int(self.np_random.integers(len(texts)))], str(self._collection))
            if self.split is None or split_of(drawn) == self.split:
                return drawn
        raise ValueError(f"{self._collection} holds no level of split={self.split!r}; it has {len(texts)} levels")

    def _begin(self, playing: game.Sokoban) -> None:
        """Write the constant cells once: symbols at even positions, separators at odd ones."""
        room = playing.level
        self.game = playing
        self._still = []
        for cell in range(room.rows * room.columns):
            self._still += [self._symbols[room.symbol(cell, -1, 0)], " " if (cell + 1) % room.columns else "\n"]
        self._still[-1] = ""

    def _observe(self, playing: game.Sokoban) -> str:
        text = self._still.copy()
        for cell in level.cells_of(playing.boxes | 1 << playing.player):
            text[2 * cell] = self._symbols[playing.level.symbol(cell, playing.player, playing.boxes)]
        return "".join(text) + (self._located(playing) if self.coordinates else "")

    def _located(self, playing: game.Sokoban) -> str:
        room = playing.level
        named = [("@", playing.player)]
        named += [("$", cell) for cell in level.cells_of(playing.boxes)]
        named += [(".", cell) for cell in level.cells_of(room.targets)]
        places = (f"{self._symbols[kind]} {cell // room.columns} {cell % room.columns}" for kind, cell in named)
        return "\n" + ", ".join(places)


def _info(success: bool, valid: bool) -> Info:
    return {"success": success, "action_valid": valid, "admissible_actions": list(ACTIONS)}


def _parsed(text: str, where: str) -> level.Level:
    try:
        return level.parse(text)
    except level.LevelError as problem:
        raise level.LevelError(f"{where}: {problem}\n{text}") from None


def _collection(path: Path) -> tuple[str, ...]:
    """Return the levels of a file as texts."""
    status = path.stat()
    texts = _read(path, status.st_mtime_ns, status.st_size)
    if not texts:
        raise ValueError(f"{path} holds no Sokoban level; XSB levels consist of lines over # @ + $ * . and space")
    return texts


@lru_cache(maxsize=4)
def _read(path: Path, modified: int, size: int) -> tuple[str, ...]:
    # Cached, so that all environments of a process read a file only once.
    return tuple(level.blocks(path.read_text(encoding="utf-8")))
