"""Maps, dynamics and optimal policy of FrozenLake, without text.

Invariant: the dynamics are exactly those of gymnasium 1.4's FrozenLake: the same transition probabilities and, for the
same map and generator, the same random draws. A state is the index ``row * columns + column``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

LEFT, DOWN, RIGHT, UP = range(4)
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Row and column offset of each action."""
Split = Literal["train", "test"]
TEST_SHARE = 0.2
"""Fraction of all layouts in ``split="test"``, which are never trained on."""


@dataclass(frozen=True)
class Lake:
    """A map with its dynamics.

    Args:
        rows: strings of S (start), F (frozen), H (hole) and G (goal), all of one length, as in gymnasium. success_rate:
        probability of moving in the intended direction; the two perpendicular directions share the rest. 1 is
            a lake that is not slippery.

    Raises:
        ValueError: the map is not a rectangle of SFHG with at least one S and one G, or the rate is not a probability.
    """

    rows: tuple[str, ...]
    success_rate: float = 1.0

    def __post_init__(self) -> None:
        if not self.rows or any(len(row) != len(self.rows[0]) for row in self.rows):
            raise ValueError(f"desc={list(self.rows)} must be rows of one length")
        cells = "".join(self.rows)
        if set(cells) - set("SFHG") or "S" not in cells or "G" not in cells:
            raise ValueError(f"desc={list(self.rows)} must hold the letters S, F, H, G alone, and at least one S and G")
        if not 0.0 <= self.success_rate <= 1.0:
            raise ValueError(f"success_rate={self.success_rate} must lie between 0 and 1")

    @cached_property
    def cells(self) -> str:
        return "".join(self.rows)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return tuple(i for i, cell in enumerate(self.cells) if cell == "S")

    @cached_property
    def slip(self) -> float:
        """Probability of each of the two perpendicular directions."""
        return (1.0 - self.success_rate) / 2.0

    def start(self, rng: np.random.Generator) -> int:
        """Draw a start cell uniformly."""
        return self.starts[min(int(rng.random() * len(self.starts)), len(self.starts) - 1)]

    def neighbour(self, state: int, action: int) -> int:
        """Return the cell next to ``state``, or ``state`` itself at the border."""
        columns = len(self.rows[0])
        row, column = divmod(state, columns)
        row_change, column_change = MOVES[action]
        row, column = row + row_change, column + column_change
        if not (0 <= row < len(self.rows) and 0 <= column < columns):
            return state
        return row * columns + column

    def move(self, state: int, action: int, rng: np.random.Generator) -> int:
        """Draw the next state. Holes and the goal are absorbing."""
        if self.cells[state] in "HG":
            return state
        if self.success_rate < 1.0:
            # As in gymnasium: the first outcome whose cumulative probability exceeds the draw.
            draw = rng.random()
            if draw < self.slip:
                action = (action - 1) % 4
            elif draw >= self.slip + self.success_rate:
                action = (action + 1) % 4
        return self.neighbour(state, action)

    def transitions(self, state: int, action: int) -> list[tuple[float, int]]:
        """Return the outcomes of a move as ``(probability, next state)``, in gymnasium's order and not merged."""
        if self.cells[state] in "HG":
            return [(1.0, state)]
        if self.success_rate >= 1.0:
            return [(1.0, self.neighbour(state, action))]
        return [
            (self.success_rate if way == action else self.slip, self.neighbour(state, way))
            for way in ((action - 1) % 4, action, (action + 1) % 4)
        ]

    @cached_property
    def policy(self) -> tuple[int, ...]:
        """Return the optimal action of every state, by value iteration; the first one among equals.

        The objective is the probability of reaching the goal, discounted by 0.999 per move: a detour of n moves must
        increase the probability by more than about n thousandths. Without the discount, the best policy on slippery ice
        can be to move against a wall for hundreds of moves, more than an episode has.
        """
        count = len(self.cells)
        outcomes = [[self.transitions(state, action) for action in range(4)] for state in range(count)]
        width = max(len(listed) for per_state in outcomes for listed in per_state)
        probability = np.zeros((count, 4, width))
        target = np.zeros((count, 4, width), np.intp)
        for state, per_state in enumerate(outcomes):
            for action, listed in enumerate(per_state):
                for k, (chance, following) in enumerate(listed):
                    probability[state, action, k], target[state, action, k] = chance, following
        goal = np.array([cell == "G" for cell in self.cells])
        done = np.array([cell in "HG" for cell in self.cells])
        value = _iterate(probability, target, goal, done)
        best = (probability * value[target]).sum(axis=2).round(12).argmax(axis=1)
        return tuple(int(action) for action in best)


def _iterate(
    probability: NDArray[np.float64], target: NDArray[np.intp], goal: NDArray[np.bool_], done: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return the discounted probability of reaching the goal from each state; 1 at the goal."""
    value = goal.astype(np.float64)
    for _ in range(20_000):  # contracts by at least 0.999 per iteration; real maps need far fewer
        following = np.where(done, goal, 0.999 * (probability * value[target]).sum(axis=2).max(axis=1))
        change = float(np.abs(following - value).max())
        value = following
        if change < 1e-12:
            break
    return value


def solvable(rows: Sequence[str]) -> bool:
    """Return whether a start reaches a goal without entering a hole."""
    columns = len(rows[0])
    cells = "".join(rows)
    open_cells = [i for i, cell in enumerate(cells) if cell == "S"]
    seen = set(open_cells)
    while open_cells:
        cell = open_cells.pop()
        column = cell % columns
        around = [cell - columns, cell + columns]
        if column:
            around.append(cell - 1)
        if column < columns - 1:
            around.append(cell + 1)
        for near in around:
            if 0 <= near < len(cells) and near not in seen and cells[near] != "H":
                if cells[near] == "G":
                    return True
                seen.add(near)
                open_cells.append(near)
    return False


def split_of(rows: Sequence[str]) -> Split:
    """Return the part of a layout, decided by its digest alone."""
    digest = hashlib.blake2b("\n".join(rows).encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") < TEST_SHARE * 2**64 else "train"


def random_map(size: int, p: float, rng: np.random.Generator, split: Split | None = None) -> tuple[str, ...]:
    """Draw a solvable square map: start at the top left, goal at the bottom right, other cells frozen with probability
    ``p``.

    Raises:
        ValueError: no such map was found in 10,000 draws, because nearly all cells are holes or the part of the split
        is
            empty.
    """
    last = size * size - 1
    for _ in range(10_000):
        cells = ["F" if draw < p else "H" for draw in rng.random(size * size).tolist()]
        cells[0], cells[last] = "S", "G"
        text = "".join(cells)
        rows = tuple(text[i : i + size] for i in range(0, last, size))
        if (split is None or split_of(rows) == split) and solvable(rows):
            return rows
    raise ValueError(
        f"found no solvable map with size={size}, p={p}, split={split} in 10,000 draws; raise p or, with a split, size"
    )
