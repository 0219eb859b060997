"""Prefixes of environments of other libraries and servers: ``PREFIX:NAME`` is the environment ``NAME`` there.

Invariant: the classes are named, not imported, and import their libraries only when one is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentkit.errors import RegistryError
from agentkit.extras import HARBOR, OPENENV, missing_extra


@dataclass(frozen=True)
class Prefix:
    """How a prefix becomes an environment."""

    entry_point: str
    """``"package.module:Class"``."""
    argument: str
    """Argument of the class that gets the text after the colon."""
    example: str
    """A complete name."""
    extra: str | None = None
    """Extra of agentkit that installs the library; None if agentkit always does."""
    packages: tuple[str, ...] = ()
    """Modules that the extra installs."""
    served: bool = False
    """Whether the name is the address of a server, which runs the environment."""

    def problem(self) -> str | None:
        """Return why the library cannot be used, with the remedy; None if it is installed."""
        if self.extra is None:
            return None
        return missing_extra(self.example.partition(":")[0], self.extra, self.packages) or None


PREFIXES = {
    "gymnasium": Prefix("agentkit.integrations.gymnasium:GymnasiumEnv", "id", "gymnasium:FrozenLake-v1"),
    "harbor": Prefix("agentkit.integrations.harbor:HarborTasks", "tasks", "harbor:tasks", "harbor", HARBOR),
    "openenv": Prefix(
        "agentkit.integrations.openenv_client:OpenEnv",
        "url",
        "openenv:http://127.0.0.1:8000",
        "openenv",
        OPENENV,
        served=True,
    ),
    "reasoning_gym": Prefix(
        "agentkit.integrations.reasoning_gym:ReasoningGym",
        "dataset",
        "reasoning_gym:leg_counting",
        "reasoning-gym",
        ("reasoning_gym",),
    ),
}


def split(id: str) -> tuple[Prefix, str] | None:
    """Return the prefix of a name and what follows it; None if it starts with no known prefix.

    Raises:
        RegistryError: nothing follows the prefix.
    """
    start, colon, name = id.partition(":")
    prefix = PREFIXES.get(start) if colon else None
    if prefix is None:
        return None
    if not name:
        raise RegistryError(f"{id!r} lacks the name after the colon, as in {prefix.example!r}")
    return prefix, name
