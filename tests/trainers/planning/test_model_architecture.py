"""The parameters that are planned are those of the models that transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentkit.errors import ConfigError
from agentkit.trainers.planning.architecture import FAMILIES, count, parse, read_architecture

SMALL: dict[str, Any] = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VARIANTS = [(family, {"tie_word_embeddings": tied}) for family in FAMILIES for tied in (False, True)]
VARIANTS += [
    ("qwen3", {"head_dim": 24}),
    ("llama", {"head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
    ("mistral", {"head_dim": 8, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_tensors_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **{**SMALL, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    planned = read_architecture(str(tmp_path))
    assert planned.tensors == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert count(planned.trunk) == sum(parameter.numel() for parameter in model.base_model.parameters())


def test_quickstart_has_the_parameters_that_its_page_states() -> None:
    assert count(read_architecture("quickstart").tensors) == 418_656


def test_a_published_model_has_its_published_size() -> None:
    """Qwen3-8B: 8.2 billion parameters, 6.95 billion without embeddings (model card)."""
    published = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    planned = parse(published, "test")
    assert count(planned.tensors) == 8_190_735_360
    assert count(planned.block) * planned.layers == pytest.approx(6.95e9, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({}, "model_type=None"),
        ({"model_type": "llama", **SMALL, "hidden_size": None}, "hidden_size"),
        ({"model_type": "llama", **SMALL, "num_hidden_layers": "many"}, "num_hidden_layers"),
    ],
)
def test_what_cannot_be_known_is_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=named):
        read_architecture(str(tmp_path))


def test_a_hub_name_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_architecture("Qwen/Qwen3-8B")
