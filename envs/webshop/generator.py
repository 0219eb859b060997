"""Generator of agentkit's own shop: products in WebShop's schema.

Invariant: the files are a pure function of this module, with the same bytes on every machine. Products come in families
whose members differ in one property each (an attribute, brand and price, or a missing option).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 20_220_704
FAMILIES = 4
"""Number of families of each kind of product."""
_COLOURS = [
    "black",
    "white",
    "red",
    "blue",
    "green",
    "grey",
    "pink",
    "purple",
    "yellow",
    "brown",
    "navy",
    "beige",
    "orange",
    "teal",
]
_BRANDS = {
    "fashion": ["Norvik", "Alderly", "Tamsin", "Corvane", "Weltham", "Ostrava"],
    "garden": ["Hearthway", "Brindle", "Lumora", "Oakfen", "Casterly", "Mellow"],
    "electronics": ["Voltera", "Zenpix", "Ardio", "Kelvane", "Orbix", "Nuvon"],
    "beauty": ["Liluna", "Verbena", "Purelle", "Saffra", "Amberly", "Dewmist"],
    "grocery": ["Greenholm", "Tastia", "Farrow", "Sunmill", "Nutwell", "Bramley"],
}
_CLOTHES = {"color": 4, "size": ("small", "medium", "large", "x-large")}
_SHOES = {"color": 3, "size": ("7", "8", "9", "10", "11")}
_HOME = {"color": 4, "size": ("small", "large")}
_DEVICES = {"color": 4, "style": ("classic", "travel", "gift set")}
_CARE = {"scent": ("lavender", "rose", "citrus", "unscented"), "size": ("2 ounce", "4 ounce", "8 ounce")}
_FOOD = {
    "flavor": ("original", "chocolate", "vanilla", "berry", "ginger"),
    "size": ("pack of 1", "pack of 3", "pack of 6"),
}


@dataclass(frozen=True)
class Kind:
    """A kind of product."""

    department: str
    query: str
    noun: str
    place: str
    attributes: tuple[str, ...]
    options: dict[str, Any]
    cheapest: float
    dearest: float


def _kind(department: str, query: str, noun: str, place: str, attributes: str, options: Any, *prices: float) -> Kind:
    return Kind(department, query, noun, place, tuple(attributes.split(", ")), options, *prices)


_WEAR = "Clothing, Shoes & Jewelry"
KINDS = (
    _kind("fashion", "men's t-shirts", "Men's T-Shirt", f"{_WEAR} › Men › Shirts › T-Shirts",
          "slim fit, machine wash, short sleeve, long sleeve, soft cotton, moisture wicking", _CLOTHES, 9, 35),
    _kind("fashion", "women's dresses", "Women's Dress", f"{_WEAR} › Women › Clothing › Dresses",
          "high waist, long sleeve, loose fit, hand wash, elastic waist, quick drying", _CLOTHES, 18, 70),
    _kind("fashion", "men's jackets", "Men's Jacket", f"{_WEAR} › Men › Clothing › Jackets & Coats",
          "water resistant, light weight, fleece lined, slim fit, machine wash, wind proof", _CLOTHES, 30, 120),
    _kind("fashion", "women's sweaters", "Women's Sweater", f"{_WEAR} › Women › Clothing › Sweaters",
          "long sleeve, hand wash, soft wool, loose fit, v neck, machine wash", _CLOTHES, 20, 80),
    _kind("fashion", "running shoes", "Running Shoes", f"{_WEAR} › Men › Shoes › Athletic",
          "non slip, arch support, light weight, rubber sole, memory foam, wide fit", _SHOES, 25, 110),
    _kind("fashion", "women's sandals", "Women's Sandals", f"{_WEAR} › Women › Shoes › Sandals",
          "open toe, ankle strap, non slip, arch support, rubber sole, memory foam", _SHOES, 15, 60),
    _kind("garden", "throw pillows", "Throw Pillow", "Home & Kitchen › Bedding › Decorative Pillows",
          "machine washable, double sided, super soft, dust proof, hidden zipper, hypo allergenic", _HOME, 10, 40),
    _kind("garden", "coffee tables", "Coffee Table", "Home & Kitchen › Furniture › Living Room Furniture › Tables",
          "solid wood, easy assemble, storage space, tempered glass, steel frame, easy clean", _HOME, 60, 300),
    _kind("garden", "area rugs", "Area Rug", "Home & Kitchen › Home Décor › Rugs",
          "non slip, machine washable, easy clean, fade resistant, hand woven, super soft", _HOME, 25, 150),
    _kind("garden", "table lamps", "Table Lamp", "Tools & Home Improvement › Lighting › Lamps",
          "energy efficient, dimmable light, brushed steel, easy install, solid wood, glass shade", _HOME, 20, 90),
    _kind("garden", "window curtains", "Window Curtains", "Home & Kitchen › Home Décor › Window Treatments",
          "machine washable, blackout lining, eco friendly, easy install, noise reducing, fade resistant",
          _HOME, 15, 70),
    _kind("garden", "office chairs", "Office Chair", "Home & Kitchen › Furniture › Home Office Furniture › Chairs",
          "lumbar support, height adjustable, breathable mesh, easy assemble, heavy duty, padded arms", _HOME, 80, 320),
    _kind("electronics", "headphones", "Headphones", "Electronics › Headphones › Over-Ear",
          "noise cancelling, long lasting, fast charging, water resistant, hands free, stereo sound",
          _DEVICES, 20, 180),
    _kind("electronics", "phone cases", "Phone Case", "Cell Phones & Accessories › Cases › Basic Cases",
          "wireless charging, shock proof, tempered glass, scratch resistant, non slip, dust proof", _DEVICES, 8, 35),
    _kind("electronics", "bluetooth speakers", "Bluetooth Speaker", "Electronics › Portable Audio › Speakers",
          "water resistant, long lasting, stereo sound, hands free, fast charging, light weight", _DEVICES, 18, 130),
    _kind("electronics", "power banks", "Power Bank", "Cell Phones & Accessories › Chargers › Power Banks",
          "fast charging, light weight, high capacity, wireless charging, quick release, dual port", _DEVICES, 15, 70),
    _kind("electronics", "security cameras", "Security Camera", "Electronics › Video › Surveillance Cameras",
          "motion detection, night vision, easy install, high definition, two way audio, weather proof",
          _DEVICES, 30, 160),
    _kind("electronics", "tablet stands", "Tablet Stand", "Electronics › Computers › Tablet Accessories › Stands",
          "aluminum alloy, height adjustable, non slip, easy carry, heavy duty, foldable design", _DEVICES, 10, 45),
    _kind("beauty", "face creams", "Face Cream", "Beauty & Personal Care › Skin Care › Face › Creams",
          "paraben free, cruelty free, sensitive skin, hyaluronic acid, fine lines, dry skin", _CARE, 8, 60),
    _kind("beauty", "shampoos", "Shampoo", "Beauty & Personal Care › Hair Care › Shampoo",
          "sulfate free, damaged hair, tea tree, paraben free, dry scalp, hair growth", _CARE, 7, 35),
    _kind("beauty", "body lotions", "Body Lotion", "Beauty & Personal Care › Skin Care › Body › Moisturizers",
          "shea butter, cruelty free, dry skin, coconut oil, alcohol free, sensitive skin", _CARE, 6, 40),
    _kind("beauty", "deodorants", "Deodorant", "Beauty & Personal Care › Personal Care › Deodorants",
          "aluminum free, alcohol free, long lasting, sensitive skin, natural ingredients, cruelty free", _CARE, 5, 25),
    _kind("beauty", "hair oils", "Hair Oil", "Beauty & Personal Care › Hair Care › Oils",
          "argan oil, damaged hair, natural ingredients, hair growth, dry hair, cruelty free", _CARE, 9, 45),
    _kind("grocery", "granola bars", "Granola Bars", "Grocery & Gourmet Food › Snack Foods › Bars › Granola",
          "gluten free, low sugar, high protein, nut free, individually wrapped, non gmo", _FOOD, 5, 35),
    _kind("grocery", "herbal teas", "Herbal Tea", "Grocery & Gourmet Food › Beverages › Tea › Herbal",
          "caffeine free, certified organic, sugar free, plant based, non gmo, hand picked", _FOOD, 4, 30),
    _kind("grocery", "protein powders", "Protein Powder", "Grocery & Gourmet Food › Breakfast Foods › Shakes",
          "soy free, plant based, keto friendly, low carb, gluten free, lactose free", _FOOD, 15, 75),
    _kind("grocery", "cookies", "Cookies", "Grocery & Gourmet Food › Snack Foods › Cookies",
          "gluten free, dairy free, keto friendly, low sugar, baked fresh, nut free", _FOOD, 4, 28),
    _kind("grocery", "trail mixes", "Trail Mix", "Grocery & Gourmet Food › Snack Foods › Trail Mix",
          "high fiber, low sodium, resealable bag, dry roasted, non gmo, artificial colors free", _FOOD, 6, 40),
)  # fmt: skip
_REQUESTS = (
    "i am looking for {what}",
    "i need {what}",
    "i would like to buy {what}",
    "can you find me {what}",
    "i want {what}",
    "looking for {what}",
)


def write(folder: Path) -> None:
    """Write the shop's three files."""
    products, attributes, people = catalogue()
    files = {"items_shuffle.json": products, "items_ins_v2.json": attributes, "items_human_ins.json": people}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def catalogue(seed: int = SEED) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Return products, their attributes and human instructions by asin, in the benchmark's schema."""
    rng = random.Random(seed)
    drafts = [draft for kind in KINDS for _ in range(FAMILIES) for draft in _family(kind, rng)]
    rng.shuffle(drafts)
    products, attributes, people = [], {}, {}
    for number, (kind, product, has) in enumerate(drafts):
        asin = f"P{number:03d}"
        products.append({"asin": asin, **product})
        attributes[asin] = {
            "attributes": has,
            "instruction": f"Find me {_phrase(kind.query, has)}",
            "instruction_attributes": has,
        }
        people[asin] = [_request(asin, kind, product, has, rng)]
    return products, attributes, people


def _family(kind: Kind, rng: random.Random) -> list[tuple[Kind, dict[str, Any], list[str]]]:
    """Return a product and variants that differ in one property each."""
    has = rng.sample(kind.attributes, 2)
    brand, other = rng.sample(_BRANDS[kind.department], 2)
    price = _round(rng.uniform(kind.cheapest, kind.dearest))
    options = {name: _values(values, rng) for name, values in kind.options.items()}
    swapped = [has[0], rng.choice([attribute for attribute in kind.attributes if attribute not in has])]
    fewer = {name: values[:-1] if number == 0 else values for number, (name, values) in enumerate(options.items())}
    dearer = _round(price * rng.uniform(1.3, 1.9))
    return [
        (kind, _product(kind, brand, has, options, price, rng), has),
        (kind, _product(kind, brand, swapped, options, price, rng), swapped),
        (kind, _product(kind, other, has, options, dearer, rng), has),
        (kind, _product(kind, other, has[:1], fewer, _round(price * rng.uniform(0.7, 1.1)), rng), has[:1]),
    ]


def _product(
    kind: Kind, brand: str, has: list[str], options: dict[str, list[str]], price: float, rng: random.Random
) -> dict[str, Any]:
    title = f"{brand} {kind.noun.lower()}, {', '.join(has)}"
    # One in six has a range of prices, as for options with a surcharge.
    pricing = f"${price:.2f}" if rng.random() < 5 / 6 else f"${price:.2f} - ${price * 1.15:.2f}"
    return {
        "name": title,
        "full_description": f"{kind.noun} by {brand}: {', '.join(has)}. {rng.choice(_PROMISES)}",
        "small_description": [f"{attribute.capitalize()}" for attribute in has] + [f"Made by {brand}"],
        "pricing": pricing,
        "images": [""],
        "category": kind.department,
        "query": kind.query,
        "product_category": kind.place,
        "customization_options": {
            name: [{"value": value, "image": None} for value in values] for name, values in options.items()
        },
    }


_PROMISES = (
    "A favourite of our customers.",
    "Made to last.",
    "A present that everybody likes.",
    "Tested by our own people.",
    "Good value, every day.",
)


def _values(values: int | tuple[str, ...], rng: random.Random) -> list[str]:
    """Return a number of colours, or most of the given values in their order."""
    if isinstance(values, int):
        return rng.sample(_COLOURS, values)
    kept = set(rng.sample(values, max(2, len(values) - 1)))
    return [value for value in values if value in kept]


def _phrase(query: str, has: list[str]) -> str:
    return f"{has[0]} {query}{f' with {has[1]}' if has[1:] else ''}"


def _request(asin: str, kind: Kind, product: dict[str, Any], has: list[str], rng: random.Random) -> dict[str, Any]:
    """Return an instruction as a person would write it, for the product with one choice of its options."""
    asked = rng.sample(has, len(has))
    chosen = {name: rng.choice(values)["value"] for name, values in product["customization_options"].items()}
    what = f"{' and '.join(asked)} {kind.query} in {' and '.join(chosen.values())}"
    return {
        "asin": asin,
        "instruction": f"{rng.choice(_REQUESTS).format(what=what)}.",
        "instruction_attributes": asked,
        "instruction_options": list(chosen.values()),
    }


def _round(price: float) -> float:
    """Round a price as shops do."""
    return int(price) + 0.99
