"""The text on which the quickstart tokenizer is trained.

Invariant: the corpus is a pure function of this file. It does not read the environments' own instructions, so that
rewording a rule there never renumbers the tokens of a model that is already trained.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

LEXICON = (
    # Moves and other action words
    *("Up", "Down", "Left", "Right", "Stay", "Push", "Look", "Go", "Take", "Open", "Close", "Use", "Put", "Move"),
    # Words for the cells of a grid
    *("player", "wall", "floor", "box", "target", "hole", "goal", "frozen", "ice", "empty", "start", "Player", "Wall"),
    *("Floor", "Box", "Target", "Hole", "Goal", "Frozen", "on", "off", "cell", "row", "column", "grid", "map", "lake"),
    # What rules and observations are made of
    *("You", "you", "your", "the", "The", "a", "an", "and", "or", "of", "to", "in", "into", "is", "are", "it", "not"),
    *(
        "no",
        "yes",
        "one",
        "two",
        "three",
        "four",
        "each",
        "every",
        "once",
        "exactly",
        "at",
        "by",
        "with",
        "from",
        "for",
    ),
    *(
        "as",
        "this",
        "that",
        "may",
        "must",
        "can",
        "cannot",
        "will",
        "when",
        "then",
        "now",
        "next",
        "all",
        "any",
        "more",
    ),
    *("answer", "action", "actions", "Actions", "turn", "turns", "step", "steps", "move", "moves", "reach", "walk"),
    *("push", "pull", "fall", "falls", "number", "numbers", "Numbers", "Target", "expression", "equals", "result"),
    *("system", "user", "assistant", "example", "nothing", "happened", "allowed", "possible", "solve", "Solve", "task"),
    *("Reach", "without", "falling", "changes", "End", "Answer", "most", "tags", "separated", "first", "second"),
    *("slippery", "take", "either", "side", "instead", "had", "format", "Your", "onto", "boxes", "targets", "square"),
    *("valid", "invalid", "Invalid", "reward", "score", "won", "lost", "done", "text", "inside", "between", "symbol"),
)
"""Words that become one token each, both at the start of a line and after a space."""

PROSE = (
    "You walk over a frozen lake from the start to the goal. Do not fall into a hole.",
    "The ice is slippery: a move may take you to the left or to the right of where you wanted to go.",
    "The map shows P for the player, _ for frozen ice, O for a hole and G for the goal. X is where you fell.",
    "You push boxes onto targets. A box can be pushed, never pulled, and only one box at a time.",
    "Symbols: # is a wall, _ is floor, O is a target, X is a box, √ is a box on a target, P is you, S is you on one.",
    "Write an arithmetic expression that equals the target. Use each number exactly once, with + - * / and ( ).",
    "Answer with your actions inside the tags, for example <answer>Right || Down</answer>.",
    "Several actions may be given in one turn, separated by || and carried out in order. At most four are allowed.",
    "Your answer had no valid format. The action is not valid here; nothing happened. Try again.",
    "The possible actions are Up, Down, Left, Right. Solve the task in as few steps as you can.",
    "The player has reached the goal. The player fell into a hole. Every box is on its target.",
)

_ROUNDS = 60
_MOVES = ("Up", "Down", "Left", "Right")
_LAKE_CELLS = "___OO_"
_ROOM_CELLS = "###___OX√"
_CELL_WORDS = ("wall", "floor", "target", "box", "box on target", "player", "player on target")


def corpus() -> Iterator[str]:
    """Yield the training texts, always the same ones in the same order."""
    rng = random.Random(0)
    for _ in range(_ROUNDS):
        yield "\n".join(f"{word} {word}" for word in LEXICON)
        yield from PROSE
        yield "\n".join(_lake(rng) for _ in range(4))
        yield "\n\n".join(_room(rng) for _ in range(4))
        yield "\n".join(" ".join(rng.choice(_CELL_WORDS) for _ in range(6)) for _ in range(6))
        yield "\n".join(_answer(rng) for _ in range(16))
        yield "\n".join(_countdown(rng) for _ in range(8))


def _lake(rng: random.Random) -> str:
    size = rng.choice((4, 4, 4, 6, 8))
    cells = [rng.choice(_LAKE_CELLS) for _ in range(size * size)]
    for symbol, place in zip("PG", rng.sample(range(size * size), 2), strict=True):
        cells[place] = symbol
    return "\n".join(" ".join(cells[row * size : (row + 1) * size]) for row in range(size))


def _room(rng: random.Random) -> str:
    size = rng.choice((6, 6, 8))
    cells = [rng.choice(_ROOM_CELLS) for _ in range(size * size)]
    cells[rng.randrange(size * size)] = rng.choice("PS")
    return "\n".join(" ".join(cells[row * size : (row + 1) * size]) for row in range(size))


def _answer(rng: random.Random) -> str:
    return f"<answer>{' || '.join(rng.choice(_MOVES) for _ in range(rng.randint(1, 5)))}</answer>"


def _countdown(rng: random.Random) -> str:
    a, b, c, d = (rng.randint(1, 99) for _ in range(4))
    return f"Numbers: {a} {b} {c} {d}\nTarget: {a + b * c - d}\n({a} + {b} * {c}) - {d}"
