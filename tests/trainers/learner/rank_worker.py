"""One learner rank in a separate process: trains on pickled batches and writes its results.

Arguments: a pickle of jobs (positional and keyword arguments of ``run``), the rank, the number of ranks, the
rendezvous file, the directory for the results (``JOB-RANK.npz``).
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentkit.config import RunConfig
from agentkit.errors import LearnerError
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner import forward, training
from agentkit.trainers.learner.backends import replicas


def run(
    config: RunConfig,
    batches: Sequence[Batch],
    rank: int,
    size: int,
    init_method: str | None,
    *,
    max_logits: int = forward.MAX_LOGITS,
    load: Path | None = None,
    save: Path | None = None,
    poison: bool = False,
) -> dict[str, np.ndarray]:
    """Train; return the weights after every step, every step's whole gradient, the metrics and the plain model.

    Continue from ``load``, or imitate first. With ``poison``, the last batch is first trained on with infinite rewards;
    ``refused`` tells whether that raised ``LearnerError`` and changed nothing.
    """
    gradients = []

    def whole(tensor: Any) -> torch.Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def recording(optimizer, **kwargs):
        if np.isfinite(kwargs["loss"]):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients.append(torch.cat([whole(p.grad).reshape(-1) for p in parameters]).numpy().copy())
        return apply_step(optimizer, **kwargs)

    apply_step, previous = replicas.apply_step, forward.MAX_LOGITS
    replicas.apply_step, forward.MAX_LOGITS = recording, max_logits
    undo = _record_deepspeed(gradients) if config.learner.zero else None
    learner = training.Training(config, rank, size, init_method)
    result = {}
    try:

        def weights() -> np.ndarray:
            parts = [learner.backend.whole(p).detach().reshape(-1) for p in learner.backend.parameters.values()]
            return torch.cat(parts).float().numpy().copy()

        result["weights-start"] = weights()
        if load is not None:
            learner.load(load)
            metrics = []
        else:
            metrics = [learner.imitate(batches[0], 1e-3)]
            result["weights-imitated"] = weights()
        first = learner.batches
        for step, batch in enumerate(batches, first):
            if poison and step == first + len(batches) - 1:
                before = weights()
                try:
                    learner.train(replace(batch, rewards=np.full_like(batch.rewards, np.inf)), step)
                    result["refused"] = np.array(False)
                except LearnerError:
                    result["refused"] = np.array(np.array_equal(weights(), before))
            metrics.append(learner.train(batch, step))
            result[f"weights-{step}"] = weights()
        if save is not None:
            learner.save(save)
        plain = learner.policy.plain_tensors(learner.backend.whole)
        result |= {f"plain-{name}": tensor.float().numpy().copy() for name, tensor in plain}
    finally:
        learner.close()
        replicas.apply_step, forward.MAX_LOGITS = apply_step, previous
        if undo is not None:
            undo()
    result |= {f"gradient-{index}": gradient for index, gradient in enumerate(gradients)}
    return result | {f"{i}-{name}": np.array(value) for i, each in enumerate(metrics) for name, value in each.items()}


def _record_deepspeed(gradients: list[np.ndarray]) -> Callable[[], None]:
    """Record gradients of DeepSpeed's engines, which have their own step; in the order of AdamW's groups."""
    from deepspeed.utils import safe_get_full_grad  # pyright: ignore[reportMissingImports]

    from agentkit.trainers.learner.backends.deepspeed import DeepSpeed

    def recording(self, *, loss, lr):
        if np.isfinite(loss):
            shapes = self._shapes()
            names = sorted(shapes, key=lambda name: len(shapes[name]) < 2)
            parts: list[Any] = [safe_get_full_grad(self.parameters[name]) for name in names]
            gradients.append(torch.cat([part.reshape(-1) for part in parts]).float().numpy().copy())
        return step(self, loss=loss, lr=lr)

    step, DeepSpeed.step = DeepSpeed.step, recording
    return lambda: setattr(DeepSpeed, "step", step)


def main(path: str, rank: str, size: str, store: str, results: str) -> None:
    jobs = pickle.loads(Path(path).read_bytes())
    for number, ((config, batches), options) in enumerate(jobs):
        init_method = f"file://{store}-{number}" if int(size) > 1 else None
        result: Any = run(config, batches, int(rank), int(size), init_method, **options)
        np.savez(Path(results) / f"{number}-{rank}.npz", **result)


if __name__ == "__main__":
    main(*sys.argv[1:])
