"""A model that cannot be loaded gives one error that names the path and the remedy."""

import os

import pytest
import torch

from agentkit.config import ModelConfig
from agentkit.errors import ConfigError
from agentkit.trainers.models import build_quickstart, load_policy, load_tokenizer, model_directory


def test_directory_without_a_model(tmp_path) -> None:
    with pytest.raises(ConfigError, match="without a model"):
        load_policy(ModelConfig(path=str(tmp_path)), seed=0)


def test_path_that_does_not_exist(tmp_path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_broken_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"does not load.*complete causal language model"):
        load_policy(ModelConfig(path=str(tmp_path)), seed=0)


def test_unknown_hub_name(monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="check the spelling and the network"):
        load_tokenizer("agentkit-tests/no-such-model")


def test_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device"):
        load_policy(ModelConfig(device="cuda:99"), seed=0)
    with pytest.raises(ConfigError, match="device"):
        load_policy(ModelConfig(device="abacus"), seed=0)


def test_dtype() -> None:
    assert load_policy(ModelConfig(dtype="bfloat16", device="cpu"), seed=0).dtype == torch.bfloat16


def test_newest_export_of_a_run(tmp_path) -> None:
    for name, age in (("checkpoints/000010/model", 30), ("checkpoints/000020/model", 10), ("model", 20)):
        build_quickstart(tmp_path / name)
        os.utime(tmp_path / name / "config.json", (1e9 - age, 1e9 - age))
    assert model_directory(tmp_path) == tmp_path / "checkpoints/000020/model"
    assert load_policy(ModelConfig(path=str(tmp_path), device="cpu"), seed=0).num_parameters() > 0
    adapter = tmp_path / "checkpoints/000030/learner/adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    assert model_directory(tmp_path) == adapter
    build_quickstart(tmp_path / "checkpoints/000030/model")
    assert model_directory(tmp_path) == tmp_path / "checkpoints/000030/model"
