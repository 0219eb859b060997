"""The Invoice environment."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

from gymnasium.error import ResetNeeded

from agentkit.envs.base import Info, TextEnv
from agentkit.envs.countdown.expression import ExpressionError, evaluate
from agentkit.envs.spaces import Text
from agentkit.tool_calls import Tool, ToolCall, ToolCallError, action_of, call_of

ITEMS = ("bench", "bowl", "chair", "clock", "desk", "lamp", "mirror", "plate", "rug", "shelf", "stool", "vase")
_MAX_QUANTITY = 9
_MAX_PRICE = 99
_TEST_SHARE = 0.2


def _tool(name: str, description: str, argument: str, schema: dict[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": {argument: schema}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class Invoice(TextEnv):
    """Compute the total of an order with tools. Prices have to be looked up.

    Action space: a call of ``price``, ``calculate`` or ``submit``, as ``{"name": …, "arguments": {…}}``.

    Observation space: the order; after a call, its result.

    Rewards: 1 for submitting the right total, otherwise 0. Submitting ends the episode.

    Args:
        lines: number of different items in an order.
        split: draw tasks from the ``"train"`` or the ``"test"`` part, which share no task; None draws from both.
        render_mode: ``"ansi"`` or None.

    Raises:
        ValueError: an argument is out of range.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (gymnasium's own declaration)
    instructions = (
        "Compute the total of the order: the sum of quantity times price over its items. Look up each price, then "
        "submit the total."
    )
    tools = (
        _tool("price", "Return the price of one piece of an item.", "item", {"type": "string"}),
        _tool(
            "calculate",
            "Return the value of an arithmetic expression with + - * / and parentheses.",
            "expression",
            {"type": "string"},
        ),
        _tool("submit", "Submit the total of the order. This ends the task.", "total", {"type": "integer"}),
    )
    max_turns = 10
    concurrency = "inline"

    def __init__(
        self, *, lines: int = 3, split: Literal["train", "test"] | None = None, render_mode: str | None = None
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not 1 <= lines <= 6:
            raise ValueError(f"lines={lines} must lie between 1 and 6")
        if split not in (None, "train", "test"):
            raise ValueError(f"split={split!r} must be 'train', 'test' or None")
        self.lines, self.split = lines, split
        examples = (("price", "item", "lamp"), ("calculate", "expression", "2 * 17"), ("submit", "total", 34))
        self.action_space = Text(
            examples=tuple(action_of(ToolCall(name, {argument: value})) for name, argument, value in examples)
        )
        self.order: dict[str, int] = {}
        """Quantity of each item."""
        self.prices: dict[str, int] = {}
        self._text = ""
        self._done = True

    @property
    def total(self) -> int:
        """The right answer."""
        return sum(quantity * self.prices[item] for item, quantity in self.order.items())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        while True:
            chosen = self.np_random.permutation(len(ITEMS))[: self.lines]
            quantities = self.np_random.integers(1, _MAX_QUANTITY + 1, self.lines)
            prices = self.np_random.integers(1, _MAX_PRICE + 1, len(ITEMS))
            self.order = {ITEMS[k]: int(quantity) for k, quantity in zip(chosen, quantities, strict=True)}
            self.prices = dict(zip(ITEMS, map(int, prices), strict=True))
            if self.split in (None, self._part()):
                break
        self._done = False
        self._text = "Order: " + ", ".join(f"{quantity} {item}" for item, quantity in self.order.items())
        return self._text, {"success": False, "action_valid": True}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self._done:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        try:
            call = call_of(action, self.tools)
            self._text = self._carry_out(call)
        except (ToolCallError, ExpressionError) as problem:
            self._text = f"Error: {problem}."
            return self._text, 0.0, False, False, {"success": False, "action_valid": False}
        success = self._done and call.arguments["total"] == self.total
        return self._text, float(success), self._done, False, {"success": success, "action_valid": True}

    def expert(self) -> Iterator[str]:
        """Yield calls that solve the task: all prices, the total, and its submission."""
        if self._done:
            return
        for item in self.order:
            yield action_of(ToolCall("price", {"item": item}))
        products = (f"{quantity} * {self.prices[item]}" for item, quantity in self.order.items())
        yield action_of(ToolCall("calculate", {"expression": " + ".join(products)}))
        yield action_of(ToolCall("submit", {"total": self.total}))

    def render(self) -> Any:
        """Return the last observation (``ansi``)."""
        return self._text if self.render_mode == "ansi" else None

    def _carry_out(self, call: ToolCall) -> str:
        """Return the result of a call. Raises ``ToolCallError`` or ``ExpressionError`` if it has none."""
        if call.name == "calculate":
            return str(evaluate(call.arguments["expression"]).value)
        if call.name == "price":
            item = call.arguments["item"]
            if item not in self.prices:
                raise ToolCallError(f"there is no item {item!r:.80}; the items are {', '.join(ITEMS)}")
            return str(self.prices[item])
        self._done = True
        return "Correct." if call.arguments["total"] == self.total else "Wrong."

    def _part(self) -> Literal["train", "test"]:
        """Return the part of the task; the order of its lines does not matter."""
        text = repr([(item, self.order[item], self.prices[item]) for item in sorted(self.order)])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "test" if int.from_bytes(digest, "big") < _TEST_SHARE * 2**64 else "train"
