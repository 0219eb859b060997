"""Comparing texts as WebShop's reward does.

Invariant: ``token_set_ratio`` gives the number that thefuzz 0.19 gives without its optional accelerator, which is what
the benchmark pins, for any two objects; it is built on difflib alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache

MATCH = 85
"""Two texts whose ratio is above it count as the same."""
# The order decides: the first that a text holds is its colour.
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
    """The first colour that an option holds, else the option itself.

    A text holds a colour as a part of it; a pair of name and value, as which the goals' options come here, only if one
    of the two is the colour. That is the benchmark's behaviour.
    """
    return next((colour for colour in COLOURS if colour in option), option)


def matches(one: object, other: object) -> bool:
    """Whether two attributes or options count as the same."""
    return token_set_ratio(str(one), str(other)) > MATCH


@lru_cache(maxsize=1 << 14)
def token_set_ratio(one: str, other: str) -> int:
    """Likeness of two texts as sets of words, 0 to 100: what is common is held against common and rest of each."""
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
