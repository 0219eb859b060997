"""Invoice: the expert's calls, wrong calls, and the parts of the tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gymnasium.error import ResetNeeded

import agentkit
from agentkit.envs.check import check
from agentkit.envs.invoice import Invoice


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def test_it_passes_the_checks_of_environments() -> None:
    failed = [result for result in check("Invoice-v0", lines=2) if not result.passed]
    assert not failed, failed


@pytest.mark.parametrize("lines", [1, 3, 6])
def test_prices_that_are_looked_up_give_the_total(lines: int) -> None:
    env = agentkit.make("Invoice-v0", lines=lines)
    for seed in range(20):
        observation, _ = env.reset(seed=seed)
        order = [part.split(" ") for part in observation.removeprefix("Order: ").split(", ")]
        assert len({item for _, item in order}) == lines
        total = sum(int(quantity) * int(env.step(call("price", item=item))[0]) for quantity, item in order)
        assert env.step(call("submit", total=total)) == (
            "Correct.", 1.0, True, False, {"success": True, "action_valid": True}
        )  # fmt: skip


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("lamp", "not valid JSON"),
        (call("buy", item="lamp"), "there is no tool 'buy'"),
        (call("price"), "the argument 'item' is missing"),
        (call("price", item="car"), "there is no item 'car'"),
        (call("calculate", expression="__import__('os')"), "Error"),
        (call("submit", total="12"), "must be of type integer"),
    ],
)
def test_a_wrong_call_is_an_invalid_action_that_changes_nothing(action: str, text: str) -> None:
    env = Invoice()
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(action)
    assert text in observation
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"success": False, "action_valid": False})
    *_, last = env.expert()
    assert env.step(last)[1] == 1.0


def test_a_wrong_total_ends_the_episode_without_reward() -> None:
    env = Invoice()
    env.reset(seed=1)
    assert env.step(call("calculate", expression="2 * (3 + 4) / 4"))[0] == "7/2"
    result = env.step(call("submit", total=env.total + 1))
    assert result == ("Wrong.", 0.0, True, False, {"success": False, "action_valid": True})
    with pytest.raises(ResetNeeded):
        env.step(call("submit", total=env.total))


def test_the_parts_share_no_task() -> None:
    def tasks(split: Any) -> set[str]:
        env, seen = Invoice(lines=1, split=split), set()
        for seed in range(300):
            env.reset(seed=seed)
            seen.add(repr([(item, count, env.prices[item]) for item, count in env.order.items()]))
        return seen

    assert not tasks("train") & tasks("test")


@pytest.mark.parametrize("kwargs", [{"lines": 0}, {"lines": 7}, {"split": "dev"}])
def test_wrong_arguments_are_named(kwargs: dict[str, Any]) -> None:
    (name,) = kwargs
    with pytest.raises(ValueError, match=f"{name}="):
        agentkit.make("Invoice-v0", **kwargs)
