"""The planner's view of a game: what can matter to the goal, as a PDDL problem that starts where the game is now.

Invariant: nothing that is left out can be part of a shortest plan. Things of other types than the goal's are never in
the way (receptacles do not fill up), every place is one step from every other, and so a receptacle matters only if it
is the goal's, holds a thing that matters, or does to things what the goal wants. Fast Downward then plans in
milliseconds, where whole kitchens take it minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_TYPE = re.compile(r"\w+type\b")
_STATIONS = {"ishot": "microwavetype", "iscool": "fridgetype", "isclean": "sinkbasintype"}
"""A property that a goal may want → the receptacles that give it."""


class Fact(NamedTuple):
    """Something that holds: a predicate and the names that it is about, in small letters as Fast Downward has them."""

    predicate: str
    names: tuple[str, ...]


def problem(facts: Iterable[Fact], types: Mapping[str, str], original: str) -> str:
    """The reduced problem.

    Args:
        facts: everything that holds now.
        types: every name → its PDDL type.
        original: the game's problem, whose goal it is.

    Raises ``ValueError`` if there is no goal.
    """
    start = original.find("(:goal")
    if start < 0:
        raise ValueError("the game's problem has no (:goal ...)")
    goal = original[start:].lower()
    facts = [fact for fact in facts if "@" not in fact.predicate]  # what Fast Downward derives, it derives again
    kept = _relevant(facts, goal) | {name for name, type in types.items() if type in ("agent", "rtype", "otype")}
    objects = "\n".join(f"{name} - {types[name]}" for name in sorted(kept))
    init = "\n".join(f"({' '.join((fact.predicate, *fact.names))})" for fact in facts if kept.issuperset(fact.names))
    head = "(define (problem now)\n(:domain alfred)"
    return f"{head}\n(:objects\n{objects}\n)\n(:init\n{init}\n(= (total-cost) 0)\n)\n{goal}"


def _relevant(facts: list[Fact], goal: str) -> set[str]:
    """Things, receptacles and locations that can matter."""

    def pairs(predicate: str) -> list[tuple[str, str]]:
        return [(fact.names[0], fact.names[1]) for fact in facts if fact.predicate == predicate]

    named = set(_TYPE.findall(goal)) | {station for wanted, station in _STATIONS.items() if wanted in goal}
    type_of = dict(pairs("objecttype"))
    carried = {thing for _, thing in pairs("holds")}
    things = {thing for thing, type in type_of.items() if type in named} | carried
    homes = {receptacle for receptacle, type in pairs("cancontain") if type in {type_of[thing] for thing in carried}}
    places = {place for place, type in pairs("receptacletype") if type in named | homes}
    places |= {place for thing, place in pairs("inreceptacle") if thing in things}
    locations = {location for place, location in pairs("receptacleatlocation") if place in places}
    return things | places | locations | {location for _, location in pairs("atlocation")}
