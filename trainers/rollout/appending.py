"""The parts of a chat template that leaves earlier turns alone.

Invariant: a template has such parts only if rendering a whole conversation at once gives the same text as appending
turn after turn. A template that rewrites or strips earlier turns (usually reasoning between ``<think>`` tags) has none:
with appending, the model would see another history in training than in use.
"""

from __future__ import annotations

from typing import NamedTuple

from agentkit.errors import RendererError
from agentkit.trainers.rollout.template import ANSWER, OBSERVATION, SYSTEM, ChatTemplate, changes
from agentkit.types import Message

_SECOND, _THIRD = "Qsecond2Q", "Qthird3Q"
_THINKING = f"<think>\nQreason8Q\n</think>\n\n{ANSWER}"


class Parts(NamedTuple):
    """``head SYSTEM after_system OBSERVATION tail ANSWER close open OBSERVATION tail ANSWER …``"""

    head: str
    after_system: str
    tail: str
    close: str
    """Ends an answer; its last token is ``end_of_turn``."""
    open: str
    end_of_turn: str


def parts_of(template: ChatTemplate) -> Parts:
    """Return the constant parts of ``template``. Raises ``RendererError`` if turns cannot be appended."""

    def conversation(*contents: str) -> str:
        messages = [Message(("user", "assistant")[k % 2], content) for k, content in enumerate(contents)]
        return template.render([Message("system", SYSTEM), *messages], prompt=len(contents) % 2 == 1)

    opening = conversation(OBSERVATION)
    head, after_system, tail = _split(opening, SYSTEM, OBSERVATION)
    two = conversation(OBSERVATION, ANSWER, _SECOND)
    if not two.startswith(opening + ANSWER):
        raise _rewrites(opening + ANSWER, two)
    bridge, end = _split(two[len(opening + ANSWER) :], _SECOND)
    if end != tail:
        raise _rewrites(tail, end)
    for answer in (ANSWER, _THINKING):
        appended = opening + answer + bridge + _SECOND + tail + answer + bridge + _THIRD + tail
        rendered = conversation(OBSERVATION, answer, _SECOND, answer, _THIRD)
        if rendered != appended:
            raise _rewrites(appended, rendered)
    token = template.first_special(bridge)
    if token is None:
        raise no_end_of_turn(bridge)
    cut = bridge.index(token) + len(token)
    return Parts(head, after_system, tail, bridge[:cut], bridge[cut:], token)


def no_end_of_turn(after: str) -> RendererError:
    return RendererError(
        f"the chat template ends an answer with {after!r}, which contains no special token, so the engine cannot "
        "detect the end of an answer; use a template with an end-of-turn token"
    )


def _split(text: str, *marks: str) -> list[str]:
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise changes(mark, text)
        before, text = text.split(mark)
        parts.append(before)
    return [*parts, text]


def _rewrites(appended: str, rendered: str) -> RendererError:
    same = next(
        (i for i, (a, b) in enumerate(zip(appended, rendered, strict=False)) if a != b),
        min(len(appended), len(rendered)),
    )
    what = "strips the reasoning of" if "Qreason8Q" in appended and "Qreason8Q" not in rendered else "rewrites"
    here = slice(max(0, same - 20), same + 40)
    return RendererError(
        f"the chat template {what} earlier turns: appending a turn gives …{appended[here]!r} where the template "
        f"renders …{rendered[here]!r}. Training would then see another history than the engine. Set "
        "model.history=rerender, or model.chat_template to a template that leaves history alone (for Qwen3-like "
        "templates: one without the branch that removes <think>…</think>)"
    )
