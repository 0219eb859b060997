"""Extraction of the words of a product name that denote the product.

Invariant: an extractor is a pure function from a name to words in lower case, in order and with repetitions.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from agentkit.errors import ConfigError

Nouns = Callable[[str], Sequence[str]]
MODELS = ("en_core_web_sm", "en_core_web_lg")
"""spaCy models that were used with the benchmark; its current code uses the first."""
_STOP_TEXT = """
    a an and are as at be but by for from if in into is it its no not of on or per set such that the their then
    there these they this to up was will with without your you x
"""
_STOP = frozenset(_STOP_TEXT.split())


def extractor(name: str) -> Nouns:
    """Return an extractor: ``tokens``, ``spacy``, or ``auto`` (spaCy if one of its models is installed, otherwise
    tokens).

    Raises:
        ConfigError: the name is unknown, or spaCy has no model.
    """
    if name not in ("auto", "spacy", "tokens"):
        raise ConfigError(f"nouns={name!r} must be 'auto', 'spacy', 'tokens', or a function")
    model = None if name == "tokens" else _model()
    if name == "spacy" and model is None:
        raise ConfigError(f"nouns='spacy' needs a model: python -m spacy download {MODELS[0]}")
    return by_tokens if model is None else _by_spacy(model)


@lru_cache(maxsize=1 << 14)
def by_tokens(text: str) -> tuple[str, ...]:
    """Return the words of letters that are not function words, which approximates the nouns without a model."""
    words = re.findall(r"[^\s,;:()\[\]/|&+\"]+", text.lower())
    words = [word.strip(".-'!?*’") for word in words]
    return tuple(word for word in words if word.isalpha() and word not in _STOP)


def _model() -> str | None:
    return next((name for name in MODELS if importlib.util.find_spec("spacy") and importlib.util.find_spec(name)), None)


@cache
def _by_spacy(model: str) -> Nouns:
    nlp = importlib.import_module("spacy").load(model)

    @lru_cache(maxsize=1 << 14)
    def nouns(text: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in nlp(text) if token.pos_ in ("NOUN", "PROPN"))

    return nouns
