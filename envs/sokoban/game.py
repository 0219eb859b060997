"""The rules of Sokoban on a position that changes with each move.

Invariant: the number of boxes is constant, no two objects share a cell, and none is in a wall.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentkit.envs.sokoban.level import Level
from agentkit.envs.sokoban.solver import Board, OutOfBudget, solve

STEP_REWARD = -0.1
BOX_REWARD = 1.0
FINISH_REWARD = 10.0
# Limits of the expert's search: weight of the bound, and positions. Optimal on small rooms, at most twice the
# optimum on usual ones, any solution on the largest.
_EFFORTS = ((1.0, 1_000), (2.0, 2_000), (4.0, 3_000), (30.0, 20_000))


class Sokoban:
    """A game in progress. ``player`` is a cell, ``boxes`` a bit set over cells."""

    def __init__(self, level: Level, solution: Sequence[int] = ()) -> None:
        """Start a level. ``solution``: known moves that solve it, used if the solver finds none in time."""
        self.level = level
        self.player = level.player
        self.boxes = level.boxes
        self._board: Board | None = None
        self._known: dict[tuple[int, int], int] = {}
        self._planned: dict[tuple[int, int], int] = {}
        _remember(level, level.player, level.boxes, solution, self._known)

    @property
    def solved(self) -> bool:
        return self.boxes == self.level.targets

    def move(self, direction: int) -> float:
        """Walk or push; blocked moves change nothing.

        Returns:
            The reward: -0.1 for the move, +1 for a box pushed onto a target, -1 for one pushed off, +10 for the last
            one.
        """
        level = self.level
        player, boxes = _moved(level, self.player, self.boxes, level.moves[direction])
        gained = (boxes & level.targets).bit_count() - (self.boxes & level.targets).bit_count()
        self.player, self.boxes = player, boxes
        return STEP_REWARD + BOX_REWARD * gained + (FINISH_REWARD if gained and self.solved else 0.0)

    def plan(self) -> Iterator[int]:
        """Return moves that solve the current position; none if it is lost or exceeds the solver's limits."""
        player, boxes = self.player, self.boxes
        while boxes != self.level.targets:
            if (player, boxes) not in self._planned:
                self._search(player, boxes)
            direction = self._planned.get((player, boxes))
            if direction is None:
                return
            yield direction
            player, boxes = _moved(self.level, player, boxes, self.level.moves[direction])

    def _search(self, player: int, boxes: int) -> None:
        """Plan from a position, within the limits of the search."""
        if self._board is None:
            self._board = Board(self.level)
        for weight, nodes in _EFFORTS:
            try:
                solution = solve(self._board, player, boxes, weight=weight, max_nodes=nodes)
            except OutOfBudget:
                continue
            if solution is not None:
                _remember(self.level, player, boxes, solution.moves, self._planned)
            return
        self._planned.update(self._known)


def _remember(level: Level, player: int, boxes: int, solution: Sequence[int], plan: dict[tuple[int, int], int]) -> None:
    """Store the next move of every position along a solution."""
    for direction in solution:
        plan[player, boxes] = direction
        player, boxes = _moved(level, player, boxes, level.moves[direction])


def _moved(level: Level, player: int, boxes: int, move: int) -> tuple[int, int]:
    """Return player and boxes after one move."""
    ahead, beyond = player + move, player + 2 * move
    if level.walls >> ahead & 1:
        return player, boxes
    if boxes >> ahead & 1:
        if (level.walls | boxes) >> beyond & 1:
            return player, boxes
        boxes ^= (1 << ahead) ^ (1 << beyond)
    return ahead, boxes
