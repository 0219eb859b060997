"""Mathematics: answers against a computer algebra system, equality that cannot hang, and Python as a tool."""

import asyncio
import json
import re
import shutil
import time
from collections import Counter
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from requiring import require

import agentkit
from agentkit.envs import shared_resources as shared
from agentkit.envs.math import Math
from agentkit.envs.math.answer_forms import value_in_form
from agentkit.envs.math.env import answer_in
from agentkit.envs.math.problems import KINDS, Problem, draw, number, polynomial
from agentkit.envs.math.verifier import LONGEST, Verifier, verifier
from agentkit.envs.sync import SyncTextEnv
from agentkit.envs.task_files import part_of
from agentkit.errors import ConfigError, EnvCrashed
from agentkit.portal import portal

MEMORY = "128m"


@pytest.fixture(scope="module", autouse=True)
def share():
    """A share in the verifier, which is closed after the module's tests."""
    require("math_verify", "pip install 'agentkit-rl[math]'")
    held = verifier()
    portal().run(held._use(lambda shared: shared.equal("1", "2")))
    yield held
    portal().run(held._release())
    assert "math verifier" not in shared._open


# Problems.


def by_sympy(text):
    """Return the answer to a problem, computed by SymPy from its text."""
    sympy = pytest.importorskip("sympy")
    x = sympy.Symbol("x")

    def expression(latex):
        latex = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"(Rational(\1, \2))", latex).replace(r"\cdot", "*")
        latex = re.sub(r"\^\{(\d+)\}", r"**\1", latex).replace(")(", ")*(")
        return sympy.sympify(re.sub(r"(\d)x", r"\1*x", latex), rational=True)

    formulas = re.findall(r"\$(.*?)\$", text)
    integers = [int(n) for n in re.findall(r"\d+", text)]
    if "\\int" in text:
        ((low, high, body),) = re.findall(r"int_\{(-?\d+)\}\^\{(-?\d+)\} \((.*)\) \\,", text)
        return sympy.integrate(expression(body), (x, int(low), int(high)))
    if "Compute" in text:
        return expression(formulas[0])
    if "Solve" in text or "larger solution" in text:
        left, right = formulas[0].split("=")
        return max(sympy.solve(expression(left) - expression(right), x))
    if "what is $xy$" in text:
        y = sympy.Symbol("y")
        equations = []
        for formula in formulas[:2]:
            left, right = formula.split("=")
            equations.append(sympy.sympify(re.sub(r"(\d)([xy])", r"\1*\2", left)) - int(right))
        solution = sympy.solve(equations, [x, y])
        return solution[x] * solution[y]
    if "Expand" in text:
        return sympy.expand(expression(formulas[0]))
    if "common divisor" in text:
        return sympy.igcd(*integers)
    if "remainder" in text:
        return sympy.Integer(integers[0]) ** integers[1] % integers[2]
    if "divisors" in text:
        return sympy.divisor_count(integers[0])
    assert "Differentiate" in text
    return sympy.diff(expression(formulas[0]), x)


def test_answers_are_those_of_a_computer_algebra_system():
    sympy = pytest.importorskip("sympy")
    texts = set()
    for seed in range(120):
        problem = draw(np.random.default_rng(seed), None)
        wanted = by_sympy(problem.problem)
        given = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", problem.answer)
        given = re.sub(r"(\d)x", r"\1*x", re.sub(r"\^\{(\d+)\}", r"**\1", given))
        assert sympy.expand(sympy.sympify(given, rational=True) - wanted) == 0, problem
        texts.add(re.sub(r"[^A-Za-z]", "", problem.problem)[:20])
    assert len(texts) >= len(KINDS) - 1


def test_the_parts_share_no_problem():
    parts = {split: {draw(np.random.default_rng(s), split).problem for s in range(80)} for split in ("train", "test")}
    assert not parts["train"] & parts["test"]
    assert {part_of(text) for text in parts["train"]} == {"train"}


@pytest.mark.parametrize(
    ("coefficients", "text"),
    [
        ([0], "0"),
        ([1], "1"),
        ([-1, 1], "x - 1"),
        ([0, -1], "-x"),
        ([3, 0, -2], "-2x^{2} + 3"),
        ([1, 1, 1], "x^{2} + x + 1"),
    ],
)
def test_polynomials_are_written_as_people_do(coefficients, text):
    assert polynomial(coefficients) == text
    assert number(Fraction(-3, 4)) == r"-\frac{3}{4}"


# Answers.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"so \boxed{1}, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed {x^{2}}", "x^{2}"),
        ("42", "42"),
        ("$x+1$", "x+1"),
        (r"\boxed{}", None),
        (r"\boxed{1", None),
        (r"1} \text{or} {2", None),
        ("I think\n42", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_box_or_everything(text, answer):
    assert answer_in(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "1/2", True),
        (r"-\frac{1}{2}", r"\frac{-2}{4}", True),
        (r"\frac{1}{2}", "0.49", False),
        ("x^{2} + 2x + 1", "(x+1)^2", True),
        ("x^{2} + 2x + 1", "(x-1)^2", False),
        ("3", "x = 3", True),
        ("3", "3 or 4", False),
        ("3", "3, 4", False),
        ("3", r"\pm 3", False),
        ("3", "x", False),
        ("3", "three and nothing else", False),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("3", "\x00", False),
        ("3", "\ud800", False),
        ("3", "1" * (LONGEST + 1), False),
    ],
)
async def test_equality_is_mathematical(share, gold, answer, same):
    assert await share.use(lambda shared: shared.equal(gold, answer)) is same


# Forms.


def monomials(**coefficients):
    """``xxy=3`` is 3x^2 y, ``one=2`` the constant 2."""
    kinds = {name: Counter("" if name == "one" else name) for name in coefficients}
    return {frozenset(kinds[name].items()): Fraction(value) for name, value in coefficients.items()}


@pytest.mark.parametrize(
    ("answer", "form", "value"),
    [
        ("5", "number", 5),
        ("x = 5", "number", 5),
        ("xy=-5", "number", -5),
        (r"x \in \{5\}", "number", 5),
        ("−5", "number", -5),
        ("(+5.0)", "number", 5),
        (".5", "number", Fraction(1, 2)),
        ("1,234,567", "number", 1234567),
        ("1 234 567", "number", 1234567),
        (r"1{,}120", "number", 1120),
        (r"1\,120", "number", 1120),
        (r"\text{5}", "number", 5),
        ("-3/4", "number", Fraction(-3, 4)),
        (r"\dfrac{6}{8}", "number", Fraction(3, 4)),
        (r"\left(-\tfrac34\right)", "number", Fraction(-3, 4)),
        (r"\frac {3} {-4}", "number", Fraction(-3, 4)),
        (r"\frac 3 4", "number", Fraction(3, 4)),
        (r"1 \frac{1}{2}", "number", Fraction(3, 2)),
        (r"-1\frac{1}{2}", "number", Fraction(-3, 2)),
        ("1 1/2", "number", Fraction(3, 2)),
        ("0.333333", "number", Fraction(333333, 10**6)),
        (r"86\frac{13}{1}", "number", None),
        (r"\frac{1}{0}", "number", None),
        (r"86 \cdot 13", "number", None),
        ("0 + 5", "number", None),
        ("--5", "number", None),
        ("(2)(3)", "number", None),
        ("8 6", "number", None),
        ("8$6", "number", None),
        (r"8\text6", "number", None),
        ("2 .5", "number", None),
        ("2^3", "number", None),
        ("1/2/3", "number", None),
        (r"\frac{1}{2} - \frac{1}{3}", "number", None),
        (r"\frac{1 + 2}{3}", "number", None),
        (r"\frac{\frac{1}{2}}{3}", "number", None),
        (r"\gcd(4, 6)", "number", None),
        (r"\sqrt{4}", "number", None),
        ("3x = 0", "number", None),
        ("1, 2", "number", None),
        ("", "number", None),
        ("٣", "number", None),
        ("５", "number", None),
        ("1" * (LONGEST + 1), "number", None),
        ("3/4", "lowest terms", Fraction(3, 4)),
        (r"\frac{-3}{4}", "lowest terms", Fraction(-3, 4)),
        ("-7", "lowest terms", -7),
        ("6/8", "lowest terms", None),
        (r"\frac{-1}{-2}", "lowest terms", None),
        (r"\frac{1}{-2}", "lowest terms", None),
        (r"-\frac{-1}{2}", "lowest terms", None),
        (r"\frac{3}{1}", "lowest terms", None),
        (r"\frac{0}{5}", "lowest terms", None),
        ("0.75", "lowest terms", None),
        (r"1\frac{1}{2}", "lowest terms", None),
        (r"f'(x) = 9 \cdot x^2 - 2", "expanded", monomials(xx=9, one=-2)),
        (r"\frac{dy}{dx} = -2 + 9x^{2}", "expanded", monomials(xx=9, one=-2)),
        (r"\left(\frac12 x^{2} + -3xy\right)", "expanded", monomials(xx=Fraction(1, 2), xy=-3)),
        ("yx + 0.5X", "expanded", monomials(xy=1, X=Fraction(1, 2))),
        ("0x^2 + x^1", "expanded", monomials(x=1)),
        ("0", "expanded", {}),
        ("9xy^{0}", "expanded", None),
        ("9x^0", "expanded", None),
        (r"\frac{1}{0}x", "expanded", None),
        ("(5x + 4)(x + 3)", "expanded", None),
        ("x(x + 3)", "expanded", None),
        ("(x + 1)^2", "expanded", None),
        (r"5x \cdot x + 3", "expanded", None),
        (r"3 \cdot 2x", "expanded", None),
        (r"3x \cdot 1", "expanded", None),
        ("3 2x", "expanded", None),
        ("x + 2 + 3x", "expanded", None),
        ("xy + yx", "expanded", None),
        ("2 + x + 0", "expanded", None),
        ("x^1 + x", "expanded", None),
        ("3x^{3-1}", "expanded", None),
        ("x^23", "expanded", None),
        (r"\frac{d}{dx}(x^2)", "expanded", None),
        (r"\frac{d}{dx} x^2", "expanded", None),
        (r"\int x dx", "expanded", None),
    ],
)
def test_the_form_is_read_from_the_text_and_the_value_is_exact(answer, form, value):
    assert value_in_form(answer, form) == value


def unsolved(text):
    """Return the formulas of a problem's text that could be copied, as expressions or equations true of the answer."""
    formulas = re.findall(r"\$(.*?)\$", text)
    integers = re.findall(r"\d+", text)
    if "Differentiate" in text:
        formulas = [rf"\frac{{d}}{{dx}}({formulas[0]})", rf"({formulas[0]})'"]
    elif "Expand" in text:
        formulas += collected_in_part(formulas[0])
    elif "divisor of" in text:
        formulas = [rf"\gcd({integers[0]}, {integers[1]})"]
    elif "remainder" in text:
        formulas += [rf"{formulas[0]} \bmod {integers[2]}", rf"{formulas[0]} \pmod{{{integers[2]}}}"]
    elif "divisors" in text:
        formulas = [rf"\tau({integers[0]})", rf"\sigma_0({integers[0]})", rf"\sum_{{d \mid {integers[0]}}} 1"]
    for formula in formulas:
        left, _, right = formula.partition("=")
        yield from (formula, f"0 + {formula}", rf"1 \cdot ({formula})", f"(({formula}))", rf"\left({formula}\right)")
        yield from (f"{{{formula}}}", f"+{formula}", f"-(-({formula}))", f"{formula} + 0", rf"\frac{{{formula}}}{{1}}")
        yield from (f"x = {formula}", f"({formula})^1", rf"\text{{{formula}}}", f"{formula}={formula}", f"y={formula}")
        yield from (rf"{formula} \cdot 1", rf"\frac{{-({formula})}}{{-1}}", f"{formula}y^{{0}}", f"{formula}^{{1}}")
        yield from (formula.replace("x", "X", 1) + " + 0X", formula.replace(" ", ""), formula.replace(" ", r"\,"))
        yield formula.translate({ord("0") + digit: 0xFF10 + digit for digit in range(10)})
        if right:
            yield from (f"{left} - ({right})", f"{right} = {left}", f"0 = {right} - ({left})")


def collected_in_part(product):
    """The product of two sums, multiplied out, with the two terms in x kept apart under different spellings."""
    x, one = frozenset({("x", 1)}), frozenset()
    first, second = (
        cast(dict[Any, Fraction], value_in_form(part, "expanded")) for part in product.strip("()").split(")(")
    )
    a, b, c = first[x], first.get(one, 0), second.get(one, 0)
    spellings = (("x", "X"), ("x", "xy^{0}"), ("x", "x^{1}"), ("xy^0", "x"), ("x", r"x \cdot 1"), ("x", "1x"))
    for some, other in spellings if b and c else ():
        yield f"{a}x^{{2}} + {a * c}{some} + {b}{other} + {b * c}".replace("+ -", "- ")


def rational(answer):
    return Fraction(re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer))


def respelt(answer, form, rng):
    """Return equivalent spellings of a correct answer in the same form."""
    yield from (answer, f"x = {answer}", f"( {answer} )", f"\\displaystyle {answer}", f"${answer}$")
    yield rf"\left({answer.replace('frac', 'dfrac')}\right)"
    yield re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer)
    yield re.sub(r"-\\frac\{", r"\\frac{-", answer)
    if form == "number":
        value = rational(answer)
        yield from (f"{value.numerator * 3}/{value.denominator * 3}" if value > 0 else answer,)
        if value.denominator == 1:
            yield from (f"{value.numerator:,}", f"{value}.0", rf"\frac{{{-value}}}{{-1}}")
    if form == "expanded":
        terms = re.sub(r" ([+-]) ", r" \1", answer).replace("+", "").split(" ")
        rng.shuffle(terms)
        yield from (
            " + ".join(terms),
            answer.replace(" ", ""),
            re.sub(r"(?<=\d)x", r" \\cdot x", answer),
        )
        yield re.sub(r"\^\{(\d)\}", r"^\1", answer)


@pytest.mark.parametrize("kind", range(len(KINDS)))
async def test_copying_the_question_earns_nothing_and_its_answer_everything(kind):
    topic, form, make = KINDS[kind]
    rng = np.random.default_rng(kind)
    env = Math()
    await env.reset(seed=0)

    async def score(answer):
        env.problem, env._done = problem, False
        return (await env.step(f"\\boxed{{{answer}}}"))[1]

    for _ in range(300):
        text, answer = make(lambda low, high: int(rng.integers(low, high + 1)))
        problem = Problem(problem=text, answer=answer, topic=topic, form=form)
        for copy in unsolved(text):
            assert await score(copy) == 0, (text, copy)
        for same in respelt(answer, form, rng):
            assert await score(same) == 1, (text, same)
        if form == "lowest terms":
            value = rational(answer)
            above, below = value.numerator, value.denominator
            for other in (rf"\frac{{{-above}}}{{{-below}}}", rf"\frac{{{2 * above}}}{{{2 * below}}}", f"{answer} + 0"):
                assert await score(other) == 0, (text, other)
    await env.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hostile_expressions_end_and_do_not_delay_others(share):
    hostile = [
        "{" * 300,
        "9^{9^{9^{9^{9}}}}",
        "(1000000!)!",
        "9^{99999999}",
        "(" * 400 + "1" + ")" * 400,
        r"\int_0^1 e^{e^{e^{x^{x}}}} dx",
    ]
    start = time.monotonic()
    asked = [share.use(lambda shared, text=text: shared.equal("3", text)) for text in hostile]
    asked.append(share.use(lambda shared: shared.equal("3", "3.0")))
    loop_ran = 0

    async def tick():
        nonlocal loop_ran
        while True:
            await asyncio.sleep(0.05)
            loop_ran += 1

    ticking = asyncio.ensure_future(tick())
    verdicts = await asyncio.gather(*asked)
    ticking.cancel()
    assert verdicts == [False] * len(hostile) + [True]
    assert loop_ran > 5 * min(time.monotonic() - start, 10) / 2


async def test_a_verifier_that_is_killed_is_replaced(share):
    resource: Any = shared._open["math verifier"].resource
    assert await share.use(lambda shared: shared.equal("2", "4/2"))
    first = resource._server._process
    first.kill()
    assert await share.use(lambda shared: shared.equal("2", "4/2"))
    assert resource._server._process.pid != first.pid


async def test_verifier_that_cannot_start_raises():
    broken = Verifier("no_such_module")
    with pytest.raises(EnvCrashed, match="died"):
        await broken.equal("1", "2")
    await broken.close()


# Episodes.


async def test_the_expert_solves_every_problem():
    env = Math(split="test")
    for seed in range(30):
        observation, _ = await env.reset(seed=seed)
        (answer,) = env.expert()
        _, reward, terminated, _, info = await env.step(answer)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
        assert list(info["metrics"].values()) == [1.0]
        with pytest.raises(ResetNeeded):
            await env.step(answer)
        assert (await env.reset(seed=seed))[0] == observation
    await env.close()


@pytest.mark.parametrize(
    ("action", "reward", "valid"),
    [(r"Surely \boxed{0.5}", 1.0, True), ("1/2", 1.0, True), (r"\boxed{2}", 0.0, True), (r"\boxed{", 0.0, False)],
)
async def test_a_users_problem_is_judged(tmp_path, action, reward, valid):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": "Half of one?", "answer": r"\frac{1}{2}", "topic": "halves"}) + "\n")
    env = Math(path=str(path))
    assert (await env.reset(seed=1))[0] == "Half of one?"
    _, earned, terminated, truncated, info = await env.step(action)
    await env.close()
    assert (earned, terminated, truncated) == (reward, True, False)
    assert info == {"success": reward == 1.0, "action_valid": valid, "metrics": {"halves/success": reward}}


@pytest.mark.parametrize(("answer", "reward"), [("1120", 1.0), ("1,120", 1.0), (r"86 \cdot 13 + 2", 0.0)])
async def test_a_users_problem_may_ask_for_a_form(tmp_path, answer, reward):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"problem": r"$86 \cdot 13 + 2$?", "answer": "1120.0", "form": "number"}) + "\n")
    env = Math(path=str(path))
    await env.reset(seed=1)
    assert (await env.step(answer))[1] == reward
    await env.close()


def test_wrong_arguments_are_named(tmp_path, monkeypatch):
    wrong: list[dict[str, Any]] = [
        {"max_turns": 3},
        {"max_turns": 0, "tools": True},
        {"time_limit": 0},
        {"time_limit": 1.5},
        {"split": "dev"},
    ]
    for kwargs in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(kwargs))}="):
            Math(**kwargs)
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "x"}')
    with pytest.raises(ConfigError, match="line 1: answer"):
        Math(path=str(path))
    path.write_text('{"problem": "x", "answer": "1 + 1", "form": "number"}')
    with pytest.raises(ConfigError, match=r"line 1: .*'1 \+ 1' is not of the form 'number'"):
        Math(path=str(path))
    assert Math.max_turns_for(tools=True) == 8
    assert Math.max_turns_for(tools=True, max_turns=3) == 3
    assert "python:" in Math.instructions_for(tools=True)
    assert "python:" not in Math.instructions_for()


@pytest.mark.parametrize("backend", ["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])])
def test_python_is_a_tool(backend):
    require(backend != "local" or shutil.which("bwrap") is not None, "install bubblewrap")
    env = SyncTextEnv(agentkit.make("Math-v0", tools=True, backend=backend, memory=MEMORY, time_limit=1))
    try:
        env.reset(seed=0)
        said, reward, terminated, truncated, info = env.step("python: print(2**10)")
        assert (said, reward, terminated, truncated) == ("Output:\n1024", 0.0, False, False)
        assert info == {"success": False, "action_valid": True}
        assert env.step("```python\nx = 3\nprint(x)\n```")[0] == "Output:\n3"
        said = env.step("python:\nimport sys\nprint(1, file=sys.stderr)\n1 / 0")[0]
        assert said.startswith("Output:\n(nothing was printed)\nThe program failed: runtime error.")
        assert said.endswith("ZeroDivisionError: division by zero")
        assert "(nothing was printed)" in env.step("python: x = 1")[0]
        assert env.step("python:")[4]["action_valid"] is False
        flood = env.step("python: print('x' * 10**6)")[0]
        assert "output limit" in flood
        assert len(flood) < 6_000
        (answer,) = env.expert()
        _, reward, terminated, _, info = env.step(answer)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    finally:
        env.close()


async def test_without_tools_code_is_an_answer():
    env = Math()
    await env.reset(seed=0)
    _, reward, terminated, _, _ = await env.step("python: print(1)")
    await env.close()
    assert (reward, terminated) == (0.0, True)
