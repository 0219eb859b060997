"""A gymnasium spec that loads its environment only when gymnasium makes it.

Invariant: reading ``id`` loads nothing; ``entry_point``, ``max_episode_steps`` and the other fields are asked of the
environment's class when they are first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec

from agentkit import registry

if TYPE_CHECKING:  # at run time this module may be imported by the import of gymnasium that envs.base begins with
    from agentkit.envs.base import AsyncTextEnv, TextEnv

BLOCKING = "agentkit.envs.blocking:BlockingTextEnv"


def _load(self: EnvSpec) -> tuple[type[TextEnv] | type[AsyncTextEnv], dict[str, Any]]:
    loaded = registry.entry(self.id.partition("/")[2]).load()
    cls: Any = loaded.entry_point
    return cls, loaded.kwargs


def _entry_point(self: EnvSpec) -> str | type[Any]:
    cls, _ = _load(self)
    return BLOCKING if _is_asynchronous(cls) else _address(cls)


def _kwargs(self: EnvSpec) -> dict[str, Any]:
    cls, kwargs = _load(self)
    return {"environment": _address(cls), **kwargs} if _is_asynchronous(cls) else dict(kwargs)


def _is_asynchronous(cls: type[Any]) -> bool:
    from agentkit.envs.base import AsyncTextEnv

    return issubclass(cls, AsyncTextEnv)


def _address(cls: type[Any]) -> str | type[Any]:
    """The class as text where it can be imported by name, so that gymnasium can serialise the spec."""
    return cls if "." in cls.__qualname__ else f"{cls.__module__}:{cls.__qualname__}"


def _lazy(read: Any) -> Any:
    # EnvSpec is a dataclass that assigns every field once; the assignment is ignored, since the class knows better.
    return property(read, lambda self, value: None)


class LazySpec(EnvSpec):
    """``EnvSpec`` of one registered name; a gymnasium step is one action, so the limit is turns times actions.

    An asynchronous environment is made within one that waits for it.
    """

    entry_point = _lazy(_entry_point)
    kwargs = _lazy(_kwargs)
    max_episode_steps = _lazy(lambda self: _load(self)[0].max_turns * _load(self)[0].actions_per_turn)
    nondeterministic = _lazy(lambda self: not _load(self)[0].deterministic)
