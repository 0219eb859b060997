"""The embedded engine without threads: queue, step, pause, change weights.

Invariant: every submitted request leaves through ``outbox`` exactly once, with a generation or an error, unless
it is cancelled. No key or value computed under older weights is used after ``update``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from agentkit.errors import EngineError
from agentkit.trainers.inference.base import EngineStats, Generation, PauseMode
from agentkit.trainers.inference.batch import RunningBatch
from agentkit.trainers.inference.request import GenerationRequest
from agentkit.trainers.inference.sessions import SessionStore
from agentkit.trainers.inference.weights import load_weights
from agentkit.trainers.weights.base import Receiver, Weights
from agentkit.trainers.weights.tensors import bytes_of
from agentkit.types import FinishReason


class Core:
    """The engine's state. Only ``stats`` may be called from another thread."""

    def __init__(
        self,
        model: Any,
        batch: RunningBatch,
        store: SessionStore,
        decoder: Callable[[], Callable[[Sequence[int]], str]],
        *,
        shared: bool,
    ) -> None:
        """``shared``: the owner changes the weights of ``model`` in place; ``update`` only records the version.

        ``decoder`` loads the tokenizer for the first request with stop strings.
        """
        self.outbox: list[tuple[GenerationRequest, Generation | EngineError]] = []
        self.failure: EngineError | None = None
        self._model, self._batch, self._store, self._decoder, self._shared = model, batch, store, decoder, shared
        self._receiver = Receiver(str(model.device))
        self._waiting: deque[GenerationRequest] = deque()
        self._paused = False
        self._version = 0
        self._busy_s = self._request_s = 0.0

    def has_work(self) -> bool:
        return not self._paused and bool(self._batch.rows or self._waiting)

    def step(self) -> None:
        """Sample one token for every running request. An unexpected error fails all current and later requests."""
        begun = time.perf_counter()
        try:
            finished = self._batch.step(self._waiting)
        except Exception as error:
            self.fail(
                EngineError(
                    f"the engine's forward pass failed ({type(error).__name__}: {error}); start it again", fatal=True
                )
            )
            return
        finally:
            seconds = time.perf_counter() - begun
            self._busy_s += seconds
        self._request_s += seconds * (len(self._batch.rows) + len(finished))
        for ended in finished:
            if ended.reason is None:
                problem = f"the weights of version {self._version} give non-finite probabilities: lower learner.lr"
                self.outbox.append((ended.request, EngineError(problem)))
            else:
                self._finish(ended.request, ended.reason)

    def submit(self, request: GenerationRequest) -> None:
        if self.failure is not None:
            self.outbox.append((request, self.failure))
            return
        if request.sampling.stop_strings:
            try:
                request.decode = self._decoder()
            except Exception as error:
                self.outbox.append((request, EngineError(f"stop strings need the model's tokenizer: {error}")))
                return
        self._waiting.append(request)

    def cancel(self, request: GenerationRequest) -> None:
        """Free the place of a cancelled request."""
        if not self._batch.remove(request, remember=False) and request in self._waiting:
            self._waiting.remove(request)

    def abort(self, session: str) -> None:
        for request in [r for r in (*self._batch.rows, *self._waiting) if r.session == session]:
            self.cancel(request)
            self._finish(request, "abort")
        self._store.forget(session)

    def pause(self, mode: PauseMode) -> None:
        self._check()
        self._paused = True
        if mode == "abort":
            for request in [*self._batch.rows, *self._waiting]:
                if not self._batch.remove(request, remember=True):
                    self._waiting.remove(request)
                self._finish(request, "abort")

    def resume(self) -> None:
        self._check()
        self._paused = False

    def update(self, weights: Weights) -> int:
        self._check()
        if not self._paused:
            raise EngineError("update_weights was called while the engine samples: call pause first")
        if not self._shared:
            try:
                load_weights(self._model, weights, self._receiver)
            except EngineError as error:
                if error.fatal:
                    self.fail(error)
                raise
        self._store.clear()
        kept = self._batch.clear()
        for request in kept:
            request.close_run(self._version)
        # Back to the head of the queue, in order: joining again computes their keys under the new weights.
        self._waiting.extendleft(reversed(kept))
        self._version = weights.version
        return weights.version

    def checksum(self) -> str:
        self._check()
        digest = sha256()
        for name, tensor in self._model.state_dict().items():
            digest.update(name.encode())
            digest.update(bytes_of(tensor).data)
        return digest.hexdigest()

    def fail(self, error: EngineError) -> None:
        """Fail every request, and every later call, with the error."""
        self.failure = self.failure or error
        self.outbox += [(request, self.failure) for request in (*self._batch.clear(), *self._waiting)]
        self._waiting.clear()
        self._store.clear()
        self._receiver.close()

    def stats(self) -> EngineStats:
        counters = self._batch.counters
        return EngineStats(
            generated_tokens=counters.generated,
            prefilled_tokens=counters.prefilled,
            reused_tokens=counters.reused,
            busy_s=self._busy_s,
            running=len(self._batch.rows),
            waiting=len(self._waiting),
            request_s=self._request_s,
        )

    def _finish(self, request: GenerationRequest, reason: FinishReason) -> None:
        self.outbox.append((request, request.result(reason, self._version)))

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure
