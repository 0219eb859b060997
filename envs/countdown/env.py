"""The Countdown environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.countdown.expression import Expression, ExpressionError, evaluate
from agentkit.envs.countdown.game import Split, Task, draw, solve
from agentkit.envs.spaces import Text

_EXAMPLES = ("7", "7 - 3", "(7 - 3) * 5", "(7 - 3) * 5 + 2", "(7 - 3) * 5 + 2 - 6", "(7 - 3) * 5 + 2 - 6 / 2")
"""Examples of expressions with one number, two numbers, and so on."""
_NUMBERS = 4


def _rules(numbers: int) -> str:
    """Return the instructions for a count of numbers; the default ones if the count is invalid."""
    example = dict(enumerate(_EXAMPLES, 1)).get(numbers, _EXAMPLES[_NUMBERS - 1])
    return (
        "Combine the numbers into the target with + - * / and parentheses. "
        "Use every number exactly once, and no other number.\n"
        f"Action: the expression alone, such as {example}"
    )


class Countdown(TextEnv):
    """Reach a target from given numbers by arithmetic. An episode is one step.

    Action space: an arithmetic expression, which is parsed and never executed.

    Observation space: the numbers and the target; after the step, whether and why the expression is wrong.

    Rewards: 1 for an expression that uses every number once and equals the target exactly, otherwise 0.

    Args:
        numbers: how many numbers a task has.
        max_number: largest number.
        max_target: largest target; the smallest is 1.
        split: draw tasks from the ``"train"`` or the ``"test"`` part, which share no task; None draws from both.
        render_mode: ``"ansi"`` or None.

    Raises:
        ValueError: an argument is out of range.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = _rules(_NUMBERS)
    max_turns = 1
    actions_per_turn = 1
    concurrency = "inline"
    deterministic = True

    def __init__(
        self,
        *,
        numbers: int = _NUMBERS,
        max_number: int = 25,
        max_target: int = 100,
        split: Split | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not 1 <= numbers <= len(_EXAMPLES):
            raise ValueError(f"numbers={numbers} must lie between 1 and 6 (the solver tries every combination)")
        if not 1 <= max_number <= 999_999:
            raise ValueError(f"max_number={max_number} must lie between 1 and 999999")
        if max_target < 1:
            raise ValueError(f"max_target={max_target} must be at least 1")
        if split not in (None, "train", "test"):
            raise ValueError(f"split={split!r} must be 'train', 'test' or None")
        self.numbers, self.max_number, self.max_target = numbers, max_number, max_target
        self.split: Split | None = split
        self.instructions = _rules(numbers)
        self.action_space = Text(examples=(_EXAMPLES[numbers - 1],))
        self.task: Task | None = None
        self._text = ""
        self._done = True

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        return _rules(kwargs.get("numbers", _NUMBERS))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        task = draw(self.numbers, self.max_number, self.max_target, self.np_random, self.split)
        self.task, self._done = task, False
        self._text = f"Numbers: {' '.join(map(str, task.numbers))}\nTarget: {task.target}"
        return self._text, {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._done or self.task is None:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        self._done = True
        try:
            expression = evaluate(action)
        except ExpressionError as problem:
            self._text = f"Not an expression: {problem}."
            return self._text, 0.0, True, False, {"success": False, "action_valid": False}
        success = self.task.solved_by(expression)
        self._text = "Correct." if success else _wrong(expression, self.task)
        return self._text, float(success), True, False, {"success": success, "action_valid": True}

    def expert(self) -> Iterator[str]:
        """Yield an expression that solves the task."""
        if self.task is None:
            raise ResetNeeded("call reset() before expert()")
        if not self._done:
            solution = solve(self.task)
            assert solution is not None, "a drawn task is solvable"
            yield solution

    def render(self) -> Any:
        """Return the last observation (``ansi``)."""
        return self._text if self.render_mode == "ansi" else None


def _wrong(expression: Expression, task: Task) -> str:
    """Return why an expression is not a solution."""
    if expression.value == task.target:
        return "Wrong: every number must be used exactly once, and no other."
    value = str(expression.value)
    return f"Wrong: the value is {value if len(value) <= 20 else 'far off'}, not {task.target}."
