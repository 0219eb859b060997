"""Load a published weights file into a served model.

Invariant: an update is atomic; names and shapes are checked before any weight is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from agentkit.errors import EngineError
from agentkit.trainers.inference.manifest import Manifest, read_manifest


@torch.no_grad()
def load_weights(model: Any, path: Path, version: int) -> None:
    """Copy the safetensors file ``path`` into ``model`` in place, converting to its precision and device.

    Tensors that are tied in the model may be left out of the file. Raises ``EngineError`` when the file cannot be
    read, was published as another version, or belongs to another model; the model is then unchanged.
    """
    state = model.state_dict()
    manifest = read_manifest(path, version)
    _check(state, manifest)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for tensor in manifest.tensors:
                state[tensor.name].copy_(file.get_tensor(tensor.name))
    except (SafetensorError, OSError) as error:
        raise EngineError(f"the weights in {path} cannot be read ({error}): publish them again") from error


def _check(state: dict[str, torch.Tensor], manifest: Manifest) -> None:
    names = {tensor.name for tensor in manifest.tensors}
    if unknown := sorted(names - state.keys()):
        raise EngineError(
            f"the weights file {manifest.path} holds {unknown[0]} ({len(unknown)} such tensors), which the served "
            "model does not have: publish the policy's own state dict, adapters merged"
        )
    held = {state[name].data_ptr() for name in names}
    manifest.check_fits(
        {name: tuple(tensor.shape) for name, tensor in state.items() if name in names or tensor.data_ptr() not in held}
    )
