"""Advantages and losses of other packages, called like the built-in ones.

Invariant: what a plug-in returns is checked before it is used; a ``PluginError`` names the plug-in and the problem.
Plug-ins are found by name in each process that trains, so that ranks on other machines use their own installation.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from agentkit.config import AlgorithmConfig
from agentkit.plugins import ADVANTAGE, LOSS, Kind, Plugin
from agentkit.trainers.batch import Batch
from agentkit.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

    from agentkit.trainers.algorithms.interface import TokenInputs

COLUMNS = ("advantages", "returns", "policy_weight", "entropy_weight")


def estimate_columns(batch: Batch, values: FloatArray, config: AlgorithmConfig) -> tuple[FloatArray, ...]:
    """Call the plug-in estimator; return the four columns of an ``Estimate``.

    The plug-in returns them, or only the advantages ``[N]``: returns are then 0 and both weights 1. Values at masked
    positions are replaced by 0.
    """
    plugin, function = _bound(ADVANTAGE, config.advantage, config.options)
    result = function(batch, values, config)
    if isinstance(result, np.ndarray):
        if plugin.traits.needs_critic:
            raise plugin.error(
                "returned only advantages; an estimator that needs a critic returns an Estimate, whose "
                "returns are the critic's targets"
            )
        weight = batch.mask.astype(np.float32)
        result = (result, np.zeros(batch.num_tokens, np.float32), weight, weight)
    if not isinstance(result, tuple) or len(result) != len(COLUMNS):
        raise plugin.error(f"returned {_describe(result)}, not advantages [{batch.num_tokens}] or an Estimate")
    return tuple(_column(plugin, name, column, batch) for name, column in zip(COLUMNS, result, strict=True))


def _column(plugin: Plugin, name: str, column: Any, batch: Batch) -> FloatArray:
    wanted = f"numbers of the shape [{batch.num_tokens}]"
    if not isinstance(column, np.ndarray) or column.shape != (batch.num_tokens,) or column.dtype.kind not in "fiub":
        raise plugin.error(f"returned {name} that are {_describe(column)}, not {wanted}")
    with np.errstate(over="ignore"):
        column = np.where(batch.mask, column, 0).astype(np.float32)
    if wrong := int(np.count_nonzero(~np.isfinite(column))):
        raise plugin.error(
            f"returned {name} that are NaN or infinite at {wrong} of {int(batch.mask.sum())} action tokens"
        )
    return column


def token_loss(inputs: TokenInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Call the plug-in loss; return the columns of a ``TokenLoss``. It may return only the loss of each token."""
    import torch

    plugin, function = _bound(LOSS, config.loss, config.options)
    result = function(inputs, config)
    never = torch.zeros_like(inputs.mask)
    columns = (result, never, never) if isinstance(result, torch.Tensor) else result
    if not isinstance(columns, tuple) or len(columns) != 3:
        raise plugin.error(f"returned {_describe(result)}, not the loss of each token or a TokenLoss")
    for name, column in zip(("loss", "clipped", "masked"), columns, strict=True):
        if not isinstance(column, torch.Tensor) or column.shape != inputs.mask.shape:
            raise plugin.error(f"returned a {name} that is {_describe(column)}, not a tensor {list(inputs.mask.shape)}")
    loss, clipped, masked = columns
    if not loss.is_floating_point() or clipped.dtype != torch.bool or masked.dtype != torch.bool:
        kinds = f"{loss.dtype}, {clipped.dtype} and {masked.dtype}"
        raise plugin.error(f"returned {kinds}; loss must be floating point, clipped and masked bool")
    if not bool(torch.isfinite(loss.detach()[inputs.mask]).all()):
        raise plugin.error("returned a loss that is NaN or infinite at an action token")
    return loss, clipped, masked


def _bound(kind: Kind, name: str, options: dict[str, Any]) -> tuple[Plugin, Callable[..., Any]]:
    return _bound_to(kind, name, json.dumps(options, sort_keys=True))


@functools.lru_cache(maxsize=32)
def _bound_to(kind: Kind, name: str, options: str) -> tuple[Plugin, Callable[..., Any]]:
    plugin = kind.load(name)
    return plugin, plugin.bind(json.loads(options))


def _describe(value: Any) -> str:
    """Return type, shape and dtype of a value as text."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {list(shape)} of {dtype}"
