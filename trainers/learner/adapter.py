"""Low-rank adapters: their insertion into a model, and their files in the format of PEFT.

Invariant: ``peft.PeftModel.from_pretrained`` loads the files on the base model that they name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from agentkit.config import ModelConfig
from agentkit.errors import LearnerError
from agentkit.trainers.learner.files import replace_file, writing
from agentkit.trainers.models.load import name_of_base, quiet_peft

if TYPE_CHECKING:
    import peft

PEFT_NAME = "default"
"""The name that PEFT gives to the only adapter of a model."""
_IN_MODEL = re.compile(rf"(\.lora_\w+)\.{PEFT_NAME}(?=\.|$)")


@dataclass(frozen=True)
class Adapter:
    """The adapters of a model, as PEFT describes them."""

    config: peft.LoraConfig

    def write(self, directory: Path, weights: Iterable[tuple[str, Tensor]], *, write: bool) -> None:
        """Write the trainable weights of a ``Scorer``, with the configuration.

        Gathering them may be a collective operation: ranks that do not ``write`` iterate as well.
        """
        held = {adapter_name(name): tensor.detach().cpu().contiguous() for name, tensor in weights if write}
        if write:
            replace_file(
                directory / "adapter_model.safetensors",
                lambda temporary: save_file(held, temporary, metadata={"format": "pt"}),
            )
            with writing(directory):
                self.config.save_pretrained(str(directory))


def adapter_name(parameter: str) -> str:
    """Return the name in PEFT's files of a trainable weight of a ``Scorer``.

    The files name the modules below PEFT's two wrappers, and leave out the adapter's name
    (https://huggingface.co/docs/peft/developer_guides/checkpoint).
    """
    return "base_model.model." + _IN_MODEL.sub(r"\1", parameter.removeprefix("causal_lm."))


def add_adapters(model: PreTrainedModel, config: ModelConfig, seed: int) -> Adapter:
    """Insert the adapters of ``config.lora``; only they are trainable. ``seed`` is the one that made ``model``.

    Raises ``LearnerError`` if PEFT is missing, or the model has no such modules.
    """
    try:
        import peft
    except ImportError as error:
        raise LearnerError("model.lora needs peft: pip install 'agentkit-rl[lora]'") from error
    lora = config.lora
    assert lora is not None
    adapters = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules),
        task_type="CAUSAL_LM",
    )
    try:
        with quiet_peft():
            adapted = peft.get_peft_model(model, adapters).eval()
    except ValueError as error:
        raise LearnerError(f"model.lora does not fit the model ({error}): check model.lora.target_modules") from error
    described = adapted.peft_config[PEFT_NAME]
    described.base_model_name_or_path, described.revision = name_of_base(config.path, seed)
    described.inference_mode = True
    return Adapter(described)  # type: ignore[arg-type]
