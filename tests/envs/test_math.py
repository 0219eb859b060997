"""Mathematics: answers against a computer algebra system, equality that cannot hang, and Python as a tool."""

import asyncio
import json
import re
import shutil
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from requiring import require

import agentkit
from agentkit.envs import shared
from agentkit.envs.adapters import Blocking
from agentkit.envs.math import Math
from agentkit.envs.math.env import answer_in
from agentkit.envs.math.problems import KINDS, draw, number, polynomial
from agentkit.envs.math.verifier import LONGEST, verifier
from agentkit.envs.portal import portal
from agentkit.envs.tasks import part_of
from agentkit.errors import ConfigError, EnvCrashed

MEMORY = "128m"


@pytest.fixture(scope="module", autouse=True)
def share():
    """A share in the verifier, which ends with the module's tests."""
    require("math_verify", "pip install 'agentkit-rl[math]'")
    held = verifier()
    portal().run(held._use(lambda shared: shared.equal("1", "2")))
    yield held
    portal().run(held._give_back())
    assert "math verifier" not in shared._entries


# Problems.


def by_sympy(text):
    """The answer to a problem, worked out from its text."""
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


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_hostile_expressions_end_and_delay_nobody(share):
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
    resource: Any = shared._entries["math verifier"].resource
    first = resource._process
    first.kill()
    assert await share.use(lambda shared: shared.equal("2", "4/2"))
    assert resource._process.pid != first.pid


async def test_a_verifier_that_cannot_start_is_no_score(monkeypatch):
    from agentkit.envs.math import verifier as module

    monkeypatch.setattr(module, "_BOOT", "raise SystemExit(1)")
    broken = module.Verifier()
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


def test_wrong_arguments_are_named(tmp_path, monkeypatch):
    wrong: list[dict[str, Any]] = [
        {"max_turns": 3},
        {"max_turns": 0, "tools": True},
        {"time_limit": 0},
        {"split": "dev"},
    ]
    for kwargs in wrong:
        with pytest.raises(ValueError, match=f"{next(iter(kwargs))}="):
            Math(**kwargs)
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "x"}')
    with pytest.raises(ConfigError, match="line 1: answer"):
        Math(path=str(path))
    assert Math.max_turns_for(tools=True) == 8
    assert Math.max_turns_for(tools=True, max_turns=3) == 3
    assert "python:" in Math.instructions_for(tools=True)
    assert "python:" not in Math.instructions_for()


@pytest.mark.parametrize("backend", ["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])])
def test_python_is_a_tool(backend):
    require(backend != "local" or shutil.which("bwrap") is not None, "install bubblewrap")
    env = Blocking(agentkit.make("Math-v0", tools=True, backend=backend, memory=MEMORY, time_limit=1))
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
