"""Products, read from the benchmark's files.

Invariant: a product has the fields and values that WebShop's own loader gives it, whether it is read from the official
files, from the output of that loader, or from agentkit's own files. Files are never written; errors name the file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json import JSONDecoder
from pathlib import Path
from typing import Any, TextIO

from agentkit.data import DATASETS
from agentkit.errors import DataError

Forms = Sequence[tuple[str, ...]]
SETS: dict[str, Forms] = {name: known.forms for name, known in DATASETS.items() if name.startswith("webshop-")}
"""File names of each data set: products, then attributes."""
FORMS: Forms = (*SETS["webshop-small"], *SETS["webshop-own"])
"""File names in other folders. The first existing ones are used; of its two sizes, the benchmark uses the small one by
default."""
_PEOPLE = "items_human_ins.json"
DEFAULT_PRICE = 100.0
"""Price range of products without a known price."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product, with all data that pages show and rewards compare."""

    asin: str
    title: str
    category: str
    query: str
    """The search words of its category."""
    product_category: str
    """Its category, with ``›`` between the levels."""
    description: str
    bullets: list[str]
    prices: list[float]
    """One price, or the ends of a range."""
    price_tag: str
    options: dict[str, list[str]]
    """Choices by name, all in lower case."""
    attributes: list[str]
    image: str = ""
    option_images: dict[str, str | None] = field(default_factory=dict)
    rating: str = "N.A."
    reviews: list[dict[str, Any]] = field(default_factory=list)
    instruction: str | None = None
    """The instruction of a synthetic goal for it, without options and price."""
    instruction_attributes: list[str] = field(default_factory=list)
    human: list[dict[str, Any]] = field(default_factory=list)
    """Instructions written by people: ``instruction``, ``instruction_attributes``, ``instruction_options``."""


def files(folder: Path, forms: Forms = FORMS) -> list[Path]:
    """Return the files of a folder: products, attributes, and instructions by people if they exist.

    Raises:
        DataError: the folder contains no files of a known form.
    """
    for form in forms:
        if all((folder / name).is_file() for name in form):
            names = dict.fromkeys((*form, _PEOPLE))
            return [folder / name for name in names if (folder / name).is_file()]
    wanted = " nor ".join(" with ".join(form) for form in forms)
    raise DataError(f"{folder} holds no products of WebShop: there is neither {wanted}")


def read(folder: Path, forms: Forms = FORMS) -> Iterator[Product]:
    """Yield the products of a folder in order, each asin once. Raises ``DataError``."""
    listed, known, *written = files(folder, forms)
    attributes = _json(known)
    people = _json(written[0]) if written else {}
    seen: set[str] = set()
    for raw in _raw(listed):
        asin = raw["asin"]
        if asin == "nan" or len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        yield _product(raw, attributes.get(asin, {}), people.get(asin) or raw.get("instructions") or [])
    if not seen:
        raise DataError(f"{listed} holds no product")


def _product(raw: dict[str, Any], known: dict[str, Any], people: list[dict[str, Any]]) -> Product:
    bullets = raw["small_description"]
    prices, tag = _prices(raw.get("pricing"))
    options, images = _options(raw.get("customization_options") or {})
    return Product(
        asin=raw["asin"],
        title=raw["name"],
        category=raw["category"],
        query=raw["query"].lower().strip(),
        product_category=raw["product_category"],
        description=raw["full_description"] or "",
        bullets=bullets if isinstance(bullets, list) else [bullets or ""],
        prices=prices,
        price_tag=tag,
        options=options,
        attributes=known.get("attributes", ["DUMMY_ATTR"]),
        image=next(iter(raw.get("images") or []), None) or "",
        option_images=images,
        rating=str(raw.get("Rating") or "N.A."),
        reviews=raw.get("Reviews") or [],
        instruction=known.get("instruction"),
        instruction_attributes=known.get("instruction_attributes") or [],
        human=[
            {name: one[name] for name in ("instruction", "instruction_attributes", "instruction_options")}
            for one in people
        ],
    )


def _prices(pricing: str | list[float] | None) -> tuple[list[float], str]:
    """Return up to two prices, and their text on a page."""
    if isinstance(pricing, str):
        found = (re.sub(r"[^\d.]", "", part) for part in pricing.split("$")[1:])
        pricing = [float(number) for number in found if number.strip(".")]
    prices = [float(price) for price in (pricing or [DEFAULT_PRICE])[:2]]
    return prices, " to ".join(f"${price}" for price in prices)


def _options(raw: dict[str, Any]) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    options: dict[str, list[str]] = {}
    images: dict[str, str | None] = {}
    for name, contents in raw.items():
        if contents is None:
            continue
        values = [content["value"].strip().replace("/", " | ").lower() for content in contents]
        options[name.lower()] = values
        images |= {value: content.get("image") for value, content in zip(values, contents, strict=True)}
    return options, images


def _json(path: Path) -> Any:
    with _named(path), path.open(encoding="utf-8") as stream:
        return json.load(stream)


def _raw(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a JSON array, or of a file with one entry per line."""
    if path.name.endswith(".jsonl.gz"):
        with _named(path), gzip.open(path, "rt", encoding="utf-8") as stream:
            yield from map(json.loads, stream)
        return
    with _named(path), path.open(encoding="utf-8") as stream:
        yield from stream_array(stream)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise ``DataError`` if a file cannot be read to its end."""
    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} is damaged, or cannot be read: {error}; fetch or copy it again") from error


def stream_array(stream: TextIO, block: int = 1 << 22) -> Iterator[Any]:
    """Yield the objects of a JSON array one by one: the whole file is larger than most machines' memory."""
    decoder, text, place, opened = JSONDecoder(), "", 0, False
    while True:
        while place < len(text) and text[place] in " \t\r\n,[":
            if text[place] == "[" and opened:
                break
            opened |= text[place] == "["
            place += 1
        if opened and text[place : place + 1] == "]":
            return
        try:
            element, place = decoder.raw_decode(text, place)
            yield element
        except json.JSONDecodeError as error:
            more = stream.read(block)
            if not more or (text[place:] and not opened):
                raise DataError(f"{getattr(stream, 'name', 'the file')} is not a JSON array: {error}") from error
            text, place = text[place:] + more, 0
