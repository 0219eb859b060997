"""The Math environment: problems with one answer, optionally with Python as a tool.

Invariant: answers in a known form are compared exactly, others symbolically in a worker process; code runs in a
sandbox. A failure of the process or of the sandbox is an ``EnvError``, never a score.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.code_runner.runner import SOURCE_LIMIT, Limits, Run, check_time_limit, runner
from agentkit.envs.math.answer_forms import value_in_form
from agentkit.envs.math.problems import Problem, draw
from agentkit.envs.math.verifier import verifier
from agentkit.envs.spaces import Text
from agentkit.envs.task_files import Split, check_split, load
from agentkit.sandboxes.spec import parse_size

if TYPE_CHECKING:
    from agentkit.envs.isolation.redundancy import Redundancy

_CODE = re.compile(r"\s*(?:python:(?P<plain>.*)|```(?:python|py)?[ \t]*\n(?P<fenced>.*?)```\s*)", re.DOTALL)
_BOXED = re.compile(r"\\boxed\s*\{")
_SHOWN = 4_000
"""Bytes of a program's output that an observation shows."""


class Math(AsyncTextEnv):
    r"""Solve a mathematical problem.

    Action space: ``\boxed{answer}`` in LaTeX; with ``tools`` also Python code, as ``python: CODE`` or a fenced block.

    Observation space: the problem; then the output of a program, or whether the answer is correct.

    Rewards: 1 for an answer that equals the known one and has the form that the problem asks for, otherwise 0. An
    answer terminates the episode.

    Args:
        path: file of problems with one JSON object per line; None draws problems from the seed.
        split: draw problems from the ``"train"`` or the ``"test"`` part, which share no problem; None draws from both.
        tools: allow Python before the answer.
        max_turns: turns of an episode; if None, 1 without tools and 8 with them.
        time_limit: seconds of processor time of one program.
        memory: address space of one program.
        backend: back end of the sandboxes that run programs: ``"docker"``, ``"local"``, or another name.
        redundancy: its ``spares``, ``hedge`` and ``health`` apply to these sandboxes; None keeps one spare.

    Raises:
        ValueError: an argument is out of range.
        ConfigError: ``path`` contains no problems, or math-verify is not installed.
    """

    instructions = (
        "Solve the problem.\n"
        r"Action: the answer alone, as \boxed{answer}, in LaTeX: an exact number such as \boxed{\frac{3}{4}}, or an "
        "expression"
    )
    max_turns = 1
    deterministic = True  # except for programs that use the time or random numbers

    def __init__(
        self,
        *,
        path: str | None = None,
        split: Split | None = None,
        tools: bool = False,
        max_turns: int | None = None,
        time_limit: int = 2,
        memory: int | str = "256m",
        backend: str = "docker",
        redundancy: Redundancy | None = None,
    ) -> None:
        check_split(split)
        self.max_turns = self.max_turns_for(tools=tools, max_turns=max_turns)
        if not 1 <= self.max_turns <= 100 or (self.max_turns > 1 and not tools):
            raise ValueError(f"max_turns={max_turns} must lie between 1 and 100, and be 1 without tools")
        check_time_limit(time_limit)
        self.split: Split | None = split
        code = ("python: print(2**10)",) if tools else ()
        self.action_space = Text(examples=(r"\boxed{42}", r"\boxed{\frac{1}{2}}", r"\boxed{x^2 + 1}", *code))
        self._problems = load(path, Problem, "problem", split) if path is not None else None
        self._verifier = verifier()
        self._python = runner(backend, memory, redundancy) if tools else None
        self._limits = Limits(seconds=time_limit, memory=int(parse_size(memory)), output=_SHOWN)
        self.problem: Problem | None = None
        self._done = True

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str | None:
        return "backend" if kwargs.get("tools") else None

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        turns = kwargs.get("max_turns")
        return turns if turns is not None else 8 if kwargs.get("tools") else cls.max_turns

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        if not kwargs.get("tools"):
            return cls.instructions
        return (
            f"{cls.instructions}; or `python:` followed by a Python 3 program, whose output you are then shown (it "
            f"begins anew each time, with the standard library alone). You have {cls.max_turns_for(**kwargs)} turns."
        )

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        rng, known = self.np_random, self._problems
        self.problem = draw(rng, self.split) if known is None else known[int(rng.integers(len(known)))]
        self._done = False
        return self.problem.problem, {"success": False, "action_valid": True}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self.problem is None or self._done:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        self.policy_code_ran = False
        if self._python is not None and (code := _CODE.fullmatch(action)) is not None:
            return await self._use_python(code["plain"] or code["fenced"] or "")
        self._done = True
        answer = answer_in(action)
        if answer is None:
            said = r"This is no answer: write \boxed{answer}."
            return said, 0.0, True, False, self._info(False, valid=False)
        success = await self._equals(answer)
        return "Correct." if success else "Wrong.", float(success), True, False, self._info(success)

    def expert(self) -> Iterator[str]:
        """Yield the known answer."""
        if self.problem is None:
            raise ResetNeeded("call reset() before expert()")
        if not self._done:
            yield f"\\boxed{{{self.problem.answer}}}"

    async def close(self) -> None:
        await self._verifier.release()
        if self._python is not None:
            await self._python.release()

    async def _use_python(self, program: str) -> tuple[str, float, bool, bool, Info]:
        info: Info = {"success": False, "action_valid": False}
        program = program.strip("\n")
        if not program.strip() or len(program.encode("utf-8", "replace")) > SOURCE_LIMIT:
            return f"This is no program of 1 to {SOURCE_LIMIT} bytes.", 0.0, False, False, info
        assert self._python is not None
        source = program.lstrip(" \t")
        (run,) = await self._python.use(lambda shared: shared.run(source, [""], self._limits, begun=self._begun))
        return _told(run), 0.0, False, False, info | {"action_valid": True}

    def _begun(self) -> None:
        self.policy_code_ran = True

    async def _equals(self, answer: str) -> bool:
        assert self.problem is not None
        gold, form = self.problem.answer, self.problem.form
        if form is not None:
            value = value_in_form(answer, form)
            return value is not None and value == value_in_form(gold, form)
        same_text = "".join(answer.split()) == "".join(gold.split())
        return same_text or await self._verifier.use(lambda shared: shared.equal(gold, answer))

    def _info(self, success: bool, *, valid: bool = True) -> Info:
        assert self.problem is not None
        metrics = {f"{self.problem.topic}/success": float(success)}
        return {"success": success, "action_valid": valid, "metrics": metrics}


def answer_in(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{…}``, or the whole text; None if that is not one line of LaTeX."""
    boxes = list(_BOXED.finditer(text))
    if not boxes:
        answer = text.strip().strip("$").strip()
        return answer if answer and _balanced(answer) and "\n" not in answer else None
    start, depth = boxes[-1].end(), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip() or None
    return None


def _balanced(text: str) -> bool:
    depth = 0
    for letter in text:
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth < 0:
            return False
    return depth == 0


def _told(run: Run) -> str:
    """Return the observation after a program ended."""
    output = run.stdout.rstrip() or "(nothing was printed)"
    if not run.failure:
        return f"Output:\n{output}"
    return f"Output:\n{output}\nThe program failed: {run.failure}.\n{run.stderr.rstrip()[-1000:]}".rstrip()
