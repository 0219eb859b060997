"""Environments that fail as their action requests; they run inside sandboxes."""

import os
import random
import stat
import sys
import time
from typing import Any, ClassVar

from agentkit.envs.base import Concurrency, TextEnv


class Faulty(TextEnv):
    """Counts; see ``step`` for what else."""

    instructions = "Count."
    max_turns = 50
    actions_per_turn = 2
    concurrency: ClassVar[Concurrency] = "inline"

    def __init__(self, word: str = "count", render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.word = word

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return f"{self.word} 0 {self.np_random.random()}", {"options": options, "success": False, "action_valid": True}

    def step(self, action: str) -> Any:
        self.count += 1
        text, reward, info = f"{self.word} {self.count}", 0.5, {"success": False, "action_valid": True}
        if action == "die":
            os._exit(7)
        if action == "exit":
            raise SystemExit(3)
        if action == "raise":
            raise KeyError("no such room")
        if action == "hang":
            time.sleep(3600)
        if action == "print":
            print("\x01\x00\x00\x00\x02{}" * 10_000, flush=True)
            os.system("echo from a child; echo to stderr >&2")
        if action == "garbage":
            for fd in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(fd).st_mode) or stat.S_ISSOCK(os.fstat(fd).st_mode):
                        os.write(fd, b"\x07garbage" * 100)
                except OSError:
                    pass
        if action == "huge":
            text = "x" * (2 << 20)
        if action == "nan":
            reward = float("nan")
        if action == "odd info":
            info |= {"nan": float("inf"), "set": {1}, "class": Faulty}
        if action == "surrogate":
            text = "\ud800"
        if action == "pid":
            text = str(os.getpid())
        if action == "chance":
            text = str(random.SystemRandom().random())
        if action == "modules":
            text = " ".join(sorted(sys.modules))
        return text, reward, self.count == 40, False, info


class Alone(Faulty):
    """An environment that declares ``process``."""

    concurrency: ClassVar[Concurrency] = "process"


class Moody(Faulty):
    """An environment that is not deterministic."""

    deterministic: ClassVar[bool] = False


class Programs(Faulty):
    """An environment that runs code of the policy."""

    @classmethod
    def runs_policy_code(cls, **kwargs: Any) -> bool:
        return True


class Own(Faulty):
    """An environment that declares sandboxes of its own."""

    @classmethod
    def own_sandboxes(cls, **kwargs: Any) -> str:
        return "where"
