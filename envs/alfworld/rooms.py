"""Rooms of generated games: the receptacles and objects that a kitchen, living room, bedroom or bathroom may have.

Invariant: the number of a scene alone decides its receptacles, so splits by scene are splits by room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["kitchen", "living room", "bedroom", "bathroom"]


@dataclass(frozen=True)
class Template:
    """A kind of room: its receptacles with their smallest and largest number, and its objects."""

    first_scene: int
    receptacles: dict[str, tuple[int, int]]
    objects: tuple[str, ...]


TEMPLATES: dict[Kind, Template] = {
    "kitchen": Template(
        1,
        {
            "Fridge": (1, 1), "Microwave": (1, 1), "SinkBasin": (1, 1), "CounterTop": (1, 3), "GarbageCan": (1, 1),
            "Cabinet": (2, 5), "Drawer": (1, 4), "StoveBurner": (0, 2), "DiningTable": (0, 1), "SideTable": (0, 1),
            "Shelf": (0, 2), "CoffeeMachine": (1, 1),
        },
        (
            "Apple", "Bowl", "Bread", "ButterKnife", "Cup", "DishSponge", "Egg", "Fork", "Knife", "Lettuce", "Mug",
            "Pan", "PepperShaker", "Plate", "Pot", "Potato", "SaltShaker", "SoapBottle", "Spatula", "Spoon", "Tomato",
        ),
    ),
    "living room": Template(
        201,
        {
            "Sofa": (1, 1), "ArmChair": (0, 2), "CoffeeTable": (1, 1), "SideTable": (1, 2), "Dresser": (0, 1),
            "Drawer": (1, 3), "Shelf": (0, 3), "Cabinet": (0, 2), "GarbageCan": (1, 1), "Safe": (0, 1),
        },
        (
            "Book", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Newspaper", "Pen", "Pillow", "RemoteControl",
            "Statue", "TissueBox", "Vase", "Watch",
        ),
    ),
    "bedroom": Template(
        301,
        {
            "Bed": (1, 1), "Desk": (1, 2), "SideTable": (0, 2), "Dresser": (0, 1), "Drawer": (1, 4), "Shelf": (0, 3),
            "GarbageCan": (1, 1), "Safe": (0, 1), "ArmChair": (0, 1),
        },
        (
            "AlarmClock", "Book", "Bowl", "CD", "CellPhone", "CreditCard", "KeyChain", "Laptop", "Mug", "Pen", "Pencil",
            "Pillow", "RemoteControl", "Statue", "Watch",
        ),
    ),
    "bathroom": Template(
        401,
        {
            "SinkBasin": (1, 2), "CounterTop": (1, 1), "Toilet": (1, 1), "BathtubBasin": (0, 1), "Cabinet": (1, 4),
            "Drawer": (0, 2), "Shelf": (0, 2), "GarbageCan": (1, 1), "Cart": (0, 1),
        },
        (
            "Candle", "Cloth", "DishSponge", "HandTowel", "PaperTowel", "SoapBar", "SoapBottle", "SprayBottle",
            "TissueBox", "ToiletPaper",
        ),
    ),
}  # fmt: skip
LAMP = "DeskLamp"
LAMP_ROOMS: tuple[Kind, ...] = ("living room", "bedroom")
LAMP_PLACES = ("Desk", "SideTable", "Dresser", "CoffeeTable")


@dataclass(frozen=True)
class Scene:
    """One room: its number, and the type of each of its receptacles."""

    number: int
    kind: Kind
    receptacles: tuple[str, ...]


def scene(kind: Kind, index: int) -> Scene:
    """Return the ``index``-th room of a kind."""
    template = TEMPLATES[kind]
    rng = np.random.default_rng([template.first_scene, index])
    receptacles: list[str] = []
    for name, (fewest, most) in template.receptacles.items():
        receptacles += [name] * int(rng.integers(fewest, most + 1))
    return Scene(template.first_scene + index, kind, tuple(receptacles))
