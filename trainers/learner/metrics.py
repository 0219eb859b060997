"""Metrics of a training step, from sums over action tokens of all ranks and from per-token columns: pure functions.

Invariant: sums and columns are of the action tokens of all micro-batches and ranks, so metrics do not depend on either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agentkit.trainers.algorithms.advantages import Estimate
from agentkit.types import FloatArray

Sums = dict[str, float]
QUANTILES = (10, 50, 90)
"""Percentiles of the critics' disagreement."""


def policy_metrics(parts: list[Sums]) -> dict[str, float]:
    """Means over all tokens of all optimiser steps on one batch; loss and norm are means over the steps."""
    if not parts:
        return {"policy/lr": 0.0}
    tokens = sum(part["tokens"] for part in parts)
    per_token = ("entropy", "kl_behaviour", "clip_fraction", "mask_fraction", "kl_reference")
    metrics = {f"policy/{name}": sum(part[name] for part in parts) / tokens for name in per_token if name in parts[0]}
    weight, squared = (sum(part[name] for part in parts) for name in ("weight", "weight_squared"))
    metrics["policy/ess"] = weight**2 / (tokens * squared)
    metrics |= {f"policy/{name}": _mean(parts, name) for name in ("loss", "grad_norm")}
    if "disagreement" in parts[0]:
        metrics["critic/disagreement_entropy_correlation"] = _correlation(parts)
    return metrics | {"policy/lr": parts[-1]["lr"]}


def product_sums(disagreement: Tensor, entropy: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What the correlation of disagreement and entropy needs, in addition to the sum of the entropy."""
    x, y = disagreement[mask].double(), entropy.detach()[mask].double()
    return {
        "disagreement": x.sum(),
        "disagreement_squared": (x * x).sum(),
        "entropy_squared": (y * y).sum(),
        "disagreement_entropy": torch.dot(x, y),
    }


def critic_metrics(
    parts: Sequence[list[Sums]], values: np.ndarray, estimated: Estimate, mask: np.ndarray
) -> dict[str, float]:
    """Explained variance, and means over the optimiser steps: of all critics and, if there are several, of each.

    Args:
        parts: results of the steps of each critic.
        values: of each token's state, before the batch, ``[M, N]``.
        estimated: result of the estimator.
        mask: which tokens are actions, ``[N]``.
    """
    names = next((tuple(of[0]) for of in parts if of), ())
    steps = [part for of in parts for part in of]
    metrics = {f"critic/{name}": _mean(steps, name) for name in names}
    metrics["critic/explained_variance"] = explained_variance(np.mean(values, axis=0), estimated.returns, mask)
    if len(parts) == 1:
        return metrics
    for index, of in enumerate(parts):
        metrics |= {f"critic/{index}/{name}": _mean(of, name) for name in ("loss", "grad_norm") if of}
        metrics[f"critic/{index}/explained_variance"] = explained_variance(values[index], estimated.returns, mask)
    return metrics


def disagreement_metrics(disagreement: np.ndarray, estimated: Estimate, mask: np.ndarray) -> dict[str, float]:
    """Percentiles of the disagreement over the action tokens, and the shares that it masks.

    ``disagreement`` is that of all tokens, ``[N]``.
    """
    found = np.percentile(disagreement[mask], QUANTILES)
    metrics = {f"critic/disagreement_p{q}": float(value) for q, value in zip(QUANTILES, found, strict=True)}
    metrics["critic/advantage_masked"] = float((estimated.policy_weight[mask] == 0).mean())
    metrics["critic/entropy_masked"] = float((estimated.entropy_weight[mask] == 0).mean())
    return metrics


def explained_variance(values: FloatArray, returns: FloatArray, mask: np.ndarray) -> float:
    """``1 - Var(R - V) / Var(R)`` over the action tokens; ``values`` ``[N]`` are those of each token's state."""
    variance = float(returns[mask].var()) if mask.any() else 0.0
    return 1.0 - float((returns - values)[mask].var()) / variance if variance > 0 else 0.0


def _correlation(parts: list[Sums]) -> float:
    """Pearson's correlation of disagreement and entropy; 0 if one of them is constant."""
    n, x, y, xx, yy, xy = (
        sum(part[name] for part in parts)
        for name in (
            "tokens",
            "disagreement",
            "entropy",
            "disagreement_squared",
            "entropy_squared",
            "disagreement_entropy",
        )
    )
    variances = max(n * xx - x * x, 0.0) * max(n * yy - y * y, 0.0)
    return (n * xy - x * y) / math.sqrt(variances) if variances > 0 else 0.0


def _mean(parts: list[Sums], name: str) -> float:
    return sum(part[name] for part in parts) / len(parts)
