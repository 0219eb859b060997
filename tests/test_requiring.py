"""A missing optional part skips the test with a reason, and fails it in CI."""

from __future__ import annotations

import pytest
from requiring import require


def test_available_parts_are_accepted() -> None:
    require("json", "-")
    require(True, "-")


def test_missing_parts_skip_the_test_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no_such_module is not installed; pip install it"):
        require("no_such_module", "pip install it")
    with pytest.raises(pytest.skip.Exception, match="buy a GPU"):
        require(False, "buy a GPU")


def test_in_ci_nothing_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="allows no skipping; pip install it"):
        require("no_such_module", "pip install it")
