"""Full-text search over products, equivalent to Lucene with its English analyzer.

Invariant: hits are sorted by BM25 (k1 0.9, b 0.4, as in the benchmark's engine), then by number; only products with a
word of the query are hits. A saved index gives the same hits as the original one.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agentkit.envs.webshop.products import Product
from agentkit.errors import DataError

K1, B = 0.9, 0.4
HITS = 50
REMEDY = "pip install 'agentkit-rl[webshop]'"
# Words by Unicode segmentation: dots and apostrophes join letters, dots and commas join digits.
_WORD = re.compile(r"\w+(?:(?:(?<=[^\W\d_])['’.:](?=[^\W\d_])|(?<=\d)[.,'](?=\d))\w+)*")
_STOP_TEXT = """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they
    this to was will with
"""
_STOP = frozenset(_STOP_TEXT.split())


def document(product: Product) -> str:
    """Return the text of a product that is indexed."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, next(iter(product.bullets), ""), options]).lower()


def analyze(text: str) -> list[str]:
    """Return the stems of a text's words, without stop words."""
    words = [word[:-2] if word.endswith(("'s", "’s")) else word for word in _WORD.findall(text.lower())]
    stems = _stemmer().stemWords([word for word in words if word not in _STOP])
    return [stem for stem in stems if stem]  # the Porter stemmer removes a single "s"


class Index:
    """A search index; build it, or load a saved one (memory-mapped)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @classmethod
    def build(cls, products: Iterable[Product]) -> Index:
        engine = _module("bm25s").BM25(method="lucene", k1=K1, b=B)
        engine.index([analyze(document(product)) for product in products], show_progress=False)
        return cls(engine)

    def save(self, folder: Path) -> None:
        self._engine.save(str(folder), show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> Index:
        return cls(_module("bm25s").BM25.load(str(folder), mmap=True, show_progress=False, verbosity=0))

    def search(self, text: str, count: int = HITS) -> list[int]:
        """Return the numbers of the best products, at most ``count``."""
        words = [word for word in analyze(text) if word in self._engine.vocab_dict]
        if not words:
            return []
        scores = self._engine.get_scores(words)
        found = np.flatnonzero(scores > 0)
        if len(found) > count:
            least = np.partition(scores[found], -count)[-count]
            found = found[scores[found] >= least]
        return found[np.argsort(-scores[found], kind="stable")][:count].tolist()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(f"WebShop's search needs {name}: {REMEDY}") from error


@cache
def _stemmer() -> Any:
    return _module("Stemmer").Stemmer("porter", 100_000)
