"""The PDDL problem for the planner: the current state of a game, reduced to what can matter for the goal.

Invariant: nothing that is omitted can be part of a shortest plan. Objects of other types never block anything
(receptacles do not fill up), and every place is one step from every other; so a receptacle matters only if it is the
goal's, contains an object that matters, or changes objects as the goal requires. The reduction shortens planning from
minutes to milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_TYPE = re.compile(r"\w+type\b")
_STATIONS = {"ishot": "microwavetype", "iscool": "fridgetype", "isclean": "sinkbasintype"}
"""A property that a goal may require → the receptacles that give it."""


class Fact(NamedTuple):
    """A fact: a predicate and its arguments, in lower case as in Fast Downward."""

    predicate: str
    names: tuple[str, ...]


def problem(facts: Iterable[Fact], types: Mapping[str, str], original: str) -> str:
    """Return the reduced problem.

    Args:
        facts: all facts of the current state.
        types: every name → its PDDL type.
        original: the problem of the game, which contains the goal.

    Raises:
        ValueError: the problem has no goal.
    """
    start = original.find("(:goal")
    if start < 0:
        raise ValueError("the game's problem has no (:goal ...)")
    goal = original[start:].lower()
    facts = [fact for fact in facts if "@" not in fact.predicate]  # Fast Downward derives these facts again
    kept = _relevant(facts, goal) | {name for name, type in types.items() if type in ("agent", "rtype", "otype")}
    objects = "\n".join(f"{name} - {types[name]}" for name in sorted(kept))
    init = "\n".join(f"({' '.join((fact.predicate, *fact.names))})" for fact in facts if kept.issuperset(fact.names))
    head = "(define (problem now)\n(:domain alfred)"
    return f"{head}\n(:objects\n{objects}\n)\n(:init\n{init}\n(= (total-cost) 0)\n)\n{goal}"


def _relevant(facts: list[Fact], goal: str) -> set[str]:
    """Return the objects, receptacles and locations that can matter."""

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
