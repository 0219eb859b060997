"""The CodeContest environment: programming tasks that are judged on hidden inputs.

Invariant: expected outputs never leave this process; a program gets only inputs. A program that fails or exceeds its
limits is wrong; a sandbox that fails is an ``EnvError``, never a score.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gymnasium.error import ResetNeeded

from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.code_contest.task import Case, Task
from agentkit.envs.code_contest.task_families import draw
from agentkit.envs.code_runner.runner import SOURCE_LIMIT, Limits, Run, check_time_limit, runner
from agentkit.envs.spaces import Text
from agentkit.envs.task_files import Split, check_split, load
from agentkit.sandboxes.spec import parse_size

if TYPE_CHECKING:
    from agentkit.envs.isolation.redundancy import Redundancy

_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_SHOWN = 500
"""Characters of an input or output that an observation shows."""


class CodeContest(AsyncTextEnv):
    """Write a Python program that reads standard input and writes standard output.

    Action space: a program, as text or in a fenced block.

    Observation space: the task with examples; after a step, the first example that the program failed.

    Rewards: 1 if all hidden tests pass, otherwise 0; with ``partial_credit`` the fraction of hidden tests passed.

    Args:
        path: file of tasks with one JSON object per line; None draws tasks from the seed.
        split: draw tasks from the ``"train"`` or the ``"test"`` part, which share no task; None draws from both.
        max_turns: programs that may be submitted. All but the last run on the examples first, and the observation
            shows the failure.
        partial_credit: reward the fraction of hidden tests that the last program passed.
        time_limit: seconds of processor time of one run.
        memory: address space of the program, such as ``"256m"``.
        backend: back end of the sandboxes that run programs: ``"docker"``, ``"local"``, or another name.
        redundancy: its ``spares``, ``hedge`` and ``health`` apply to these sandboxes; None keeps one spare.

    Raises:
        ValueError: an argument is out of range.
        ConfigError: ``path`` contains no tasks, or ``memory`` is not a size.
    """

    instructions = (
        "Write a Python 3 program that solves the task. It reads standard input, writes standard output, has the "
        "standard library alone, and is judged on hidden inputs.\n"
        "Action: the whole program, and nothing else"
    )
    max_turns = 1
    deterministic = False  # a program may depend on the time, or exceed its time limit

    def __init__(
        self,
        *,
        path: str | None = None,
        split: Split | None = None,
        max_turns: int = 1,
        partial_credit: bool = False,
        time_limit: int = 2,
        memory: int | str = "256m",
        backend: str = "docker",
        redundancy: Redundancy | None = None,
    ) -> None:
        check_split(split)
        if not 1 <= max_turns <= 100:
            raise ValueError(f"max_turns={max_turns} must lie between 1 and 100")
        check_time_limit(time_limit)
        self.max_turns, self.partial_credit = max_turns, partial_credit
        self.split: Split | None = split
        self.action_space = Text(examples=("print(sum(map(int, input().split())))", "print(input()[::-1])"))
        self._tasks = load(path, Task, "statement", split) if path is not None else None
        self._runner = runner(backend, memory, redundancy)
        self.limits = Limits(seconds=time_limit, memory=int(parse_size(memory)))
        """Limits of one run of a program."""
        self.task: Task | None = None
        self._turns_left = 0

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str:
        return "backend"

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        return kwargs.get("max_turns", cls.max_turns)

    @classmethod
    def instructions_for(cls, **kwargs: Any) -> str:
        turns = cls.max_turns_for(**kwargs)
        return cls.instructions if turns == 1 else f"{cls.instructions}. You may hand in up to {turns} programs."

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        rng = self.np_random
        self.task = draw(rng, self.split) if self._tasks is None else self._tasks[int(rng.integers(len(self._tasks)))]
        self._turns_left = self.max_turns
        examples = "".join(
            f"\n\nInput:\n{case.input.rstrip()}\nOutput:\n{case.output.rstrip()}" for case in self.task.examples
        )
        return self.task.statement + examples, {"success": False, "action_valid": True}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self.task is None or self._turns_left < 1:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        self._turns_left -= 1
        self.policy_code_ran = False
        last = self._turns_left == 0
        program = program_in(action)
        if not program.strip() or len(program.encode("utf-8", "replace")) > SOURCE_LIMIT:
            said = f"This is no program of 1 to {SOURCE_LIMIT} bytes."
            return said, 0.0, last, False, {"success": False, "action_valid": False}
        info: Info = {"success": False, "action_valid": True}
        if not last and self.task.examples:
            passed, complaint = await self._judge(program, self.task.examples, all_of_them=False)
            if passed < len(self.task.examples):
                return f"Wrong on an example. {complaint}", 0.0, False, False, info
        tests = self.task.tests
        passed, _ = await self._judge(program, tests, all_of_them=last and self.partial_credit)
        success = passed == len(tests)
        if success:
            self._turns_left = 0
        if not success and not last:
            return "Right on the examples, but not on all hidden tests.", 0.0, False, False, info
        reward = passed / len(tests) if self.partial_credit else float(success)
        info["success"] = success
        if self.partial_credit:
            info["metrics"] = {"tests_passed": passed / len(tests)}
        return "Correct." if success else "Wrong.", reward, True, False, info

    def expert(self) -> Iterator[str]:
        """Yield the program that belongs to the task."""
        if self.task is None:
            raise ResetNeeded("call reset() before expert()")
        if self.task.solution is None:
            raise NotImplementedError("this task has no `solution`")
        if self._turns_left:
            yield self.task.solution.strip()

    async def close(self) -> None:
        await self._runner.release()

    def _begun(self) -> None:
        self.policy_code_ran = True

    async def _judge(self, program: str, cases: tuple[Case, ...], *, all_of_them: bool) -> tuple[int, str]:
        """Return the number of cases that ``program`` passes, and the reason of the last failure.

        Stops at the first failure unless ``all_of_them``, and always at a case that exceeded its time limit.
        """
        task = self.task
        assert task is not None

        def right(index: int, run: Run) -> bool:
            return not run.failure and task.accepts(run.stdout, cases[index].output)

        def enough(index: int, run: Run) -> bool:
            return not right(index, run) and (not all_of_them or run.failure == "time limit")

        inputs = [case.input for case in cases]
        runs = await self._runner.use(lambda shared: shared.run(program, inputs, self.limits, enough, self._begun))
        wrong = [index for index, run in enumerate(runs) if not right(index, run)]
        return len(runs) - len(wrong), _complaint(runs[wrong[-1]], cases[wrong[-1]]) if wrong else ""


def program_in(answer: str) -> str:
    """Return the last fenced block of an answer, or the whole answer."""
    blocks = _BLOCK.findall(answer)
    return blocks[-1] if blocks else answer


def _complaint(run: Run, case: Case) -> str:
    got = run.failure or "no failure"
    told = f"Input:\n{_short(case.input)}\nExpected:\n{_short(case.output)}\nYour program: {got}, and wrote:\n"
    return told + _short(run.stdout) + (f"\n{_short(run.stderr, end=True)}" if run.failure == "runtime error" else "")


def _short(text: str, *, end: bool = False) -> str:
    text = text.rstrip()
    if len(text) <= _SHOWN:
        return text
    return f"…{text[-_SHOWN:]}" if end else f"{text[:_SHOWN]}…"
