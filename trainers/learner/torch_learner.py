"""The learner role: an asynchronous interface to ``Training``, with a compute thread and staged weights.

Invariant: all computation happens in one separate thread, one call at a time, so an inline learner never blocks the
event loop and no two calls use the weights at once. With several ranks every method is called on every rank; only rank
0 writes common files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agentkit.config import RunConfig
from agentkit.errors import CheckpointError, LearnerError
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.files import read_state, write_state, writing
from agentkit.trainers.learner.training import Training
from agentkit.trainers.models.load import load_tokenizer
from agentkit.trainers.weights.base import BUCKET_BYTES, Staging, Weights
from agentkit.trainers.weights.shared_memory import SharedStaging

Result = TypeVar("Result")


class Learner:
    """Turns batches into weights with torch, on one rank of ``world_size``."""

    def __init__(self, config: RunConfig, *, rank: int = 0, world_size: int = 1, init_method: str | None = None):
        self._config, self._rank, self._world_size, self._init_method = config, rank, world_size, init_method
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._training: Training | None = None
        self._staging: Staging = SharedStaging()
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
        return await self._compute(lambda: self._ready.imitate(batch, lr))

    async def train(self, batch: Batch, step: int) -> dict[str, float]:
        """Train on one global batch (all minibatches and epochs); ``step`` is the run's training step, from 0.

        Returns metrics ``policy/…`` and ``critic/…``. Raises ``LearnerError`` on a non-finite loss, which is not
        applied.
        """
        return await self._compute(lambda: self._ready.train(batch, step))

    async def publish(self, version: int) -> Weights:
        """Stage the policy's weights (plain names, adapters merged) as ``version``, for any number of engines.

        They stay available until the next ``publish`` or ``close``. Raises ``LearnerError`` when there is no room.
        """
        return await self._compute(lambda: self._publish(version))

    async def export(self, directory: Path) -> None:
        """Write model and tokenizer as a Hugging Face directory that transformers and vLLM load."""
        await self._compute(lambda: self._export(Path(directory)))

    async def save(self, directory: Path) -> None:
        """Write the complete state for an exact continuation into ``directory``."""
        await self._compute(lambda: self._save(Path(directory)))

    async def load(self, directory: Path) -> None:
        """Restore a state that ``save`` wrote. Raises ``CheckpointError`` when it is incomplete or does not fit."""
        await self._compute(lambda: self._load(Path(directory)))

    async def close(self) -> None:
        """Leave the ranks, release the staged weights and stop the thread after its current call. Idempotent."""
        if self._closed:
            return
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
        parameters = list(training.policy.scorer.parameters())
        return {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "device": str(training.policy.device),
        }

    def _publish(self, version: int) -> Weights | None:
        buckets = self._ready.policy.buckets(BUCKET_BYTES)
        if self._rank == 0:
            return self._staging.stage(version, buckets)
        for _ in buckets:  # gathered from all ranks
            pass
        return None

    def _export(self, directory: Path) -> None:
        policy = self._ready.policy
        if self._rank == 0:
            with writing(directory):
                policy.causal_lm.save_pretrained(directory, state_dict=policy.merged_state_dict())
                load_tokenizer(self._config.model.path).save_pretrained(directory)

    def _save(self, directory: Path) -> None:
        training = self._ready
        if self._rank == 0:
            write_state(directory / "learner.pt", training.state())
        random = {"cpu": torch.get_rng_state()}
        if training.policy.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(training.policy.device)
        write_state(directory / f"random-{self._rank}.pt", random)

    def _load(self, directory: Path) -> None:
        training = self._ready
        state, random = read_state(directory / "learner.pt"), read_state(directory / f"random-{self._rank}.pt")
        try:
            training.restore(state)
        except (LearnerError, KeyError, ValueError) as error:
            raise CheckpointError(f"{directory} does not fit this configuration: {error}") from error
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and training.policy.device.type == "cuda":
            torch.cuda.set_rng_state(random["cuda"], training.policy.device)
