"""A gymnasium spec that loads its environment only when gymnasium makes it.

Invariant: reading ``id`` loads nothing; ``entry_point``, ``max_episode_steps`` and the other fields are asked of the
environment's class when they are first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec

from agentkit import registry
from agentkit.errors import RegistryError

if TYPE_CHECKING:  # at run time this module may be imported by the import of gymnasium that envs.base begins with
    from agentkit.envs.base import TextEnv


def _load(self: EnvSpec) -> tuple[type[TextEnv], dict[str, Any]]:
    from agentkit.envs.base import TextEnv

    loaded = registry.entry(self.id.partition("/")[2]).load()
    cls: Any = loaded.entry_point
    if not issubclass(cls, TextEnv):
        raise RegistryError(f"{self.id} is asynchronous: gymnasium cannot drive it; use agentkit.make")
    return cls, loaded.kwargs


def _address(cls: type[TextEnv]) -> str | type[TextEnv]:
    """The class as text where it can be imported by name, so that gymnasium can serialise the spec."""
    return cls if "." in cls.__qualname__ else f"{cls.__module__}:{cls.__qualname__}"


def _lazy(read: Any) -> Any:
    # EnvSpec is a dataclass that assigns every field once; the assignment is ignored, since the class knows better.
    return property(read, lambda self, value: None)


class LazySpec(EnvSpec):
    """``EnvSpec`` of one registered name; a gymnasium step is one action, so the limit is turns times actions."""

    entry_point = _lazy(lambda self: _address(_load(self)[0]))
    kwargs = _lazy(lambda self: dict(_load(self)[1]))
    max_episode_steps = _lazy(lambda self: _load(self)[0].max_turns * _load(self)[0].actions_per_turn)
    nondeterministic = _lazy(lambda self: not _load(self)[0].deterministic)
