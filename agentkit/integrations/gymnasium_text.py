"""Spaces of gymnasium as text: how observations are shown, and how actions are named and parsed (pure)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from agentkit.envs.spaces import Text
from agentkit.errors import ConfigError

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white", "crimson")
"""By the last digit of their ANSI code."""
_COLOURED = re.compile(r"\x1b\[(?:\d+;)*?(?:3|4)([0-8])(?:;\d+)*m(.*?)\x1b\[0?m", re.DOTALL)
_CODE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_HEADING = re.compile(r"^[ \t]*#+ +(.*?)[ \t]*$", re.MULTILINE)
_DOCUMENTED = re.compile(r"^[ \t]*[-*] (\d+):[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_NOT_PROSE = re.compile(r"```.*?```|!\[.*?\]\(.*?\)|</?a\b.*?>", re.DOTALL)
"""Code, images and links in HTML."""
_MOST_NAMED = 100
"""Actions of the largest space whose actions are listed."""


def uncoloured(text: str) -> str:
    """Return a text with ANSI colours written as ``<red>…</red>``, and without other terminal codes."""
    told = _COLOURED.sub(lambda found: f"<{(c := _COLOURS[int(found[1])])}>{found[2]}</{c}>", text)
    return _CODE.sub("", told)


def check_readable(id: str, space: Any) -> None:
    """Raise ``ConfigError`` unless ``shown`` has a form for the observations of a space."""
    if isinstance(space, spaces.Tuple):
        parts: Sequence[Any] = space.spaces
    elif isinstance(space, spaces.Dict):
        parts = tuple(space.spaces.values())
    else:
        flat = isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary) and len(space.shape) <= 2
        if not flat and not isinstance(space, spaces.Text | Text | spaces.Discrete):
            raise ConfigError(
                f"gymnasium:{id} has the observation space {space}, which has no text form, and it does not render "
                "text; register a version that is wrapped in an observation wrapper with a Text space"
            )
        return
    for part in parts:
        check_readable(id, part)


def shown(space: Any, value: Any) -> str:
    """Return an observation as text: arrays as rows of numbers, tuples and dicts part by part."""
    if isinstance(space, spaces.Tuple):
        return ", ".join(shown(part, item) for part, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {shown(part, value[name])}" for name, part in space.spaces.items())
    if isinstance(space, spaces.Text | Text):
        return str(value)
    rows = np.atleast_2d(np.asarray(value))
    return "\n".join(
        " ".join(f"{number:.4g}" if rows.dtype.kind == "f" else str(number) for number in row) for row in rows
    )


def name_actions(
    id: str, env: gymnasium.Env[Any, Any], documented: str, given: Sequence[str] | None
) -> list[str] | None:
    """Return the names of the actions of a ``Discrete`` space.

    They are those given, those that the environment tells (``get_action_meanings``, ``actions``), those that its
    documentation lists under ``Action Space``, or the numbers. None if the space is of another kind or too large.

    Raises:
        ConfigError: names are given, and do not fit the space.
    """
    space = env.action_space
    if given is not None:
        lowered = {name.strip().lower() for name in given}
        if not isinstance(space, spaces.Discrete) or not len(given) == len(lowered) == space.n or "" in lowered:
            raise ConfigError(f"actions={list(given)} must be different names, one for each action of {space} of {id}")
        return list(given)
    if not isinstance(space, spaces.Discrete) or space.n > _MOST_NAMED:
        return None
    numbers = range(int(space.start), int(space.start + space.n))
    unwrapped: Any = env.unwrapped
    if hasattr(unwrapped, "get_action_meanings"):
        found = dict(enumerate(unwrapped.get_action_meanings(), numbers.start))
    elif hasattr(getattr(unwrapped, "actions", None), "__members__"):  # an enumeration, as in MiniGrid
        found = {int(member): name for name, member in unwrapped.actions.__members__.items()}
    else:
        listed = _DOCUMENTED.findall(_sections(documented).get("action space", ""))
        found = {int(number): name for number, name in listed}
    names = [str(found.get(number, "")).lower() for number in numbers]
    return names if "" not in names and len(set(names)) == len(names) else [str(number) for number in numbers]


def parse(space: Any, names: Sequence[str] | None, text: str) -> Any:
    """Return the action that a text means, or None if there is none.

    A name may be shortened to words that only one name has: ``left`` for ``move left``.
    """
    if isinstance(space, spaces.Text | Text):
        return text if text in space else None
    said = " ".join(text.lower().split())
    if isinstance(space, spaces.Discrete):
        if re.fullmatch(r"-?[0-9]{1,18}", said):
            action = np.int64(said)
        else:
            known = [name.lower() for name in names or ()]
            words = re.compile(rf"(?<!\w){re.escape(said)}(?!\w)")
            meant = [k for k, name in enumerate(known) if name == said] or [
                k for k, name in enumerate(known) if said and words.search(name)
            ]
            if len(meant) != 1:
                return None
            action = space.start + meant[0]
        return action if action in space else None
    try:
        numbers = np.array([float(part) for part in re.split(r"[\s,]+", said.strip("[]() "))]).reshape(space.shape)
    except ValueError:
        return None
    with np.errstate(all="ignore"):
        action = numbers.astype(space.dtype)
    exact = space.dtype.kind == "f" or np.array_equal(action, numbers)
    return action if exact and action in space else None


def rules(documented: str, *, observation: bool) -> str:
    """Return the parts of a documentation that describe the game and, if wanted, its observations."""
    sections = _sections(documented)
    wanted = ["", "description", *(["observation space"] if observation else [])]
    lines = _NOT_PROSE.sub("", "\n".join(sections.get(title, "") for title in wanted)).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _sections(documented: str) -> dict[str, str]:
    """Return the text under each heading in lower case; that before the first one under an empty heading."""
    first, *rest = _HEADING.split(documented)
    return {"": first, **{title.lower(): text for title, text in zip(rest[::2], rest[1::2], strict=True)}}


def prompt(id: str, space: Any, names: Sequence[str] | None) -> str:
    """Return the instructions for an action. Raises ``ConfigError`` for a space whose actions cannot be written."""
    if isinstance(space, spaces.Text | Text):
        return "Action: a text."
    if isinstance(space, spaces.Discrete):
        if names is None:
            return f"Action: a number from {space.start} to {space.start + space.n - 1}."
        listed = (f"{k} ({name})" if name != str(k) else name for k, name in enumerate(names, int(space.start)))
        return f"Actions: {'; '.join(listed)}. Answer with the number or the name of one."
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return f"Action: {int(np.prod(space.shape))} numbers with spaces between them, in {space}."
    raise ConfigError(f"gymnasium:{id} has the action space {space}, whose actions cannot be written as text")


def samples(space: Any, names: Sequence[str] | None) -> list[str]:
    """Return texts of some actions; none for a space of texts."""
    if names is not None:
        return list(names)
    if isinstance(space, spaces.Text | Text):
        return []
    space.seed(0)
    return [" ".join(map(str, np.ravel(space.sample()).tolist())) for _ in range(8)]
