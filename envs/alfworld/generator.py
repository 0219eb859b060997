"""Generator of agentkit's own games in ALFWorld's format: random rooms, objects and goals in ALFRED's domain.

Invariant: the split and the index decide every byte of a game. Every game can be won: the objects of its goal exist,
are not yet where they belong, and can be brought there. The splits share no game, and ``valid_unseen`` shares no room.

The domain (``alfred.pddl``), the grammar (``alfred.twl2``), the goals and the table of what fits where come from the
``alfworld`` package. A game is written as ``TASK-OBJECT-None-RECEPTACLE-SCENE/trial_NUMBER/game.tw-pddl`` with its
``traj_data.json``, like the official games.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from agentkit.envs.alfworld import alfworld_package
from agentkit.envs.alfworld.games import GAME, SPLITS, TASKS, TRAJECTORY, Split, Task
from agentkit.envs.alfworld.rooms import LAMP, LAMP_PLACES, LAMP_ROOMS, TEMPLATES, Kind, Scene, scene

COUNTS: dict[Split, int] = {"train": 600, "valid_seen": 96, "valid_unseen": 96}
"""Number of games of each split; every sixth has the same task. All games and the planner's libraries fit into the
``/tmp`` of a sandbox."""
_SEEN_SCENES, _UNSEEN_SCENES = range(8), range(8, 12)
_STATION = {
    "pick_clean_then_place_in_recep": ("SinkBasin", "Cleanable"),
    "pick_heat_then_place_in_recep": ("Microwave", "Heatable"),
    "pick_cool_then_place_in_recep": ("Fridge", "Coolable"),
}
"""Receptacle that gives an object the property that a task requires, and the name of the class of such objects."""
_OPENABLE = ("Fridge", "Cabinet", "Microwave", "Drawer", "Safe")
_MOST_OBJECTS = 3
Name = TypeVar("Name", bound=str)
_INSIDE = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
"""Receptacles that are parts of another one, whose name their ids start with."""


class Goal(NamedTuple):
    """A goal in ALFRED's terms; ``receptacle`` is the lamp if an object is to be examined."""

    task: Task
    object: str
    receptacle: str


@dataclass(frozen=True)
class Game:
    """A generated game: its folder, and the contents of its two files."""

    folder: str
    game: dict[str, Any]
    trajectory: dict[str, Any]


def write(folder: Path) -> None:
    """Write the whole collection into ``folder``."""
    for split, count in COUNTS.items():
        for index in range(count):
            made = generate(split, index)
            target = folder / split / made.folder
            target.mkdir(parents=True)
            (target / GAME).write_text(json.dumps(made.game))
            (target / TRAJECTORY).write_text(json.dumps(made.trajectory))


def generate(split: Split, index: int) -> Game:
    """Return the ``index``-th game of a split."""
    rng = np.random.default_rng([SPLITS.index(split), index])
    task: Task = TASKS[index % len(TASKS)]
    while True:
        room = _room(task, split, rng)
        goal = _goal(task, room, rng)
        if goal is not None and _part(goal, room) in (split, None):
            return _written(goal, room, f"trial_{SPLITS.index(split)}{index:05d}", rng)


def _room(task: Task, split: Split, rng: np.random.Generator) -> Scene:
    kinds: tuple[Kind, ...] = tuple(TEMPLATES)
    if task == "look_at_obj_in_light":
        kinds = LAMP_ROOMS
    elif task in _STATION:
        kinds = tuple(kind for kind in kinds if _STATION[task][0] in TEMPLATES[kind].receptacles)
    scenes = _UNSEEN_SCENES if split == "valid_unseen" else _SEEN_SCENES
    return scene(_draw(kinds, rng), int(rng.choice(scenes)))


def _goal(task: Task, room: Scene, rng: np.random.Generator) -> Goal | None:
    """Draw a goal for a room; None if the room has no place for it."""
    thing = _draw(TEMPLATES[room.kind].objects, rng)
    homes = [receptacle for receptacle in _homes(thing, room) if receptacle not in _STATION.get(task, ())]
    if len(homes) < 2:  # one in which it is found, and another one to bring it to
        return None
    if task == "look_at_obj_in_light":
        return Goal(task, thing, LAMP) if set(LAMP_PLACES) & set(room.receptacles) else None
    if task in _STATION:
        station, property = _STATION[task]
        if station not in room.receptacles or thing not in alfworld_package.constants().VAL_ACTION_OBJECTS[property]:
            return None
    return Goal(task, thing, _draw(homes, rng))


def _homes(thing: str, room: Scene) -> list[str]:
    """Return the types of receptacles in a room that may contain an object, in a fixed order."""
    holders = alfworld_package.constants().VAL_RECEPTACLE_OBJECTS
    return sorted({receptacle for receptacle in room.receptacles if thing in holders[receptacle]})


def _part(goal: Goal, room: Scene) -> Split | None:
    """Return the split of a goal in a room; None if the room alone decides it."""
    if room.number - TEMPLATES[room.kind].first_scene not in _SEEN_SCENES:
        return None
    names = "-".join((goal.task, goal.object, goal.receptacle, str(room.number))).encode()
    return "valid_seen" if np.random.default_rng(list(names)).integers(5) == 0 else "train"


class _Placed(NamedTuple):
    """A thing in the room: its id, its type, and for an object the id of its receptacle."""

    id: str
    type: str
    location: str
    inside: str = ""


def _written(goal: Goal, room: Scene, trial: str, rng: np.random.Generator) -> Game:
    places = _places(room, rng)
    things = list(_things(goal, room, places, rng))
    templates = alfworld_package.goals()[goal.task]["templates"]
    names = {"obj": goal.object, "recep": goal.receptacle, "toggle": goal.receptacle, "mrecep": ""}
    sentence = templates[int(rng.integers(len(templates)))].format(**{key: name.lower() for key, name in names.items()})
    ending = alfworld_package.goals()[goal.task]["pddl"].replace("#", "-").format(**names)
    domain, grammar = alfworld_package.texts()
    game = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", sentence),
        "pddl_problem": _problem(trial, places, things, ending),
        "solvable": True,
    }
    looks = goal.task == "look_at_obj_in_light"
    trajectory = {
        "task_type": goal.task,
        "task_id": trial,
        "pddl_params": {
            "object_target": goal.object,
            "parent_target": "" if looks else goal.receptacle,
            "toggle_target": goal.receptacle if looks else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"scene_num": room.number},
        "turk_annotations": {"anns": [{"task_desc": sentence}]},
    }
    return Game(f"{goal.task}-{goal.object}-None-{goal.receptacle}-{room.number}/{trial}", game, trajectory)


def _places(room: Scene, rng: np.random.Generator) -> list[_Placed]:
    """Return the receptacles of a room, each at its own location."""
    cells = rng.permutation(24 * 24)[: len(room.receptacles)]
    placed = []
    for name, cell in zip(room.receptacles, cells, strict=True):
        x, z = int(cell) // 24 - 12, int(cell) % 24 - 12
        rest = _position(x / 4, float(rng.choice([0.3, 0.9, 1.4])), z / 4)
        id = f"{_INSIDE[name]}_bar_{rest}_bar_{name}" if name in _INSIDE else f"{name}_bar_{rest}"
        placed.append(_Placed(id, name, _location(x, z)))
    return placed


def _things(goal: Goal, room: Scene, places: list[_Placed], rng: np.random.Generator) -> Iterator[_Placed]:
    """Yield the objects of a room: those of the goal, away from their destination, and other objects anywhere."""
    template = TEMPLATES[room.kind]
    wanted = 2 if goal.task == "pick_two_obj_and_place" else 1
    others = [name for name in template.objects if name != goal.object]
    count = int(rng.integers(len(others) // 2, len(others) + 1))
    names = [goal.object] * (wanted + int(rng.integers(2)))
    for other in rng.permutation(len(others))[:count]:
        names += [others[other]] * int(rng.integers(1, _MOST_OBJECTS + 1))
    for number, name in enumerate(names):
        homes = set(_homes(name, room)) - ({goal.receptacle} if name == goal.object else set())
        yield _inside(name, number, [place for place in places if place.type in homes], rng)
    if set(LAMP_PLACES) & set(room.receptacles) and room.kind in LAMP_ROOMS:
        yield _inside(LAMP, len(names), [place for place in places if place.type in LAMP_PLACES], rng)


def _inside(name: str, number: int, places: list[_Placed], rng: np.random.Generator) -> _Placed:
    place = places[int(rng.integers(len(places)))]
    # Heights distinguish the ids of objects in one receptacle.
    x, z = (float(rng.uniform(-3, 3)) for _ in range(2))
    return _Placed(f"{name}_bar_{_position(x, 0.5 + number / 100, z)}", name, place.location, place.id)


def _problem(name: str, places: list[_Placed], things: list[_Placed], ending: str) -> str:
    constants = alfworld_package.constants()
    holders, properties = constants.VAL_RECEPTACLE_OBJECTS, constants.VAL_ACTION_OBJECTS
    start = _location(0, 12)
    receptacle_types = sorted({place.type for place in places})
    object_types = sorted({thing.type for thing in things})
    objects = [
        "agent1 - agent",
        *(f"{name}Type - rtype" for name in receptacle_types),
        *(f"{name}Type - otype" for name in object_types),
        *(f"{place.id} - receptacle" for place in places),
        *(f"{thing.id} - object" for thing in things),
        *(f"{location} - location" for location in [start, *(place.location for place in places)]),
    ]
    facts = [f"receptacleType {place.id} {place.type}Type" for place in places]
    facts += [f"objectType {thing.id} {thing.type}Type" for thing in things]
    facts += [
        f"canContain {receptacle}Type {thing}Type"
        for receptacle in receptacle_types
        for thing in object_types
        if thing in holders[receptacle]
    ]
    facts += [f"openable {place.id}" for place in places if place.type in _OPENABLE]
    facts += [f"pickupable {thing.id}" for thing in things if thing.type != LAMP]
    facts += [
        f"{property.lower()} {thing.id}"
        for property in sorted(properties)
        for thing in things
        if thing.type in properties[property]
    ]
    facts += [f"inReceptacle {thing.id} {thing.inside}" for thing in things]
    facts += [f"receptacleAtLocation {place.id} {place.location}" for place in places]
    facts += [f"objectAtLocation {thing.id} {thing.location}" for thing in things]
    facts += [f"atLocation agent1 {start}", "= (total-cost) 0"]
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", *objects, ")", "(:init"]
    return "\n".join([*lines, *(f"({fact})" for fact in facts), ")", ending.strip()])


def _position(*coordinates: float) -> str:
    """Return coordinates as in ALFRED's ids, with two digits before and after the decimal point."""
    texts = (f"{abs(value):05.2f}".replace(".", "_dot_") for value in coordinates)
    signs = ("minus" if value < 0 else "plus" for value in coordinates)
    return "_bar_".join(f"_{sign}_{text}" for sign, text in zip(signs, texts, strict=True))


def _location(x: int, z: int) -> str:
    texts = (f"_minus_{-value}" if value < 0 else str(value) for value in (x, z))
    return f"loc_bar_{'_bar_'.join(texts)}_bar_0_bar_30"


def _draw(options: Sequence[Name], rng: np.random.Generator) -> Name:
    return options[int(rng.integers(len(options)))]
