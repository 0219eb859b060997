"""Check arguments of public functions and classes.

Invariant: a value that does not fit raises one ``ConfigError`` that names the argument, the value and what is expected.
"""

from __future__ import annotations

import typing
from numbers import Integral, Real
from typing import Any, TypeGuard

from agentkit.errors import ConfigError


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of the values of ``choices``, a ``Literal`` type."""
    allowed = typing.get_args(choices)
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}")


def check_type(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raise ``ConfigError`` unless ``value`` is None or an instance of ``kind``; the message says what is expected."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r:.200} must be {expected}, not {type(value).__name__}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise ``ConfigError`` unless ``value`` is an integer, not a boolean, and at least ``least``."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer, at least {least}")


def check_positive(**values: object) -> None:
    """Raise ``ConfigError`` unless each value is None or a number above 0."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and value > 0):
            raise ConfigError(f"{name}={value!r} must be a number above 0")


def check_not_negative(**values: object) -> None:
    """Raise ``ConfigError`` unless each value is a number of at least 0."""
    for name, value in values.items():
        if not (_is_number(value) and value >= 0):
            raise ConfigError(f"{name}={value!r} must be a number of at least 0")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
