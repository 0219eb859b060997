"""Small roles for the placement tests, in a separate module that actors can import."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from agentkit.errors import AgentkitError, EngineError


class PickyError(AgentkitError):
    """Its constructor cannot be called with its ``args``."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class Probe:
    """A role whose methods tests call to cause effects and faults."""

    kind = "probe"

    def __init__(self, *, rank: int = 0, world_size: int = 1, init_method: str | None = None, spoil: str = "") -> None:
        if spoil == "agentkit":
            raise PickyError(code=7)
        if spoil == "hang":
            time.sleep(60)
        if spoil == "exit":
            print("no such driver", file=sys.stderr)
            os._exit(5)
        self.rank, self.world_size, self.init_method = rank, world_size, init_method
        self.history: list[Any] = []
        self.inside = 0
        self.closed = 0
        self.on_close = ""
        self.full = asyncio.Event()

    def helper(self) -> str:
        return "not a coroutine"

    async def _private(self) -> None: ...

    async def reset(self) -> None:
        Probe.__init__(self, rank=self.rank, world_size=self.world_size, init_method=self.init_method)

    async def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    async def identity(self) -> dict[str, Any]:
        return {"rank": self.rank, "world_size": self.world_size, "init_method": self.init_method, "pid": os.getpid()}

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    async def note(self, value: Any, delay: float = 0.0) -> None:
        self.history.append(value)
        await asyncio.sleep(delay)

    async def notes(self) -> list[Any]:
        return list(self.history)

    async def meet(self, number: int) -> int:
        """Returns once ``number`` calls are inside at the same time."""
        self.inside += 1
        if self.inside == number:
            self.full.set()
        await self.full.wait()
        return self.inside

    async def wait_for_cancel(self) -> None:
        self.history.append("waiting")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.history.append("cancelled")
            raise

    async def fail(self, kind: str) -> None:
        if kind == "picky":
            raise PickyError(code=42)
        if kind == "engine":
            error = EngineError("the prompt is too long")
            error.retryable = True
            raise error
        if kind == "unpicklable":
            error = EngineError("has a lambda")
            error.callback = lambda: None  # type: ignore[attr-defined]
            raise error
        if kind == "cancel":
            raise asyncio.CancelledError
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner

    async def unpicklable(self) -> Any:
        return lambda: None

    async def block(self, seconds: float) -> None:
        """Hangs the event loop."""
        time.sleep(seconds)  # noqa: ASYNC251

    async def spawn(self) -> int:
        """Starts a process that ignores polite signals; returns its pid."""
        script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True);"
        child = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", script + "time.sleep(600)"], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        return child.pid

    async def only_rank(self, rank: int, what: str) -> int:
        """Rank ``rank`` misbehaves, the others are stuck as in a collective."""
        if self.rank != rank:
            await asyncio.sleep(600)
        elif what == "raise":
            raise PickyError(code=self.rank)
        elif what == "die":
            os._exit(9)
        return self.rank

    async def prepare_close(self, how: str) -> None:
        self.on_close = how

    async def close(self) -> None:
        self.closed += 1
        if self.on_close == "hang":
            await asyncio.sleep(600)
        if self.on_close == "raise":
            raise PickyError(code=1)
        if self.on_close:
            with open(self.on_close, "a") as file:  # noqa: ASYNC230
                file.write("closed\n")


class Torch:
    """Threads of torch, and a collective over gloo."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, init_method: str | None = None) -> None:
        import torch

        self.torch = torch
        if init_method is not None:
            torch.distributed.init_process_group("gloo", init_method, rank=rank, world_size=world_size)

    async def wait(self) -> None:
        await asyncio.sleep(600)

    async def mean_of(self, values: np.ndarray) -> float:
        return await self.total(float(values.mean())) / 3.0

    async def total(self, value: float) -> float:
        tensor = self.torch.tensor([value * (self.torch.distributed.get_rank() + 1)])
        await asyncio.to_thread(self.torch.distributed.all_reduce, tensor)
        return float(tensor[0])
