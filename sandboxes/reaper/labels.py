"""Labels by which sandboxes are found again. Back ends store them with each sandbox."""

from __future__ import annotations

from collections.abc import Mapping

MANAGED = "agentkit.managed"
ID = "agentkit.id"
OWNER = "agentkit.owner"
RUN = "agentkit.run"
"""Name of the owner's heartbeat file."""
SERVER = "agentkit.server"
"""Name of the owner, if it is a sandbox server: a successor of that name may take its sandboxes over."""
HOST = "agentkit.host"
CREATED = "agentkit.created"
SPEC = "agentkit.spec"
ORIGIN = "agentkit.origin"
"""The snapshot that a sandbox was created from, which must outlive the sandbox."""
DISCARDED = "agentkit.discarded"
"""Of a snapshot: its owner discarded it while a sandbox that was created from it existed."""


def user_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a specification as back ends store them."""
    return {f"agentkit.user.{name}": value for name, value in labels.items()}
