"""Check the files of a model.

Invariant: no model is loaded or downloaded, and torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from agentkit.errors import ConfigError
from agentkit.extras import missing_extra, missing_smollm2

QUICKSTART = "quickstart"
SMOLLM2 = "smollm2"
BUILT_IN = (QUICKSTART, SMOLLM2)
"""Names of models that need neither a directory nor the hub. They come before directories of the same name."""
ADAPTER = "adapter"
"""Folder of the adapter in the learner's part of a checkpoint."""
_ADAPTER_CONFIG = "adapter_config.json"
_NAMES = ", ".join(f"`{name}`" for name in BUILT_IN)
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def model_directory(path: Path) -> Path | None:
    """Return the model directory at ``path``: ``path`` itself, or the newest export of a run; None if there is none.

    An adapter in the format of PEFT is a model directory, too.
    """
    if (path / "config.json").is_file() or is_adapter(path):
        return path
    patterns = ("model/config.json", f"model/{_ADAPTER_CONFIG}", "checkpoints/*/model/config.json")
    patterns = (*patterns, f"checkpoints/*/learner/{ADAPTER}/{_ADAPTER_CONFIG}")
    exports = [config for pattern in patterns for config in path.glob(pattern)]
    newest = max(exports, key=lambda config: config.stat().st_mtime_ns, default=None)
    return newest.parent if newest else None


def is_adapter(directory: str | Path) -> bool:
    """Return whether ``directory`` holds an adapter in the format of PEFT instead of a whole model."""
    directory = Path(directory)
    return (directory / _ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def base_of_adapter(directory: Path) -> tuple[str, str | None]:
    """Return path or name, and revision, of the base model of an adapter. Raises ``ConfigError`` if it names none."""
    settings = _json(directory / _ADAPTER_CONFIG)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{directory / _ADAPTER_CONFIG} names no base model: set base_model_name_or_path there")
    return base, revision


def locate(path: str, key: str = "model.path") -> str:
    """Return the name to pass to transformers: a model directory, or a hub name unchanged.

    Args:
        path: model directory, run directory or hub name; not one of ``BUILT_IN``.
        key: setting that errors name.

    Raises:
        ConfigError: ``path`` is a directory without a model, or does not exist.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        found = model_directory(directory)
        if found is None:
            raise ConfigError(
                f"{key}={path!r} is a directory without a model: it contains neither config.json nor "
                "adapter_config.json nor model/ nor checkpoints/; name a Hugging Face model directory, or a run that "
                "has saved a checkpoint"
            )
        return str(found)
    if directory.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ConfigError(f"{key}={path!r} does not exist; use {_NAMES}, a directory or a hub name")
    return path


def template_text(chat_template: str) -> str:
    """Return the text of ``model.chat_template``, which may name a file. Raises ``ConfigError``."""
    if any(mark in chat_template for mark in ("{{", "{%", "{#", "\n")):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"model.chat_template={chat_template!r} cannot be read ({reason}): name a file, or give the text of a "
            "Jinja template"
        ) from error


def problems(path: str, key: str, *, chat: bool, chat_template: str | None = None) -> Iterator[str]:
    """Yield reasons why the model at ``path`` cannot be used, one sentence each, according to its files.

    Args:
        path: as in ``locate``, or one of ``BUILT_IN``; a hub name is not checked.
        key: setting that the sentences name.
        chat: whether it is the policy, which needs a tokenizer and a chat template.
        chat_template: ``model.chat_template``, which replaces the model's own.
    """
    if chat_template is not None:
        try:
            template_text(chat_template)
        except ConfigError as error:
            yield str(error)
    if path == SMOLLM2 and (problem := missing_smollm2(f"{key}={path}")):
        yield problem
    if path in BUILT_IN:
        return
    try:
        directory = Path(locate(path, key))
    except ConfigError as error:
        yield str(error)
        return
    if not directory.is_dir():
        return
    if is_adapter(directory):
        yield from _adapter_problems(directory, key)
    elif "model_type" not in _json(directory / "config.json"):
        yield f"{key}={path!r}: {directory / 'config.json'} names no model_type; transformers cannot load it"
    if not any(next(directory.glob(pattern), None) for pattern in _WEIGHTS):
        yield f"{key}={path!r}: {directory} holds no weights ({', '.join(_WEIGHTS)}); copy or download them"
    if not chat:
        return
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        yield f"{key}={path!r}: {directory} holds no tokenizer; save it there with `tokenizer.save_pretrained`"
    elif chat_template is None and not _has_chat_template(directory):
        yield (
            f"{key}={path!r}: {directory} holds no chat template, which turns observations into prompts; set "
            "model.chat_template, or use an instruction-tuned model"
        )


def tokenizer_problem(path: str, policy: str, key: str) -> str:
    """Return why the model at ``path`` cannot read the tokens of ``policy``, according to their files; or nothing.

    Args:
        path: a model as in ``locate``, whose own tokenizer is optional.
        policy: the model whose tokenizer is used. Unless both are directories, nothing is checked.
        key: setting that the sentence names.
    """
    found = [model_directory(Path(name).expanduser()) for name in (path, policy) if name not in BUILT_IN]
    directories = [directory for directory in found if directory is not None]
    if len(directories) < 2:
        return ""
    own, ids = (_token_ids(directory) for directory in directories)
    if moved := sum(own.get(token, id) != id for token, id in ids.items()):
        return (
            f"{key}={path!r}: its tokenizer gives {moved:,} tokens of model.path={policy!r} other ids, and a critic "
            "reads the policy's tokens; choose a model with the same tokenizer, or fresh critics with critic.layers"
        )
    size = _json(directories[0] / "config.json").get("vocab_size")
    if isinstance(size, int) and size <= max(ids.values(), default=0):
        return (
            f"{key}={path!r}: it knows {size:,} tokens, and model.path={policy!r} has more; choose a model with the "
            "same tokenizer, or fresh critics with critic.layers"
        )
    return ""


def is_hub_name(path: str) -> bool:
    """Return whether ``path``, as accepted by ``locate``, names a model of the hub."""
    return path not in BUILT_IN and not Path(path).expanduser().is_dir()


def _adapter_problems(directory: Path, key: str) -> Iterator[str]:
    if problem := missing_extra(f"{key}={str(directory)!r}, an adapter,", "lora", ["peft"]):
        yield problem
    try:
        base, _ = base_of_adapter(directory)
    except ConfigError as error:
        yield str(error)
        return
    for problem in problems(base, key, chat=False):
        yield f"the base model of the adapter {directory} cannot be used: {problem}"


def _has_chat_template(directory: Path) -> bool:
    files = ("chat_template.jinja", "chat_template.json")
    if any((directory / name).is_file() for name in files) or (directory / "additional_chat_templates").is_dir():
        return True
    return bool(_json(directory / "tokenizer_config.json").get("chat_template"))


def _token_ids(directory: Path) -> dict[str, int]:
    """Return the ids of the tokens in ``tokenizer.json``; of other formats, nothing."""
    content = _json(directory / "tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab", {})
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    return (vocabulary if isinstance(vocabulary, dict) else {}) | added


def _json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
