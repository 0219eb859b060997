"""Sokoban levels and the XSB text format.

Invariant: a level has a wall on all sides, one player, at least one box and as many boxes as targets. Cells are
numbered row by row, ``row * columns + column``, so a move is an addition; sets of cells are the bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = "# .$*@+"
_ALIASES = str.maketrans("-_", "  ")
_LEVEL_CHARACTERS = frozenset("# .$*@+-_")


class LevelError(ValueError):
    """The text is not a Sokoban level."""


@dataclass(frozen=True)
class Level:
    """A starting position. ``walls``, ``targets`` and ``boxes`` are bit sets over cells; ``player`` is a cell."""

    rows: int
    columns: int
    walls: int
    targets: int
    boxes: int
    player: int

    @property
    def moves(self) -> tuple[int, int, int, int]:
        """Offsets of the cells in the directions Up, Down, Left and Right."""
        return (-self.columns, self.columns, -1, 1)

    def symbol(self, cell: int, player: int, boxes: int) -> str:
        """Return the XSB character of a cell in a position of this level."""
        bit = 1 << cell
        if self.walls & bit:
            return WALL
        if boxes & bit:
            return BOX_ON_TARGET if self.targets & bit else BOX
        if cell == player:
            return PLAYER_ON_TARGET if self.targets & bit else PLAYER
        return TARGET if self.targets & bit else FLOOR

    def text(self) -> str:
        """Return the level as XSB, one line per row."""
        lines = (
            "".join(self.symbol(row * self.columns + column, self.player, self.boxes) for column in range(self.columns))
            for row in range(self.rows)
        )
        return "\n".join(lines)


def parse(text: str) -> Level:
    """Parse one level. Short rows are padded, a missing wall is added, and unreachable floor becomes wall.

    Raises:
        LevelError: an unknown character, not exactly one player, no box, or different numbers of boxes and targets.
    """
    lines = [line.rstrip().translate(_ALIASES) for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        for character in line:
            if character not in _LEVEL_CHARACTERS:
                raise LevelError(f"line {number} holds {character!r}; XSB knows # @ + $ * . and space")
    lines = _closed(lines)
    columns, cells = len(lines[0]), "".join(lines)
    players, boxes, targets = (_where(cells, symbols) for symbols in ("@+", "$*", ".*+"))
    if not boxes or boxes.bit_count() != targets.bit_count():
        raise LevelError(
            f"a level has as many boxes as targets, and at least one; this one has {boxes.bit_count()} boxes and "
            f"{targets.bit_count()} targets"
        )
    return Level(len(lines), columns, _where(cells, "#"), targets, boxes, players.bit_length() - 1)


def _where(cells: str, symbols: str) -> int:
    """Return the cells with one of the given symbols, as a bit set."""
    return sum(1 << cell for cell, symbol in enumerate(cells) if symbol in symbols)


def _closed(lines: list[str]) -> list[str]:
    """Return rows of equal length with walls on all sides and walls instead of unreachable floor."""
    width = max(map(len, lines), default=0)
    lines = ["#" * (width + 2), *(f"#{line.ljust(width)}#" for line in lines), "#" * (width + 2)]
    cells = "".join(lines)
    players = _where(cells, "@+")
    if players.bit_count() != 1:
        raise LevelError(f"a level has one player (@ or +); this one has {players.bit_count()}")
    walls = _where(cells, "#")
    inside = flood(players, ((1 << len(cells)) - 1) & ~walls, width + 2)
    outside = _where(cells, " ") & ~inside
    cells = "".join("#" if outside >> cell & 1 else symbol for cell, symbol in enumerate(cells))
    lines = [cells[start : start + width + 2] for start in range(0, len(cells), width + 2)]
    # The added wall is kept only on the sides where the level is open.
    top, bottom = (int(set(lines[row]) == {"#"}) for row in (1, -2))
    left, right = (int({line[column] for line in lines} == {"#"}) for column in (1, -2))
    return [line[left : len(line) - right] for line in lines[top : len(lines) - bottom]]


def flood(start: int, free: int, columns: int) -> int:
    """Return the cells of ``free`` that are connected to the bit ``start``; the walls at the sides separate rows."""
    reached, before = start, 0
    while reached != before:
        before = reached
        reached |= (reached << 1 | reached >> 1 | reached << columns | reached >> columns) & free
    return reached


def blocks(text: str) -> Iterator[str]:
    """Split a collection into the texts of its levels: sequences of lines that consist only of level characters.

    Titles, comments (``; 12``) and blank lines separate levels.
    """
    current: list[str] = []
    for line in [*text.splitlines(), ""]:
        if "#" in line and _LEVEL_CHARACTERS.issuperset(line.rstrip()):
            current.append(line)
        elif current:
            yield "\n".join(current)
            current = []


def count(folder: Path) -> dict[str, int]:
    """Return the number of levels in the text files of a folder."""
    return {"levels": sum(1 for path in folder.glob("*.txt") for _ in blocks(path.read_text(encoding="utf-8")))}


def cells_of(bits: int) -> Iterator[int]:
    """Yield the cells of a bit set in ascending order."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
