"""Checks before a run: environments that cannot be made, models that cannot be loaded."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentkit import model_files, registry
from agentkit.config import RunConfig
from agentkit.config_io import parse_config
from agentkit.envs.base import TextEnv
from agentkit.errors import ConfigError
from agentkit.preflight import check


class Picky(TextEnv):
    """Rejects some numbers when it is created, others when it is reset; may end the process."""

    instructions = "None."

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        if number == 1:
            raise ValueError("number=1 is not allowed; try 2")
        self.number = number

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if self.number == 3:
            raise RuntimeError("nothing to play")
        if self.number == 4:
            sys.stderr.write("the engine of the game is broken\n")
            sys.stderr.flush()
            import os

            os._exit(9)
        return "", {"success": False, "action_valid": True}

    def step(self, action: str) -> Any:
        raise NotImplementedError


class Inline(Picky):
    concurrency = "inline"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both environments, declared by an installed package, so that other processes can find them."""
    place = tmp_path / "packages"
    (place / "picky-1.0.dist-info").mkdir(parents=True)
    (place / "picky-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    points = "[agentkit.envs]\nPicky-v0 = picky_environments:Picky\nInline-v0 = picky_environments:Inline\n"
    (place / "picky-1.0.dist-info" / "entry_points.txt").write_text(points)
    (place / "picky_environments.py").write_text(Path(__file__).read_text())
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", f"{place}:{Path(__file__).parents[1]}")
    monkeypatch.setattr(registry, "_installed", None)
    yield
    registry._installed = None
    sys.modules.pop("picky_environments", None)


def config(*overrides: str, env: str = "FrozenLake-v1") -> RunConfig:
    return parse_config(f"env: {{id: {env}}}", list(overrides))


def problems(*overrides: str, env: str = "FrozenLake-v1", thorough: bool = False) -> list[str]:
    try:
        check(config(*overrides, env=env), thorough=thorough)
    except ConfigError as error:
        return str(error).split("\nerror: ")
    return []


def test_an_environment_is_made_and_reset(plugin: None) -> None:
    assert problems("env.kwargs.number=2", env="Inline-v0", thorough=True) == []
    (problem,) = problems("env.kwargs.number=1", env="Inline-v0", thorough=True)
    assert problem == "env.kwargs: Inline-v0 cannot be made with {'number': 1}: number=1 is not allowed; try 2"
    (problem,) = problems("env.kwargs.number=3", env="Inline-v0", thorough=True)
    assert problem.endswith("RuntimeError: nothing to play")
    (problem,) = problems("evaluation.kwargs.number=1", env="Inline-v0", thorough=True)
    assert problem.startswith("evaluation.kwargs: ")


def test_an_environment_that_is_not_inline_is_made_in_another_process(plugin: None) -> None:
    (problem,) = problems("evaluation.kwargs.number=1", env="Picky-v0", thorough=True)
    assert problem == "evaluation.kwargs: Picky-v0 cannot be made with {'number': 1}: number=1 is not allowed; try 2"


def test_a_crashing_environment_does_not_crash_the_check(plugin: None) -> None:
    (problem,) = problems("env.kwargs.number=4", env="Picky-v0", thorough=True)
    assert "its process ended with status 9 (the engine of the game is broken)" in problem


def test_only_a_dry_run_makes_an_environment_that_may_be_slow(plugin: None) -> None:
    assert problems("env.kwargs.number=1", env="Picky-v0") == []
    assert len(problems("env.kwargs.number=1", env="Inline-v0")) == 1


def test_missing_extras_are_found_together(monkeypatch: pytest.MonkeyPatch) -> None:
    find, absent = importlib.util.find_spec, ("ray", "vllm", "deepspeed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else find(name, *rest))
    found = problems("cluster={}", "engine.kind=vllm", "learner.backend=deepspeed")
    settings = {"vllm": "engine.kind=vllm", "ray": "cluster", "deepspeed": "learner.backend=deepspeed"}
    for problem, (extra, setting) in zip(found, settings.items(), strict=True):
        assert problem.startswith(
            f"{setting} needs the extra '{extra}' ({extra} not installed); pip install 'agentkit-rl[{extra}]'"
        )
    assert problems("learner.backend=deepspeed", "learner.zero_stage=0") == []


def test_the_sandboxes_of_an_environment_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    (problem,) = problems("env.kwargs.backend=docker", env="CodeContest-v0", thorough=True)
    assert problem.startswith("env.kwargs.backend=docker: ")
    (problem,) = problems("env.sandbox=docker", thorough=True)
    assert problem.startswith("env.sandbox=docker: FrozenLake-v1 cannot be made in it: ")


def test_sandbox_servers_are_reached_before_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN", "a-token-of-the-tests-alone")
    (problem,) = problems("env.sandbox=remote", "env.servers=[http://127.0.0.1:9]")
    assert problem.startswith("env.servers=http://127.0.0.1:9: the sandbox server http://127.0.0.1:9 does not answer")
    (problem,) = problems("env.sandbox=remote", "env.servers=[http://example.org]", thorough=True)
    assert "would receive the token unencrypted" in problem


def test_a_run_needs_a_token_for_its_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AGENTKIT_SANDBOX_TOKEN", raising=False)
    monkeypatch.setenv("AGENTKIT_SANDBOX_TOKEN_FILE", str(tmp_path / "none"))
    (problem,) = problems("env.sandbox=remote")
    assert problem.startswith("env.sandbox=remote: no token: ")


def test_a_full_machine_is_a_problem_before_a_run() -> None:
    (problem,) = problems("env.sandbox=local", "env.health.watermark=0.01")
    assert "is in use, the limit is 1%; free some, or raise env.health.watermark" in problem


@pytest.mark.parametrize("setting", ["spares=2", "hedge=p95", "health.ping_interval=1"])
def test_a_setting_of_sandboxes_without_a_sandbox_is_a_problem(setting: str) -> None:
    (problem,) = problems(f"env.{setting}")
    assert problem.endswith("applies to sandboxes, and FrozenLake-v1 runs without one: set env.sandbox, or remove it")
    assert problems(f"env.{setting}", env="CodeContest-v0") == []


def test_arguments_are_checked_for_sandboxes_too() -> None:
    (problem,) = problems("env.sandbox=docker", "env.kwargs.sise=4")
    assert "did you mean 'size'?" in problem


MODEL = {
    "config.json": {"model_type": "qwen2"},
    "model.safetensors": {},
    "tokenizer.json": {},
    "tokenizer_config.json": {"chat_template": "{{ messages }}"},
}


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (None, None),
        ("config.json", "is a directory without a model"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer"),
        ("tokenizer_config.json", "holds no chat template"),
    ],
)
def test_a_model_needs_all_its_files(tmp_path: Path, missing: str | None, words: str | None) -> None:
    for name, content in MODEL.items():
        if name != missing:
            (tmp_path / name).write_text(json.dumps(content))
    found = problems(f"model.path={tmp_path}")
    if words is None:
        assert found == []
        return
    (problem,) = found
    assert problem.startswith(f"model.path={str(tmp_path)!r}")
    assert words in problem


def test_a_chat_template_of_the_configuration_is_enough(tmp_path: Path) -> None:
    for name, content in MODEL.items():
        if name != "tokenizer_config.json":
            (tmp_path / name).write_text(json.dumps(content))
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert problems(f"model.path={tmp_path}", f"model.chat_template={template}") == []
    (problem,) = problems(f"model.path={tmp_path}", "model.chat_template=missing.jinja")
    assert problem.startswith("model.chat_template='missing.jinja' cannot be read")


def test_a_model_that_transformers_saved_has_them(tmp_path: Path) -> None:
    from agentkit.trainers.models import build_quickstart

    build_quickstart(tmp_path, seed=0)
    assert list(model_files.problems(str(tmp_path), "model.path", chat=True)) == []


def test_an_adapter_needs_its_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, base = tmp_path / "adapter", tmp_path / "base"
    adapter.mkdir()
    for name, content in MODEL.items():
        if name != "config.json":
            (adapter / name).write_text(json.dumps(content))
    settings: dict[str, Any] = {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (problem,) = problems(f"model.path={adapter}")
    assert problem.startswith(
        f"the base model of the adapter {adapter} cannot be used: model.path={str(base)!r} does not"
    )
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_text(json.dumps(MODEL[name]))
    assert problems(f"model.path={adapter}") == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = (line for line in problems(f"model.path={adapter}") if "adapter" in line)
    assert "pip install 'agentkit-rl[lora]'" in problem
    monkeypatch.undo()
    (adapter / "adapter_config.json").write_text("{}")
    (problem,) = problems(f"model.path={adapter}")
    assert "names no base model" in problem


def test_a_critics_model_needs_no_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(json.dumps(MODEL[name]))
    gae = ("algorithm.advantage=gae", "critic={}")
    assert problems(*gae, f"critic.path={tmp_path}") == []
    (problem,) = problems(*gae, "critic.path=/nowhere")
    assert problem.startswith("critic.path='/nowhere' does not exist")


@pytest.mark.parametrize(
    ("vocabulary", "size", "words"),
    [
        ({"a": 0, "b": 1}, 10, None),
        ({"a": 0}, 10, None),  # lacks a token, but reads its id
        ({"a": 1, "b": 0}, 10, "gives 2 tokens of model.path"),
        ({}, 3, "it knows 3 tokens"),
    ],
)
def test_a_critic_reads_the_policys_tokens(
    tmp_path: Path, vocabulary: dict[str, int], size: int, words: str | None
) -> None:
    end = [{"id": 3, "content": "<end>"}]
    for name, ids, count in (("policy", {"a": 0, "b": 1}, 4), ("critic", vocabulary, size)):
        (tmp_path / name).mkdir()
        files = MODEL | {
            "config.json": {"model_type": "qwen3", "vocab_size": count},
            "tokenizer.json": {"model": {"vocab": ids}, "added_tokens": end if ids else []},
        }
        for file, content in files.items():
            (tmp_path / name / file).write_text(json.dumps(content))
    found = problems(
        f"model.path={tmp_path / 'policy'}", "algorithm.advantage=gae", f"critic={{path: {tmp_path / 'critic'}}}"
    )
    assert [str(words) in problem for problem in found] == ([] if words is None else [True])
