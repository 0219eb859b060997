"""What a prompt shows of the earlier turns of an episode: a pure function.

Invariant: with a window, the number of messages is bounded. Roles alternate, because many templates require it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentkit.trainers.rollout.summary import Summarize
from agentkit.trainers.rollout.tools import ToolUse
from agentkit.types import Message, Turn


def conversation(
    system: str,
    turns: Sequence[Turn],
    observation: str,
    window: int | None = None,
    summarize: Summarize | None = None,
    tools: ToolUse | None = None,
) -> list[Message]:
    """Return the messages before the next answer.

    Args:
        system: content of the system message.
        turns: the earlier turns of the episode.
        observation: what the answer replies to.
        window: maximum number of earlier turns; None shows all. Where turns are left out, the first message of the
            user is the first observation, which often states the task, followed by the next observation that is shown.
        summarize: makes a text of the turns that are left out; it is shown between these two observations.
        tools: how tools are used. Calls and their results are messages of their own if the template has such.
    """
    left_out = 0 if window is None else max(0, len(turns) - window)
    shown = turns[left_out:]
    observations = [*(turn.observation for turn in shown), observation]
    if left_out:
        omitted = "1 turn is" if left_out == 1 else f"{left_out} turns are"
        note = f"{omitted} left out here."
        if summarize is not None and (summary := summarize(turns[:left_out])):
            note += f" Summary:\n{summary}"
        observations[0] = f"{turns[0].observation}\n\n[{note}]\n\n{observations[0]}"
    messages = [Message("system", system), Message("user", observations[0])]
    for turn, answered in zip(shown, observations[1:], strict=True):
        messages += [_answer(turn, tools), Message(role_after(turn, tools), answered)]
    return messages


def role_after(turn: Turn, tools: ToolUse | None) -> Literal["user", "tool"]:
    """Return the role of the message that follows ``turn``."""
    return "tool" if tools is not None and tools.native and turn.actions else "user"


def _answer(turn: Turn, tools: ToolUse | None) -> Message:
    if tools is None or not tools.native:
        return Message("assistant", turn.response)
    if not turn.actions:
        return Message("assistant", tools.readable(turn.response))
    answer = tools.read(turn.response)
    return Message("assistant", answer.content, answer.calls)
