"""The embedded engine: any transformers causal LM, continuous batching, no service to start.

Invariant: only one thread uses the model; the engine starts and ends it. Callers stay on their event loop: a call is a
message to the thread, and futures are resolved in batches after each token. Every pending call is answered, even if the
thread fails.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import ConfigError, EngineError
from agentkit.trainers.cpu_threads import use_threads
from agentkit.trainers.inference.base import EngineStats, Generation, PauseMode, Sampling
from agentkit.trainers.inference.batch import RunningBatch
from agentkit.trainers.inference.cache import KeyValueShape, RowCache
from agentkit.trainers.inference.core import Core
from agentkit.trainers.inference.request import GenerationRequest
from agentkit.trainers.inference.sampling import check_sampling, uniforms
from agentkit.trainers.inference.serving import prepare, vocabulary_size
from agentkit.trainers.inference.sessions import SessionStore
from agentkit.trainers.models import load_policy, load_tokenizer
from agentkit.trainers.weights.base import Weights

_START_TIMEOUT_S = 1800.0
"""Loading may download a model."""
_CONTROL_TIMEOUT_S = 300.0
"""Pausing waits for one token, updating for one copy of the weights."""
_IDLE_BATCHES = 4
"""Maximum prefix memory of idle sessions, in full batches of full length."""

_Command = tuple[Callable[[Core], Any], "asyncio.Future[Any] | None"]


class HFEngine:
    """Implements ``InferenceEngine`` over transformers. One engine belongs to one event loop."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        seed: int,
        deterministic: bool = False,
        model_object: Any = None,
    ) -> None:
        """``seed`` determines the weights of the quickstart model and the sampling of requests without a seed.

        ``deterministic``: requests are computed one by one and reuse nothing, so a result depends only on prompt,
        sampling seed and weights. ``model_object``: serve this transformers model in place, without a copy;
        its owner changes the weights while the engine is paused, and ``update_weights`` copies nothing.
        """
        self._model, self._engine, self._seed = model, engine, seed
        self._threads = engine.threads or torch.get_num_threads()
        self._rows = 1 if deterministic else engine.max_batch
        self._reuse = not deterministic
        self._given = model_object
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._core: Core | None = None
        self._closed = False
        self._vocabulary = 0
        self._requests = 0
        self._tokenizer: Any = None

    async def start(self) -> None:
        if self._thread is not None or self._closed:
            raise EngineError("the engine has already been started; make a new one")
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._serve, name="agentkit-hf-engine", daemon=True)
        self._thread.start()
        await self._answer(self._ready, "start", _START_TIMEOUT_S)

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        core = self._running()
        if core.failure is not None:
            raise core.failure
        check_sampling(sampling)
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        self._check_prompt(prompt)
        limit = min(sampling.max_tokens, self._engine.max_context - len(prompt))
        self._requests += 1
        seed = (self._seed, self._requests) if sampling.seed is None else sampling.seed
        request = GenerationRequest(
            session=session,
            prompt=prompt,
            sampling=sampling,
            limit=limit,
            numbers=uniforms(seed, limit if sampling.temperature > 0 else 0),
            future=self._loop.create_future(),
            stop_ids=frozenset(sampling.stop_ids),
        )
        self._inbox.put((lambda core: core.submit(request), None))
        try:
            return await request.future
        except asyncio.CancelledError:
            self._inbox.put((lambda core: core.cancel(request), None))
            raise

    async def abort(self, session: str) -> None:
        """Return at once; later calls for the session are handled after it."""
        self._running()
        self._inbox.put((lambda core: core.abort(session), None))

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", lambda core: core.pause(mode))

    async def resume(self) -> None:
        await self._call("resume", lambda core: core.resume())

    async def update_weights(self, weights: Weights) -> int:
        return await self._call("update_weights", lambda core: core.update(weights))

    async def sleep(self) -> None:
        raise EngineError("the hf engine keeps its memory: engine.sleep needs engine.kind=vllm")

    async def checksum(self) -> str:
        return await self._call("checksum", lambda core: core.checksum())

    async def stats(self) -> EngineStats:
        return self._running().stats()

    async def close(self) -> None:
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._inbox.put(None)
        await self._answer(self._ended, "close", _CONTROL_TIMEOUT_S)
        thread.join(timeout=5)
        self._core = None

    def _running(self) -> Core:
        if self._core is None or self._closed:
            problem = "the engine is closed" if self._closed else "the engine is not started: await start()"
            raise EngineError(problem, fatal=True)
        return self._core

    def _check_prompt(self, prompt: np.ndarray) -> None:
        if prompt.ndim != 1 or len(prompt) == 0:
            raise EngineError(f"a prompt is a non-empty list of ids, not an array of shape {prompt.shape}")
        if len(prompt) >= self._engine.max_context:
            raise EngineError(
                f"the prompt of {len(prompt)} tokens leaves no room in engine.max_context={self._engine.max_context}: "
                "raise it, or end the episode earlier"
            )
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise EngineError(
                f"the prompt has ids from {prompt.min()} to {prompt.max()}, but the model knows 0 to "
                f"{self._vocabulary - 1}: was it rendered with another model's tokenizer?"
            )

    async def _call(self, what: str, command: Callable[[Core], Any]) -> Any:
        self._running()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._inbox.put((command, future))
        return await self._answer(future, what, _CONTROL_TIMEOUT_S)

    async def _answer(self, future: asyncio.Future[Any], what: str, timeout: float) -> Any:
        try:
            return await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            raise EngineError(f"the engine did not answer {what} within {timeout:.0f} s", fatal=True) from None

    # The compute thread

    def _serve(self) -> None:
        answers: list[tuple[asyncio.Future[Any], Any]] = []
        try:
            core = self._load()
        except BaseException as error:
            self._settle([(self._ready, _as_engine_error(error)), (self._ended, None)])
            return
        self._core = core
        self._settle([(self._ready, None)])
        try:
            while self._obey(core, answers):
                self._hand_out(core, answers)
                if core.has_work():
                    core.step()
        except BaseException as error:
            core.fail(_as_engine_error(error))
        finally:
            core.fail(EngineError("the engine was closed before the request was finished", fatal=True))
            self._refuse_rest(core, answers)
            self._hand_out(core, answers)
            self._settle([(self._ended, None)])

    def _obey(self, core: Core, answers: list[tuple[asyncio.Future[Any], Any]]) -> bool:
        """Carry out pending commands; wait for one if there is nothing to compute. Return False to stop."""
        block = not core.has_work() and not core.outbox and not answers
        while True:
            try:
                command = self._inbox.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            block = False
            action, future = command
            try:
                result = action(core)
            except EngineError as error:
                result = error
            if future is not None:
                answers.append((future, result))

    def _refuse_rest(self, core: Core, answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None and command[1] is not None:
                answers.append((command[1], core.failure))
            elif command is not None:
                command[0](core)

    def _hand_out(self, core: Core, answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
        settled = [(request.future, result) for request, result in core.outbox] + answers
        core.outbox.clear()
        answers.clear()
        if settled:
            self._settle(settled)

    def _settle(self, settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
        try:
            self._loop.call_soon_threadsafe(_set_results, settled)
        except RuntimeError:
            return  # The event loop is closed, so no caller waits.

    def _load(self) -> Core:
        use_threads(self._threads)
        model = self._given if self._given is not None else load_policy(self._model, self._seed)
        view, shape = prepare(model, self._engine.max_context)
        self._vocabulary = vocabulary_size(model)
        try:
            cache = RowCache(shape, self._rows, self._engine.max_context, dtype=model.dtype, device=model.device)
        except (RuntimeError, MemoryError) as error:
            raise EngineError(
                f"no memory for the keys and values of engine.max_batch={self._rows} sequences of "
                f"engine.max_context={self._engine.max_context} tokens ({error}): lower one of them"
            ) from error
        store = SessionStore(self._idle_budget(shape, model) if self._reuse else 0)
        batch = RunningBatch(view, cache, self._rows, store)
        return Core(model, batch, store, self._decoder, shared=self._given is not None)

    def _idle_budget(self, shape: KeyValueShape, model: Any) -> int:
        """Return the budget of idle sessions in tokens: a few batches, within a quarter of the free memory."""
        on_gpu = model.device.type == "cuda"
        free = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
        affordable = free // 4 // (shape.numbers_per_token * model.dtype.itemsize)
        return min(_IDLE_BATCHES * self._engine.max_batch * self._engine.max_context, affordable)

    def _decoder(self) -> Callable[[Sequence[int]], str]:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model.path)
        tokenizer = self._tokenizer
        return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _set_results(settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in settled:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _as_engine_error(error: BaseException) -> EngineError:
    if isinstance(error, EngineError):
        return error
    cause = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    converted = EngineError(cause, fatal=True)
    converted.__cause__ = error
    return converted
