"""The parts of a chat template that leaves earlier turns alone.

Invariant: a template has such parts only if rendering a whole conversation at once gives the same text as appending
turn after turn. A template that rewrites or strips earlier turns (usually reasoning between ``<think>`` tags) has none:
with appending, the model would see another history in training than in use.
"""

from __future__ import annotations

from typing import NamedTuple

from agentkit.errors import RendererError
from agentkit.trainers.rollout.template import ChatTemplate, changes
from agentkit.trainers.rollout.tool_probing import ANSWER, CALLS, OBSERVATION, OPENING, RESULTS, SYSTEM
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
    called: str | None = None
    """What comes before the result of a tool: ``head SYSTEM after_system OBSERVATION tail``, a call and
    ``end_of_turn``. None if calls are not messages of their own."""


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
    parts = Parts(head, after_system, tail, bridge[:cut], bridge[cut:], token)
    return parts._replace(called=_called(template, parts)) if template.tools and template.tools.native else parts


def _called(template: ChatTemplate, parts: Parts) -> str:
    """Return what comes before the result of a tool. Raises ``RendererError`` if such turns cannot be appended."""
    assert template.tools is not None
    if template.tools.end != parts.end_of_turn:
        raise RendererError(
            f"the chat template ends an answer with {parts.end_of_turn!r}, and one with a tool call with "
            f"{template.tools.end!r}, so what follows is not known before the answer; set model.history=rerender"
        )
    opening = template.render(OPENING)
    # Some formats allow no text before a call.
    thought = _THINKING if template.tools.read(ANSWER + template.tools.write(CALLS[1])).calls else ""
    answers = (Message("assistant", "", CALLS[:1]), Message("assistant", thought, CALLS[1:]))
    results = [Message("tool", text) for text in RESULTS]
    appended = called = ""
    for answer, result in zip(answers, results, strict=True):
        rendered = template.render([*OPENING, answer, result])
        if not rendered.startswith(opening) or rendered.count(result.content) != 1:
            raise _rewrites(opening, rendered)
        if answer.content and "Qreason8Q" not in rendered:
            raise _rewrites(opening + answer.content, rendered)
        called = called or rendered[: rendered.index(parts.end_of_turn, len(opening)) + len(parts.end_of_turn)]
        appended += rendered[len(opening) :] if appended else rendered
    appended += ANSWER + parts.close + parts.open + OBSERVATION + parts.tail
    played = [message for turn in zip(answers, results, strict=True) for message in turn]
    rendered = template.render([*OPENING, *played, Message("assistant", ANSWER), OPENING[1]])
    if rendered != appended:
        raise _rewrites(appended, rendered)
    return called


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
