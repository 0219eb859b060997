"""Official data sets, at the places where agentkit looks for them: ``AGENTKIT_DATA``, or the default data folder.

Both are read when tests are collected, because many tests set ``AGENTKIT_DATA`` to another folder. Tests that use
this module have the mark ``official``. Without the data they are skipped with the command that fetches it; with
``CI=true`` they fail (see ``requiring``), unless ``-m "not official"`` deselects them.
"""

from __future__ import annotations

from pathlib import Path

from requiring import require

from agentkit import data

_FOUND = {name: data.find(name) for name in ("boxoban-test", "swebench-lite-dev", "webshop-small")}
_ALFWORLD = data.root() / data.dataset("alfworld").folder


def official(name: str) -> Path:
    """Return the folder of an official data set."""
    found = _FOUND[name]
    require(found is not None, _remedy(name))
    assert found is not None
    return found


def alfworld_games(split: str) -> Path:
    """Return the folder of one split of ALFWorld's official games; the other splits may be missing."""
    places = [_ALFWORLD / split, *sorted(_ALFWORLD.glob(f"json_*/{split}"))]
    found = next((place for place in places if place.is_dir()), None)
    require(found is not None, _remedy("alfworld"))
    assert found is not None
    return found


def _remedy(name: str) -> str:
    return f"run `agentkit data fetch {name}`, or set AGENTKIT_DATA to a folder that contains it"
