"""Small environments with configurable faults."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

from agentkit.envs.base import AsyncTextEnv, Concurrency, TextEnv
from agentkit.errors import UnexplainedCrash


def misbehave(how: str) -> Any:
    """Return a wrong result of ``step``, or fail, as ``how`` selects."""
    info = {"success": False, "action_valid": True}
    if how == "unexplained":
        raise UnexplainedCrash("its sandbox died")
    if how == "crash":
        raise KeyError("no such room")
    if how == "exit":
        raise SystemExit(3)
    if how == "die":
        os._exit(9)
    if how == "segfault":
        ctypes.string_at(0)
    wrong: dict[str, Any] = {
        "nan": ("text", float("nan"), False, False, info),
        "infinite": ("text", float("inf"), False, False, info),
        "reward_text": ("text", "1.0", False, False, info),
        "bytes": (b"text", 0.0, False, False, info),
        "none": None,
        "four": ("text", 0.0, False, info),
        "flag": ("text", 0.0, 1, False, info),
        "no_success": ("text", 0.0, False, False, {"action_valid": True}),
        "no_info": ("text", 0.0, False, False, None),
    }
    return wrong[how]


CONTRACT = ["nan", "infinite", "reward_text", "bytes", "none", "four", "flag", "no_success", "no_info"]


class Puppet(TextEnv):
    """Counts to ``length``; misbehaves at step ``at`` in the way ``how``, for seeds below ``until`` (negative: all).

    With ``once``, a file, it misbehaves only as long as that does not exist, and creates it.
    """

    instructions = "Say Go."
    max_turns = 20
    actions_per_turn = 3
    concurrency: ClassVar[Concurrency] = "inline"

    def __init__(
        self,
        how: str = "",
        at: int = 1,
        length: int = 3,
        once: str = "",
        pause: float = 0.0,
        share: float = 1.0,
        fail_in: str = "step",
    ) -> None:
        super().__init__()
        if how and fail_in == "init":
            raise KeyError("cannot be made")
        self.how, self.at, self.length, self.once, self.pause, self.share = how, at, length, once, pause, share
        self.fail_in = fail_in
        self.resets = 0
        self.children: list[subprocess.Popen[bytes]] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        self.resets += 1
        self.seed_ = seed or 0
        self.bad = bool(self.how) and self.np_random.random() < self.share
        if self.bad and self.once:
            try:
                Path(self.once + str(seed)).touch(exist_ok=False)
            except FileExistsError:
                self.bad = False
        if self.bad and self.fail_in == "reset":
            raise KeyError("cannot be reset")
        return f"seed {seed} count 0 resets {self.resets} pid {os.getpid()}", {"success": False}

    def step(self, action: str) -> Any:
        if self.pause:
            time.sleep(self.pause)
        self.count += 1
        if self.bad and self.count == self.at:
            if self.how == "hang":
                time.sleep(3600)
            elif self.how == "spin":
                while True:
                    pass
            elif self.how == "grandchild":
                self.children.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]))
            else:
                return misbehave(self.how)
        done = self.count >= self.length
        children = "".join(f" child {child.pid}" for child in self.children)
        text = f"seed {self.seed_} count {self.count} resets {self.resets} pid {os.getpid()}{children}"
        reward = float(self.np_random.integers(0, 3)) if done else 0.0
        return text, reward, done, False, {"success": done and reward > 0, "action_valid": action != "Bad"}


class Plain(Puppet):
    """An environment that does not declare how it runs."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        _, info = super().reset(seed=seed, options=options)
        return "count 0", info

    def step(self, action: str) -> Any:
        _, *rest = super().step(action)
        return f"count {self.count}", *rest


class Detour(TextEnv):
    """A start, and a detour that returns to it; every episode earns 1 when it leaves by ``Go``, at any time."""

    instructions = "Say Go or Stay."
    max_turns = 6
    actions_per_turn = 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return "at the start", {"success": False}

    def step(self, action: str) -> Any:
        gone = action == "Go"
        return "gone" if gone else "at the start", float(gone), gone, False, {"success": gone, "action_valid": True}


class Unsteady(Puppet):
    """An environment that is not deterministic."""

    deterministic: ClassVar[bool] = False


class AsyncPuppet(AsyncTextEnv):
    """The same as a coroutine; ``stubborn`` swallows its cancellation."""

    instructions = "Say Go."
    max_turns = 20
    closed: ClassVar[int] = 0

    def __init__(self, how: str = "", pause: float = 0.0, length: int = 3) -> None:
        self.how, self.pause, self.length = how, pause, length

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        await super().reset(seed=seed)
        self.count = 0
        return f"seed {seed}", {}

    async def step(self, action: str) -> Any:
        self.policy_code_ran = False
        await asyncio.sleep(self.pause)
        self.count += 1
        if self.how in ("hang", "policy hangs"):
            self.policy_code_ran = self.how == "policy hangs"
            await asyncio.sleep(3600)
        elif self.how == "stubborn":
            for _ in range(20):
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
        elif self.how:
            return misbehave(self.how)
        done = self.count >= self.length
        return f"count {self.count}", float(done), done, False, {"success": done, "action_valid": True}

    async def close(self) -> None:
        type(self).closed += 1
