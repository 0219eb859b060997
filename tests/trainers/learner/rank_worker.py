"""One learner rank in a separate process: trains on pickled batches and writes its results.

Arguments: a pickle of ``(config, batches)``, the rank, the number of ranks, the rendezvous file, the output (npz).
"""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import torch

from agentkit.trainers.learner import training
from agentkit.trainers.learner.backends import replicas


def run(config, batches, rank: int, size: int, init_method: str | None) -> dict[str, np.ndarray]:
    """Train; returns the weights, every step's whole gradient (policy and critic in turn) and the metrics."""
    gradients = []

    def recording(optimizer, **kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.append(torch.cat([p.grad.reshape(-1) for p in parameters]).numpy().copy())
        return apply_step(optimizer, **kwargs)

    apply_step = replicas.apply_step
    replicas.apply_step = recording
    try:
        learner = training.Training(config, rank, size, init_method)
        metrics = [learner.imitate(batches[0], 1e-3)]
        metrics += [learner.train(batch, step) for step, batch in enumerate(batches)]
        weights = torch.cat([p.detach().reshape(-1) for p in learner.backend.trainable().values()]).numpy()
        learner.close()
    finally:
        replicas.apply_step = apply_step
    result = {f"gradient-{index}": gradient for index, gradient in enumerate(gradients)}
    result |= {f"{index}-{name}": np.array(value) for index, each in enumerate(metrics) for name, value in each.items()}
    return result | {"weights": weights}


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        config, batches = pickle.load(file)
    results: Any = run(config, batches, int(sys.argv[2]), int(sys.argv[3]), f"file://{sys.argv[4]}")
    np.savez(sys.argv[5], **results)
