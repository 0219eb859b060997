"""An environment for tests of roles, in a module that a sandbox can load."""

from __future__ import annotations

from typing import Any

from agentkit.envs.base import TextEnv


class Patient(TextEnv):
    """An environment with a configurable number of turns."""

    instructions = "Wait."
    max_turns = 1

    def __init__(self, turns: int = 1) -> None:
        super().__init__()
        self.max_turns = turns

    @classmethod
    def max_turns_for(cls, **kwargs: Any) -> int:
        return kwargs.get("turns", cls.max_turns)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return "Wait.", {"success": False}

    def step(self, action: str) -> Any:
        return "Wait.", 0.0, False, False, {"success": False, "action_valid": True}
