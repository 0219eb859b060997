"""Adapters are saved in the format of PEFT, alone, and give the exported model again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentkit.config import ModelConfig, RunConfig
from agentkit.errors import ConfigError, LearnerError
from agentkit.model_files import base_of_adapter
from agentkit.trainers.inference.vllm import VLLMEngine
from agentkit.trainers.learner.torch_learner import Learner
from agentkit.trainers.models.load import load_policy, load_tokenizer
from agentkit.trainers.models.quickstart import build_quickstart

LORA = {"rank": 4, "alpha": 8.0}
IDS = torch.arange(1, 21)[None]


async def trained(config: RunConfig, batch: Any, directory: Path) -> torch.Tensor:
    """Train a step, write ``directory/state`` and ``directory/model``, and return the logits of the learner's model."""
    learner = Learner(config)
    await learner.start()
    for _ in range(2):
        await learner.imitate(batch, 1e-2)
    with torch.no_grad():
        logits = learner.model(input_ids=IDS).logits.float()
    await learner.save(directory / "state")
    await learner.export(directory / "model")
    await learner.close()
    return logits


def set_base(adapter: str, base: str | None) -> None:
    file = Path(adapter, "adapter_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), ("v_proj", "embed_tokens")], ids=str)
async def test_peft_and_transformers_load_the_adapter(configure, make_batch, tiny_model, tmp_path, targets):
    lora = LORA | {"target_modules": targets}
    logits = await trained(configure(model={"lora": lora}), make_batch(1), tmp_path)
    adapter, base = tmp_path / "state" / "adapter", AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not torch.allclose(logits_of(base), logits, atol=1e-3)
    np.testing.assert_allclose(logits_of(peft.PeftModel.from_pretrained(base, str(adapter))), logits, atol=1e-6)
    np.testing.assert_allclose(logits_of(AutoModelForCausalLM.from_pretrained(adapter)), logits, atol=1e-6)

    # PEFT itself would write the same configuration and the same names.
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(adapter))
    again.save_pretrained(str(tmp_path / "peft"), save_embedding_layers=False)
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "peft"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    settings, expected = (json.loads((f / "adapter_config.json").read_text()) for f in (adapter, tmp_path / "peft"))
    for each in (settings, expected):
        each["target_modules"].sort()
    assert settings == expected
    assert settings["base_model_name_or_path"] == str(tiny_model)
    assert (settings["r"], settings["lora_alpha"]) == (4, 8.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_loaded_adapter_is_the_exported_model(configure, make_batch, tmp_path, dtype):
    await trained(configure(model={"lora": LORA, "dtype": dtype}), make_batch(1), tmp_path)
    model, adapter = (
        load_policy(ModelConfig(path=str(tmp_path / name), dtype=dtype, device="cpu"), seed=0)
        for name in ("model", "state/adapter")
    )
    exported, merged = model.state_dict(), adapter.state_dict()
    assert exported.keys() == merged.keys()
    assert all(torch.equal(exported[name], merged[name]) for name in exported)
    assert adapter.dtype == getattr(torch, dtype)
    assert all(parameter.requires_grad for parameter in adapter.parameters())


async def test_a_checkpoint_holds_no_frozen_weight(configure, make_batch, tmp_path):
    batch = make_batch(1)
    await trained(configure(model={"lora": LORA}, algorithm={"kl": "k2"}), batch, tmp_path)
    files = {path: load_file(path) for path in (tmp_path / "state").rglob("*.safetensors")}
    assert {path.parent.name for path in files} == {"adapter", "moments"}
    assert all(".lora_" in name for tensors in files.values() for name in tensors)


async def test_an_adapter_of_the_quickstart_model_names_its_seed(tmp_path):
    from agentkit.trainers.batch import flatten
    from agentkit.types import Group, Trajectory, Turn

    ids = np.arange(1, 9, dtype=np.int32)
    turn = Turn(ids, ids, np.full(8, -3, np.float32), ((0, 8),), reward=1.0)
    batch = flatten([Group(0, 0, 0, [Trajectory(0, member, "test", 0, 0, [turn]) for member in range(2)])])
    model = {"device": "cpu", "lora": LORA}
    config = RunConfig.model_validate({"env": {"id": "Test-v0"}, "model": model, "seed": 5})
    logits = await trained(config, batch, tmp_path)
    adapter = tmp_path / "state" / "adapter"
    assert base_of_adapter(adapter) == ("quickstart", "5")
    loaded = load_policy(ModelConfig(path=str(adapter), device="cpu"), seed=0)
    np.testing.assert_allclose(logits_of(loaded), logits, atol=1e-5)
    plain, quickstart = (load_tokenizer(path) for path in (str(adapter), "quickstart"))
    assert plain.chat_template == quickstart.chat_template
    assert plain.get_vocab() == quickstart.get_vocab()

    # vLLM gets a whole model; adapters on top of an adapter have it as their base.
    engine = VLLMEngine(ModelConfig(path=str(adapter)), config.engine, seed=0)
    written = AutoModelForCausalLM.from_pretrained(engine._model_path())
    np.testing.assert_allclose(logits_of(written), logits, atol=1e-5)
    engine._remove_built()
    second = config.model_copy(update={"model": ModelConfig.model_validate(model | {"path": str(adapter)})})
    logits = await trained(second, batch, tmp_path / "second")
    loaded = load_policy(ModelConfig(path=str(tmp_path / "second/state/adapter"), device="cpu"), seed=0)
    np.testing.assert_allclose(logits_of(loaded), logits, atol=1e-5)


async def test_an_adapter_without_its_base_model_is_an_error(configure, make_batch, tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    await trained(configure(model={"lora": LORA, "path": str(base)}), make_batch(1), tmp_path)
    adapter = str(tmp_path / "state" / "adapter")
    build_quickstart(tmp_path / "other")
    set_base(adapter, str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"the adapter of model.path=.*does not load"):
        load_policy(ModelConfig(path=adapter, device="cpu"), seed=0)
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"base model of the adapter .*/other' does not exist.*base_model_name_or_path"
    ):
        load_policy(ModelConfig(path=adapter, device="cpu"), seed=0)
    set_base(adapter, None)
    with pytest.raises(ConfigError, match="names no base model: set base_model_name_or_path"):
        load_policy(ModelConfig(path=adapter, device="cpu"), seed=0)


async def test_modules_that_the_model_does_not_have_are_an_error(configure):
    learner = Learner(configure(model={"lora": LORA | {"target_modules": ("query",)}}))
    with pytest.raises(LearnerError, match=r"check model.lora.target_modules"):
        await learner.start()
    await learner.close()
