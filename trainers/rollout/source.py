"""The configured environment of a run, before an instance is made.

Invariant: a misconfigured environment is rejected before anything starts.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from agentkit import registry
from agentkit.config import EnvConfig
from agentkit.envs.isolation.redundancy import RecoveryMode, Redundancy
from agentkit.errors import ConfigError
from agentkit.sandboxes.pool.health import HealthPolicy
from agentkit.tool_calls import Tool, check_tools
from agentkit.trainers.rollout.contract import crashed

if TYPE_CHECKING:  # sandboxes are imported only if they are used
    from agentkit.envs.isolation.placement import Placement

Where = Literal["inline", "thread", "process", "async", "sandbox"]


@dataclass(frozen=True)
class EnvSource:
    """A configured environment: its class, its arguments, where it runs, and its time limits."""

    id: str
    cls: type[Any] | None
    """None for an environment in a sandbox, whose code is not imported here."""
    kwargs: dict[str, Any]
    where: Where
    instructions: str
    max_turns: int
    actions_per_turn: int
    step_timeout: float
    reset_timeout: float
    tools: tuple[Tool, ...] = ()
    has_expert: bool = False
    runs_policy_code: bool = False
    recovery: RecoveryMode = "retry"
    placement: Placement | None = None
    """Back end and specification of the sandboxes, for an environment in a sandbox."""
    redundancy: Redundancy = field(default_factory=Redundancy)
    """How its sandboxes survive failures; ``recovery`` is resolved."""

    @classmethod
    def of(cls, config: EnvConfig) -> EnvSource:
        """Return the environment that ``config`` describes.

        Raises:
            RegistryError, ConfigError: the environment is unknown or misconfigured.
            SandboxError, EnvError: the environment cannot be made in a sandbox.
        """
        here = registry.arguments_here(config.id, config.kwargs, config.backend, config.sandbox_spec)
        if here is None:
            return cls._in_sandbox(config)
        spec = registry.entry(config.id).load()
        env: Any = spec.entry_point
        kwargs = {**spec.kwargs, **here}
        registry.check_arguments(config.id, env, kwargs)
        if env.own_sandboxes(**kwargs) is None:
            recovery = _recovery(config, env.deterministic)
        else:
            kwargs = registry.with_redundancy(env, kwargs, _redundancy(config, config.recovery))
            recovery = config.recovery or "retry"
        asynchronous = inspect.iscoroutinefunction(env.step)
        if asynchronous and config.concurrency not in (None, "inline"):
            raise ConfigError(
                f"env.concurrency={config.concurrency} does not apply to {config.id}, whose methods are coroutines: "
                "they are awaited; drop the setting"
            )
        source = cls(
            id=config.id,
            cls=env,
            kwargs=kwargs,
            where="async" if asynchronous else (config.concurrency or env.concurrency),
            instructions=env.instructions_for(**kwargs),
            max_turns=config.max_turns or env.max_turns_for(**kwargs),
            actions_per_turn=config.actions_per_turn or env.actions_per_turn,
            tools=_tools(config.id, env.tools_for(**kwargs)),
            step_timeout=config.step_timeout,
            reset_timeout=config.reset_timeout,
            has_expert=env.has_expert(),
            runs_policy_code=env.runs_policy_code(**kwargs),
            recovery=recovery,
        )
        if source.where == "process":
            source.importable()
        return source

    @classmethod
    def _in_sandbox(cls, config: EnvConfig) -> EnvSource:
        from agentkit.envs.isolation.env import describe
        from agentkit.envs.isolation.placement import place

        assert config.backend is not None
        placement = place(config.id, config.kwargs, config.backend, config.sandbox_spec)
        said = describe(placement)
        recovery = _recovery(config, said.deterministic)
        return cls(
            id=config.id,
            cls=None,
            kwargs=config.kwargs,
            where="sandbox",
            instructions=said.instructions,
            max_turns=config.max_turns or said.max_turns,
            actions_per_turn=config.actions_per_turn or said.actions_per_turn,
            tools=said.tools,
            step_timeout=config.step_timeout,
            reset_timeout=config.reset_timeout,
            has_expert=said.has_expert,
            runs_policy_code=said.runs_policy_code,
            recovery=recovery,
            placement=placement,
            redundancy=_redundancy(config, recovery),
        )

    def make(self) -> Any:
        """Make an environment in this process or in a new sandbox. Raises ``EnvCrashed``, ``SandboxError``."""
        if self.placement is not None:
            where = self.placement
            alone = replace(self.redundancy, spares=0, standbys=0)  # for one environment, a new sandbox is soon enough
            return registry.make(
                self.id, sandbox=where.backend, sandbox_spec=where.spec, redundancy=alone, **self.kwargs
            )
        assert self.cls is not None
        try:
            return self.cls(**self.kwargs)
        except (Exception, SystemExit) as error:
            raise crashed("making the environment", error) from error

    def importable(self) -> tuple[str, str, dict[str, Any], str | None]:
        """Return what a worker process needs to make the environment.

        Returns:
            Module, qualified name and arguments of the class, and the script to load if the module is ``__main__``.

        Raises:
            ConfigError: the class cannot be imported by another process.
        """
        assert self.cls is not None
        module, qualname = self.cls.__module__, self.cls.__qualname__
        main_path = None
        if module == "__main__":
            main_path = getattr(sys.modules["__main__"], "__file__", None)
        if "<locals>" in qualname or (module == "__main__" and main_path is None):
            raise ConfigError(
                f"{self.id} ({module}.{qualname}) cannot run in a worker process, because its class cannot be "
                "imported there; move it to the top level of a module, or set env.concurrency to thread or inline"
            )
        return module, qualname, self.kwargs, main_path


def _tools(id: str, declared: Any) -> tuple[Tool, ...]:
    try:
        return check_tools(declared)
    except ValueError as error:
        raise ConfigError(f"{id} declares its tools wrongly: {error}") from None


def _redundancy(config: EnvConfig, recovery: RecoveryMode | None) -> Redundancy:
    return Redundancy(
        recovery=recovery,
        spares=config.spares,
        standbys=config.standbys,
        hedge=config.hedge,
        share=config.sandbox_share,
        spread=config.sandbox_spread,
        health=HealthPolicy(**config.health.model_dump()),
    )


def _recovery(config: EnvConfig, deterministic: bool) -> RecoveryMode:
    try:
        return _redundancy(config, config.recovery).mode(deterministic)
    except ConfigError as error:
        settings = f"env.recovery={config.recovery} and env.standbys={config.standbys}"
        raise ConfigError(f"{config.id} with {settings}: {error}") from None
