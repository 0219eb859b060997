"""ALFWorld's hand-coded expert: heuristics that look for things where such things usually are.

Invariant: it sees every command that is carried out, whoever chose it, and says after each what it would do next. It is
told of games in the words of version 2.1.2, whichever the game's own are, except that putting something down is always
"put" to it: its book-keeping knows no "move".
"""

from __future__ import annotations

import random
import re
from typing import Any

from agentkit.envs.alfworld import package

_MOST_STEPS = 150
_PUT = re.compile(r"put (.+) in/on (.+)")
_MOVE = re.compile(r"move (.+) to (.+)")


class Handcoded:
    """The expert of one game. ``goal``: as ``GameFile.goal``. Draws from a generator seeded with ``seed``."""

    def __init__(self, goal: dict[str, Any], seed: int, feedback: str) -> None:
        agents = package.load("alfworld.agents.expert")
        names = set(package.constants().OBJECTS)
        random.seed(seed)  # the expert draws from the global generator, of a process in which nobody else does
        self._agent = agents.HandCodedTWAgent(max_steps=_MOST_STEPS)
        self._agent.task_params = {
            key: value.lower() if isinstance(value, str) and value in names else value for key, value in goal.items()
        }
        policy = self._agent.get_task_policy(self._agent.task_params)
        self._agent.policy = policy(self._agent.task_params, max_steps=_MOST_STEPS)
        self._agent.observe(feedback)
        self.next: str | None = "look"
        """What it would do now; None once it has given up."""

    def watch(self, command: str, feedback: str, commands: list[str], facts: list[Any], won: bool) -> None:
        """See what a command led to."""
        if self.next is None:
            return
        own = {_PUT.sub(r"move \1 to \2", known): known for known in commands}
        state = _Seen(feedback=feedback, admissible_commands=sorted(own), facts=facts, won=won)
        try:
            wanted = self._agent.act(state, 0, won, _MOVE.sub(r"put \1 in/on \2", command))
        except Exception:  # time is up, every subgoal is done, or the heuristics met what they were not made for
            self.next = None
        else:
            self.next = own.get(wanted, "look")


class _Seen(dict[str, Any]):
    """A state whose parts are keys and attributes, as TextWorld's are."""

    __getattr__ = dict[str, Any].__getitem__
