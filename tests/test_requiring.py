"""A missing part is said aloud, and is a failure where nothing may be missing."""

from __future__ import annotations

import pytest
from requiring import require


def test_what_is_there_is_no_obstacle() -> None:
    require("json", "-")
    require(True, "-")


def test_what_is_missing_is_skipped_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no_such_module is not installed; pip install it"):
        require("no_such_module", "pip install it")
    with pytest.raises(pytest.skip.Exception, match="buy a GPU"):
        require(False, "buy a GPU")


def test_in_ci_nothing_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="allows no skipping; pip install it"):
        require("no_such_module", "pip install it")
