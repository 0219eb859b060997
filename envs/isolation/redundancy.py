"""Settings: how environments in sandboxes survive failures.

Invariant: a ``Redundancy`` whose fields contradict each other cannot be made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentkit.errors import ConfigError
from agentkit.sandboxes.arguments import check_choice, check_integer, check_not_negative, check_type
from agentkit.sandboxes.pool.health import HealthPolicy
from agentkit.sandboxes.recovery.hedge import Quantile

RecoveryMode = Literal["retry", "replay", "void"]
"""What happens to an episode whose environment failed. ``retry``: it is void and started again from its seed.
``replay``: it continues in another environment. ``void``: it is void and not started again."""


def check_redundancy(value: object) -> None:
    """Raise ``ConfigError`` unless ``value``, the argument ``redundancy``, is a ``Redundancy`` or None."""
    check_type("redundancy", value, Redundancy, "an agentkit.Redundancy, such as Redundancy(spares=1)")


@dataclass(frozen=True)
class Redundancy:
    """How environments in sandboxes survive failures.

    Raises:
        ConfigError: a field is out of range, or ``standbys`` are combined with a recovery other than ``replay``.
    """

    recovery: RecoveryMode | None = None
    """None: ``replay`` if the environment declares itself deterministic, otherwise ``retry``."""
    spares: int = 0
    """Number of ready environments, each in its own sandbox, that can replace a failed one."""
    standbys: int = 0
    """Number of environments in other sandboxes that follow each episode; they need ``replay``."""
    hedge: Quantile | float | None = None
    """When a second attempt of a slow reset or step begins: a quantile of past durations, or seconds; None: never.
    Steps are hedged only with ``replay``, resets only with a seed."""
    share: int = 1
    """Largest number of environments in one sandbox, for environments that declare ``inline``."""
    spread: int = 1
    """One sandbox holds at most 1 / ``spread`` of the environments."""
    health: HealthPolicy = field(default_factory=HealthPolicy)
    """Intervals and thresholds of the health checks."""

    def __post_init__(self) -> None:
        if self.recovery is not None:
            check_choice("recovery", self.recovery, RecoveryMode)
        for name, least in (("spares", 0), ("standbys", 0), ("share", 1), ("spread", 1)):
            check_integer(name, getattr(self, name), least)
        if self.standbys and self.recovery not in (None, "replay"):
            raise ConfigError(f"standbys={self.standbys} needs recovery='replay', not {self.recovery!r}")
        if isinstance(self.hedge, str):
            check_choice("hedge", self.hedge, Quantile)
        elif self.hedge is not None:
            check_not_negative(hedge=self.hedge)
        check_type("health", self.health, HealthPolicy, "an agentkit.HealthPolicy")

    def mode(self, deterministic: bool) -> RecoveryMode:
        """Return the recovery of an environment.

        Args:
            deterministic: whether the environment declares itself deterministic.

        Raises:
            ConfigError: ``replay`` or ``standbys`` are set, and the environment is not deterministic.
        """
        if deterministic:
            return self.recovery or "replay"
        if self.recovery == "replay" or self.standbys:
            setting = f"standbys={self.standbys}" if self.standbys else "recovery='replay'"
            raise ConfigError(
                f"{setting} needs a deterministic environment, and this one declares itself not deterministic; set "
                "recovery to 'retry' or 'void', and standbys to 0"
            )
        return self.recovery or "retry"
