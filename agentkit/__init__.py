"""agentkit: write an environment once, run it anywhere, train an LLM agent on it.

Invariant: importing this package is cheap and loads neither torch nor any environment; names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from agentkit import gymnasium_bridge

_HOMES: dict[str, str] = {
    "AgentkitError": "agentkit.errors",
    "AsyncTextEnv": "agentkit.envs.base",
    "EnvSpec": "agentkit.registry",
    "Group": "agentkit.types",
    "Message": "agentkit.types",
    "Text": "agentkit.envs.spaces",
    "TextEnv": "agentkit.envs.base",
    "Trajectory": "agentkit.types",
    "Turn": "agentkit.types",
    "env_class": "agentkit.registry",
    "list_envs": "agentkit.registry",
    "make": "agentkit.registry",
    "make_vec": "agentkit.envs.vector",
    "register": "agentkit.registry",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentkit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


gymnasium_bridge.install()
