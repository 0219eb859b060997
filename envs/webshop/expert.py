"""The expert of WebShop, which knows the product that the goal was made from.

Invariant: the expert uses only actions that the page offers (it searches only on a page with a search bar), and can
continue from any page. It buys the goal's own product with the goal's options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from agentkit.envs.webshop.fuzzy_match import matches, normalized_colour
from agentkit.envs.webshop.goals import Goal
from agentkit.envs.webshop.products import Product
from agentkit.envs.webshop.session import PER_PAGE, Session


def plan(session: Session) -> Iterator[str]:
    """Yield actions from the current page to the purchase."""
    if session.page == "done":
        return
    wanted = session.goal.product
    product = session.catalogue.product(wanted)
    chosen = dict(session.options)
    if session.item != wanted:
        chosen = {}
        yield from _to_item(session, wanted)
    elif session.page == "item_sub_page":
        yield "click[< prev]"
    for name, value in options_to_choose(session.goal, product):
        if chosen.get(name) != value and value not in chosen.values():
            yield f"click[{value}]"
    yield "click[buy now]"


def _to_item(session: Session, wanted: int) -> Iterator[str]:
    """Yield actions that lead to the page of a product."""
    hits, number = session.hits, session.number
    drawn = session.keywords[:1] == ["<r>"]  # repeated for every list, because only visible products are certain
    known = hits if not drawn else session.shown if session.page == "search_results" else []
    if session.page != "index" and wanted in known:
        if session.page == "item_sub_page":
            yield "click[< prev]"
        if session.page != "search_results":
            yield "click[< prev]"
    else:
        if session.page != "index":
            yield "click[back to search]"
        words = search_words(session)
        yield f"search[{words}]"
        hits, number = _search(session, words), 1
    page = hits.index(wanted) // PER_PAGE + 1
    yield from ["click[next >]"] * (page - number)
    yield from ["click[< prev]"] * (number - page)
    yield f"click[{session.catalogue.product(wanted).asin.lower()}]"


def search_words(session: Session) -> str:
    """Return words that find the goal's product: those of the instruction if it is then on the first page, otherwise
    the best other words."""
    goal = session.goal
    product = session.catalogue.product(goal.product)
    whole = re.sub(r", and price lower than [\d.]+ dollars$", "", goal.instruction)
    kind = re.sub(r"^find me ", "", (product.instruction or whole), flags=re.IGNORECASE)
    texts = [kind, whole, product.title, f"{product.title} {' '.join(product.attributes)}", f"<q> {product.query}"]
    ranked: list[tuple[int, str]] = []
    for text in map(_searchable, texts):
        hits = _search(session, text)
        if goal.product in hits:
            place = hits.index(goal.product)
            if place < PER_PAGE:
                return text
            ranked.append((place, text))
    return min(ranked)[1]


def options_to_choose(goal: Goal, product: Product) -> list[tuple[str, str]]:
    """Return the option names and values of the product that match the goal's."""
    holders = {value: name.lower() for name, values in product.options.items() for value in values}
    wanted = [option[1] if isinstance(option, tuple) else _closest(option, holders) for option in goal.options]
    chosen: dict[str, str] = {}
    for value in wanted:
        if value in holders:  # if a value matches several options, it is used for the last one
            chosen.setdefault(holders[value], value)
    return list(chosen.items())


def _closest(option: str, values: dict[str, str]) -> str | None:
    like = [value for value in values if matches(normalized_colour(value), normalized_colour(option))]
    return option if option in values else like[0] if like else None


def _searchable(text: str) -> str:
    """Return ``text`` in a form that can be the argument of an action."""
    return " ".join(text.replace("[", " ").replace("]", " ").lower().split())


def _search(session: Session, words: str) -> list[int]:
    return session.catalogue.search(words.split(" "), session.rng)
