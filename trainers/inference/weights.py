"""Load published weights into a served model.

Invariant: an update is atomic. Names and shapes are checked, and the first weights have arrived, before any is written;
a failure after that is fatal for the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from agentkit.errors import EngineError
from agentkit.trainers.weights.base import Receiver, Weights, check_fits


@torch.no_grad()
def load_weights(model: Any, weights: Weights, receiver: Receiver) -> None:
    """Copy ``weights`` into ``model`` in place, converting to its precision and device.

    Tensors that are tied in the model may be left out. Raises ``EngineError`` when the weights are of another model or
    no longer available; ``model`` is unchanged, unless the error is fatal.
    """
    state = model.state_dict()
    _check(state, weights)
    changed = False
    try:
        for bucket in weights.buckets(receiver):
            for name, tensor in bucket:
                changed = True
                state[name].copy_(tensor)
    except Exception as error:
        if not changed:
            raise
        raise EngineError(
            f"an update to version {weights.version} failed half-way ({error}): the engine serves nothing any more",
            fatal=True,
        ) from error


def _check(state: dict[str, torch.Tensor], weights: Weights) -> None:
    names = {tensor.name for tensor in weights.tensors}
    if unknown := sorted(names - state.keys()):
        raise EngineError(
            f"the weights of version {weights.version} have {unknown[0]} ({len(unknown)} such tensors), which the "
            "served model does not have: publish the policy's own state dict, adapters merged"
        )
    held = {state[name].data_ptr() for name in names}
    check_fits(
        weights,
        {name: tuple(tensor.shape) for name, tensor in state.items() if name in names or tensor.data_ptr() not in held},
    )


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name → shape of all tensors in a model directory's safetensors files; empty if none can be read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(directory).glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 (the handle is not a mapping)
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError):
            return {}
    return shapes
