"""The configurations of the guide to clusters fit the machines for which they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_snippets import ROOT, blocks
from typer.testing import CliRunner

from agentkit.cli import app
from agentkit.config_io import load_config
from agentkit.trainers.cluster.placement import plan, shortage, total
from agentkit.trainers.planning import memory
from agentkit.trainers.planning.architecture import count, read_architecture

GPU_BYTES = 80e9
MODELS = {
    "/models/Qwen2.5-7B-Instruct": (7.6e9, {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                                            "num_attention_heads": 28, "num_key_value_heads": 4}),
    "/models/Qwen2.5-14B-Instruct": (14.8e9, {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                                              "num_attention_heads": 40, "num_key_value_heads": 8}),
}  # fmt: skip
"""Parameters and dimensions, as published, of the guide's models."""


@pytest.mark.parametrize(("index", "machines"), [(0, 1), (1, 4)], ids=["one machine", "four machines"])
def test_a_configuration_uses_all_gpus_and_fits_their_memory(index: int, machines: int, tmp_path: Path) -> None:
    block = [block for block in blocks(ROOT / "docs" / "cluster_guide.md") if block.language == "yaml"][index]
    parameters, dimensions = MODELS[yaml.safe_load(block.text)["model"]["path"]]
    described = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False, **dimensions}
    (tmp_path / "config.json").write_text(json.dumps(described))
    file, override = tmp_path / "run.yaml", f"model.path={tmp_path}"
    file.write_text(block.text)

    config = load_config(file, [override])
    plans = plan(config, gpus=True)
    assert total(plans)["GPU"] == 8 * machines
    assert shortage(plans, [{"CPU": 64.0, "GPU": 8.0}] * machines) is None
    model = read_architecture(str(tmp_path))
    assert count(model.tensors) == pytest.approx(parameters, rel=0.01)
    rank, engine = memory.learner(config, model), memory.engine(config, model)
    assert rank.total - rank.host < 0.9 * GPU_BYTES
    assert engine.total < 0.85 * GPU_BYTES
    episode = config.env.max_turns * (config.rollout.max_tokens + 120)  # type: ignore[operator]
    assert episode < config.engine.max_context

    printed = CliRunner().invoke(app, ["plan", str(file), override, "--gpus", str(8 * machines)])
    assert printed.exit_code == 0, printed.output
    assert f"split of {8 * machines} GPUs" in printed.output
    assert "recommended" in printed.output
