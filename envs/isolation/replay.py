"""Continue an episode after its environment failed: replay its calls in a fresh environment.

Invariant: an episode continues only if every replayed call has the same result as the first time. A call that fails
again after a replay is not tried a third time. Only for environments in which the same seed and actions give the same
episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar

from agentkit.errors import EnvCrashed, EnvTimeout, UnexplainedCrash
from agentkit.sandboxes.recovery.replay import ActionLog, Diverged

Recovery = Literal["retry", "replay", "void"]
"""What happens to an episode whose environment failed. ``retry``: it is void and started again from its seed.
``replay``: it continues in a fresh environment. ``void``: it is void and not started again."""

E = TypeVar("E")
T = TypeVar("T")


class Replay(Generic[E]):
    """The calls of one episode of an environment ``E``.

    Args:
        env: the environment of the first episode.
        renew: replaces an environment that failed by a fresh one.
    """

    def __init__(self, env: E, renew: Callable[[E], Awaitable[E]]) -> None:
        self.env = env
        self.replays = 0
        """Number of replays over all episodes."""
        self._renew = renew
        self._log: ActionLog[E] = ActionLog(_describe)

    @property
    def begun(self) -> bool:
        """Whether an episode has started with a known seed."""
        return len(self._log) > 0

    def begin(self) -> None:
        """Start an episode: the next call is its ``reset``, with a seed."""
        self._log.clear()

    async def do(self, call: Callable[[E], Awaitable[T]]) -> T:
        """Make a call on the environment; if it fails, replay the episode and make the call once more.

        Raises:
            EnvError: the error of the call if it is neither a crash nor a timeout, or of the call after the replay.
            EnvCrashed: the replay differs from the episode.
        """
        try:
            result = await call(self.env)
        except UnexplainedCrash:
            raise  # the policy may have caused it, so it gets no more attempts than the attribution rule allows
        except (EnvCrashed, EnvTimeout) as error:
            await self._replay(error)
            result = await call(self.env)
        self._log.record("call", call, result)
        return result

    async def _replay(self, error: Exception) -> None:
        self.replays += 1
        self.env = await self._renew(self.env)
        try:
            await self._log.repeat_all(self.env)
        except Diverged as diverged:
            raise EnvCrashed(
                f"the episode cannot continue: its replay differs at call {diverged.index} (0 is reset), although the "
                "environment declares itself deterministic; set env.recovery=retry"
            ) from error


def _describe(result: Any) -> bytes:
    return repr(result).encode("utf-8", "surrogatepass")  # repr shows floats exactly
