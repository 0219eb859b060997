"""The learner role: an asynchronous interface to ``Training``, with a compute thread and staged weights.

Invariant: all computation happens in one separate thread, one call at a time, so an inline learner never blocks the
event loop and no two calls use the weights at once. With several ranks every method is called on every rank; only rank
0 writes common files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agentkit.config import RunConfig
from agentkit.errors import CheckpointError, LearnerError
from agentkit.model_files import ADAPTER
from agentkit.trainers.batch import Batch
from agentkit.trainers.cpu_threads import use_threads
from agentkit.trainers.freed_memory import release_freed_memory
from agentkit.trainers.learner.files import writing
from agentkit.trainers.learner.training import Training
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.weights.base import BUCKET_BYTES, Bucket, Staging, Weights
from agentkit.trainers.weights.choose import staging_of
from agentkit.trainers.weights.sender import Sender
from agentkit.trainers.weights.sent import SentWeights
from agentkit.types import FloatArray

Result = TypeVar("Result")


class Learner:
    """Turns batches into weights with torch, on one rank of ``world_size``."""

    def __init__(self, config: RunConfig, *, rank: int = 0, world_size: int = 1, init_method: str | None = None):
        self._config, self._rank, self._world_size, self._init_method = config, rank, world_size, init_method
        threads = config.learner.threads or torch.get_num_threads()
        self._thread = ThreadPoolExecutor(1, "learner", initializer=use_threads, initargs=(threads,))
        self._training: Training | None = None
        self._staging: Staging | None = None
        self._published: int | None = None
        """The version that was published and that the weights still are."""
        self._closed = False
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()

    async def start(self) -> dict[str, Any]:
        """Load the model and meet the other ranks; returns ``parameters``, ``trainable`` and ``device``.

        Raises ``ConfigError`` when the model does not load, ``LearnerError`` when the ranks do not meet.
        """
        return await self._compute(self._start)

    async def imitate(self, batch: Batch, lr: float) -> dict[str, float]:
        """One optimiser step of behaviour cloning: mean negative log-likelihood of the batch's action tokens.

        Rewards and recorded log-probabilities are ignored. Raises ``LearnerError`` on a non-finite loss.
        """
        self._published = None
        return await self._compute(lambda: self._ready.imitate(batch, lr))

    async def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on one global batch (all minibatches and epochs); ``step`` is the run's training step, from 0.

        Returns metrics ``policy/…``, ``critic/…`` and ``credit/…``. Raises ``LearnerError`` on a non-finite loss, which
        is not applied.
        """
        self._published = None
        return await self._compute(lambda: self._train(batch, step))

    async def credit_heads(self) -> dict[str, Any] | None:
        """Layers and head sets of the last batch's attention-rhythm credit; None before the first, or without it."""
        credit = self._ready.credit
        return await self._compute(credit.state) if credit is not None else None

    async def token_credit(self) -> dict[str, FloatArray] | None:
        """What the last batch gave each of its action tokens (see ``Training.token_credit``); None on other ranks."""
        return self._ready.token_credit if self._rank == 0 else None

    async def publish(self, version: int) -> Weights:
        """Publish the policy's weights (plain names, adapters merged) as ``version``, for any number of engines.

        Staged ones stay available until the next ``publish`` or ``close``. Those that are ``sent`` need ``send`` for
        each update, and are available until they change. Rank 0 returns them. Raises ``LearnerError`` when there is no
        room.
        """
        weights = await self._compute(lambda: self._stage(version))
        self._published = version
        return weights

    async def send(self, weights: SentWeights) -> int:
        """Send published weights to engines that update to them at the same time; return how many receivers got them.

        If they have changed since, returns 0 at once, and the engines raise ``WeightsUnavailable``.
        """
        sender = self._staging
        assert isinstance(sender, Sender)
        if self._published != weights.version:
            sender.refuse(weights, "the learner has trained since it published them")
            return 0
        return await self._compute(lambda: sender.send(weights, self._buckets))

    async def export(self, directory: Path) -> None:
        """Write model and tokenizer as a Hugging Face directory that transformers and vLLM load."""
        await self._compute(lambda: self._export(Path(directory)))

    async def save(self, directory: Path) -> None:
        """Write the complete state for an exact continuation into ``directory``; adapters in the format of PEFT, with
        the tokenizer, in ``adapter``."""
        await self._compute(lambda: self._save(Path(directory)))

    async def load(self, directory: Path) -> None:
        """Restore a state that ``save`` wrote. Raises ``CheckpointError`` when it is incomplete or does not fit."""
        self._published = None
        await self._compute(lambda: self._load(Path(directory)))

    async def close(self) -> None:
        """Leave the ranks, release the staged weights and stop the thread after its current call. Idempotent."""
        if self._closed:
            return
        if self._staging is not None:
            await self._compute(self._staging.release)
        if self._training is not None:
            training, self._training = self._training, None
            await self._compute(training.close)
            torch.use_deterministic_algorithms(self._was_deterministic)
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model itself, for an inline engine that serves it in place; raises before ``start``."""
        return self._ready.policy.causal_lm

    @property
    def _ready(self) -> Training:
        if self._training is None:
            raise LearnerError("the learner is not running: call start() first")
        return self._training

    async def _compute(self, function: Callable[[], Result]) -> Result:
        if self._closed:
            raise LearnerError("the learner is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _start(self) -> dict[str, Any]:
        if self._config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        training = self._training = Training(self._config, self._rank, self._world_size, self._init_method)
        self._staging = staging_of(self._config, rank=self._rank, ranks=self._world_size, device=str(training.device))
        return {
            "parameters": training.policy.size,
            "trainable": training.policy.trained_size,
            "device": str(training.device),
        }

    def _train(self, batch: Batch, step: int) -> dict[str, float]:
        release_freed_memory()  # of an engine in this process
        metrics = self._ready.train(batch, step)
        release_freed_memory()
        return metrics

    def _stage(self, version: int) -> Weights:
        assert self._staging is not None
        return self._staging.stage(version, self._buckets())

    def _buckets(self) -> Iterator[Bucket]:
        """Gather the policy's weights from all ranks, which all iterate."""
        training = self._ready
        return training.policy.buckets(BUCKET_BYTES, training.backend.whole)

    def _export(self, directory: Path) -> None:
        state = self._plain_state()
        if self._rank == 0:
            with writing(directory):
                self._ready.policy.causal_lm.save_pretrained(directory, state_dict=state)
                self._save_tokenizer(directory)

    def _save(self, directory: Path) -> None:
        self._ready.save(directory)
        if self._rank == 0 and self._config.model.lora is not None:
            with writing(directory):
                self._save_tokenizer(directory / ADAPTER)

    def _save_tokenizer(self, directory: Path) -> None:
        model = self._config.model
        load_tokenizer(model.path, model.chat_template).save_pretrained(directory)

    def _plain_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the plain model, on rank 0 only; all ranks take part."""
        training = self._ready
        tensors = training.policy.plain_tensors(training.backend.whole)
        return {name: tensor.cpu() for name, tensor in tensors if self._rank == 0}

    def _load(self, directory: Path) -> None:
        try:
            self._ready.load(directory)
        except (LearnerError, KeyError, ValueError) as error:
            raise CheckpointError(f"{directory} does not fit this configuration: {error}") from error
