"""A small scripted engine for tests of timing and order: it implements the engine's contract without a model.

Its tokens are a pure function of the prompt, the sampling seed and the version, so that records can be re-derived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from agentkit.trainers.inference.base import EngineStats, Generation, PauseMode, Sampling
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.weights.base import Weights

Script = Callable[[str, int], str]
"""The answer to a prompt, from the prompt's text and the request's seed."""


Latency = float | Callable[[int], float]
"""Seconds that an answer takes, or those seconds from the request's seed."""


class ScriptedEngine:
    """An engine that returns the answer of ``script`` after ``latency`` seconds."""

    def __init__(self, renderer: ChatRenderer, script: Script | str, latency: Latency = 0.0) -> None:
        self.renderer = renderer
        self.script: Script = script if callable(script) else (lambda text, seed: str(script))
        self.latency = latency
        self.version = 0
        self.prompts: dict[str, list[list[int]]] = {}
        self.results: dict[str, list[list[int]]] = {}
        self.samplings: list[Sampling] = []
        self.aborted: list[str] = []
        self.cancelled = 0
        self.running = 0
        self.fail: Exception | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._mode: PauseMode | None = None
        self._interrupts: set[asyncio.Event] = set()

    async def start(self) -> None: ...

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        await self._open.wait()
        if self.fail is not None:
            raise self.fail
        prompt = np.asarray(prompt_ids).tolist()
        interrupt = asyncio.Event()
        self._interrupts.add(interrupt)
        self.running += 1
        began = self.version
        try:
            latency = self.latency(sampling.seed or 0) if callable(self.latency) else self.latency
            if latency:
                await asyncio.wait_for(interrupt.wait(), latency)
                return Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
            await asyncio.sleep(0)
        except asyncio.TimeoutError:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self._interrupts.discard(interrupt)
        ids = self.renderer.encode_answer(self.script(self.renderer.decode(prompt), sampling.seed or 0))
        ids = ids[: sampling.max_tokens]
        self.prompts.setdefault(session, []).append(prompt)
        self.results.setdefault(session, []).append(ids.tolist())
        self.samplings.append(sampling)
        half = len(ids) // 2
        versions = ((began, len(ids)),) if began == self.version else ((began, half), (self.version, len(ids) - half))
        finish = "stop" if ids[-1] in sampling.stop_ids else "length"
        return Generation(ids, np.full(len(ids), -0.5, np.float32), versions, finish)

    async def abort(self, session: str) -> None:
        self.aborted.append(session)

    async def pause(self, mode: PauseMode) -> None:
        self._open.clear()
        if mode == "abort":
            for interrupt in self._interrupts:
                interrupt.set()

    async def resume(self) -> None:
        self._open.set()

    async def update_weights(self, weights: Weights) -> int:
        assert not self._open.is_set()
        self.version = weights.version
        return self.version

    async def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0.0, self.running, 0)

    async def close(self) -> None: ...
