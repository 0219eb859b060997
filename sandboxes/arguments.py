"""Check arguments of public classes."""

from __future__ import annotations

import typing
from typing import Any

from agentkit.errors import ConfigError


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of the values of ``choices``, a ``Literal`` type."""
    allowed = typing.get_args(choices)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_positive(**values: float | None) -> None:
    """Raise ``ConfigError`` unless each value that is given is a number above 0."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value!r} must be above 0")
