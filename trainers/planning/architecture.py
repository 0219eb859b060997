"""The shape of a decoder-only transformer, from the ``config.json`` of its folder; no weights are read.

Invariant: ``tensors`` lists exactly the parameters of the model that transformers builds from the same file. An
architecture whose parameters are not known here is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentkit.config import RunConfig
from agentkit.errors import ConfigError
from agentkit.model_files import QUICKSTART, SMOLLM2, base_of_adapter, is_adapter, is_hub_name, locate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of ``model_type`` with the layout below: gated MLP, RMS norms, rotary positions, grouped key/value heads."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Dimensions of a model. Widths count numbers, not bytes."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Width of all query heads."""
    key_value: int
    """Width of all key heads, and of all value heads."""
    head_width: int
    vocabulary: int
    tied: bool
    """Whether the output layer shares the weights of the embedding."""
    biases: frozenset[str]
    """Linear layers that have a bias."""
    head_norms: bool
    """Whether queries and keys are normalised per head (Qwen3)."""

    @property
    def heads(self) -> int:
        return self.query // self.head_width

    @property
    def key_heads(self) -> int:
        return self.key_value // self.head_width

    @property
    def linears(self) -> dict[str, Shape]:
        """Name and shape ``[out, in]`` of the linear layers of one block."""
        return {
            "self_attn.q_proj": (self.query, self.hidden),
            "self_attn.k_proj": (self.key_value, self.hidden),
            "self_attn.v_proj": (self.key_value, self.hidden),
            "self_attn.o_proj": (self.hidden, self.query),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    @property
    def block(self) -> dict[str, Shape]:
        """Name and shape of the parameters of one block."""
        shapes = {f"{name}.weight": shape for name, shape in self.linears.items()}
        shapes |= {f"{name}.bias": self.linears[name][:1] for name in self.linears if name in self.biases}
        if self.head_norms:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_width,) for name in "qk"}
        return shapes | {f"{name}_layernorm.weight": (self.hidden,) for name in ("input", "post_attention")}

    @property
    def trunk(self) -> dict[str, Shape]:
        """Name and shape of all parameters but those of the output layer."""
        blocks = {f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in self.block.items()}
        return {"embed_tokens.weight": (self.vocabulary, self.hidden), **blocks, "norm.weight": (self.hidden,)}

    @property
    def tensors(self) -> dict[str, Shape]:
        """Name and shape of all parameters; a tied one is listed once."""
        shapes = {f"model.{name}": shape for name, shape in self.trunk.items()}
        return shapes if self.tied else shapes | {"lm_head.weight": (self.vocabulary, self.hidden)}


def count(shapes: Mapping[str, Shape]) -> int:
    """Return the number of parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def read_architecture(path: str, key: str = "model.path") -> Architecture:
    """Return the architecture of ``path`` (as in ``ModelConfig.path``); ``key`` is the setting that errors name.

    Raises:
        ConfigError: there is no such folder, or its architecture is unknown.
    """
    if path == QUICKSTART:
        from agentkit.trainers.models.quickstart import quickstart_config

        return parse(quickstart_config().to_dict(), f"{key}={path}")
    if path == SMOLLM2:
        from agentkit.trainers.models.smollm2 import smollm2_config

        return parse(smollm2_config().to_dict(), f"{key}={path}")
    if is_hub_name(path):
        raise ConfigError(
            f"{key}={path!r} is not a folder; its size is read from config.json without a download: copy that file "
            f"into a folder and set {key} to the folder"
        )
    place = Path(locate(path, key))
    if is_adapter(place):
        return read_architecture(base_of_adapter(place)[0], key)
    file = place / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path!r}: {file} cannot be read ({error})") from error
    return parse(settings, f"{key}={path!r}")


def critic_architecture(config: RunConfig, policy: Architecture) -> Architecture | None:
    """Return the architecture of the run's critics, which are all alike; None if it has none.

    Raises:
        ConfigError: as ``read_architecture``, for ``critic.path``.
    """
    critic = config.critic
    if critic is None:
        return None
    if critic.path is not None:
        return read_architecture(critic.path, "critic.path")
    if critic.fresh is None:
        return policy
    from agentkit.trainers.models.quickstart import critic_config

    return parse(critic_config(policy.vocabulary, *critic.fresh).to_dict(), "critic")


def parse(settings: Mapping[str, Any], what: str) -> Architecture:
    """Return the architecture that the content of a ``config.json`` describes; errors name ``what``.

    Raises:
        ConfigError: the family is unknown, or a dimension is missing.
    """
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{what}: the memory of model_type={family!r} cannot be planned; known are {', '.join(FAMILIES)}"
        )

    def dimension(name: str, default: int | None = None) -> int:
        value = settings.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{what}: config.json has {name}={value!r}, and a positive whole number is needed")
        return value

    hidden, heads = dimension("hidden_size"), dimension("num_attention_heads")
    width = dimension("head_dim", hidden // heads)
    return Architecture(
        layers=dimension("num_hidden_layers"),
        hidden=hidden,
        intermediate=dimension("intermediate_size"),
        query=heads * width,
        key_value=dimension("num_key_value_heads", heads) * width,
        head_width=width,
        vocabulary=dimension("vocab_size"),
        tied=bool(settings.get("tie_word_embeddings", False)),
        biases=_biases(family, settings),
        head_norms=family == "qwen3",
    )


def _biases(family: str, settings: Mapping[str, Any]) -> frozenset[str]:
    inputs = {f"self_attn.{name}_proj" for name in "qkv"}
    if family == "qwen2":
        return frozenset(inputs)
    found: set[str] = set()
    if family in ("llama", "qwen3") and settings.get("attention_bias"):
        found |= inputs | {"self_attn.o_proj"}
    if family == "llama" and settings.get("mlp_bias"):
        found |= {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    return frozenset(found)
