"""The error classes of agentkit.

Invariant: an error is attributed to exactly one boundary (its class), states whether a retry can help (``retryable``)
and whether the failed call had effects (``side_effects``). Messages name the problem, the place and the remedy.
``EnvError`` voids an episode, with one exception: an ``UnexplainedCrash`` that happens twice to an episode counts as
the policy's failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agentkit.text import printable

SideEffects = Literal["none", "maybe", "done"]
"""Effects of a failed call: none, possibly some, or all that were requested."""


class AgentkitError(Exception):
    """Base of all errors of this package."""

    retryable: bool = False
    side_effects: SideEffects = "none"

    def __str__(self) -> str:
        """The message, safe to print: it may quote what a sandbox or a policy wrote."""
        return printable(super().__str__())


class ConfigError(AgentkitError):
    """A setting is misspelt, of a wrong type or contradictory; raised before anything starts."""


class MissingExtra(AgentkitError):
    """An optional part of agentkit is not installed; the message names the extra to install."""


class RegistryError(AgentkitError):
    """A name of an environment or a plug-in is unknown or claimed twice, or the plug-in does not load."""


class PluginError(AgentkitError):
    """A plug-in (advantage, loss, reward, filter, parser or summary) raised, or returned what its kind forbids."""


class DataError(AgentkitError):
    """A data set is missing, cannot be fetched, or has the wrong content."""


class EnvError(AgentkitError):
    """An environment failed; the episode is voided and may be retried in a fresh environment from its seed."""

    retryable = True
    side_effects = "maybe"


class EnvCrashed(EnvError):
    """The environment raised, or its process died."""


class UnexplainedCrash(EnvCrashed):
    """The environment's sandbox failed after code of the policy ran in it, and no external cause is on record.

    Evaluation and the rollout loop repeat such an episode once. If it fails in the same way, it counts as the policy's
    failure. Code that steps environments itself must decide how to count it; the policy should not benefit from such a
    failure.
    """


class AgentUnavailable(EnvCrashed):
    """What runs the agent of an episode failed (its sandbox or the engine of sandboxes), not the agent."""


class EnvTimeout(EnvError):
    """The environment did not answer in time."""


class EnvContractError(EnvError):
    """The environment returned something that its API forbids: a wrong type, a non-finite reward, a non-string text."""


class EnvFailureBudgetExceeded(EnvError):
    """Too many environments failed: training on the remaining episodes would be biased."""

    retryable = False


class EngineError(AgentkitError):
    """The inference engine failed, or does not support the request."""

    def __init__(self, message: str = "", *, fatal: bool = False) -> None:
        """``fatal``: the engine that raised the error serves nothing any more, and must be replaced."""
        super().__init__(message)
        self.fatal = fatal


class WeightsUnavailable(EngineError):
    """The learner has trained since it published these weights, and keeps no copy: the next version will follow."""


class RendererError(AgentkitError):
    """A chat template cannot be used, or not in the way that ``model.history`` asks for."""


class RoleError(AgentkitError):
    """A role (engine, learner) in another process died, hung or could not be started."""

    side_effects = "maybe"


class LearnerError(AgentkitError):
    """The learner cannot train: a non-finite loss, a batch that does not fit, a model that does not load."""


class CheckpointError(AgentkitError):
    """A checkpoint is missing, is incomplete or belongs to another configuration."""


class RunDirectoryError(AgentkitError):
    """A run directory exists already, is in use, or is not a run directory."""


class SandboxError(AgentkitError):
    """A sandbox, or the engine behind it, failed; ``details`` holds plain data for programs, not escaped."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class ImageError(SandboxError):
    """An image is missing, cannot be pulled in time, or has a bad name. Not a crash of a sandbox."""


class StartTimeout(SandboxError):
    """A sandbox did not become ready; ``details``: ``phase``, ``log_tail``. Everything created is removed."""

    retryable = True


LOSS_REASONS: Mapping[str, str] = {
    "exited": "its main process ended, by itself or killed by something in the sandbox",
    "oom": "its memory limit killed its main process",
    "removed": "it was removed: closed, expired, or removed from outside",
    "engine_down": "its engine or sandbox server is gone",
    "agent_dead": "the connection to its agent ended, or the agent answers pings but not the call",
    "hung": "its agent does not respond: stopped, starved, or frozen from outside",
    "frozen": "it was paused from outside",
    "slow": "it was far slower than its peers, and its pool removed it",
    "tainted": "processes in it survived their kill; restart it",
    "replaced": "it was restarted, reset or replaced; processes and handles of the earlier one are gone",
    "closed": "this end closed the connection; the sandbox itself may still run",
    "unreplayable": "its state cannot be rebuilt: the effect of an action is not known",
    "diverged": "its state cannot be rebuilt: a replayed action had another result",
}
"""Meaning of each ``reason`` of ``SandboxLost``."""


class SandboxLost(SandboxError):
    """The sandbox is gone. ``details``: ``reason`` (one of ``LOSS_REASONS``), and where known ``exit_code``,
    ``log_tail``, ``stdout``, ``stderr``. A call in progress may have had effects."""

    retryable = True
    side_effects = "maybe"


class EngineUnavailable(SandboxError):
    """The container engine, or a sandbox server, does not answer. Nothing was done."""

    retryable = True


class BreakerOpen(EngineUnavailable):
    """The engine failed so often that calls fail at once until it recovers; ``details``: ``retry_after`` in s."""


class ExecTimeout(SandboxError):
    """A command ran out of time and ``check=True``. ``details``: ``result``, the partial ``ExecResult``."""

    side_effects = "maybe"


class ExecFailed(SandboxError):
    """A command ended with a nonzero exit code and ``check=True``. ``details``: ``result``."""

    side_effects = "done"


class CommandNotFound(SandboxError):
    """The program, its working directory or its user does not exist or may not be used; nothing ran."""


class ResourcesExhausted(SandboxError):
    """The sandbox has no process, memory or open file left to start a program; nothing ran."""

    retryable = True


class PathError(SandboxError):
    """A path in a sandbox is missing, of the wrong kind, not permitted, or outside the allowed folders."""


class FileTooLarge(SandboxError):
    """A file is larger than the limit of the call; nothing was transferred."""


class DiskFull(SandboxError):
    """A write exceeded the sandbox's disk or its quota."""

    side_effects = "maybe"


class ProtocolError(SandboxError):
    """The peer of a connection violated the protocol; the connection is dropped."""

    side_effects = "maybe"


class InvalidTransition(SandboxError):
    """The call is not possible in the sandbox's current state (exec on a paused one, resume on a running one, …)."""


class UnsupportedFeature(SandboxError):
    """The back end does not support what the specification or the call asks for."""


class PoolExhausted(SandboxError):
    """No sandbox became free within the time allowed."""

    retryable = True


class PoolClosed(SandboxError):
    """The pool is closing or closed."""


class SandboxExpired(SandboxError):
    """The sandbox outlived its time to live, or its owner's heartbeat stopped."""


class QuotaExceeded(SandboxError):
    """A limit of a sandbox server (sandboxes, body size, concurrency) was reached."""

    retryable = True


class AccessDenied(SandboxError):
    """A sandbox server refuses the token, or its policy does not allow the request."""
