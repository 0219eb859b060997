"""Continue an episode after its environment failed, by replaying its calls in another one.

Invariant: an episode continues only if every replayed call has the same result as the first time. If the environment
itself, not its sandbox, fails twice in one call, the call is not made a third time. An
``UnexplainedCrash`` is never replayed, because the policy may have caused it.
"""

from __future__ import annotations

from typing import Any, TypeVar

from agentkit.errors import AgentkitError, EnvCrashed, EnvTimeout, SandboxError, SandboxLost, UnexplainedCrash
from agentkit.sandboxes.backoff import RestartLimit
from agentkit.sandboxes.recovery.hedge import Hedge
from agentkit.sandboxes.recovery.record import RecoveryLog
from agentkit.sandboxes.recovery.replay import Diverged
from agentkit.sandboxes.recovery.standby import Target
from agentkit.sandboxes.recovery.supervision import GivenUp, Supervised

T = TypeVar("T", bound=Target)

LIMIT, WINDOW = 5, 60.0
"""Recoveries of one environment within so many seconds, after which its episode is given up."""


class SupervisedEnv(Supervised[T]):
    """An environment whose episodes are replayed after a failure, or that is replaced before its next ``reset``.

    Args:
        replays: whether episodes are replayed.
        standbys: number of environments that follow each episode.
        log: where recoveries are recorded.
        hedge: hedges slow calls.
    """

    repeats = True  # an environment has no effects outside of the instance that was lost

    def __init__(
        self, *, replays: bool, standbys: int = 0, log: RecoveryLog | None = None, hedge: Hedge | None = None
    ) -> None:
        super().__init__(
            _describe, replays=replays, standbys=standbys, limit=RestartLimit(LIMIT, WINDOW), log=log, hedge=hedge
        )

    def loss(self, error: AgentkitError) -> str | None:
        broken = self.target is not None and bool(self.target.failure)
        return cause_of_loss(error) if isinstance(error, EnvCrashed | EnvTimeout) or broken else None

    async def irrecoverable(self, target: T, error: AgentkitError | None) -> AgentkitError | None:
        if error is None:
            error = EnvCrashed(f"the environment is lost: {target.failure}")
        failed_again = self._losses > 1 and not isinstance(error.__cause__, SandboxError)
        may_recover = isinstance(error, EnvCrashed | EnvTimeout) and not isinstance(error, UnexplainedCrash)
        return None if self.replays and may_recover and not failed_again else error

    def given_up(self, why: GivenUp, text: str, last: Exception | None) -> AgentkitError:
        if isinstance(last, Diverged):
            return EnvCrashed(
                f"the episode cannot continue: its replay differs at call {last.index} (0 is reset), although the "
                "environment declares itself deterministic; set env.recovery=retry"
            )
        return last if isinstance(last, AgentkitError) else EnvCrashed(f"the episode cannot continue: {text}")


def cause_of_loss(error: BaseException) -> str:
    """Return the reason for which the sandbox was lost, or the name of the error of the environment itself."""
    lost = error.__cause__ if isinstance(error.__cause__, SandboxLost) else error
    return str(lost.details.get("reason", "agent_dead")) if isinstance(lost, SandboxLost) else type(error).__name__


def _describe(result: Any) -> bytes:
    return repr(result).encode("utf-8", "surrogatepass")  # repr shows floats exactly
