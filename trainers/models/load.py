"""Loading of a policy or a tokenizer from ``model.path``, which may be an adapter in the format of PEFT.

Invariant: a loaded policy is a plain model; an adapter is merged into its base model. Every failure to load
is one error that names the path and the remedy; nothing is downloaded unless the path is a name on the hub.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from agentkit.config import ModelConfig
from agentkit.errors import ConfigError
from agentkit.model_files import QUICKSTART, SMOLLM2, base_of_adapter, is_adapter, locate, template_text
from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer
from agentkit.trainers.models.smollm2 import smollm2_directory


def source(path: str) -> str:
    """The directory or hub name that transformers and vLLM load for ``path``, which is not ``quickstart``.

    SmolLM2 is converted first unless that has been done. Raises ``ConfigError``, or as ``smollm2_directory``.
    """
    return str(smollm2_directory()) if path == SMOLLM2 else locate(path)


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of ``path``, with its own chat template unless one is given (both as in ``ModelConfig``).

    Raises ``ConfigError``.
    """
    template = None if chat_template is None else template_text(chat_template)
    if path == QUICKSTART:
        tokenizer = quickstart_tokenizer()
    else:
        place = source(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place)
        except Exception as error:
            raise _not_loadable("tokenizer", path, place, error) from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def load_policy(model: ModelConfig, seed: int) -> PreTrainedModel:
    """The policy in evaluation mode, in ``model.dtype``, on ``model.device``, without the adapters of ``model.lora``.

    ``seed`` decides the initial weights of the quickstart model and nothing else. Raises ``ConfigError``.
    """
    device = resolve_device(model.device)
    dtype = getattr(torch, model.dtype)
    if model.path == QUICKSTART:
        policy = quickstart_model(seed)
    elif is_adapter(place := source(model.path)):
        policy = _merged(model, place)
    else:
        try:
            policy = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
        except Exception as error:
            raise _not_loadable("model", model.path, place, error) from error
    policy.to(device=device, dtype=dtype)  # type: ignore[call-arg]
    return policy.eval()


def write_model(model: ModelConfig, seed: int, directory: Path) -> Path:
    """Write what ``load_policy`` loads, with the tokenizer, as transformers and vLLM load it; return ``directory``."""
    load_policy(model.model_copy(update={"device": "cpu"}), seed).save_pretrained(directory)
    load_tokenizer(model.path, model.chat_template).save_pretrained(directory)
    return directory


def name_of_base(path: str, seed: int) -> tuple[str, str | None]:
    """The directory or hub name, and the revision, by which an adapter names the model that ``load_policy`` loads.

    The revision of the quickstart model is its seed.
    """
    if path == QUICKSTART:
        return QUICKSTART, str(seed)
    place = source(path)
    return (str(Path(place).resolve()) if os.path.isdir(place) else place), None


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Hide the warning that PEFT reads an attribute that transformers has renamed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def _merged(model: ModelConfig, directory: str) -> PreTrainedModel:
    """The base model of an adapter, in ``model.dtype`` on the CPU, with the adapter added to its weights."""
    base, revision = base_of_adapter(Path(directory))
    seed = int(revision) if base == QUICKSTART and revision else 0
    try:
        policy = load_policy(model.model_copy(update={"path": base, "device": "cpu"}), seed)
    except ConfigError as error:
        raise ConfigError(
            f"the base model of the adapter {directory} does not load: {error} (base_model_name_or_path in its "
            "adapter_config.json names the model)"
        ) from error
    try:
        import peft

        with quiet_peft():
            adapted: Any = peft.PeftModel.from_pretrained(policy, directory)
        merged = adapted.merge_and_unload()
    except Exception as error:
        raise _not_loadable("adapter", model.path, directory, error) from error
    return merged.requires_grad_(True)


def resolve_device(name: str) -> torch.device:
    """Return the device; ``auto`` is a GPU if there is one. Raises ``ConfigError`` for a missing device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"model.device={name!r} is not a torch device: use auto, cpu or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"model.device={name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} GPUs: set "
            "model.device=auto, or install a CUDA build of torch"
        )
    return device


def _not_loadable(what: str, path: str, place: str, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if os.path.isdir(place):
        remedy = "check that the directory holds a complete causal language model as transformers saves it"
    else:
        remedy = f"check the spelling and the network, or use `{QUICKSTART}` or the directory of a downloaded model"
    return ConfigError(f"the {what} of model.path={path!r} does not load ({reason}): {remedy}")
