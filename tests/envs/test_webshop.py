"""WebShop: its rewards against the formulas, its pages against recorded ones, its data against the official counts."""

import dataclasses
import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
import webshop_reference as reference
from gymnasium.error import ResetNeeded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from official import official
from requiring import require
from thefuzz import fuzz

import agentkit
from agentkit import data
from agentkit.envs.check import check
from agentkit.envs.webshop import catalogue, expert, generator, goals, pages, products
from agentkit.envs.webshop.catalogue import count, open_catalogue
from agentkit.envs.webshop.env import read_action
from agentkit.envs.webshop.fuzzy_match import COLOURS, token_set_ratio
from agentkit.envs.webshop.noun_extraction import by_tokens, extractor
from agentkit.envs.webshop.reward import matching_options, score, type_score
from agentkit.envs.webshop.search import Index, analyze, document
from agentkit.errors import ConfigError, DataError


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A data folder for the tests."""
    before = os.environ.get("AGENTKIT_DATA")
    os.environ["AGENTKIT_DATA"] = str(tmp_path_factory.mktemp("data"))
    yield
    del os.environ["AGENTKIT_DATA"]
    if before is not None:
        os.environ["AGENTKIT_DATA"] = before


@pytest.fixture(scope="module")
def own():
    require("bm25s", "pip install 'agentkit-rl[webshop]'")
    return open_catalogue("webshop-own")


@pytest.fixture(scope="module")
def small():
    require("bm25s", "pip install 'agentkit-rl[webshop]'")
    return open_catalogue(str(official("webshop-small")))


def make(**arguments):
    return agentkit.make("WebShop-v0", **{"nouns": "tokens", **arguments})


# -- rewards ------------------------------------------------------------------------------------------------------

words = st.sampled_from(
    ["", "red", "light blue", "x-large", "pack of 3", "non slip", "slip resistant", "Ünï 中", "a a b"]
)
texts = st.one_of(words, st.text(max_size=12), st.lists(words, max_size=3).map(" ".join))


@settings(max_examples=120, deadline=None)
@given(texts, texts)
def test_text_similarity_equals_the_librarys(one, other):
    assert token_set_ratio(one, other) == fuzz.token_set_ratio(one, other)
    assert token_set_ratio(one, str(("color", other))) == fuzz.token_set_ratio(one, ("color", other))


def test_the_colours_are_the_benchmarks():
    assert list(COLOURS) == reference.COLOURS


@pytest.mark.official
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6_909), st.integers(0, 999), st.randoms(use_true_random=False), st.floats(0, 300))
def test_the_reward_is_that_of_the_formulas(small, goal_number, other, chance, price):
    goal = small.goal(goal_number)
    wanted = small.product(goal.product)
    for bought in (wanted, small.product(other)):
        chosen = {name: chance.choice(values) for name, values in bought.options.items() if chance.random() < 0.8}
        plain = {
            **{name: getattr(wanted, name) for name in ("query", "product_category", "title")},
            "attributes": goal.attributes,
            "options": goal.options,
            "price_upper": reference.limit_of(goal.instruction),
        }
        found = score(bought, price, chosen.values(), goal, wanted, by_tokens)
        assert found.reward == reference.reward(dataclasses.asdict(bought), price, chosen, plain, by_tokens)
        assert 0.0 <= found.reward <= 1.0


def test_options_match_as_in_the_benchmarks_own_examples():
    wanted = ("grey", "XL", "pack of 12")
    assert matching_options(["pack of 12", "grey", "XL"], wanted) == 3
    assert matching_options(["pack of 12", "blue", "XL"], wanted) == 2
    assert matching_options(["pack of 12", "powder snow", "XL"], ("cool powder snow", "XL", "pack of 12")) == 3
    assert matching_options([], wanted) == 0


def named(title, query="q", category="a › b"):
    return products.Product("A", title, "c", query, category, "", [], [1.0], "$1.0", {}, [])


@pytest.mark.parametrize(
    ("bought", "kind"),
    [
        (named("red shoe"), 1.0),
        (named("red hat", query="x", category="a › b › c"), 1.0),
        (named("red hat", query="x", category="x › b"), 1.0),  # half of the words are common
        (named("hat"), 0.0),  # no word is: the query does not matter then
    ],
)
def test_the_kind_of_product(bought, kind):
    assert type_score(bought, named("red shoe"), by_tokens)[0] == kind


def test_few_common_words_count_little():
    goal = named(" ".join(f"word{chr(97 + k)}" for k in range(20)))
    assert type_score(named("worda"), goal, by_tokens)[0] == 0.1  # 1 of 20
    assert type_score(named("worda wordb wordc", query="x", category="x"), goal, by_tokens)[0] == 0.5  # 3 of 20
    assert type_score(named("anything"), named("1 2 3"), by_tokens)[0] == 1.0  # nothing to compare: 0.2


def test_noun_extractors_can_be_exchanged():
    env = make(nouns=lambda name: [])
    env.reset(seed=0)
    assert extractor("tokens") is by_tokens
    title = "Rusticware 921ORB Kitchen and Bath Cabinet Knob"
    assert by_tokens(title) == ("rusticware", "kitchen", "bath", "cabinet", "knob")
    for wrong in ("x", None, 3, []):
        with pytest.raises(ConfigError, match=re.escape(f"nouns={wrong!r}")):
            make(nouns=wrong)


# -- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.official
def test_the_official_small_set_has_its_official_counts(small):
    assert count(official("webshop-small")) == {"products": 1_000, "goals": 6_910}
    assert (len(small), small.goals) == (1_000, 6_910)
    # As recorded by others who ran the official code on this set.
    assert small.goal(0).instruction.startswith(
        "Find me double sided, machine washable decorative pillows with printing"
    )
    assert small.goal(1).instruction.startswith(
        "Find me butt lifting, light weight women's shorts with high waist, tummy"
    )


@pytest.mark.official
def test_goals_and_prices_are_those_of_the_official_order_of_draws(small):
    """Repeat the official loader and goal builder with the global generator that they use."""
    shop = list(products.read(official("webshop-small")))
    state = random.getstate()
    try:
        random.seed(7)
        prices = [random.uniform(*p.prices[:2]) if len(p.prices) > 1 else p.prices[0] for p in shop]
        told = []
        for product, price in zip(shop, prices, strict=True):
            if product.instruction is None:
                continue
            above = [p for p in [10.0 * i for i in range(1, 100)] if p > price][:4]
            upper = sorted(random.sample(above, 2))[1] if len(above) >= 2 else 1_000_000
            names = sorted(product.options)
            for values in itertools.product(*(product.options[name] for name in names)):
                told.append(
                    (product.asin, upper, dict(zip(names, values, strict=True)), product.instruction_attributes)
                )
        random.seed(233)
        random.shuffle(told)
    finally:
        random.setstate(state)
    catalogue = open_catalogue(str(official("webshop-small")), seed=7)
    assert [catalogue.price(i) for i in range(1_000)] == prices
    for number in range(0, 6_910, 7):
        goal = catalogue.goal(number)
        asin, upper, options, attributes = told[number]
        assert (catalogue.product(goal.product).asin, goal.price_upper) == (asin, upper)
        assert (goal.options, goal.attributes) == (tuple(options.items()), tuple(attributes))
    assert small.goal(0).attributes == catalogue.goal(0).attributes  # the shuffle does not depend on the seed
    assert [small.price(i) for i in range(1_000)] != prices


@pytest.mark.official
def test_human_goals(small):
    people = open_catalogue(str(official("webshop-small")), human=True)
    assert people.goals == sum(
        len(one["instruction_attributes"]) > 0 for p in products.read(official("webshop-small")) for one in p.human
    )
    goal = people.goal(0)
    assert all(isinstance(option, str) for option in goal.options)
    assert goal.weight == 1


def test_raw_files_load_as_the_official_loader_would(tmp_path):
    raw = {
        "asin": "B1",
        "name": "Shirt",
        "category": "fashion",
        "query": " Men's Shirts ",
        "product_category": "a › b",
        "full_description": "soft",
        "small_description": "one bullet",
        "pricing": "$19.99 - $1,027.50",
        "images": ["x.jpg"],
        "customization_options": {"Size": [{"value": " L/XL ", "image": None}], "Color": None},
    }
    others = [
        {**raw, "asin": "B2", "pricing": ""},
        {**raw, "asin": "B1"},
        {**raw, "asin": "nan"},
        {**raw, "asin": "B" * 11},
    ]
    (tmp_path / "items_shuffle.json").write_text(json.dumps([raw, *others], indent=1))
    attributes = {"B1": {"attributes": ["soft"], "instruction": "Find me", "instruction_attributes": ["soft"]}}
    (tmp_path / "items_ins_v2.json").write_text(json.dumps(attributes))
    first, second = products.read(tmp_path)
    assert (first.prices, first.price_tag) == ([19.99, 1027.5], "$19.99 to $1027.5")
    assert (first.options, first.query, first.bullets) == ({"size": ["l | xl"]}, "men's shirts", ["one bullet"])
    assert (second.prices, second.price_tag, second.attributes) == ([100.0], "$100.0", ["DUMMY_ATTR"])
    with pytest.raises(DataError, match="no products of WebShop"):
        list(products.read(tmp_path / "nothing"))


def product(asin):
    return {
        **{"asin": asin, "name": "Shirt", "category": "fashion", "query": "shirts", "product_category": "a › b"},
        **{"full_description": "soft", "small_description": [], "pricing": "$19.99"},
    }


def shop(folder, size="", asins=("B1",)):
    """A folder with a few products, in the form of an official size; several can share it."""
    known = {"attributes": ["soft"], "instruction": "Find me", "instruction_attributes": ["soft"]}
    folder.mkdir(exist_ok=True)
    (folder / f"items_shuffle{size}.json").write_text(json.dumps([product(asin) for asin in asins]))
    (folder / f"items_ins_v2{size}.json").write_text(json.dumps(dict.fromkeys(asins, known)))
    return folder


def test_each_set_reads_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    for name in ("webshop-small", "webshop-full"):
        shop(shop(tmp_path / name, "_1000", ["SMALL"]), "", ["FULL"])
        (tmp_path / name / "items_human_ins.json").write_text("{}")
    folders = {name: tmp_path / name for name in ("webshop-small", "webshop-full")}
    assert [open_catalogue(name).product(0).asin for name in folders] == ["SMALL", "FULL"]
    # Of a folder that is none the small one counts, which is the benchmark's default; the same folder can be both.
    assert [open_catalogue(str(folder)).product(0).asin for folder in folders.values()] == ["SMALL", "SMALL"]
    assert count(folders["webshop-full"]) == {"products": 1, "goals": 1}
    assert [p.asin for p in products.read(shop(tmp_path / "one", "", ["FULL"]))] == ["FULL"]


@pytest.mark.parametrize("name", ["products.jsonl.gz", "attributes.json", "items_human_ins.json"])
@pytest.mark.parametrize("size", [0, 100, -10])
def test_files_that_were_cut_short_are_named(tmp_path, monkeypatch, name, size):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    entries = "\n".join(json.dumps(product(f"B{number}")) for number in range(500))
    (tmp_path / "products.jsonl.gz").write_bytes(gzip.compress(entries.encode()))
    known = {f"B{number}": {"attributes": ["soft"]} for number in range(500)}
    (tmp_path / "attributes.json").write_text(json.dumps(known))
    (tmp_path / "items_human_ins.json").write_text(json.dumps({f"B{number}": [] for number in range(500)}))
    assert len(list(products.read(tmp_path))) == 500
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"{re.escape(str(path))} (is damaged|holds no product)"):
        open_catalogue(str(tmp_path))


def test_damaged_derived_data_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(catalogue, "_open", {})
    folder = str(shop(tmp_path / "shop", asins=[f"B{number}" for number in range(60)]))
    open_catalogue(folder)
    written = [path for path in (tmp_path / "data" / ".derived").rglob("*") if path.is_file() and path.stat().st_size]
    assert {"products.bin", "asins.npy", "goals.bin", "weights.npy", "vocab.index.json"} <= {p.name for p in written}
    for path, cut in itertools.product(written, (0, 100, -1)):
        whole = path.read_bytes()
        path.unlink()  # what is mapped stays as it is
        path.write_bytes(whole[:cut])
        catalogue._open.clear()
        found = open_catalogue(folder)
        assert (len(found), found.goals, found.number("B9")) == (60, 60, 9)
        assert found.goal(59).instruction
        assert found.search(["shirt"], np.random.default_rng(0))
        assert path.read_bytes() == whole, (path, cut)


def test_only_damaged_derived_data_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    folder = str(shop(tmp_path / "shop"))
    open_catalogue(folder)
    (base,) = (tmp_path / "data" / ".derived").iterdir()
    before = (base / "products" / "products.bin").stat().st_ino
    os.truncate(base / "synthetic-0" / "prices.npy", 100)
    monkeypatch.setattr(catalogue, "_open", {})
    assert open_catalogue(folder).price(0) == 19.99
    assert (base / "products" / "products.bin").stat().st_ino == before
    assert sorted(path.name for path in base.iterdir() if path.is_dir()) == ["products", "synthetic-0"]


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_long_files_are_read_piece_by_piece(block):
    values = [{"a": "[],]"}, [1, 2], "x", {"b": {"c": []}}]
    assert list(products.stream_array(StringIO(f" {json.dumps(values)}\n"), block)) == values
    assert list(products.stream_array(StringIO("[]"), block)) == []
    with pytest.raises(DataError, match="not a JSON array"):
        list(products.stream_array(StringIO('[{"a": 1}, {"b"'), block))


def test_our_own_shop_is_the_same_everywhere(own, tmp_path):
    assert (len(own), own.goals) == (448, 3_552)
    generator.write(tmp_path)
    digests = {path.name: data.sha256(path) for path in sorted(tmp_path.iterdir())}
    # After a change of the generator, raise the version of webshop-own in agentkit/data.py, then update this.
    assert data.DATASETS["webshop-own"].version == 1
    assert digests["items_shuffle.json"][:16] == "0eec9b4fb31ecbdb"


def test_our_own_shop_has_structure(own):
    shop = [own.product(number) for number in range(len(own))]
    assert {p.category for p in shop} == {"fashion", "garden", "electronics", "beauty", "grocery"}
    assert len({p.asin for p in shop}) == len(shop)
    kinds = {}
    for product in shop:
        kinds.setdefault(product.query, []).append(set(product.attributes))
    assert all(any(0 < len(a ^ b) <= 2 for a, b in itertools.combinations(group, 2)) for group in kinds.values())
    assert any(len(p.prices) == 2 for p in shop)
    # An option that hides a colour in a longer word can never match: see the benchmark's rule.
    values = {value for p in shop for group in p.options.values() for value in group}
    assert all(re.search(rf"\b{c}\b", v) for v in values for c in [reference.first_colour(v)] if c != v)


def test_splits_are_the_official_ranges():
    assert [goals.split_range(split, 6_910) for split in (None, "test", "eval", "train")] == [
        range(6_910),
        range(500),
        range(500, 1_500),
        range(1_500, 6_910),
    ]
    with pytest.raises(ConfigError, match="only 1500 goals"):
        goals.split_range("train", 1_500)


def test_goals_are_drawn_by_weight_within_the_split(own):
    env = make(split="eval")
    drawn = np.array([(env.reset(seed=seed), env.goal_number)[1] for seed in range(1_500)])
    assert drawn.min() >= 500
    assert drawn.max() < 1_500
    weights = np.array([own.goal(number).weight for number in range(500, 1_500)])
    heavy = set((500 + np.flatnonzero(weights > np.median(weights))).tolist())
    share = sum(number in heavy for number in drawn.tolist()) / len(drawn)
    expected = weights[weights > np.median(weights)].sum() / weights.sum()
    assert share == pytest.approx(expected, abs=0.05)


# -- search -------------------------------------------------------------------------------------------------------


def test_words_are_split_as_by_lucene():
    assert analyze("The Women's running-shoes, size 9.5 (U.S.A.) are 1,000 dresses’s") == [
        *("women", "run", "shoe", "size", "9.5", "u.s.a", "1,000", "dress"),
    ]  # fmt: skip


def test_hits_are_those_of_bm25_computed_by_hand(own):
    """Lucene's formula: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), tf / (tf + k1 (1 - b + b len / mean))."""
    texts = [analyze(document(own.product(number))) for number in range(len(own))]
    mean = sum(map(len, texts)) / len(texts)
    for query in ("slim fit men's t-shirts", "gluten free free cookies", "lavender", "zzz", "of the"):
        scores = np.zeros(len(texts))
        for word in analyze(query):
            holders = sum(word in text for text in texts)
            idf = np.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
            for number, text in enumerate(texts):
                tf = text.count(word)
                scores[number] += idf * tf / (tf + 0.9 * (0.6 + 0.4 * len(text) / mean)) if tf else 0.0
        found = own.search(query.split(" "), np.random.default_rng(0))
        assert len(found) == min(50, int((scores > 0).sum()))
        assert scores[found] == pytest.approx(np.sort(scores)[::-1][: len(found)], abs=1e-5)


def test_an_index_that_was_saved_finds_the_same(own, tmp_path):
    built = Index.build([own.product(number) for number in range(len(own))])
    built.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    for query in ("red dresses", "power banks fast charging", ""):
        assert built.search(query) == loaded.search(query) == own.search(query.split(" "), np.random.default_rng(0))


@pytest.mark.official
def test_the_official_set_is_found_by_its_own_instructions(small):
    asked = [(number, p.instruction) for number, p in enumerate(map(small.product, range(1_000))) if p.instruction]
    hits = [small.search(text.split(" "), np.random.default_rng(0)) for _, text in asked]
    assert len(asked) == 415
    assert sum(number in found[:10] for (number, _), found in zip(asked, hits, strict=True)) / 415 > 0.75
    assert sum(number in found for (number, _), found in zip(asked, hits, strict=True)) / 415 > 0.92


def test_special_searches(own):
    rng = np.random.default_rng(0)
    assert {own.product(n).query for n in own.search(["<q>", "hair", "oils"], rng)} == {"hair oils"}
    assert len(own.search(["<c>", "grocery"], rng)) == 80
    assert all("non slip" in own.product(n).attributes for n in own.search(["<a>", "non", "slip"], rng))
    drawn = own.search(["<r>"], rng)
    assert len(set(drawn)) == 50
    assert own.search(["<a>", "nothing"], rng) == own.search(["<c>"], rng) == own.search(["zzz"], rng) == []


# -- pages --------------------------------------------------------------------------------------------------------


@pytest.mark.official
def test_pages_read_as_recorded_from_the_official_environment(small):
    env = make(data=str(official("webshop-small")))
    observation, info = env.reset(seed=0, options={"goal": 0})
    text = small.goal(0).instruction
    assert observation == f"WebShop [SEP] Instruction: [SEP] {text} [SEP] Search"
    observation = env.step("search[decorative pillows with printing technology]")[0]
    assert observation.startswith(
        f"Instruction: [SEP] {text} [SEP] Back to Search [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] B"
    )
    asin = re.findall(r"Next > \[SEP\] (B\w{9}) \[SEP\] ", observation)[0]
    observation = env.step("click[next >]")[0]
    assert "[SEP] Page 2 (Total results: 50) [SEP] < Prev [SEP] Next > [SEP] B" in observation
    assert asin in env.step("click[< prev]")[0]
    observation = env.step(f"click[{asin.lower()}]")[0]
    product = small.product(small.number(asin))
    choices = [text for name, values in product.options.items() for text in (name, *values)]
    expected = ["Back to Search", "< Prev", *choices, product.title, f"Price: {product.price_tag}", "Rating: N.A."]
    expected += ["Description", "Features", "Reviews", "Buy Now"]
    assert observation == " [SEP] ".join(["Instruction:", text, *(part.strip() for part in expected)])
    observation, reward, terminated, truncated, info = env.step("click[buy now]")
    assert observation.startswith(
        "Thank you for shopping with us! [SEP] Your code: [SEP] None [SEP] (Paste it in your MTurk interface.) [SEP] "
        f"Purchased [SEP] asin [SEP] {asin} [SEP] options [SEP] {{}} [SEP] attrs [SEP] None [SEP] category [SEP] None"
    )
    assert observation.endswith(f"Your score (min 0.0, max 1.0) [SEP] {reward} [SEP] Reward Details [SEP] None")
    assert (terminated, truncated, info["success"]) == (True, False, reward == 1.0)
    assert info["metrics"]["reward"] == reward
    with pytest.raises(ResetNeeded):
        env.step("click[back to search]")


def test_rich_pages_mark_what_was_clicked(own):
    env = make(observation_mode="text_rich")
    first, _ = env.reset(seed=0)
    product = own.product(env.session.goal.product)
    assert first.endswith("[button] Search [button_]\n")
    results = env.step(f"search[{product.title}]")[0]
    assert f"\n\n[button] {product.asin} [button_]\n{product.title}\n{product.price_tag}\n" in results
    name, values = next(iter(product.options.items()))
    item = env.step(f"click[{product.asin.lower()}]")[0]
    assert f"\n{name}\n  [button] {values[0]} [button_]\n" in item
    item = env.step(f"click[{values[0]}]")[0]
    assert item.startswith(f"You have clicked {values[0]}.\nInstruction:")
    assert f"  [clicked button] {values[0]} [clicked button_]" in item
    assert f"\n[clicked button] {product.asin} [clicked button_]\n" in env.step("click[< prev]")[0]
    assert "[clicked button]" not in env.step("click[back to search]")[0]


def test_pages_have_the_blanks_and_gaps_of_the_benchmarks_templates(own, monkeypatch):
    env = make(observation_mode="text_rich", show_attributes=True)
    first, _ = env.reset(seed=0)
    text = env.session.goal.instruction
    assert first == f"WebShop\nInstruction: \n{text}\n[button] Search [button_]\n"
    number = env.session.goal.product
    product = own.product(number)
    env.step(f"search[{product.title}]")
    top = f"Instruction:\n{text}\n[button] Back to Search [button_]\n"
    # The list goes on behind its end, where there are no products.
    last, results = -(-len(env.session.hits) // 10), ""
    for page in range(2, last + 2):
        results = env.step("click[next >]")[0]
        found = f"Page {page} (Total results: {len(env.session.hits)})\n"
        assert results.startswith(f"{top}{found}[button] < Prev [button_]\n[button] Next > [button_]\n")
    assert results.endswith("[button] Next > [button_]\n")
    env.step("click[back to search]")
    env.step(f"search[{product.title}]")
    env.step(f"click[{product.asin.lower()}]")
    top += "[button] < Prev [button_]\n"
    changed = dataclasses.replace(product, description="", bullets=["first ", "", "last"], reviews=[], attributes=["a"])
    shop = env.session.catalogue
    show = shop.product
    monkeypatch.setattr(shop, "product", lambda n: changed if n == number else show(n))
    kinds = f"{product.category}\n{product.query}\n{product.product_category}\n"
    pages_of = {"description": "", "features": " first \n \n last\n", "reviews": "", "attributes": f" a\n{kinds}"}
    for sub_page, expected in pages_of.items():
        assert env.step(f"click[{sub_page}]")[0] == top + expected
        plain = " [SEP] ".join(line.strip() for line in expected.splitlines())
        assert pages.text(env.session).partition("[SEP] < Prev")[2] == (f" [SEP] {plain}" if expected else "")
        env.step("click[< prev]")
    review = {"title": "Good", "score": 4, "body": ""}
    changed = dataclasses.replace(changed, bullets=[], reviews=[review], description=" \n ")
    assert env.step("click[features]")[0] == top
    env.step("click[< prev]")
    assert env.step("click[reviews]")[0] == top + '"Good"\n4\n'
    env.step("click[< prev]")
    assert env.step("click[description]")[0] == top
    env.step("click[< prev]")
    receipt = env.step("click[buy now]")[0].split("\n")
    assert receipt[1:4] == ["Your code: ", "None", " (Paste it in your MTurk interface.)"]
    assert "Goal " in receipt
    assert receipt[-3] == "Reward Details "


class Visible(HTMLParser):
    """Collect the visible texts of a page's body."""

    def __init__(self, page):
        super().__init__()
        self.texts, self.labels, self._path = [], {}, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in ("meta", "input", "img", "link"):
            self._path.append(tag)
        if tag == "input" and values["type" if "type" in values else "name"] == "radio":
            self.labels[values["value"]] = values["name"]
        if tag == "button" and "value" in values:
            self.labels[str(values["value"])[6:-1]] = "button"

    def handle_endtag(self, tag):
        assert self._path.pop() == tag

    def handle_data(self, data):
        if self._path and "head" not in self._path and data.strip():
            self.texts.append(data.strip())


@pytest.mark.official
def test_html_equals_the_text_and_links_every_clickable_element(small):
    rng = np.random.default_rng(0)
    env = make(data=str(official("webshop-small")), show_attributes=True)
    seen = set()
    for seed in range(60):
        observation, info = env.reset(seed=seed)
        for _ in range(12):
            session = env.session
            seen.add((session.page, session.sub_page if session.page == "item_sub_page" else ""))
            page = Visible(pages.html(session))
            assert page.texts == [part for part in observation.split(" [SEP] ") if part.strip()]
            assert set(page.labels) | {a.lower() for a in page.texts if session.catalogue.number(a) is not None} >= {
                label for label in session.clickable() if label != "search"
            }
            if session.page == "done":
                break
            observation, *_, info = env.step(
                info["admissible_actions"][int(rng.integers(len(info["admissible_actions"])))]
            )
    assert {name for name, _ in seen} == {"index", "search_results", "item_page", "item_sub_page", "done"}
    assert {sub for _, sub in seen} == {"", "Description", "Features", "Reviews", "Attributes"}


def test_options_are_forgotten_by_every_list_of_results_and_kept_on_sub_pages(own):
    env = make()
    env.reset(seed=0)
    product = own.product(env.session.goal.product)
    name, values = next(iter(product.options.items()))
    to_item = [f"search[{product.title}]", f"click[{product.asin.lower()}]", f"click[{values[1]}]"]
    for leaving in (["click[< prev]"], ["click[back to search]", to_item[0]], [to_item[0]]):
        for action in to_item:
            env.step(action)
        assert env.session.options == {name: values[1]}
        for action in ("click[features]", "click[< prev]"):
            assert env.step(action)[-1]["action_valid"]
            assert env.session.options == {name: values[1]}
        for action in leaving:
            env.step(action)
        assert env.session.options == {}
        assert env.session.page == "search_results"


@pytest.mark.parametrize(
    "action",
    ["", "search[]", "search", "click[]", "click[search]", "click[buy now]", "Search[x]", "click [x]", "search[a\nb]"],
)
def test_invalid_actions_change_nothing(own, action):
    env = make()
    before, _ = env.reset(seed=0)
    assert env.step(action)[:4] == (before, 0.0, False, False)
    assert env.step(action)[4]["action_valid"] is False


def test_actions_are_read_as_the_benchmark_reads_them(own):
    env = make()
    env.reset(seed=0)
    assert env.step("search[RED shoes] and more")[-1]["action_valid"]
    assert env.session.keywords == ["red", "shoes"]
    assert not env.step("search[red [shoes]]")[-1]["action_valid"]  # the last bracket opens the argument
    assert env.step("click[NEXT >]")[-1]["action_valid"]


@given(st.one_of(st.text(alphabet="[]a\n\r\u2028 ", max_size=12), st.text()))
@example("a[b]]")
@example("[[a]")
@example("a[]")
@settings(max_examples=1_000, deadline=None)
def test_actions_are_found_where_the_benchmarks_expression_finds_them(text):
    found = re.match(r"(.+)\[(.+)\]", text)
    assert read_action(text) == (found and found.groups())


def test_long_texts_are_parsed_quickly(own):
    env = make()
    env.reset(seed=0)
    for text in ("[" * 1_000_000, "[" * 1_000_000 + "]" * 1_000_000, "a[" * 1_000_000):
        began = time.process_time()
        assert env.step(text)[-1]["action_valid"] is False
        assert time.process_time() - began < 0.5


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_no_text_breaks_it(text):
    env = make()
    env.reset(seed=0)
    env.step(text)
    env.step(f"search[{text}]")
    env.step(f"click[{text}]")


def test_short_pages_are_short(own):
    env = make(observation_mode="compact")
    length = 0
    first, _ = env.reset(seed=4)
    assert first == f"Task: {env.session.goal.instruction}"
    observation, reward = first, 0.0
    for action in env.expert():
        observation, reward, *_ = env.step(action)
        length += len(observation)
    assert reward == 1.0
    assert length < 2_000
    assert observation == f"Bought {env.session.product.asin.lower()}. Score 1.00"


# -- the environment ----------------------------------------------------------------------------------------------


def test_it_passes_the_checks(own):
    assert [result for result in check("WebShop-v0", nouns="tokens") if not result.passed] == []


def play(env, goal):
    _, info = env.reset(seed=0, options={"goal": goal})
    taken = 0
    for action in env.expert():
        _, _, _, _, info = env.step(action)
        assert info["action_valid"], action
        taken += 1
    return info["success"] and taken <= env.max_turns, info


def test_the_expert_solves_our_own_goals(own):
    env = make()
    assert all(play(env, goal)[0] for goal in range(0, own.goals, 9))
    people = make(human_goals=True)
    assert all(play(people, goal)[0] for goal in range(0, people.catalogue.goals, 5))


def expert_share(small, step):
    """Return the expert's success rate, weighted as episodes are drawn; goals that it misses are unreachable."""
    env = make(data=str(official("webshop-small")))
    won = all_weight = 0.0
    for number in range(0, small.goals, step):
        success, info = play(env, number)
        weight = small.goal(number).weight
        all_weight += weight
        won += weight * success
        if not success:
            # It fails only if no option of the product matches one of the goal's options.
            goal = small.goal(number)
            assert info["metrics"]["attributes"] == 1.0
            assert info["metrics"]["price"]
            offered = [v for values in small.product(goal.product).options.values() for v in values]
            assert any(matching_options(offered, [option]) == 0 for option in goal.options)
    return won / all_weight


@pytest.mark.official
def test_the_expert_solves_every_solvable_official_task(small):
    assert expert_share(small, 61) >= 0.95


@pytest.mark.official
@pytest.mark.slow
def test_the_expert_solves_every_solvable_task_of_the_whole_official_set(small):
    assert expert_share(small, 1) >= 0.95


def test_the_expert_continues_from_every_position(own):
    rng = np.random.default_rng(1)
    env = make()
    for seed in range(120):
        _, info = env.reset(seed=seed)
        if seed % 4 == 0:
            info = env.step("search[<r>]")[-1]
        for _ in range(int(rng.integers(8))):
            known = [action for action in info["admissible_actions"] if action != "click[buy now]"]
            info = env.step(known[int(rng.integers(len(known)))])[-1]
        for action in list(env.expert()):
            info = env.step(action)[-1]
            assert info["action_valid"], action
        assert info["success"]


def test_search_words_come_from_the_instruction(own):
    env = make()
    for seed in range(20):
        env.reset(seed=seed)
        assert expert.search_words(env.session) in env.session.goal.instruction.lower()


def test_wrong_arguments_are_named(own):
    wrong = {"observation_mode": ["picture", 1], "split": ["valid", 1], "data": [3, "", None, True, ["x"]]}
    wrong["price_seed"] = ["../../../evil", "7", None, 1.0, True]
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
                make(**{name: value})
    with pytest.raises(ValueError, match="render_mode"):
        make(render_mode="rgb_array")
    with pytest.raises(DataError, match="agentkit data fetch webshop-small"):
        make(data="webshop-small")
    with pytest.raises(ConfigError, match=r"known: .*webshop-own"):
        make(data="webshop")
    env = make()
    for goal in (9999, -1, "17", 1.5, True, [1]):
        with pytest.raises(ConfigError, match=re.escape(f"goal={goal!r}")):
            env.reset(options={"goal": goal})
    assert env.reset(options={"goal": np.int64(17)})[1]["goal"] == 17


def test_a_path_may_start_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shop(tmp_path / "my shop")
    assert len(make(data="~/my shop").catalogue) == 1


@pytest.mark.official
def test_the_official_set_can_be_taken_from_a_folder(small):
    folder = data.fetch("webshop-small", official("webshop-small"))
    assert data.verify("webshop-small") == []
    assert make(data="webshop-small").catalogue.goals == 6_910
    assert folder.parent == data.root()


MEASURE = """
import sys, time, json, random
import psutil, gymnasium, numpy, bm25s, Stemmer
import agentkit
from agentkit.envs import base
process = psutil.Process()
began, before = time.process_time(), process.memory_info().rss
first = agentkit.make("WebShop-v0", data=sys.argv[1], nouns="tokens")
load = time.process_time() - began
envs = [first] + [agentkit.make("WebShop-v0", data=sys.argv[1], nouns="tokens") for _ in range(999)]
rng = random.Random(0)
times = {"search": [], "click": []}
infos = [env.reset(seed=k)[1] for k, env in enumerate(envs)]
for turn in range(4):
    for k, env in enumerate(envs):
        if env.session.page == "done":
            continue
        action = rng.choice(infos[k]["admissible_actions"])
        start = time.perf_counter()
        infos[k] = env.step(action)[-1]
        times[action[:5].replace("searc", "search")].append(time.perf_counter() - start)
everything = sorted(times["search"] + times["click"])
found = {"load": load, "rss": process.memory_info().rss - before, "all": everything[len(everything) // 2]}
print(json.dumps({**found, "search": sorted(times["search"])[len(times["search"]) // 2]}))
"""


@pytest.mark.official
@pytest.mark.slow
def test_a_thousand_instances_share_one_small_catalogue(small):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(official("webshop-small"))],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    found = json.loads(done.stdout.split("\n")[-2])
    print(found)
    assert found["rss"] < 1 << 30
    assert found["load"] < 2.0
    # Measured 0.1 ms and 0.3 ms on an idle core; the bounds, which are what is promised, leave room for a busy one.
    assert found["all"] < 1e-3
    assert found["search"] < 5e-3


@pytest.mark.official
def test_building_everything_anew_takes_little(small, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    began = time.process_time()
    open_catalogue(str(official("webshop-small")), seed=99)
    assert time.process_time() - began < 2.0
