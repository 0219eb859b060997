"""What becomes of an episode whose environment died: play it again up to that point, in a new one, and go on.

Invariant: an episode that goes on went exactly as before: every answer of the replayed calls has the digest of the
first one's, or the episode is lost. A call that fails again after a replay fails for good, so that an action that
kills its environment is not tried for ever. Only for environments where the same seed and actions give the same
episode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar

from agentkit.errors import EnvCrashed, EnvTimeout, UnexplainedCrash

Recovery = Literal["retry", "replay", "void"]
"""``retry``: the episode is void, and played anew from its seed by whoever runs it. ``replay``: this module.
``void``: the episode is void, and nobody plays it again."""

E = TypeVar("E")
T = TypeVar("T")


class Replay(Generic[E]):
    """The calls of one episode of an environment ``E``; ``renew`` gives a fresh one in place of one that failed."""

    def __init__(self, env: E, renew: Callable[[E], Awaitable[E]]) -> None:
        self.env = env
        self.replays = 0
        """How often it was played again, over all episodes."""
        self._renew = renew
        self._calls: list[tuple[Callable[[E], Awaitable[Any]], bytes]] = []

    @property
    def begun(self) -> bool:
        """There is an episode, whose seed is known."""
        return bool(self._calls)

    def begin(self) -> None:
        """A new episode: the next call is its ``reset``, with a seed."""
        self._calls.clear()

    async def do(self, call: Callable[[E], Awaitable[T]]) -> T:
        """Make a call on the environment, on a replayed one if this one fails.

        Raises ``EnvError``: what the call raised, if not a crash or a timeout; what it raised after a replay; or
        ``EnvCrashed`` if the replay went otherwise than the first time.
        """
        try:
            result = await call(self.env)
        except UnexplainedCrash:
            raise  # it may be the policy's doing, and then it gets no more tries than the rule allows
        except (EnvCrashed, EnvTimeout) as error:
            await self._again(error)
            result = await call(self.env)
        self._calls.append((call, digest(result)))
        return result

    async def _again(self, error: Exception) -> None:
        self.replays += 1
        self.env = await self._renew(self.env)
        for number, (call, expected) in enumerate(self._calls):
            if digest(await call(self.env)) != expected:
                raise EnvCrashed(
                    f"the episode cannot go on: its replay differs at call {number} (0 is reset), though the "
                    "environment calls itself deterministic; set env.recovery=retry"
                ) from error


def digest(result: Any) -> bytes:
    """Of an answer of an environment: of its ``repr``, which shows floats exactly."""
    return hashlib.sha256(repr(result).encode("utf-8", "surrogatepass")).digest()
