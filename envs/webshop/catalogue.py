"""Products, goals and search index of a shop, memory-mapped and shared by all environments of a process.

Invariant: derived data is written once, into a folder whose name is a digest of its sources; it is written under a
temporary name and then renamed, so that an interrupted write is repeated. It is read-only afterwards.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import shutil
import tempfile
import threading
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from agentkit import data, progress
from agentkit.envs.webshop import goals as goals_module
from agentkit.envs.webshop import products as products_module
from agentkit.envs.webshop.goals import Goal
from agentkit.envs.webshop.products import FORMS, SETS, Forms, Product
from agentkit.envs.webshop.search import HITS, Index
from agentkit.errors import ConfigError

T = TypeVar("T")
FORMAT = 1
"""Version of the derived data; increased whenever their format changes."""
_CACHED_PRODUCTS = 4_096
_PREFIXES = {"<a>": "attributes", "<c>": "category", "<q>": "query"}
_lock = threading.Lock()
_open: dict[tuple[Path, Forms, bool, int], Catalogue] = {}


def count(folder: Path) -> dict[str, int]:
    """Return the number of products and of synthetic goals in a folder."""
    products = list(products_module.read(folder))
    return {"products": len(products), "goals": len(goals_module.build(products, human=False, seed=0)[1])}


def open_catalogue(name: str, *, human: bool = False, seed: int = 0) -> Catalogue:
    """Return the catalogue of a data set or of a folder; the same object for equal arguments.

    Raises:
        DataError: the data set is missing or damaged.
        ConfigError: the name is unknown.
    """
    if not isinstance(name, str | Path) or name == "":
        raise ConfigError(f"data={name!r} must be the name of a data set, or a folder: {', '.join(SETS)}")
    place = Path(name).expanduser()
    folder = data.locate(str(name)) if name in SETS or not place.is_dir() else place
    key = (folder.resolve(), SETS.get(str(name), FORMS), human, seed)
    with _lock:
        if key not in _open:
            _open[key] = _catalogue(*key)
        return _open[key]


class Records(Sequence[Any]):
    """A memory-mapped sequence of JSON values."""

    def __init__(self, path: Path) -> None:
        self._ends = np.load(path.with_suffix(".npy"), mmap_mode="r")
        with path.open("rb") as stream:  # an empty file cannot be memory-mapped
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if len(self._ends) else b""
        if len(self._ends) and len(self._bytes) != self._ends[-1]:
            raise ValueError(f"{path} holds {len(self._bytes)} bytes instead of {self._ends[-1]}")

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


class _Products(NamedTuple):
    """Derived data of the products."""

    records: Records
    asins: np.ndarray
    order: np.ndarray
    search: Index

    @classmethod
    def load(cls, folder: Path) -> _Products:
        return cls(
            Records(folder / "products.bin"),
            np.load(folder / "asins.npy", mmap_mode="r"),
            np.load(folder / "order.npy", mmap_mode="r"),
            Index.load(folder / "index"),
        )

    @staticmethod
    def write(folder: Path, products: list[Product]) -> None:
        Records.write(folder / "products.bin", products)
        asins = np.array([product.asin.encode() for product in products])
        order = np.argsort(asins, kind="stable")
        np.save(folder / "asins.npy", asins[order])
        np.save(folder / "order.npy", order.astype(np.int32))
        Index.build(products).save(folder / "index")


class _Goals(NamedTuple):
    """Derived data for one kind of goals and one seed of prices."""

    records: Records
    prices: np.ndarray
    weights: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> _Goals:
        return cls(
            Records(folder / "goals.bin"),
            np.load(folder / "prices.npy", mmap_mode="r"),
            np.load(folder / "weights.npy", mmap_mode="r"),
        )

    @staticmethod
    def write(folder: Path, prices: list[float], goals: list[Goal]) -> None:
        Records.write(folder / "goals.bin", goals)
        np.save(folder / "prices.npy", np.array(prices))
        np.save(folder / "weights.npy", np.cumsum([goal.weight for goal in goals]))


class Catalogue:
    """Products by number and asin, goals by number, and the search index."""

    def __init__(self, products: _Products, goals: _Goals) -> None:
        self._products, self._asins, self._order, self._index = products
        self._goals, self._prices, self._weights = goals
        self.product = lru_cache(_CACHED_PRODUCTS)(self._product)
        """Return the product with this number."""

    def __len__(self) -> int:
        return len(self._products)

    @property
    def goals(self) -> int:
        """Number of goals."""
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
        """Return the number of the product with this asin."""
        place = int(np.searchsorted(self._asins, np.array(asin.encode(), self._asins.dtype)))
        if place < len(self._asins) and self._asins[place].decode() == asin:
            return int(self._order[place])
        return None

    def draw(self, goals: range, rng: np.random.Generator) -> int:
        """Draw the number of a goal from a range, in proportion to the weights of the goals."""
        before = float(self._weights[goals.start - 1]) if goals.start else 0.0
        point = before + rng.random() * (float(self._weights[goals.stop - 1]) - before)
        return min(goals.start + bisect(self._weights[goals.start : goals.stop], point), goals.stop - 1)

    def search(self, keywords: Sequence[str], rng: np.random.Generator) -> list[int]:
        """Return the numbers of the products that a search finds, best first.

        The first word ``<r>`` requests random products; ``<a>``, ``<c>`` and ``<q>`` request all products of an
        attribute, a category or a query.
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


def _catalogue(folder: Path, forms: Forms, human: bool, seed: int) -> Catalogue:
    inputs = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in products_module.files(folder, forms)
    ]
    digest = hashlib.sha256(json.dumps([FORMAT, str(folder), inputs]).encode()).hexdigest()[:16]
    base = data.derived_root() / f"webshop-{digest}"
    shop = cache(lambda: list(products_module.read(folder, forms)))
    return Catalogue(
        _kept(base / "products", _Products.load, lambda target: _Products.write(target, shop())),
        _kept(
            base / f"{'human' if human else 'synthetic'}-{seed}",
            _Goals.load,
            lambda target: _Goals.write(target, *goals_module.build(shop(), human=human, seed=seed)),
        ),
    )


def _kept(folder: Path, load: Callable[[Path], T], write: Callable[[Path], None]) -> T:
    """Load derived data from a folder; write them first if they are missing or cannot be loaded."""
    with contextlib.suppress(OSError, EOFError, ValueError):
        return load(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError, EOFError, ValueError):
            return load(folder)  # another process was faster
        target = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            with progress.work(f"indexing the shop ({folder.name})"):
                write(target)
            target.chmod(0o755)
            if folder.exists():
                shutil.rmtree(folder)
            target.rename(folder)
        finally:
            shutil.rmtree(target, ignore_errors=True)
        return load(folder)
