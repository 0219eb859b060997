"""Data shared by all components: messages, turns, trajectories and groups.

Invariant: the concatenation of a trajectory's turns (``prompt_ids`` then ``action_ids``, turn after turn) is exactly
the token sequence that the inference engine saw and produced; if the history was rendered again for each turn, this
holds for each turn alone. There is no padding.

This module imports no other package than numpy: trajectories can be recorded and read without torch or an environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentkit.tool_calls import ToolCall

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

Places = tuple[tuple[str, str], ...]
"""Sandboxes, as host and id, in the order of use."""

VersionRuns = tuple[tuple[int, int], ...]
"""Run-length record of the policy version of each token: ``((policy_version, number_of_tokens), …)`` in token order."""

FinishReason = Literal["stop", "length", "abort"]
"""Why a generation ended: a stop id or string, the token budget, or an abort by the caller or a weight update."""

Outcome = Literal["terminated", "truncated", "voided"]
"""How an episode ended. ``voided``: its environment failed, so it is not evidence about the policy."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, before it is rendered into tokens."""

    role: Literal["system", "user", "assistant", "tool"]
    """``tool``: the result of the last call."""
    content: str
    calls: tuple[ToolCall, ...] = ()
    """Calls of the assistant, after its content."""


@dataclass(slots=True)
class Turn:
    """One turn: an observation, the policy's answer, and the reward."""

    prompt_ids: IntArray
    """Ids added since the last action, or all ids before the action if ``Trajectory.rerendered``; int32 ``[p]``."""
    action_ids: IntArray
    """Ids that the engine produced, including a sampled stop id, int32 ``[a]``."""
    action_logprobs: FloatArray
    """Log-probabilities of ``action_ids`` under the behaviour policy: full vocabulary, at the sampling temperature."""
    versions: VersionRuns
    """Policy versions that produced ``action_ids``; the counts sum to ``len(action_ids)``."""
    finish_reason: FinishReason = "stop"
    reward: float = 0.0
    """Sum of the environment's rewards in this turn and the format penalty, if any."""
    observation: str = ""
    response: str = ""
    actions: tuple[str, ...] = ()
    """Actions that the parser read in ``response``; empty if the format was invalid."""
    valid: bool = True
    """Whether the format and all executed actions were valid."""
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
    """Policy version at the start of the episode; retries of a failed environment keep that of the first attempt."""
    turns: list[Turn] = field(default_factory=list)
    final_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Ids of the last observation of an episode truncated by the environment or ``max_turns``, int32 ``[f]``; a critic
    bootstraps from it. Empty otherwise, including when the context overflowed."""
    outcome: Outcome = "terminated"
    reason: str = ""
    """Reason of a truncation (``max_turns``, ``env`` or ``context``), or the error message of a voided episode."""
    success: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    attempt: int = 0
    """Number of earlier attempts of this member whose environment failed."""
    duration_s: float = 0.0
    ended_at: float = 0.0
    """When the episode ended, in seconds since the epoch; 0 in records of older versions."""
    sandboxes: Places = ()
    """Sandboxes in which its environment was; empty without one. An environment may have further ones of its own."""
    system: str = ""
    """System message, at the start of the first turn's ``prompt_ids``; empty in records of older versions."""
    rerendered: bool = False
    """Whether the ``prompt_ids`` of each turn, and ``final_ids``, are a whole conversation, rendered again. Each turn
    is then a token sequence of its own."""

    @property
    def reward(self) -> float:
        """Undiscounted return of the episode."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def states(self) -> list[str]:
        """Text of the environment's state at each turn.

        This is the turn's ``observation``, except after an answer with an invalid format: such an answer does not
        change the environment, and ``observation`` is then the previous text with an error message.
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
        """Number of tokens of all sequences: prompts, actions and the final observation."""
        return sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in self.turns) + len(self.final_ids)


@dataclass(slots=True)
class Group:
    """Episodes of one task (environment and seed): the unit of baselines and of staleness."""

    group_id: int
    seed: int
    version_started: int
    """Oldest ``version_started`` of all members ever started for the group, including retries."""
    members: list[Trajectory] = field(default_factory=list)

    @property
    def voided(self) -> bool:
        """Whether environments failed so often that the group is incomplete; it says nothing about the policy then."""
        return any(member.outcome == "voided" for member in self.members)
