"""Optional parts of agentkit (the extras of its distribution)."""

from __future__ import annotations

import importlib.util

from agentkit.errors import MissingExtra

_TRAINING = ("safetensors", "tokenizers", "torch", "transformers")


def require_training() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``train`` are installed; imports none of them."""
    missing = [name for name in _TRAINING if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"training needs the extra 'train' ({', '.join(missing)} not installed); pip install 'agentkit-rl[train]'"
        )
