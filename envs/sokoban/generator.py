"""Generator of Sokoban rooms: carve, place, play backwards, solve.

Invariant: a generated room comes with moves that solve it, and the same generator state gives the same room on every
machine. A room is played backwards from its solved position by pulling boxes, so it is solvable by construction. The
solver then finds a short solution; if it finds none in time (many boxes in a large room), the reversed backward play is
the solution.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentkit.envs.sokoban.level import Level, cells_of, flood
from agentkit.envs.sokoban.solver import Board, OutOfBudget, Push, solve, write_out

Split = Literal["train", "test"]
TEST_SHARE = 0.2
"""Fraction of all rooms in ``split="test"``, which are never trained on."""
_ATTEMPTS = 2_000
_PATIENCE = 50
"""Attempts in which rooms with less than two pushes per box are rejected; small rooms may allow no more."""
_PLAYS = 4
"""Backward plays of one room; the hardest one is used, because most end close to their start."""
_PROOFS = ((4.0, 500), (30.0, 1_000))
"""Limits of the solver: weight of the bound, and positions."""


class _Draws:
    """Uniform integers from a generator, drawn in blocks, because single draws would dominate the time."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._block: list[float] = []

    def below(self, limit: int) -> int:
        if not self._block:
            self._block = self._rng.random(256).tolist()
        return int(self._block.pop() * limit)


def split_of(level: Level) -> Split:
    """Return the part of a level, decided by the digest of its text."""
    digest = hashlib.blake2b(level.text().encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"


@dataclass(frozen=True)
class Room:
    """A level and moves that solve it (0 Up, 1 Down, 2 Left, 3 Right)."""

    level: Level
    solution: tuple[int, ...]


def generate(rows: int, columns: int, boxes: int, rng: np.random.Generator, split: Split | None = None) -> Room:
    """Draw a solvable room of ``rows`` times ``columns`` cells, including the surrounding wall.

    No box starts on a target.

    Raises:
        ValueError: no room was found in 2,000 attempts, because the boxes do not fit.
    """
    draws = _Draws(rng)
    for attempt in range(_ATTEMPTS):
        floor = _carve(rows, columns, boxes, draws)
        plays = [_play_backwards(rows, columns, floor, boxes, draws) for _ in range(_PLAYS)]
        score, level, pushes = max(plays, key=lambda play: play[0])
        if score < 2 * boxes and attempt < _PATIENCE:
            continue
        if level is not None and (split is None or split_of(level) == split):
            return Room(level, _proof(level, pushes))
    raise ValueError(
        f"found no room with rows={rows}, columns={columns}, boxes={boxes}, split={split} in {_ATTEMPTS} attempts; "
        "make it larger or take fewer boxes"
    )


def _proof(level: Level, pushes: list[Push]) -> tuple[int, ...]:
    """Return a short solution from the solver, or the reversed backward play if the room is too large."""
    board = Board(level)
    for weight, nodes in _PROOFS:
        try:
            solution = solve(board, level.player, level.boxes, weight=weight, max_nodes=nodes)
        except OutOfBudget:
            continue
        assert solution is not None, "a room that was played backwards can be solved"
        return solution.moves
    return write_out(board, level.player, level.boxes, pushes)


def _carve(rows: int, columns: int, boxes: int, draws: _Draws) -> int:
    """Return the floor of a connected room as a bit set, carved by a random walk that is sometimes two cells wide."""
    height, width = rows - 2, columns - 2
    wanted = min(height * width, max(2 * boxes + 3, height * width * (50 + draws.below(26)) // 100))
    row, column, direction = draws.below(height), draws.below(width), draws.below(4)
    floor, dug = 0, 0
    while dug < wanted:
        bit = 1 << ((row + 1) * columns + column + 1)
        if not floor & bit:
            floor |= bit
            dug += 1
        if draws.below(20) < 7:
            direction = draws.below(4)
        row_change, column_change = ((-1, 0), (1, 0), (0, -1), (0, 1))[direction]
        if 0 <= row + row_change < height and 0 <= column + column_change < width:
            row, column = row + row_change, column + column_change
        else:
            direction = draws.below(4)
    return floor


def _play_backwards(
    rows: int, columns: int, floor: int, boxes: int, draws: _Draws
) -> tuple[int, Level | None, list[Push]]:
    """Put boxes on targets, pull them at random, and select the position that is farthest from solved.

    Returns:
        Its distance (the sum over boxes of the pushes to the nearest target), the level, and the pushes that lead back;
        0 and None if in no position all boxes were off the targets.
    """
    cells = list(cells_of(floor))
    if len(cells) < boxes + 1:
        return 0, None, []
    targets = 0
    for _ in range(boxes):
        targets |= 1 << cells.pop(draws.below(len(cells)))
    player = cells[draws.below(len(cells))]
    walls = ((1 << (rows * columns)) - 1) & ~floor
    board = Board(Level(rows, columns, walls, targets, targets, player))
    nearest = [min(column) for column in zip(*board.distances, strict=True)]
    placed, region = targets, flood(1 << player, floor & ~targets, columns)
    trail: list[Push] = []
    positions = [(placed, region)]
    score = farthest = 0
    for _ in range(20 + 40 * boxes):
        free = floor & ~placed
        pulls = [
            (cell, direction)
            for cell in cells_of(placed)
            for direction, move in enumerate(board.moves)
            if region >> (cell + move) & 1 and free >> (cell + 2 * move) & 1
        ]
        if not pulls:
            break
        cell, direction = pulls[draws.below(len(pulls))]
        move = board.moves[direction]
        placed ^= (1 << cell) ^ (1 << (cell + move))
        region = flood(1 << (cell + 2 * move), floor & ~placed, columns)
        # The push that reverts the pull: from the box's current cell, in the opposite direction (Up and Down, Left and
        # Right have consecutive numbers).
        trail.append((cell + move, direction ^ 1))
        positions.append((placed, region))
        distance = 0 if placed & targets else sum(nearest[box] for box in cells_of(placed))
        if distance > score:
            score, farthest = distance, len(trail)
    if not score:
        return 0, None, []
    placed, region = positions[farthest]
    pushes = _without_loops(positions[: farthest + 1], trail)[::-1]
    standing = list(cells_of(region))
    return score, Level(rows, columns, walls, targets, placed, standing[draws.below(len(standing))]), pushes


def _without_loops(positions: list[tuple[int, int]], steps: list[Push]) -> list[Push]:
    """Remove loops that return to a position; ``steps[k]`` leads from ``positions[k]`` to the next one."""
    last = {position: k for k, position in enumerate(positions)}
    kept = []
    k = last[positions[0]]
    while k < len(positions) - 1:
        kept.append(steps[k])
        k = last[positions[k + 1]]
    return kept
