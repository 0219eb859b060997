"""Official data sets, where agentkit itself looks for them: in ``AGENTKIT_DATA``, or in the default data folder.

Both are read when tests are collected, since many tests set ``AGENTKIT_DATA`` to a folder of their own. A test whose
set is missing is skipped with the command that fetches it, and fails with ``CI=true`` (see ``requiring``).
"""

from __future__ import annotations

from pathlib import Path

from requiring import require

from agentkit import data

_FOUND = {name: data.find(name) for name in ("boxoban-test", "swebench-lite-dev", "webshop-small")}
_ALFWORLD = data.root() / data.dataset("alfworld").folder


def official(name: str) -> Path:
    """The folder of an official set."""
    found = _FOUND[name]
    require(found is not None, _fetch(name))
    assert found is not None
    return found


def alfworld_games(split: str) -> Path:
    """The folder of one split of ALFWorld's official games; the other splits need not be there."""
    places = [_ALFWORLD / split, *sorted(_ALFWORLD.glob(f"json_*/{split}"))]
    found = next((place for place in places if place.is_dir()), None)
    require(found is not None, _fetch("alfworld"))
    assert found is not None
    return found


def _fetch(name: str) -> str:
    return f"run `agentkit data fetch {name}`, or set AGENTKIT_DATA to a folder that holds it"
