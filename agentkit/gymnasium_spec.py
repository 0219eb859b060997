"""A gymnasium spec that loads its environment only when gymnasium makes it.

Invariant: reading ``id`` loads nothing; ``entry_point``, ``max_episode_steps`` and the other fields are read from the
environment's class when they are first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import EnvSpec

from agentkit import registry

if TYPE_CHECKING:  # at run time, envs.base imports gymnasium, which may import this module
    from agentkit.envs.base import AsyncTextEnv, TextEnv

_MAKE_SYNC = "agentkit.envs.sync:make_sync"


def _load(self: EnvSpec) -> tuple[type[TextEnv] | type[AsyncTextEnv], dict[str, Any]]:
    loaded = registry.entry(self.id.partition("/")[2]).load()
    cls: Any = loaded.entry_point
    return cls, loaded.kwargs


def _entry_point(self: EnvSpec) -> str | type[Any]:
    cls, _ = _load(self)
    return _MAKE_SYNC if _is_asynchronous(cls) else _address(cls)


def _kwargs(self: EnvSpec) -> dict[str, Any]:
    cls, kwargs = _load(self)
    return {"environment": _address(cls), **kwargs} if _is_asynchronous(cls) else dict(kwargs)


def _is_asynchronous(cls: type[Any]) -> bool:
    from agentkit.envs.base import AsyncTextEnv

    return issubclass(cls, AsyncTextEnv)


def _address(cls: type[Any]) -> str | type[Any]:
    """Return the class, as text if it can be imported by name, so that gymnasium can serialise the spec."""
    return cls if "." in cls.__qualname__ else f"{cls.__module__}:{cls.__qualname__}"


def _lazy(read: Any) -> Any:
    # The dataclass EnvSpec assigns every field once. The assignment is ignored, since the value comes from the class.
    return property(read, lambda self, value: None)


class LazySpec(EnvSpec):
    """``EnvSpec`` of one registered name; a gymnasium step is one action, so the limit is turns times actions.

    An asynchronous environment is wrapped in a synchronous one.
    """

    entry_point = _lazy(_entry_point)
    kwargs = _lazy(_kwargs)
    max_episode_steps = _lazy(lambda self: _load(self)[0].max_turns * _load(self)[0].actions_per_turn)
    nondeterministic = _lazy(lambda self: not _load(self)[0].deterministic)
