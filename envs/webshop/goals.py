"""Shopping goals, in the order of the benchmark and with its prices.

Invariant: for the same products and seed, goals, prices, order and weights are those of WebShop's own code after
``random.seed(seed)``: prices are drawn first, product by product, then the price limits of each product; the order is
always shuffled with seed 233.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentkit.envs.webshop.products import Product
from agentkit.errors import ConfigError

Split = Literal["train", "eval", "test"]
SHUFFLE_SEED = 233
NO_LIMIT = 1_000_000.0
_LIMITS = [10.0 * i for i in range(1, 100)]
_SPLITS = {"test": (0, 500), "eval": (500, 1_500), "train": (1_500, None)}


@dataclass(frozen=True, slots=True)
class Goal:
    """A shopping goal."""

    product: int
    """Index of the product from which the goal was made."""
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...] | tuple[str, ...]
    """Pairs of name and value (synthetic goals), or texts written by people."""
    price_upper: float
    weight: float
    """Weight in random draws."""


def draw_prices(products: Sequence[Product], rng: random.Random) -> list[float]:
    """Draw a price of each product within its range."""
    return [p.prices[0] if len(p.prices) == 1 else rng.uniform(*p.prices) for p in products]


def build(products: Sequence[Product], *, human: bool, seed: int) -> tuple[list[float], list[Goal]]:
    """Return the prices of all products, and the goals in their final order."""
    rng = random.Random(seed)
    prices = draw_prices(products, rng)
    goals: list[Goal] = []
    for number, product in enumerate(products):
        goals += (_human if human else _synthetic)(number, product, prices[number], rng)
    if not human:
        counts = Counter(attribute for goal in goals for attribute in goal.attributes)
        goals = [
            Goal(g.product, g.instruction, g.attributes, g.options, g.price_upper, _weight(g.attributes, counts))
            for g in goals
        ]
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return prices, goals


def split_range(split: Split | None, count: int) -> range:
    """Return the indices of a split's goals. Raises ``ConfigError`` for a set that is too small to be split."""
    first, last = (0, None) if split is None else _SPLITS[split]
    goals = range(first, count if last is None else min(last, count))
    if not goals:
        raise ConfigError(f"split={split!r}: there are only {count} goals{'; take split=None' if count else ''}")
    return goals


def _weight(attributes: Sequence[str], counts: Counter[str]) -> float:
    return sum(1.0 / counts[attribute] for attribute in attributes) / len(attributes)


def _synthetic(number: int, product: Product, price: float, rng: random.Random) -> list[Goal]:
    """Return one goal for each combination of options."""
    if product.instruction is None:
        return []
    limit, limit_text = _limit(price, rng)
    names = sorted(product.options)
    goals = []
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        wanted = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = f"{product.instruction}{' with ' + wanted if wanted else ''}{limit_text}"
        goals.append(Goal(number, text, tuple(product.instruction_attributes), tuple(options.items()), limit, 1.0))
    return goals


def _human(number: int, product: Product, price: float, rng: random.Random) -> list[Goal]:
    goals = []
    for written in product.human:
        attributes = tuple(written["instruction_attributes"])
        if attributes:
            limit, limit_text = _limit(price, rng)
            text = written["instruction"].strip(".") + limit_text
            goals.append(Goal(number, text, attributes, tuple(written["instruction_options"]), limit, 1.0))
    return goals


def _limit(price: float, rng: random.Random) -> tuple[float, str]:
    """Draw the price limit, and return it with its text in the instruction."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"
