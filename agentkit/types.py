"""The data that crosses rooms: messages, turns, trajectories and groups.

Invariant: the concatenation of a trajectory's turns (``prompt_ids`` then ``action_ids``, turn after turn) is exactly
the token sequence that the inference engine saw and produced. Nothing is tokenised twice, and nothing is padded here.

This module imports numpy alone, so that recording or reading trajectories needs neither torch nor an environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

VersionRuns = tuple[tuple[int, int], ...]
"""Run-length record of who produced each token: ``((policy_version, number_of_tokens), …)`` in token order."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a generation ended: a stop id or string, the token budget, or an abort by the caller or a weight update."""

Outcome = Literal["terminated", "truncated", "voided"]
"""How an episode ended. Voided: its environment failed, so that it says nothing about the policy."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, before it is rendered into tokens."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(slots=True)
class Turn:
    """One exchange: what the environment said, what the policy answered, what that earned."""

    prompt_ids: IntArray
    """Only the ids that were added since the last action, int32 ``[p]``."""
    action_ids: IntArray
    """The ids that the engine produced, a sampled stop id included, int32 ``[a]``."""
    action_logprobs: FloatArray
    """Log-probabilities of ``action_ids`` under the behaviour policy: full vocabulary, at the sampling temperature."""
    versions: VersionRuns
    """Which policy version produced which of ``action_ids``; the counts add up to ``len(action_ids)``."""
    finish_reason: FinishReason = "stop"
    reward: float = 0.0
    """Sum of the environment's rewards of this turn and of any format penalty."""
    observation: str = ""
    response: str = ""
    actions: tuple[str, ...] = ()
    """What the action parser read in ``response``; empty when the format was invalid."""
    valid: bool = True
    """The format was valid, and so were all the actions that the environment was given."""
    generate_s: float = 0.0
    env_s: float = 0.0


@dataclass(slots=True)
class Trajectory:
    """One episode of one member of a group."""

    group_id: int
    member: int
    env_id: str
    seed: int
    version_started: int
    """The policy version that began the episode; retries of a failed environment keep the first attempt's."""
    turns: list[Turn] = field(default_factory=list)
    final_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Ids of the last observation of an episode that the environment or ``max_turns`` cut off, on which a critic
    bootstraps; empty otherwise, also when the context overflows."""
    outcome: Outcome = "terminated"
    reason: str = ""
    """Why it was truncated (``max_turns``, ``env``, ``context``) or voided (the error's text)."""
    success: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    attempt: int = 0
    """How many environments failed under this member before this attempt."""
    duration_s: float = 0.0
    system: str = ""
    """The system message, which the first turn's ``prompt_ids`` begin with; empty in records of older versions."""

    @property
    def reward(self) -> float:
        """The episode's undiscounted return."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def states(self) -> list[str]:
        """What the environment had said last when each turn was taken.

        That is the turn's ``observation``, except after an answer without a valid format: such an answer does not move
        the environment, and ``observation`` then adds a complaint to what the environment had said before.
        """
        states: list[str] = []
        for before, turn in zip([None, *self.turns], self.turns, strict=False):
            states.append(turn.observation if before is None or before.actions else states[-1])
        return states

    @property
    def num_action_tokens(self) -> int:
        return sum(len(turn.action_ids) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        """Every token of the sequence: prompts, actions and the final observation."""
        return sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in self.turns) + len(self.final_ids)


@dataclass(slots=True)
class Group:
    """Episodes that share a task (environment and seed): the unit of baselines, of staleness and of expiry."""

    group_id: int
    seed: int
    version_started: int
    """The oldest ``version_started`` of any member that was ever begun for the group, retries included."""
    members: list[Trajectory] = field(default_factory=list)
