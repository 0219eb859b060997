"""Solver for Sokoban: A* over pushes, minimizing moves or pushes.

Invariant: a returned solution is legal and leaves every box on a target. If the node limit was not reached, it is
optimal in its metric, and None means that no solution exists. Only positions that are provably lost are pruned.

A node is a position just after a push. The bound is the cheapest assignment of boxes to targets, where the distance of
a box to a target is the number of pushes on the board without other boxes; it never overestimates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agentkit.envs.sokoban.level import Level, cells_of

FAR = 1 << 20
"""A distance larger than all real ones: the target cannot be reached."""
_ASSIGNED_BOXES = 5
"""Up to this number of boxes the bound is an exact assignment; beyond it, each box takes its nearest target."""


class OutOfBudget(Exception):
    """The node limit was reached without an answer."""


Push = tuple[int, int]
"""Cell of the box before the push, and the direction (0 Up, 1 Down, 2 Left, 3 Right)."""


class Board:
    """Distances and dead cells of a level, computed once from its walls and targets."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.moves = level.moves
        self.columns = level.columns
        self.floor = ((1 << (level.rows * level.columns)) - 1) & ~level.walls
        self.distances = [self._pushes_to(target) for target in cells_of(level.targets)]
        count = level.rows * level.columns
        self.live = sum(1 << cell for cell in range(count) if any(table[cell] < FAR for table in self.distances))
        self._bounds: dict[int, int] = {}
        # The four squares of two by two cells that contain a cell.
        c = self.columns
        self._squares = [sum(1 << (corner + offset) for offset in (0, 1, c, c + 1)) for corner in range(count - c - 1)]

    def _pushes_to(self, target: int) -> list[int]:
        """Return the fewest pushes of a single box from each cell to ``target``, found by pulling it from there."""
        table = [FAR] * (self.level.rows * self.level.columns)
        table[target] = 0
        queue = [target]
        for cell in queue:
            for move in self.moves:
                box, player = cell - move, cell - 2 * move  # cells of box and player before the push
                if self.floor >> box & 1 and player >= 0 and self.floor >> player & 1 and table[box] == FAR:
                    table[box] = table[cell] + 1
                    queue.append(box)
        return table

    def bound(self, boxes: int) -> int:
        """Return a lower bound of the pushes; ``FAR`` or more if some box can reach no free target."""
        known = self._bounds.get(boxes)
        if known is None:
            known = self._bounds[boxes] = self._assign(list(cells_of(boxes)))
        return known

    def _assign(self, boxes: list[int]) -> int:
        if len(boxes) > _ASSIGNED_BOXES:
            return sum(min(table[box] for table in self.distances) for box in boxes)
        # Dynamic programming over sets of occupied targets, box by box.
        best = {0: 0}
        for box in boxes:
            following: dict[int, int] = {}
            for taken, cost in best.items():
                for k, table in enumerate(self.distances):
                    if not taken >> k & 1 and table[box] < FAR:
                        key = taken | 1 << k
                        total = cost + table[box]
                        if total < following.get(key, FAR):
                            following[key] = total
            best = following
        return min(best.values(), default=FAR)

    def stuck(self, box: int, boxes: int) -> bool:
        """Return whether the box at ``box`` is in a square of walls and boxes that can never be opened again."""
        blocked = boxes | ~self.floor
        loose = boxes & ~self.level.targets
        for corner in (box, box - 1, box - self.columns, box - self.columns - 1):
            square = self._squares[corner]
            if blocked & square == square and loose & square:
                return True
        return False

    def layers(self, player: int, boxes: int) -> list[int]:
        """Yield the cells that the player reaches in 0, 1, 2, … moves without pushing, as bit sets."""
        free = self.floor & ~boxes
        frontier = seen = 1 << player
        found = []
        while frontier:
            found.append(frontier)
            grown = frontier << 1 | frontier >> 1 | frontier << self.columns | frontier >> self.columns
            frontier = grown & free & ~seen
            seen |= frontier
        return found


@dataclass(frozen=True)
class Solution:
    """Moves (0 Up, 1 Down, 2 Left, 3 Right) that solve a position, and the number of expanded positions."""

    moves: tuple[int, ...]
    pushes: int
    nodes: int


def solve(
    board: Board,
    player: int,
    boxes: int,
    *,
    metric: Literal["moves", "pushes"] = "moves",
    weight: float = 1.0,
    max_nodes: int | None = None,
) -> Solution | None:
    """Find a solution from a position; return None if there is none.

    Args:
        board: the level's walls and targets.
        player: cell of the player.
        boxes: cells of the boxes, as a bit set.
        metric: what to minimize.
        weight: of the bound; the solution costs at most ``weight`` times the optimum, and large weights are fast.
        max_nodes: largest number of positions to expand.

    Raises:
        OutOfBudget: ``max_nodes`` positions were expanded without an answer.
    """
    targets = board.level.targets
    walking = metric == "moves"
    parents: dict[tuple[int, int], tuple[tuple[int, int], Push] | None] = {}
    best: dict[tuple[int, int], int] = {}
    queue: list[tuple[float, int, int, tuple[int, int], tuple[tuple[int, int], Push] | None]] = []
    start = (player, boxes)
    best[start] = 0
    if board.bound(boxes) < FAR:
        queue.append((0.0, 0, 0, start, None))
    serial = nodes = 0
    expanded: set[tuple[int, int]] = set()
    while queue:
        _, _, negative_cost, node, origin = heapq.heappop(queue)
        cost = -negative_cost
        player, boxes = node
        if boxes == targets:
            parents[node] = origin
            return _unroll(board, parents, node, start, nodes)
        layers = board.layers(player, boxes)
        key = node if walking else (_region(layers), boxes)
        if key in expanded:
            continue
        expanded.add(key)
        parents[node] = origin
        nodes += 1
        if max_nodes is not None and nodes > max_nodes:
            raise OutOfBudget(f"no answer after {max_nodes} positions")
        for push, walk, after in _pushes(board, boxes, layers):
            box, direction = push
            following = (box, after)
            total = cost + (walk + 1 if walking else 1)
            if total >= best.get(following, FAR):
                continue
            bound = board.bound(after)
            if bound >= FAR or board.stuck(box + board.moves[direction], after):
                continue
            best[following] = total
            serial += 1
            heapq.heappush(queue, (total + weight * bound, bound, -total, following, (node, push)))
    return None


def _region(layers: list[int]) -> int:
    """Return the canonical cell of the player's region."""
    region = 0
    for layer in layers:
        region |= layer
    return region


def _pushes(board: Board, boxes: int, layers: list[int]) -> Iterator[tuple[Push, int, int]]:
    """Yield every possible push: box and direction, the walk to it, and the boxes after it."""
    region = _region(layers)
    allowed = board.live & ~boxes
    for box in cells_of(boxes):
        for direction, move in enumerate(board.moves):
            if region >> (box - move) & 1 and allowed >> (box + move) & 1:
                stand = 1 << (box - move)
                walk = next(k for k, layer in enumerate(layers) if layer & stand)
                yield (box, direction), walk, boxes ^ (1 << box) ^ (1 << (box + move))


def _unroll(
    board: Board,
    parents: dict[tuple[int, int], tuple[tuple[int, int], Push] | None],
    node: tuple[int, int],
    start: tuple[int, int],
    nodes: int,
) -> Solution:
    """Follow the parents back, and write out the walks."""
    pushes: list[Push] = []
    while (origin := parents[node]) is not None:
        node, push = origin
        pushes.append(push)
    return Solution(write_out(board, *start, pushes[::-1]), len(pushes), nodes)


def write_out(board: Board, player: int, boxes: int, pushes: list[Push]) -> tuple[int, ...]:
    """Convert pushes to single moves, with shortest walks between them."""
    moves: list[int] = []
    for box, direction in pushes:
        move = board.moves[direction]
        moves += _walk(board, player, box - move, boxes)
        moves.append(direction)
        boxes ^= (1 << box) ^ (1 << (box + move))
        player = box
    return tuple(moves)


def _walk(board: Board, player: int, goal: int, boxes: int) -> list[int]:
    """Return a shortest walk from ``player`` to ``goal`` around the boxes."""
    layers = board.layers(player, boxes)
    distance = next(k for k, layer in enumerate(layers) if layer >> goal & 1)
    path = []
    for k in range(distance - 1, -1, -1):
        direction = next(d for d, move in enumerate(board.moves) if layers[k] >> (goal - move) & 1)
        path.append(direction)
        goal -= board.moves[direction]
    return path[::-1]
