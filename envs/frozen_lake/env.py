"""The FrozenLake environment: the text interface of ``game.Lake``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.frozen_lake import render
from agentkit.envs.frozen_lake.game import Lake, Split, random_map
from agentkit.envs.spaces import Text

ACTIONS = ("Left", "Down", "Right", "Up")
_CODES = {name.lower(): code for code, name in enumerate(ACTIONS)}
_SYMBOLS = str.maketrans({"S": "_", "F": "_", "H": "O", "G": "G"})


class FrozenLake(TextEnv):
    """Cross a frozen lake without falling into a hole.

    Action space: ``Left``, ``Down``, ``Right``, ``Up``. Other texts are invalid and change nothing.

    Observation space: the whole map, one symbol per cell, separated by spaces.

    Rewards: 1 at the goal, otherwise 0. The goal and a hole terminate the episode.

    Args:
        size: rows and columns of random maps.
        p: probability that a cell is frozen.
        is_slippery: a move succeeds only with probability ``success_rate``; otherwise it goes to either side.
        success_rate: see ``is_slippery``.
        desc: a fixed map instead of random ones: rows of S (start), F (frozen), H (hole) and G (goal).
        split: draw random maps from the ``"train"`` or the ``"test"`` part, which share no map; None draws from both.
        render_mode: ``"ansi"``, ``"rgb_array"`` or None.

    Raises:
        ValueError: an argument is out of range, or contradicts another.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = (
        "You walk on a frozen lake. Reach the goal without falling into a hole.\n"
        "P is you, _ is ice, O is a hole, G is the goal.\n"
        "Actions: Left, Down, Right, Up. A move off the grid changes nothing."
    )
    max_turns = 20
    actions_per_turn = 5
    concurrency = "inline"
    deterministic = True

    def __init__(
        self,
        *,
        size: int = 4,
        p: float = 0.8,
        is_slippery: bool = False,
        success_rate: float = 1.0 / 3.0,
        desc: Sequence[str] | None = None,
        split: Split | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if size < 2:
            raise ValueError(f"size={size} must be at least 2, so that start and goal differ")
        if not 0.0 < p <= 1.0:
            raise ValueError(f"p={p} must lie in (0, 1]")
        if not 0.0 <= success_rate <= 1.0:
            raise ValueError(f"success_rate={success_rate} must lie between 0 and 1")
        if split not in (None, "train", "test"):
            raise ValueError(f"split={split!r} must be 'train', 'test' or None")
        if desc is not None and split is not None:
            raise ValueError("desc and split contradict: a fixed map belongs to one part; give one of them")
        self.size, self.p = size, p
        self.split: Split | None = split
        self._success_rate = success_rate if is_slippery else 1.0
        self._fixed = Lake(tuple(desc), self._success_rate) if desc is not None else None
        self.action_space = Text(examples=ACTIONS)
        self.lake: Lake | None = None
        self.state = 0
        self._steps = 0

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        if kwargs.get("is_slippery"):
            return cls.instructions + "\nThe ice is slippery: a move may take you to either side instead."
        return cls.instructions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        lake = self._fixed or Lake(random_map(self.size, self.p, self.np_random, self.split), self._success_rate)
        self.lake = lake
        self.state = lake.start(self.np_random)
        self._steps = 0
        columns = len(lake.rows[0])
        cells = lake.cells.translate(_SYMBOLS)
        self._text = "\n".join(" ".join(cells[i : i + columns]) for i in range(0, len(cells), columns))
        return self._observe(), _info(False, True)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        lake = self.lake
        if lake is None or lake.cells[self.state] in "HG":
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        code = _CODES.get(action.strip().lower())
        if code is None:
            return self._observe(), 0.0, False, False, _info(False, False)
        self.state = lake.move(self.state, code, self.np_random)
        self._steps += 1
        cell = lake.cells[self.state]
        success = cell == "G"
        return self._observe(), float(success), success or cell == "H", False, _info(success, True)

    def expert(self) -> Iterator[str]:
        """Yield optimal moves: the whole path if the ice is not slippery, otherwise one move."""
        lake = self.lake
        if lake is None:
            raise ResetNeeded("call reset() before expert()")
        state, steps = self.state, self._steps
        while lake is self.lake and lake.cells[state] not in "HG":
            action = lake.policy[state]
            yield ACTIONS[action]
            if lake.success_rate < 1.0:
                if self._steps == steps:  # the outcome of the move is not known yet
                    return
                state, steps = self.state, self._steps
            else:
                state = lake.neighbour(state, action)

    def render(self) -> Any:
        """Return the text (``ansi``) or a picture, uint8 ``[rows * 32, columns * 32, 3]`` (``rgb_array``)."""
        if self.lake is None:
            raise ResetNeeded("call reset() before render()")
        if self.render_mode == "ansi":
            return self._observe()
        if self.render_mode == "rgb_array":
            return render.picture(self.lake, self.state)
        return None

    def _observe(self) -> str:
        # One separator follows every cell, so the position in the text is twice the index of the cell.
        assert self.lake is not None
        place = 2 * self.state
        symbol = {"H": "X", "G": "√"}.get(self.lake.cells[self.state], "P")
        return f"{self._text[:place]}{symbol}{self._text[place + 1 :]}"


def _info(success: bool, valid: bool) -> Info:
    return {"success": success, "action_valid": valid, "admissible_actions": list(ACTIONS)}
