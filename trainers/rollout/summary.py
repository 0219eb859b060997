"""Summaries of the turns that a window leaves out: pure functions of these turns.

Invariant: a summary has at most ``model.summary_length`` characters, whatever the policy wrote and a plug-in returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from agentkit.config import ModelConfig
from agentkit.plugins import SUMMARY
from agentkit.types import Turn

Summarize = Callable[[Sequence[Turn]], str]
"""Returns the summary of the turns that are left out, which may be empty."""

_INVALID = "(an invalid answer)"
_MORE = "…"


def make_summary(model: ModelConfig) -> Summarize | None:
    """Return what ``model.summary`` names; None without a summary.

    Raises:
        RegistryError: a plug-in does not load.
        ConfigError: its options are wrong.
    """
    name, length = model.summary, model.summary_length
    if name is None:
        return None
    if name in SUMMARY.built_in:
        return lambda turns: actions(turns, length)
    plugin = SUMMARY.load(name)
    function = plugin.bind(model.summary_options)

    def summarize(turns: Sequence[Turn]) -> str:
        text = function([(turn.observation, turn.actions) for turn in turns])
        if not isinstance(text, str):
            raise plugin.error(f"returned {text!r:.200}, not a text")
        return text if len(text) <= length else text[: length - 1] + _MORE

    return summarize


def actions(turns: Sequence[Turn], length: int) -> str:
    """Return the actions of ``turns`` in order, in at most ``length`` characters; the oldest are left out first."""
    taken = [" ".join(action.split()) for turn in turns for action in turn.actions or (_INVALID,)]
    counted = [(action, len(list(same))) for action, same in groupby(taken)]
    listed = "; ".join(action if count == 1 else f"{action} ({count} times)" for action, count in counted)
    text = f"Actions: {listed}"
    if len(text) <= length:
        return text
    start = f"Latest actions: {_MORE}"
    return start + listed[len(listed) - (length - len(start)) :]
