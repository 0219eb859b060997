"""agentkit: write an environment once, run it anywhere, train an LLM agent on it.

Importing this package is fast: it loads no environment, torch, ray, docker or httpx. Each name is imported on first
use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkit import gymnasium_bridge
from agentkit.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from agentkit.config import RunConfig as RunConfig
    from agentkit.config_io import load_config as load_config
    from agentkit.envs.base import AsyncTextEnv as AsyncTextEnv
    from agentkit.envs.base import TextEnv as TextEnv
    from agentkit.envs.isolation.redundancy import Redundancy as Redundancy
    from agentkit.envs.spaces import Text as Text
    from agentkit.envs.vector import make_vec as make_vec
    from agentkit.errors import AgentkitError as AgentkitError
    from agentkit.evaluation import evaluate as evaluate
    from agentkit.registry import EnvSpec as EnvSpec
    from agentkit.registry import env_class as env_class
    from agentkit.registry import list_envs as list_envs
    from agentkit.registry import make as make
    from agentkit.registry import register as register
    from agentkit.results import EvalResult as EvalResult
    from agentkit.results import RunResult as RunResult
    from agentkit.rollout import Rollouts as Rollouts
    from agentkit.sandboxes.pool.health import HealthPolicy as HealthPolicy
    from agentkit.sandboxes.pool.pool import SandboxPool as SandboxPool
    from agentkit.sandboxes.sandbox import Sandbox as Sandbox
    from agentkit.sandboxes.sync import SyncSandbox as SyncSandbox
    from agentkit.tool_calls import ToolCall as ToolCall
    from agentkit.tool_calls import ToolCallError as ToolCallError
    from agentkit.tool_calls import action_of as action_of
    from agentkit.tool_calls import call_of as call_of
    from agentkit.training import train as train
    from agentkit.types import Group as Group
    from agentkit.types import Message as Message
    from agentkit.types import Trajectory as Trajectory
    from agentkit.types import Turn as Turn

_MODULES = {
    "AgentkitError": "agentkit.errors",
    "AsyncTextEnv": "agentkit.envs.base",
    "EnvSpec": "agentkit.registry",
    "EvalResult": "agentkit.results",
    "Group": "agentkit.types",
    "HealthPolicy": "agentkit.sandboxes.pool.health",
    "Message": "agentkit.types",
    "Redundancy": "agentkit.envs.isolation.redundancy",
    "RunConfig": "agentkit.config",
    "RunResult": "agentkit.results",
    "Rollouts": "agentkit.rollout",
    "Sandbox": "agentkit.sandboxes.sandbox",
    "SandboxPool": "agentkit.sandboxes.pool.pool",
    "SyncSandbox": "agentkit.sandboxes.sync",
    "Text": "agentkit.envs.spaces",
    "TextEnv": "agentkit.envs.base",
    "ToolCall": "agentkit.tool_calls",
    "ToolCallError": "agentkit.tool_calls",
    "Trajectory": "agentkit.types",
    "Turn": "agentkit.types",
    "action_of": "agentkit.tool_calls",
    "call_of": "agentkit.tool_calls",
    "env_class": "agentkit.registry",
    "evaluate": "agentkit.evaluation",
    "list_envs": "agentkit.registry",
    "load_config": "agentkit.config_io",
    "make": "agentkit.registry",
    "make_vec": "agentkit.envs.vector",
    "register": "agentkit.registry",
    "train": "agentkit.training",
}
"""Module of each public name. Invariant: the same names as in the block for type checkers above."""

if not TYPE_CHECKING:  # a type checker reports unknown names instead of giving them the type Any
    __all__ = list(_MODULES)
    __getattr__, __dir__ = lazy_exports(__name__, _MODULES)


gymnasium_bridge.install()
