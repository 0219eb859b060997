"""Reference implementation of WebShop's reward, directly from its published formulas."""

from __future__ import annotations

import re

from thefuzz import fuzz

COLOURS = [
    *("alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black", "blue", "blush"),
    *("bordeaux", "bronze", "brown", "burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "cheetah"),
    *("chestnut", "chocolate", "christmas", "coffee", "cognac", "copper", "coral", "cranberry", "cream", "crystal"),
    *("dark", "denim", "eggplant", "elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite"),
    *("grass", "gray", "green", "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon"),
    *("leopard", "light", "lilac", "lime", "magenta", "maroon", "mauve", "merlot", "midnight", "mint", "mocha"),
    *("multicolor", "mushroom", "mustard", "natural", "navy", "nude", "olive", "orange", "peach", "pewter"),
    *("pink", "plum", "purple", "rainbow", "red", "rose", "royal", "rust", "sand", "sapphire", "seashell"),
    *("silver", "skull", "slate", "steel", "stone", "stonewash", "sunflower", "tan", "taupe", "teal", "tiger"),
    *("turquoise", "violet", "walnut", "wheat", "white", "wine", "yellow"),
]


def reward(bought: dict, price: float, chosen: dict[str, str], goal: dict, nouns) -> float:
    """The formula of the paper and its code, over plain dictionaries."""
    hits = attribute_hits(bought, goal["attributes"]) + option_hits(list(chosen.values()), goal["options"])
    hits += 1 if price <= goal["price_upper"] else 0
    parts = hits / (len(goal["attributes"]) + len(goal["options"]) + 1)
    return parts * type_reward(bought, goal, nouns)


def type_reward(bought: dict, goal: dict, nouns) -> float:
    same_query = bought["query"] == goal["query"]
    ours = {part.strip() for part in bought["product_category"].split("›")}
    theirs = {part.strip() for part in goal["product_category"].split("›")}
    same_place = len([part for part in ours if part in theirs]) >= 2
    wanted, found = nouns(goal["title"]), nouns(bought["title"])
    title = 0.2 if not wanted else len({word for word in wanted if word in found}) / len(wanted)
    value = 1.0
    if not (same_query or same_place or title > 0.2):
        value = 0.5
    if title < 0.1:
        value = 0.1
    if title == 0.0:
        value = 0.0
    return value


def attribute_hits(bought: dict, wanted: list[str]) -> int:
    hits = 0
    for attribute in wanted:
        texts = [bought["title"].lower(), " ".join(bought["bullets"]).lower(), bought["description"].lower()]
        close = [own for own in bought["attributes"] if fuzz.token_set_ratio(own, attribute) > 85]
        hits += bool(close) or any(attribute in text for text in texts)
    return hits


def option_hits(chosen: list[str], wanted: list) -> int:
    """``wanted``: texts, or (name, value) pairs, which the official code compares as the tuples that they are."""
    hits = 0
    for option in wanted:
        target = first_colour(option)
        hits += any(fuzz.token_set_ratio(first_colour(value), target) > 85 for value in chosen)
    return hits


def first_colour(option):
    for colour in COLOURS:
        if colour in option:
            return colour
    return option


def limit_of(instruction: str) -> float:
    """Return the price limit in an instruction."""
    found = re.search(r"price lower than ([\d.]+) dollars$", instruction)
    return float(found[1]) if found else 1_000_000.0
