"""Translation of a game's PDDL for Fast Downward, cached because it is the slow part of loading a game.

Invariant: a translation depends only on the domain and the problem, and is plain data.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from agentkit.envs.alfworld import alfworld_package
from agentkit.envs.alfworld.cache import write_cached

_VERSION = 1


@dataclass(frozen=True)
class Translation:
    """The data from which a game's state is made."""

    sas: str
    """The task in Fast Downward's format, without pruning, because every action may be tried."""
    types: list[tuple[str, list[str]]]
    """Types and their supertypes."""
    objects: dict[str, str]
    """Object → its type."""
    facts: list[tuple[str, list[str]]]
    """Facts that hold at the start: predicate and objects."""
    parameters: dict[str, list[tuple[str, str]]]
    """Action → names and types of its parameters."""


def translated(domain: str, problem: str, cache: Path | None) -> Translation:
    """Return the translation, from ``cache`` if possible. Raises the exceptions of Fast Downward's translator."""
    kept = _place(domain, problem, cache)
    if (text := _read(kept)) is not None:
        return Translation(**json.loads(text))
    made = _translate(domain, problem)
    if kept is not None:
        write_cached(kept, zlib.compress(json.dumps(asdict(made)).encode(), 1))
    return made


def _translate(domain: str, problem: str) -> Translation:
    fast_downward = alfworld_package.load("fast_downward")
    task, sas = fast_downward.pddl2sas(domain, problem)
    facts: list[tuple[str, list[str]]] = [
        (atom.predicate, list(atom.args))
        for atom in task.init
        # Costs are assignments, and equality is not a fact of the game.
        if isinstance(atom, fast_downward.translate.pddl.conditions.Atom) and atom.predicate != "="
    ]
    return Translation(
        sas,
        [(type.name, list(type.supertype_names)) for type in task.types],
        {thing.name: thing.type_name for thing in task.objects},
        facts,
        {
            action.name: [(parameter.name.strip("?"), parameter.type_name) for parameter in action.parameters]
            for action in task.actions
        },
    )


def _place(domain: str, problem: str, cache: Path | None) -> Path | None:
    if cache is None:
        return None
    digest = hashlib.sha256(json.dumps([_VERSION, domain, problem]).encode()).hexdigest()
    return cache / f"{digest[:32]}.z"


def _read(path: Path | None) -> str | None:
    try:
        return None if path is None else zlib.decompress(path.read_bytes()).decode()
    except (OSError, zlib.error, UnicodeDecodeError):
        return None
