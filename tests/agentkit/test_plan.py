"""``agentkit plan``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkit.cli import app
from agentkit.cli.plan import shown
from agentkit.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "examples" / "minimal.yaml"
MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


def plan(*overrides: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(CONFIG), *overrides])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def value(output: str, purpose: str) -> str:
    """The amount in the first line for ``purpose``."""
    line = next(line for line in output.splitlines() if line.strip().startswith(purpose + "  "))
    return " ".join(line.split()[len(purpose.split()) :][:2])


def test_a_folder_is_planned_from_its_configuration_alone(folder: Path) -> None:
    output = plan(f"model.path={folder}", "engine.max_context=1024", "engine.max_batch=16")
    parameters = 2 * 32000 * 1024 + 8 * (2 * 1024 * 1024 + 2 * 256 * 1024 + 3 * 1024 * 2816 + 2 * 1024) + 1024
    assert f"{parameters:,} parameters" in output
    assert value(output, "weights") == shown(4 * parameters)
    assert value(output, "optimizer states") == shown(8 * parameters)
    assert value(output, "KV cache") == shown(16 * 1024 * 2 * 8 * 256 * 4)


def test_an_adapter_is_planned_as_its_base_model(folder: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "an_adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder)}))
    assert plan(f"model.path={adapter}").splitlines()[2:] == plan(f"model.path={folder}").splitlines()[2:]


def test_quickstart_is_planned() -> None:
    assert "418,656 parameters" in plan("model.path=quickstart")


def test_roles_of_a_cluster_are_placed_as_actors(folder: Path) -> None:
    lines = plan(f"model.path={folder}", "cluster.address=auto", "learner.ranks=2", "engine.replicas=3").splitlines()
    assert next(line for line in lines if line.startswith("learner ")).split()[1:5] == [
        "2",
        "actors,",
        "cluster",
        "auto",
    ]
    assert next(line for line in lines if line.startswith("engine ")).split()[1] == "3"


def test_what_is_in_host_memory_is_told_apart(folder: Path) -> None:
    output = plan(f"model.path={folder}", "model.dtype=bfloat16")
    assert value(output, "of it in host memory") == value(output, "published weights (host)")


def test_adapters_leave_few_weights_to_train(folder: Path) -> None:
    output = plan(f"model.path={folder}", "model.lora.rank=8", "model.dtype=bfloat16")
    layer = 8 * (2 * (1024 + 1024) + 2 * (1024 + 256) + 3 * (1024 + 2816))
    assert f"{8 * layer:,} trained" in output
    assert value(output, "gradients") == shown(4 * 8 * layer)


def test_an_unknown_architecture_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**MODEL, "model_type": "mamba"}))
    with pytest.raises(ConfigError, match="mamba"):
        plan(f"model.path={folder}")


def test_a_split_is_recommended_from_given_rates(folder: Path) -> None:
    """24 engine GPUs generate as fast as 16 learner GPUs train."""
    output = plan(
        f"model.path={folder}",
        "env.max_turns=10",
        "rollout.groups=1000",
        "--gpus=40",
        "--engine-rate=1000",
        "--learner-rate=1500",
        "--answer=100",
    )
    line = next(line for line in output.splitlines() if "recommended" in line)
    assert "engines 24, learner 16, async_ratio 1 " in line


def test_the_controller_is_named_as_the_limit(folder: Path) -> None:
    rates = ("rollout.groups=1000", "--engine-rate=10000", "--learner-rate=100000", "--answer=10", "--turns=100")
    assert "The controller is the limit" in plan(f"model.path={folder}", "--gpus=64", *rates)
    assert "The controller is the limit" not in plan(f"model.path={folder}", "--gpus=4", *rates)


def test_a_split_needs_the_number_of_turns(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--turns"):
        plan(f"model.path={folder}", "--gpus=8")
