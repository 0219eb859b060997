"""Optional parts of agentkit (the extras of its distribution)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from agentkit.errors import MissingExtra

_TRAINING = ("safetensors", "tokenizers", "torch", "transformers")
_SERVER = ("prometheus_client", "uvicorn")
_RAY = ("ray",)


def require_training() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``train`` are installed; imports none of them."""
    _require("training", "train", _TRAINING)


def require_server() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``server`` are installed; imports none of them."""
    _require("the sandbox server", "server", _SERVER)


def require_deepspeed() -> None:
    """Raise ``MissingExtra`` unless DeepSpeed is installed; does not import it."""
    _require("learner.backend=deepspeed", "deepspeed", ("deepspeed",))


def require_ray() -> None:
    """Raise ``MissingExtra`` unless the packages of the extra ``ray`` are installed; imports none of them."""
    _require("a cluster section", "ray", _RAY)


def missing_extra(part: str, extra: str, packages: Iterable[str]) -> str:
    """Return the problem and its remedy if a package that ``part`` needs is not installed; empty if all are there."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    return f"{part} needs the extra {extra!r} ({', '.join(missing)} not installed); pip install 'agentkit-rl[{extra}]'"


def _require(part: str, extra: str, packages: Iterable[str]) -> None:
    if problem := missing_extra(part, extra, packages):
        raise MissingExtra(problem)
