"""Skip tests with missing optional parts, naming the remedy, or fail if ``CI=true``."""

from __future__ import annotations

import importlib.util
import os

import pytest


def require(needed: str | bool, remedy: str) -> None:
    """Go on only if ``needed`` holds: a condition, or the name of a module that must be installed.

    Otherwise the test is skipped with ``remedy`` as the reason, and fails when ``CI=true``: a machine that is meant to
    test everything must not turn green by testing less. Works in tests and fixtures.
    """
    there = importlib.util.find_spec(needed) is not None if isinstance(needed, str) else needed
    if there:
        return
    what = f"{needed} is not installed" if isinstance(needed, str) else "this machine lacks what the test needs"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, and CI=true allows no skipping; {remedy}", pytrace=False)
    pytest.skip(f"{what}; {remedy}")
