"""Every error that agentkit raises on purpose.

Invariant: an error is attributed to exactly one boundary (its class), says whether trying again can help
(``retryable``) and whether the failed call had effects (``side_effects``). Messages say what is wrong, where,
and what to do. ``EnvError`` voids an episode and never scores it, with one exception: an ``UnexplainedCrash`` that
happens to an episode twice is the policy's failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agentkit.text import printable

SideEffects = Literal["none", "maybe", "done"]
"""What a failed call did before it failed: nothing, perhaps something, or all that it was asked for."""


class AgentkitError(Exception):
    """Base of all errors of this package."""

    retryable: bool = False
    side_effects: SideEffects = "none"

    def __str__(self) -> str:
        """The message, safe to print: it may quote what a sandbox or a policy wrote."""
        return printable(super().__str__())


class ConfigError(AgentkitError):
    """A setting is misspelt, of a wrong type or contradictory; raised before anything starts."""


class RegistryError(AgentkitError):
    """An environment name is unknown, claimed twice, or its plugin does not load."""


class DataError(AgentkitError):
    """A data set is not here, cannot be fetched, or is not what it should be."""


class EnvError(AgentkitError):
    """An environment failed; the episode is voided and may be retried in a fresh environment from its seed."""

    retryable = True
    side_effects = "maybe"


class EnvCrashed(EnvError):
    """The environment raised, or its process died."""


class UnexplainedCrash(EnvCrashed):
    """The environment's sandbox failed after code of the policy ran in it, and no external cause is on record.

    Evaluation and the rollout loop play such an episode once more. If that fails in the same way, the failure is the
    policy's. Code that steps an environment itself decides; it should not make failing free.
    """


class EnvTimeout(EnvError):
    """The environment did not answer in time."""


class EnvContractError(EnvError):
    """The environment returned something that its API forbids: a wrong type, a non-finite reward, a non-string text."""


class EnvFailureBudgetExceeded(EnvError):
    """So many environments failed that going on would train on a biased rest."""

    retryable = False


class EngineError(AgentkitError):
    """The inference engine failed, or was asked for something that it cannot do."""


class RendererError(AgentkitError):
    """A chat template cannot be used token-exactly across turns."""


class RoleError(AgentkitError):
    """A role (engine, learner) in another process died, hung or could not be started."""

    side_effects = "maybe"


class LearnerError(AgentkitError):
    """The learner cannot train: a non-finite loss, a batch that does not fit, a model that does not load."""


class CheckpointError(AgentkitError):
    """A checkpoint is missing, incomplete or of another configuration."""


class RunDirectoryError(AgentkitError):
    """A run directory exists already, or is not one."""


class SandboxError(AgentkitError):
    """A sandbox, or the engine behind it, failed; ``details`` holds plain data for programs, not escaped."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class ImageError(SandboxError):
    """An image is missing, cannot be pulled in time, or has a bad name. Not a crash of a sandbox."""


class StartTimeout(SandboxError):
    """A sandbox did not become ready; ``details``: ``phase``, ``log_tail``. What was created is removed."""

    retryable = True


LOSS_REASONS: Mapping[str, str] = {
    "exited": "its main process ended, by itself or killed by something in the sandbox",
    "oom": "its memory limit killed its main process",
    "removed": "it was removed: closed, expired, or removed from outside",
    "engine_down": "the engine or the sandbox server that it was on is gone",
    "agent_dead": "the connection to its agent ended, or the agent answers pings and not the call",
    "hung": "its agent gives no sign of life: stopped, starved, or frozen from outside",
    "frozen": "it was paused from outside",
    "slow": "it answered far more slowly than its peers, and its pool took it out of use",
    "tainted": "processes in it survived their kill; restart it",
    "replaced": "it was restarted, reset or replaced: what belonged to the earlier one is gone",
    "closed": "this end closed the connection; the sandbox itself may go on",
    "spoiled": "it cannot be rebuilt: what was done in it is not known exactly",
    "diverged": "it cannot be rebuilt: an action that was replayed came out differently",
}
"""Every ``reason`` of ``SandboxLost`` and what it means."""


class SandboxLost(SandboxError):
    """The sandbox is gone. ``details``: ``reason`` (one of ``LOSS_REASONS``), and where known ``exit_code``,
    ``log_tail``, ``stdout``, ``stderr``. A call in flight may have had effects."""

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
    """A command ended with another exit code than 0 and ``check=True``. ``details``: ``result``."""

    side_effects = "done"


class CommandNotFound(SandboxError):
    """The program, its working directory or its user does not exist or may not be used; nothing ran."""


class ResourcesExhausted(SandboxError):
    """The sandbox has no process, memory or open file left to start something with; nothing ran."""

    retryable = True


class PathError(SandboxError):
    """A path in a sandbox is missing, of the wrong kind, not permitted, or leads out of where it may."""


class FileTooLarge(SandboxError):
    """A file is larger than the limit of the call; nothing was transferred."""


class DiskFull(SandboxError):
    """A write met the end of the sandbox's disk or of its quota."""

    side_effects = "maybe"


class ProtocolError(SandboxError):
    """The other side of a connection sent what the protocol forbids; the connection is dropped."""

    side_effects = "maybe"


class InvalidTransition(SandboxError):
    """The call is not possible in the sandbox's present state (exec on a paused one, resume on a running one, …)."""


class UnsupportedFeature(SandboxError):
    """The back end cannot give what the specification or the call asks for; nothing weaker is put in its place."""


class PoolExhausted(SandboxError):
    """No sandbox became free within the time allowed."""

    retryable = True


class PoolClosed(SandboxError):
    """The pool is closing or closed."""


class LeaseExpired(SandboxError):
    """The sandbox outlived its time to live, or its owner's lease ran out."""


class QuotaExceeded(SandboxError):
    """A limit of a sandbox server (sandboxes, body size, concurrency) is reached."""

    retryable = True


class AccessDenied(SandboxError):
    """A sandbox server refuses the token, or what the request asks for is not on its allow-list."""
