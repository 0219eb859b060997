"""What a purchase is worth.

Invariant: the reward is WebShop's (Yao et al., 2022, eq. 1 and its code), number for number:

    reward = type * (attributes that match + options that match + price is low enough)
                  / (attributes wanted + options wanted + 1)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentkit.envs.webshop.fuzzy import matches, normalized_colour
from agentkit.envs.webshop.goals import Goal
from agentkit.envs.webshop.nouns import Nouns
from agentkit.envs.webshop.products import Product


@dataclass(frozen=True, slots=True)
class Score:
    """A reward in [0, 1] and what it is made of."""

    reward: float
    type: float
    """0, 0.1, 0.5 or 1: how far it is the kind of product that was asked for."""
    attributes: float
    """Share of the wanted attributes that match."""
    options: float | None
    """Share of the wanted options that match; None if none were wanted."""
    price: bool
    query_match: bool
    category_match: bool
    title_score: float


def score(product: Product, price: float, options: Collection[str], goal: Goal, wanted: Product, nouns: Nouns) -> Score:
    """The reward of buying ``product`` at ``price`` with the option values ``options``; ``wanted`` is the goal's own
    product."""
    kind, query_match, category_match, title_score = type_score(product, wanted, nouns)
    attributes = sum(has_attribute(product, attribute) for attribute in goal.attributes)
    chosen = matching_options(options, goal.options)
    cheap = price <= goal.price_upper
    parts = len(goal.attributes) + len(goal.options) + 1
    return Score(
        reward=kind * ((attributes + chosen + cheap) / parts),
        type=kind,
        attributes=attributes / len(goal.attributes),
        options=chosen / len(goal.options) if goal.options else None,
        price=cheap,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def type_score(product: Product, wanted: Product, nouns: Nouns) -> tuple[float, bool, bool, float]:
    """Type reward, whether the queries match, whether two levels of the categories do, and how far the names do."""
    query_match = product.query == wanted.query
    category_match = len(_levels(product) & _levels(wanted)) >= 2
    desired = nouns(wanted.title)
    common = set(nouns(product.title)) & set(desired)
    title_score = len(common) / len(desired) if desired else 0.2
    if title_score == 0.0:
        kind = 0.0
    elif title_score < 0.1:
        kind = 0.1
    else:
        kind = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    return kind, query_match, category_match, title_score


def has_attribute(product: Product, wanted: str) -> bool:
    """Whether one of the product's attributes is like it, or one of its texts says it."""
    return any(matches(attribute, wanted) for attribute in product.attributes) or any(
        wanted in text.lower() for text in (product.title, " ".join(product.bullets), product.description)
    )


def matching_options(chosen: Collection[str], wanted: Sequence[str | tuple[str, str]]) -> int:
    """How many wanted options one of the chosen values is like."""
    values = [normalized_colour(value) for value in chosen]
    return sum(any(matches(value, option) for value in values) for option in map(normalized_colour, wanted))


def _levels(product: Product) -> set[str]:
    return {level.strip() for level in product.product_category.split("›")}
