"""ALFWorld's hand-coded expert: heuristics that search for objects in likely places.

Invariant: the expert observes every executed command and then decides on its next one. It reads games in the words of
version 2.1.2, except that "move" is always "put", which its bookkeeping requires.
"""

from __future__ import annotations

import random
import re
from typing import Any

from agentkit.envs.alfworld import alfworld_package

_MOST_STEPS = 150
_PUT = re.compile(r"put (.+) in/on (.+)")
_MOVE = re.compile(r"move (.+) to (.+)")


class Handcoded:
    """The expert of one game. ``goal`` is ``GameFile.goal``; ``seed`` seeds its random choices."""

    def __init__(self, goal: dict[str, Any], seed: int, feedback: str) -> None:
        agents = alfworld_package.load("alfworld.agents.expert")
        names = set(alfworld_package.constants().OBJECTS)
        random.seed(seed)  # the expert uses the global generator, which nothing else uses in this process
        self._agent = agents.HandCodedTWAgent(max_steps=_MOST_STEPS)
        self._agent.task_params = {
            key: value.lower() if isinstance(value, str) and value in names else value for key, value in goal.items()
        }
        policy = self._agent.get_task_policy(self._agent.task_params)
        self._agent.policy = policy(self._agent.task_params, max_steps=_MOST_STEPS)
        self._agent.observe(feedback)
        self.next: str | None = "look"
        """The next command; None once the expert has given up."""

    def watch(self, command: str, feedback: str, commands: list[str], facts: list[Any], won: bool) -> None:
        """Observe the result of a command."""
        if self.next is None:
            return
        own = {_PUT.sub(r"move \1 to \2", known): known for known in commands}
        state = _Seen(feedback=feedback, admissible_commands=sorted(own), facts=facts, won=won)
        try:
            wanted = self._agent.act(state, 0, won, _MOVE.sub(r"put \1 in/on \2", command))
        except Exception:  # out of time, all subgoals are done, or a situation that the heuristics do not handle
            self.next = None
        else:
            self.next = own.get(wanted, "look")


class _Seen(dict[str, Any]):
    """A state whose entries are both keys and attributes, as in TextWorld."""

    __getattr__ = dict[str, Any].__getitem__
