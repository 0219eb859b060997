"""The Judged environment: open questions whose answers a language model scores.

Invariant: if the judge gives no score, the step raises an ``EnvError``; it never counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gymnasium.error import ResetNeeded
from pydantic import ConfigDict, Field

from agentkit.config import Strict
from agentkit.envs.base import AsyncTextEnv, Info
from agentkit.envs.judged.judge import RUBRIC, Judge
from agentkit.envs.task_files import Split, check_split, load
from agentkit.errors import ConfigError, EngineError

LONGEST = 20_000
"""Characters of an answer; a longer answer scores 0 and is not sent to the judge."""


class Question(Strict):
    """A question: the fields of one line of a file."""

    model_config = ConfigDict(frozen=True)

    question: str = Field(min_length=1)
    reference: str | None = None
    """A correct answer, shown to the judge and given by the expert."""


class Judged(AsyncTextEnv):
    """Answer an open question. An episode is one step.

    Action space: the answer, any text of 1 to 20,000 characters.

    Observation space: the question.

    Rewards: the score from 0 to 1 that the judge gives.

    Args:
        path: file of questions with one JSON object per line.
        url: an OpenAI-compatible endpoint, such as ``"http://localhost:8000/v1"``; its key is ``OPENAI_API_KEY``.
        model: name of the judge at the endpoint.
        rubric: the meaning of scores, for the judge.
        threshold: smallest score that counts as a success.
        timeout: seconds that a judgement may take.
        split: draw questions from the ``"train"`` or the ``"test"`` part, which share none; None draws from both.

    Raises:
        ValueError: an argument is out of range.
        ConfigError: ``path`` contains no questions, or ``url`` is not a URL.
    """

    instructions = "Answer the question. Another model judges your answer.\nAction: the answer"
    max_turns = 1
    deterministic = False  # a judge may give different scores

    def __init__(
        self,
        *,
        path: str,
        url: str,
        model: str,
        rubric: str = RUBRIC,
        threshold: float = 0.5,
        timeout: float = 20.0,
        split: Split | None = None,
    ) -> None:
        check_split(split)
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold} must lie above 0 and be at most 1")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout={timeout} must be a positive number of seconds")
        self._questions = load(path, Question, "question", split)
        self._threshold = threshold
        try:
            self._make = lambda: Judge(url, model, rubric=rubric, timeout_s=timeout)
            self._judge: Judge | None = self._make()
        except EngineError as error:
            raise ConfigError(f"url={url!r}: {error}") from error
        self.question: Question | None = None
        self._done = True

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        await super().reset(seed=seed)
        self.question = self._questions[int(self.np_random.integers(len(self._questions)))]
        self._done = False
        return self.question.question, {"success": False, "action_valid": True}

    async def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        if self.question is None or self._done:
            raise ResetNeeded("the episode is over (or has not begun): call reset() first")
        self._done = True
        if not action.strip() or len(action) > LONGEST:
            said = f"An answer has 1 to {LONGEST} characters."
            return said, 0.0, True, False, {"success": False, "action_valid": False}
        if self._judge is None:
            self._judge = self._make()
        score = await self._judge.score(self.question.question, action, self.question.reference)
        success = score >= self._threshold
        info = {"success": success, "action_valid": True, "metrics": {"judge_score": score}}
        return f"Score: {score:g}", score, True, False, info

    def expert(self) -> Iterator[str]:
        """Yield the reference answer."""
        if self.question is None:
            raise ResetNeeded("call reset() before expert()")
        if self.question.reference is None:
            raise NotImplementedError("this question has no `reference`")
        if not self._done:
            yield self.question.reference

    async def close(self) -> None:
        judge, self._judge = self._judge, None
        if judge is not None:
            await judge.close()
