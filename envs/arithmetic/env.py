"""The Arithmetic environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.spaces import Text
from agentkit.envs.task_files import Split, check_split, part_of

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_INTEGER = re.compile(r"-?[0-9]{1,30}")


class Arithmetic(TextEnv):
    """Answer a question such as "What is 17 + 5?". An episode is one step.

    Action space: an integer in decimal digits.

    Observation space: the question; after the step, whether the answer is correct.

    Rewards: 1 for the correct answer, otherwise 0.

    Args:
        largest: the largest number of a question; the smallest is 0. Differences are never negative.
        operations: the operations that questions use, of ``+``, ``-`` and ``*``.
        split: draw questions from the ``"train"`` or the ``"test"`` part, which share none; None draws from both.
        render_mode: ``"ansi"`` or None.

    Raises:
        ValueError: an argument is out of range.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = "Answer the question.\nAction: the result in digits"
    max_turns = 1
    actions_per_turn = 1
    concurrency = "inline"
    deterministic = True

    def __init__(
        self,
        *,
        largest: int = 99,
        operations: str = "+-",
        split: Split | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not 9 <= largest <= 999_999:
            raise ValueError(f"largest={largest} must lie between 9 and 999999")
        if not operations or not set(operations) <= set(OPERATIONS):
            raise ValueError(f"operations={operations!r} must consist of {' '.join(OPERATIONS)}")
        check_split(split)
        self.largest, self.operations, self.split = largest, operations, split
        self.action_space = Text(examples=("42",))
        self.result: int | None = None
        self._text = ""
        self._done = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        while True:
            first, second = (int(number) for number in self.np_random.integers(self.largest + 1, size=2))
            operation = self.operations[int(self.np_random.integers(len(self.operations)))]
            if operation == "-":
                first, second = max(first, second), min(first, second)
            self._text = f"What is {first} {operation} {second}?"
            if self.split is None or part_of(self._text) == self.split:
                break
        self.result, self._done = OPERATIONS[operation](first, second), False
        return self._text, {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._done or self.result is None:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        self._done = True
        valid = _INTEGER.fullmatch(action.strip()) is not None
        success = valid and int(action) == self.result
        self._text = "Correct." if success else "Wrong." if valid else "Not a number."
        return self._text, float(success), True, False, {"success": success, "action_valid": valid}

    def expert(self) -> Iterator[str]:
        """Yield the correct answer."""
        if self.result is None:
            raise ResetNeeded("call reset() before expert()")
        if not self._done:
            yield str(self.result)

    def render(self) -> Any:
        """Return the last observation (``ansi``)."""
        return self._text if self.render_mode == "ansi" else None
