"""The configured environment of a run, before an instance is made.

Invariant: a misconfigured environment is rejected before anything starts.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentkit import registry
from agentkit.config import EnvConfig
from agentkit.envs.isolation.replay import Recovery
from agentkit.errors import ConfigError
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
    has_expert: bool = False
    runs_policy_code: bool = False
    recovery: Recovery = "retry"
    placement: Placement | None = None
    """Back end and specification of the sandboxes, for an environment in a sandbox."""
    share: int = 1
    """Most environments in one sandbox."""
    spread: int = 1
    """One sandbox holds at most 1 / ``spread`` of the running environments."""

    @classmethod
    def of(cls, config: EnvConfig) -> EnvSource:
        """Return the environment that ``config`` describes.

        Raises:
            RegistryError, ConfigError: the environment is unknown or misconfigured.
            SandboxError, EnvError: the environment cannot be made in a sandbox.
        """
        sandbox = None if config.sandbox == "none" else config.sandbox
        here = registry.arguments_here(config.id, config.kwargs, sandbox, config.sandbox_spec)
        if here is None:
            return cls._in_sandbox(config)
        spec = registry.entry(config.id).load()
        env: Any = spec.entry_point
        kwargs = {**spec.kwargs, **here}
        registry.check_arguments(config.id, env, kwargs)
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
            step_timeout=config.step_timeout,
            reset_timeout=config.reset_timeout,
            has_expert=env.has_expert(),
            runs_policy_code=env.runs_policy_code(**kwargs),
            recovery=config.recovery,
        )
        _check_recovery(config, env.deterministic)
        if source.where == "process":
            source.importable()
        return source

    @classmethod
    def _in_sandbox(cls, config: EnvConfig) -> EnvSource:
        from agentkit.envs.isolation.env import describe
        from agentkit.envs.isolation.placement import place

        placement = place(config.id, config.kwargs, config.sandbox, config.sandbox_spec)
        said = describe(placement)
        _check_recovery(config, said.deterministic)
        return cls(
            id=config.id,
            cls=None,
            kwargs=config.kwargs,
            where="sandbox",
            instructions=said.instructions,
            max_turns=config.max_turns or said.max_turns,
            actions_per_turn=config.actions_per_turn or said.actions_per_turn,
            step_timeout=config.step_timeout,
            reset_timeout=config.reset_timeout,
            has_expert=said.has_expert,
            runs_policy_code=said.runs_policy_code,
            recovery=config.recovery,
            placement=placement,
            share=config.sandbox_share,
            spread=config.sandbox_spread,
        )

    def make(self) -> Any:
        """Make an environment in this process or in a new sandbox. Raises ``EnvCrashed``, ``SandboxError``."""
        if self.placement is not None:
            where = self.placement
            return registry.make(self.id, sandbox=where.backend, sandbox_spec=where.spec, **self.kwargs)
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


def _check_recovery(config: EnvConfig, deterministic: bool) -> None:
    if config.recovery == "replay" and not deterministic:
        raise ConfigError(
            f"env.recovery=replay needs a deterministic environment, and {config.id} declares itself not "
            "deterministic; set env.recovery to retry or void"
        )
