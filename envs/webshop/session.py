"""One visit to the shop: the current page, the chosen options, and the effect of actions.

Invariant: the transitions are those of WebShop. A page is a pure function of the session; clickable labels are those
that it shows. Every list of results resets the product and the chosen options.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from agentkit.envs.webshop.catalogue import Catalogue
from agentkit.envs.webshop.goals import Goal
from agentkit.envs.webshop.noun_extraction import Nouns
from agentkit.envs.webshop.products import Product
from agentkit.envs.webshop.reward import Score, score

PER_PAGE = 10
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
BUY, BACK, NEXT, PREVIOUS, SEARCH = "Buy Now", "Back to Search", "Next >", "< Prev", "Search"
PageName = Literal["index", "search_results", "item_page", "item_sub_page", "done"]
Kind = Literal["text", "instruction", "button", "link", "option", "name", "title", "image"]


@dataclass(frozen=True, slots=True)
class Part:
    """A visible part of a page."""

    kind: Kind
    text: str
    """Text with the surrounding blanks of the benchmark's templates."""
    group: str = ""
    """Name of the option, for a choice of an option."""


class Session:
    """A visit, from the search page to the purchase."""

    def __init__(
        self, catalogue: Catalogue, goal: Goal, rng: np.random.Generator, nouns: Nouns, *, show_attributes: bool = False
    ) -> None:
        self.catalogue, self.goal = catalogue, goal
        self.rng, self._nouns, self._show_attributes = rng, nouns, show_attributes
        self.actions: Counter[str] = Counter()
        """Numbers of searches, visited sub-pages and so on, since the last visit of the index page."""
        self.score: Score | None = None
        """The score of the purchase."""
        self._index()

    def _index(self) -> None:
        self.page: PageName = "index"
        self.sub_page = ""
        self.keywords: list[str] = []
        self.number = 1
        """Number of the page of results."""
        self.hits: list[int] = []
        self.item: int | None = None
        self.visited: set[int] = set()
        self.options: dict[str, str] = {}
        self.actions.clear()

    @property
    def product(self) -> Product:
        """The product of the page; only on pages of an item and after the purchase."""
        assert self.item is not None
        return self.catalogue.product(self.item)

    @property
    def shown(self) -> list[int]:
        """The products on this page of results."""
        return self.hits[(self.number - 1) * PER_PAGE : self.number * PER_PAGE]

    def search(self, words: str) -> None:
        """Search, from any page."""
        self._results(words.split(" "), 1)

    def click(self, label: str) -> bool:
        """Click on the element with this label in lower case; return False without effect if there is none."""
        part = self.clickable().get(label)
        if part is None or label == SEARCH.lower():
            return False
        sub_page = next((name for name in SUB_PAGES if name.lower() == label), None)
        if label == BUY.lower():
            self._buy()
        elif label == BACK.lower():
            self._index()
        elif label == NEXT.lower() and self.page == "search_results":
            self._results(self.keywords, self.number + 1)
        elif label == PREVIOUS.lower() and self.page == "search_results":
            self._results(self.keywords, self.number - 1)
        elif label == PREVIOUS.lower() and self.page == "item_page":
            self._results(self.keywords, self.number)
        elif sub_page is not None:
            self.page, self.sub_page = "item_sub_page", sub_page
            self.actions[sub_page] += 1
        else:
            self._item(part)
        return True

    def _results(self, keywords: list[str], number: int) -> None:
        self.keywords, self.number = keywords, number
        self.page, self.item, self.options = "search_results", None, {}
        self.hits = self.catalogue.search(keywords, self.rng)
        self.actions["search"] += 1

    def _item(self, part: Part) -> None:
        if part.kind == "link":
            self.item = self.catalogue.number(part.text)
            self.visited.add(self.item)  # pyright: ignore[reportArgumentType]
            self.actions["asin"] += 1
        elif part.kind == "option":
            self.options[part.group.lower()] = part.text
            self.actions["options"] += 1
        self.page = "item_page"

    def _buy(self) -> None:
        assert self.item is not None
        wanted = self.catalogue.product(self.goal.product)
        price = self.catalogue.price(self.item)
        self.score = score(self.product, price, self.options.values(), self.goal, wanted, self._nouns)
        self.actions["purchase"] += 1
        self.page = "done"

    # The visible page.

    @property
    def url(self) -> str:
        """The address on the benchmark's site, without host and session."""
        words = "+".join(self.keywords)
        if self.page == "search_results":
            return f"/search_results/{words}/{self.number}"
        if self.page == "item_page":
            return f"/item_page/{self.product.asin}/{words}/{self.number}/{json.dumps(self.options)}"
        if self.page == "item_sub_page":
            return f"/item_sub_page/{self.product.asin}/{words}/{self.number}/{self.sub_page}/{self.options}"
        return f"/done/{self.product.asin}/{self.options}" if self.page == "done" else "/"

    def clickable(self) -> dict[str, Part]:
        """Clickable elements by label in lower case. If options share a label, the last one counts."""
        parts = self.parts()
        labels = {part.text.lower(): part for part in parts if part.kind == "button"}
        labels |= {part.text.lower(): part for part in parts if part.kind == "link"}
        return labels | {part.text: part for part in parts if part.kind == "option"}

    def parts(self) -> list[Part]:
        """The parts of the page from top to bottom."""
        if self.page == "index":
            heading = [Part("title", "WebShop"), Part("instruction", "Instruction: "), *self._instruction()[1:]]
            return [*heading, Part("button", SEARCH)]
        if self.page == "done":
            return self._receipt()
        return [*self._instruction(), Part("button", BACK), *getattr(self, f"_{self.page}")()]

    def _instruction(self) -> list[Part]:
        return [Part("instruction", "Instruction:"), Part("instruction", self.goal.instruction)]

    def _search_results(self) -> list[Part]:
        parts = [Part("text", f"Page {self.number} (Total results: {len(self.hits)})")]
        if self.number > 1:
            parts.append(Part("button", PREVIOUS))
        parts.append(Part("button", NEXT))  # also after the last page, which leads to a page without products
        for product in map(self.catalogue.product, self.shown):
            parts += [Part("image", product.image), Part("link", product.asin)]
            parts += [Part("name", product.title), Part("text", product.price_tag)]
        return parts

    def _item_page(self) -> list[Part]:
        product = self.product
        chosen = (product.option_images.get(value) for value in self.options.values())
        image = next((image for image in chosen if image), product.image)
        parts = [Part("button", PREVIOUS), Part("image", image)]
        for name, values in product.options.items():
            parts += [Part("text", name), *(Part("option", value, name) for value in values)]
        parts += [Part("title", product.title), Part("text", f"Price: {product.price_tag}")]
        parts.append(Part("text", f"Rating: {product.rating}"))
        names = SUB_PAGES if self._show_attributes else SUB_PAGES[:-1]
        return [*parts, *(Part("button", name) for name in names), Part("button", BUY)]

    def _item_sub_page(self) -> list[Part]:
        product = self.product
        texts = {
            "Description": [product.description],
            "Features": [f" {bullet}" for bullet in product.bullets],
            "Reviews": _reviews(product),
            "Attributes": [
                *(f" {name}" for name in product.attributes),
                product.category,
                product.query,
                product.product_category,
            ],
        }[self.sub_page]
        return [Part("button", PREVIOUS), *(Part("text", text) for text in texts)]

    def _receipt(self) -> list[Part]:
        assert self.score is not None
        texts = ["Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"]
        texts += [
            "Purchased",
            "asin",
            self.product.asin,
            "options",
            _html_safe(json.dumps(self.options, sort_keys=True)),
        ]
        texts += ["attrs", "None", "category", "None", "query", "None", "product category", "None", "Target", "asin"]
        texts += ["options", "attrs", "price upper", "instuction text", "category", "product category", "query"]
        texts += ["Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(self.score.reward)]
        texts += ["Reward Details ", "None"]
        return [Part("text", text) for text in texts]


def _html_safe(text: str) -> str:
    """Return JSON in the format of the benchmark's templates."""
    for sign in "<>&'":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _reviews(product: Product) -> list[str]:
    texts = []
    for review in product.reviews:
        texts += [f'"{review.get("title", "")}"', str(review.get("score", "")), review.get("body", "")]
    return texts
