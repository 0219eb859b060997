"""Templates for the package of a new environment.

Invariant: the written package is complete: it installs, its tests pass, `agentkit env check` accepts it and
`agentkit run` trains on it. Existing files are not overwritten.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from agentkit import entry_points, registry
from agentkit.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Package:
    """A written package."""

    directory: Path
    module: str
    class_name: str
    env_id: str


def write_package(name: str, into: Path) -> Package:
    """Write the package ``name`` to the new folder ``into / name``.

    Args:
        name: name of the package, such as ``my-env``.
        into: existing parent folder.

    Returns:
        The folder, and the names of the module, the class and the environment.

    Raises:
        ConfigError: the name is malformed or in use, or the folder exists.
    """
    package = _named(name, into)
    if package.directory.exists():
        raise ConfigError(f"{package.directory} exists already; choose another name or remove it")
    values = {
        "name": name,
        "module": package.module,
        "class_name": package.class_name,
        "env_id": package.env_id,
        "agentkit": ".".join(version(entry_points.DISTRIBUTION).split(".")[:2]),
    }
    for path, template in _FILES.items():
        file = package.directory / path.format(**values)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = template
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        file.write_text(text, encoding="utf-8")
    return package


def _named(name: str, into: Path) -> Package:
    """Derive the names of module, class and environment, and check that none is in use."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a package name: use lower-case letters, digits and single hyphens, as in my-env"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise ConfigError(f"{name!r} would hide Python's own {module!r}; choose another name")
    if importlib.util.find_spec(module) is not None:
        raise ConfigError(f"{name!r} would hide the installed module {module!r}; choose another name")
    class_name = "".join(part.capitalize() for part in name.split("-"))
    env_id = f"{class_name}-v0"
    if any(entry.id == env_id for entry in registry.list_envs()):
        raise ConfigError(f"{name!r} would define {env_id}, which exists already; choose another name")
    return Package(into / name, module, class_name, env_id)


_PYPROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "@name@"
version = "0.1.0"
description = "A text environment for agentkit"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["agentkit-rl>=@agentkit@"]

[project.optional-dependencies]
test = ["pytest"]

# This entry registers the environment when the package is installed.
[project.entry-points."agentkit.envs"]
"@env_id@" = "@module@.env:@class_name@"

[tool.setuptools]
packages = ["@module@"]
"""

_ENV = '''\
"""Guess a secret number: an example to replace with your own environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentkit import Text, TextEnv


class @class_name@(TextEnv):
    """Find a number between 1 and ``largest``; the answer to a wrong guess is Higher or Lower.

    Args:
        largest: the largest possible secret number.
        render_mode: ``"ansi"`` or None.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}
    instructions = (
        "I think of a whole number. Guess it.\\n"
        "After a wrong guess I say Higher (my number is higher) or Lower.\\n"
        "Action: the number alone, such as 7"
    )
    max_turns = 8
    concurrency = "inline"  # steps return at once; use "process" for code that may hang

    def __init__(self, *, largest: int = 9, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        if largest < 2:
            raise ValueError(f"largest={largest} must be at least 2")
        self.largest = largest
        self.action_space = Text(examples=[str(number) for number in range(1, largest + 1)])
        self._secret = 0
        self._text = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random, the only source of randomness
        self._secret = int(self.np_random.integers(1, self.largest + 1))
        self._text = f"My number is between 1 and {self.largest}."
        return self._text, self._info(success=False, valid=True)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess = self._read(action)
        if guess is None:
            self._text = f"Guess a number between 1 and {self.largest}."
            return self._text, 0.0, False, False, self._info(success=False, valid=False)
        success = guess == self._secret
        self._text = "Right." if success else "Higher." if guess < self._secret else "Lower."
        return self._text, float(success), success, False, self._info(success=success, valid=True)

    def expert(self) -> Iterator[str]:
        """Yield a solution: the oracle for imitation, and an upper bound for policies."""
        yield str(self._secret)

    def render(self) -> Any:
        return self._text if self.render_mode == "ansi" else None

    def _read(self, action: str) -> int | None:
        text = action.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= len(str(self.largest))):
            return None
        return int(text) if 1 <= int(text) <= self.largest else None

    def _info(self, *, success: bool, valid: bool) -> dict[str, Any]:
        return {"success": success, "action_valid": valid, "admissible_actions": list(self.action_space.examples)}
'''

_INIT = '''\
"""@class_name@, an environment for agentkit."""

from @module@.env import @class_name@ as @class_name@
'''

_TEST = '''\
"""The environment satisfies the contract of agentkit, and the game works."""

import agentkit
from agentkit.envs.check import check


def test_satisfies_the_contract():
    failed = [result for result in check("@env_id@") if not result.passed]
    assert not failed, failed


def test_a_wrong_guess_tells_the_direction():
    env = agentkit.make("@env_id@", largest=9)
    env.reset(seed=0)
    (secret,) = env.expert()
    wrong = "9" if secret == "1" else "1"
    observation, reward, terminated, _, info = env.step(wrong)
    assert (observation, reward, terminated) == ("Lower." if wrong == "9" else "Higher.", 0.0, False)
    observation, reward, terminated, _, info = env.step(secret)
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_nonsense_is_invalid_but_harmless():
    env = agentkit.make("@env_id@")
    env.reset(seed=0)
    for nonsense in ("", "seven", "0", "-1", "10", "9" * 5000, "²"):
        _, reward, terminated, _, info = env.step(nonsense)
        assert (reward, terminated, info["action_valid"]) == (0.0, False, False)
'''

_README = """\
# @name@

A text environment for agentkit, registered as `@env_id@`.

    pip install -e .              # registers the environment
    agentkit env check @env_id@
    agentkit env play @env_id@
    agentkit run train.yaml       # imitation of the expert, then reinforcement learning

The game is in `@module@/env.py`; `pytest` (`pip install -e .[test]`) runs its tests.
"""

_TRAIN = """\
# agentkit run train.yaml
env:
  id: @env_id@
dir: runs/@module@
steps: 10
imitation:
  episodes: 256
  stop_success: 0.5
rollout:
  groups: 8
  group_size: 8
learner:
  lr: 0.001 # for the built-in small model; pretrained models need less (see the default)
evaluation:
  episodes: 64
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    "train.yaml": _TRAIN,
    "{module}/__init__.py": _INIT,
    "{module}/env.py": _ENV,
    "tests/test_{module}.py": _TEST,
}
