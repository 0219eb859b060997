"""A shop's products, goals and index, memory-mapped and shared by all environments of a process.

Invariant: what is derived from the files of a set is made once, beside nobody's files: in a folder whose name says of
what it was made, written under another name and renamed. All of it is read-only afterwards; an instance of the
environment holds no product of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import shutil
import tempfile
import threading
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agentkit import data
from agentkit.envs.webshop import goals as goals_module
from agentkit.envs.webshop import products as products_module
from agentkit.envs.webshop.goals import Goal
from agentkit.envs.webshop.products import Product
from agentkit.envs.webshop.search import HITS, Index

FORMAT = 1
"""Raised whenever what is derived changes."""
_CACHED_PRODUCTS = 4_096
_PREFIXES = {"<a>": "attributes", "<c>": "category", "<q>": "query"}
_lock = threading.Lock()
_open: dict[tuple[Path, bool, int], Catalogue] = {}


def count(folder: Path) -> dict[str, int]:
    """How many products and synthetic goals a folder holds."""
    products = list(products_module.read(folder))
    return {"products": len(products), "goals": len(goals_module.build(products, human=False, seed=0)[1])}


def open_catalogue(name: str, *, human: bool = False, seed: int = 0) -> Catalogue:
    """The catalogue of a data set, or of a folder that holds its files; one and the same for equal arguments.

    Raises ``DataError`` if it is not here, ``ConfigError`` for an unknown name.
    """
    folder = (data.locate(name) if name in data.DATASETS or not Path(name).is_dir() else Path(name)).resolve()
    key = (folder, human, seed)
    with _lock:
        if key not in _open:
            _open[key] = Catalogue(*_derived(folder, human, seed))
        return _open[key]


class Records(Sequence[Any]):
    """A memory-mapped sequence of JSON values."""

    def __init__(self, path: Path) -> None:
        self._ends = np.load(path.with_suffix(".npy"), mmap_mode="r")
        with path.open("rb") as stream:  # an empty file cannot be mapped
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if len(self._ends) else b""

    @staticmethod
    def write(path: Path, values: Iterable[Product | Goal]) -> None:
        ends = []
        with path.open("wb") as stream:
            for value in values:
                stream.write(
                    json.dumps({name: getattr(value, name) for name in value.__slots__}, ensure_ascii=False).encode()
                )
                ends.append(stream.tell())
        np.save(path.with_suffix(".npy"), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        start = int(self._ends[number - 1]) if number else 0
        return json.loads(self._bytes[start : int(self._ends[number])])


class Catalogue:
    """Products by number and asin, goals by number, and the search over them."""

    def __init__(self, products: Path, goals: Path) -> None:
        self._products = Records(products / "products.bin")
        self._asins = np.load(products / "asins.npy", mmap_mode="r")
        self._order = np.load(products / "order.npy", mmap_mode="r")
        self._index = Index.load(products / "index")
        self._goals = Records(goals / "goals.bin")
        self._prices = np.load(goals / "prices.npy", mmap_mode="r")
        self._weights = np.load(goals / "weights.npy", mmap_mode="r")
        self.product = lru_cache(_CACHED_PRODUCTS)(self._product)
        """The product of a number."""

    def __len__(self) -> int:
        return len(self._products)

    @property
    def goals(self) -> int:
        """How many goals there are."""
        return len(self._goals)

    def _product(self, number: int) -> Product:
        return Product(**self._products[number])

    def goal(self, number: int) -> Goal:
        raw = self._goals[number]
        options = tuple(option if isinstance(option, str) else tuple(option) for option in raw["options"])
        return Goal(**{**raw, "attributes": tuple(raw["attributes"]), "options": options})

    def price(self, product: int) -> float:
        return float(self._prices[product])

    def number(self, asin: str) -> int | None:
        """The number of the product with that asin."""
        place = int(np.searchsorted(self._asins, np.array(asin.encode(), self._asins.dtype)))
        if place < len(self._asins) and self._asins[place].decode() == asin:
            return int(self._order[place])
        return None

    def draw(self, goals: range, rng: np.random.Generator) -> int:
        """A goal's number, drawn from a range in proportion to the goals' weights."""
        before = float(self._weights[goals.start - 1]) if goals.start else 0.0
        point = before + rng.random() * (float(self._weights[goals.stop - 1]) - before)
        return min(goals.start + bisect(self._weights[goals.start : goals.stop], point), goals.stop - 1)

    def search(self, keywords: Sequence[str], rng: np.random.Generator) -> list[int]:
        """Numbers of the products that a search finds, best first.

        A first word ``<r>`` asks for random products; ``<a>``, ``<c>`` and ``<q>`` ask for all of an attribute, a
        category, or a query.
        """
        first, rest = keywords[0], keywords[1:]
        if first == "<r>":
            return rng.choice(len(self), min(HITS, len(self)), replace=False).tolist()
        if first in _PREFIXES:
            wanted = (rest[0] if rest else "") if first == "<c>" else " ".join(rest)
            return self._groups[_PREFIXES[first]].get(wanted.strip(), [])
        return self._index.search(" ".join(keywords))

    @cached_property
    def _groups(self) -> dict[str, dict[str, list[int]]]:
        groups: dict[str, dict[str, list[int]]] = {name: {} for name in _PREFIXES.values()}
        for number, product in enumerate(self._products):
            for name, members in groups.items():
                values = product[name] if name == "attributes" else [product[name]]
                for value in dict.fromkeys(values):
                    members.setdefault(value, []).append(number)
        return groups


def _derived(folder: Path, human: bool, seed: int) -> tuple[Path, Path]:
    """The folders of what is derived: of the products, and of the goals."""
    inputs = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != data.RECORD
    ]
    digest = hashlib.sha256(json.dumps([FORMAT, str(folder), inputs]).encode()).hexdigest()[:16]
    base = data.derived_root() / f"webshop-{digest}"
    kind = base / f"{'human' if human else 'synthetic'}-{seed}"
    if not (base / "products").is_dir() or not kind.is_dir():
        products = list(products_module.read(folder))
        with _made(base / "products") as target:
            if target is not None:
                _write_products(target, products)
        with _made(kind) as target:
            if target is not None:
                _write_goals(target, *goals_module.build(products, human=human, seed=seed))
    return base / "products", kind


def _write_products(target: Path, products: list[Product]) -> None:
    Records.write(target / "products.bin", products)
    asins = np.array([product.asin.encode() for product in products])
    order = np.argsort(asins, kind="stable")
    np.save(target / "asins.npy", asins[order])
    np.save(target / "order.npy", order.astype(np.int32))
    Index.build(products).save(target / "index")


def _write_goals(target: Path, prices: list[float], goals: list[Goal]) -> None:
    Records.write(target / "goals.bin", goals)
    np.save(target / "prices.npy", np.array(prices))
    np.save(target / "weights.npy", np.cumsum([goal.weight for goal in goals]))


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[Path | None]:
    """None if the folder is there, else a folder to fill that becomes it."""
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield target
        target.chmod(0o755)
        try:
            target.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same
                raise
    finally:
        shutil.rmtree(target, ignore_errors=True)
