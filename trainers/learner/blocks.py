"""The blocks of a transformer: which modules they are, and how they compute.

Invariant: neither setting changes results beyond the rounding of another attention kernel.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentkit.config import LearnerConfig
from agentkit.errors import LearnerError


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers of the transformers models in ``module``: what transformers keeps on one device."""
    names = {name for model in _models(module) for name in model._no_split_modules or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def configure_blocks(module: nn.Module, learner: LearnerConfig) -> None:
    """Apply ``learner.attention`` and ``learner.activation_checkpointing``; call it before a back end wraps ``module``.

    Raises ``LearnerError`` when the attention is unknown or not installed.
    """
    if learner.attention is not None:
        for model in _models(module):
            try:
                model.set_attn_implementation(learner.attention)
            except (ImportError, ValueError) as error:
                raise LearnerError(
                    f"learner.attention={learner.attention!r} cannot be used ({error}): set eager or sdpa, or null for "
                    "the default of transformers"
                ) from error
    if learner.activation_checkpointing:
        for block in blocks(module):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _models(module: nn.Module) -> list[PreTrainedModel]:
    return [part for part in module.modules() if isinstance(part, PreTrainedModel)]
