"""Fuzzy comparison of texts, as in WebShop's reward.

Invariant: ``token_set_ratio`` returns the value of thefuzz 0.19 without its optional accelerator, the version that the
benchmark pins, for all objects; it only needs difflib.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

MATCH = 85
"""Two texts with a larger ratio are equal."""
# The order matters: the first colour that a text contains is its colour.
_COLOURS_TEXT = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel
    camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry
    cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green
    grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot
    midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple
    rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan
    taupe teal tiger turquoise violet walnut wheat white wine yellow
"""
COLOURS = tuple(_COLOURS_TEXT.split())
_LATIN1 = dict.fromkeys(range(128, 256))


def normalized_colour(option: str | Sequence[str]) -> str | Sequence[str]:
    """Return the first colour in an option, or the option itself.

    A text contains a colour as a substring; a pair of name and value, the form of the goals' options, only if one of
    the two is the colour. This is the behaviour of the benchmark.
    """
    return next((colour for colour in COLOURS if colour in option), option)


def matches(one: object, other: object) -> bool:
    """Return whether two attributes or options are equal."""
    return token_set_ratio(str(one), str(other)) > MATCH


@lru_cache(maxsize=1 << 14)
def token_set_ratio(one: str, other: str) -> int:
    """Return the similarity of two texts as sets of words, 0 to 100, from common words and the rest of each text."""
    words, others = set(_plain(one).split()), set(_plain(other).split())
    if not words or not others:
        return 0
    common = " ".join(sorted(words & others))
    first = f"{common} {' '.join(sorted(words - others))}".strip()
    second = f"{common} {' '.join(sorted(others - words))}".strip()
    return max(_ratio(common, first), _ratio(common, second), _ratio(first, second))


def _plain(text: str) -> str:
    return re.sub(r"\W", " ", text.translate(_LATIN1)).lower().strip()


def _ratio(one: str, other: str) -> int:
    if one == other:
        return 100
    if not one or not other:
        return 0
    return round(100 * SequenceMatcher(None, one, other).ratio())
