"""The reward of a purchase.

Invariant: the reward is exactly that of WebShop (Yao et al., 2022, eq. 1 and its code):

    reward = type * (attributes that match + options that match + price is low enough)
                  / (attributes wanted + options wanted + 1)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentkit.envs.webshop.fuzzy_match import matches, normalized_colour
from agentkit.envs.webshop.goals import Goal
from agentkit.envs.webshop.noun_extraction import Nouns
from agentkit.envs.webshop.products import Product


@dataclass(frozen=True, slots=True)
class Score:
    """A reward in [0, 1] and its parts."""

    reward: float
    type: float
    """0, 0.1, 0.5 or 1: similarity of the product's type to the wanted one."""
    attributes: float
    """Fraction of the wanted attributes that match."""
    options: float | None
    """Fraction of the wanted options that match; None if none were wanted."""
    price: bool
    query_match: bool
    category_match: bool
    title_score: float


def score(product: Product, price: float, options: Collection[str], goal: Goal, wanted: Product, nouns: Nouns) -> Score:
    """Return the reward of a purchase.

    Args:
        product: the bought product.
        price: its price.
        options: the chosen option values.
        goal: the goal.
        wanted: the goal's own product.
        nouns: extracts nouns from names.
    """
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
    """Return the type reward, whether queries match, whether two category levels do, and the similarity of names."""
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
    """Return whether an attribute of the product is similar to ``wanted``, or one of its texts contains it."""
    return any(matches(attribute, wanted) for attribute in product.attributes) or any(
        wanted in text.lower() for text in (product.title, " ".join(product.bullets), product.description)
    )


def matching_options(chosen: Collection[str], wanted: Sequence[str | tuple[str, str]]) -> int:
    """Return the number of wanted options that are similar to a chosen value."""
    values = [normalized_colour(value) for value in chosen]
    return sum(any(matches(value, option) for value in values) for option in map(normalized_colour, wanted))


def _levels(product: Product) -> set[str]:
    return {level.strip() for level in product.product_category.split("›")}
