"""Configuration files and overrides: round trips, and errors with place and remedy."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.config import RunConfig
from agentkit.config_io import dump_config, load_config, parse_config, valid_keys
from agentkit.errors import ConfigError

SMALLEST = "env: {id: FrozenLake-v1}\n"


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, source="my.yaml")
    return str(caught.value)


@pytest.mark.parametrize("text", ["3e-5", "3E-5", "3.0e-05", "0.00003", "+3e-5", "30e-6"])
def test_every_spelling_of_a_small_number_is_parsed(text: str) -> None:
    assert parse_config(SMALLEST + f"learner: {{lr: {text}}}").learner.lr == 3e-5
    assert parse_config(SMALLEST, [f"learner.lr={text}"]).learner.lr == 3e-5


def test_an_integer_is_accepted_where_a_float_is_expected() -> None:
    config = parse_config(SMALLEST, ["rollout.async_ratio=1", "learner.betas=[0, 1]"])
    assert config.rollout.async_ratio == 1.0
    assert config.learner.betas == (0.0, 1.0)


def test_overrides_of_lists_sections_null_and_free_arguments() -> None:
    overrides = [
        "trackers=[tensorboard, wandb]",
        "model.lora={rank: 4}",
        "model.lora.alpha=8",
        "imitation={}",
        "imitation=null",
        "env.kwargs.size=8",
        "env.kwargs.map_name=no",
        "dir=somewhere/else",
        "name=",
        "name=a=b",
    ]
    config = parse_config(SMALLEST, overrides)
    assert config.trackers == ("tensorboard", "wandb")
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha) == (4, 8.0)
    assert config.imitation is None
    assert config.env.kwargs == {"size": 8, "map_name": "no"}
    assert config.dir == Path("somewhere/else")
    assert config.name == "a=b"


def test_the_last_override_wins() -> None:
    assert parse_config(SMALLEST + "seed: 1", ["seed=2", "seed=3"]).seed == 3


def test_a_misspelt_key_names_file_line_key_and_the_nearest() -> None:
    text = SMALLEST + "learner:\n  lr: 1.0\n  warmup_step: 3\n"
    message = refused(text)
    assert message == "my.yaml:4: learner.warmup_step: no such key; did you mean learner.warmup_steps?"


def test_a_key_of_another_section_is_found() -> None:
    assert "did you mean rollout.async_ratio?" in refused(SMALLEST + "async_ratio: 1\n")
    message = refused(SMALLEST, "lr=1")
    assert "override 'lr=1': lr: no such key" in message
    assert "learner.lr" in message


def test_an_unknown_key_without_similar_ones_lists_the_valid_ones() -> None:
    assert "gate has: policy" in refused(SMALLEST, "gate.zzzzzzzz=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.lr=fast", 'learner.lr: input should be a valid number, not "fast"'),
        ("learner.lr=true", "learner.lr: input should be a valid number, not true"),
        ("rollout.groups=3.5", "rollout.groups: input should be a valid integer, not 3.5"),
        ("rollout.groups='3'", 'rollout.groups: input should be a valid integer, not "3"'),
        ("deterministic=1", "deterministic: input should be a valid boolean, not 1"),
        ("trackers=[wand]", "trackers.0: input should be 'tensorboard' or 'wandb'"),
        ("learner=3", "learner: input should be an object"),
        ("learner.lr=null", "learner.lr: input should be a valid number, not null"),
        ("learner.lr.x=1", "learner.lr: input should be a valid number, not a section"),
        ("learner.lr=0", "learner.lr: input should be greater than 0, not 0"),
        ("learner.betas=[1]", "learner.betas.1: this key is required"),
    ],
)
def test_wrong_values_name_the_expected_and_the_given_value(override: str, expected: str) -> None:
    message = refused(SMALLEST, override)
    assert expected in message
    assert override in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.lr", "has the form `section.key=value`"),
        ("=3", "has the form `section.key=value`"),
        ("learner..lr=3", "has the form `section.key=value`"),
        ("name='a", "not valid YAML"),
        ("env.id.x=3", "env.id is the value 'FrozenLake-v1', not a section"),
    ],
)
def test_malformed_overrides(override: str, expected: str) -> None:
    assert expected in refused(SMALLEST, override)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "env: this key is required"),
        ("env: {}", "my.yaml:1: env.id: this key is required"),
        ("- a", "my.yaml:1: the file must contain `key: value` lines"),
        ("env: {id: A}\nseed: [", "my.yaml:2: not valid YAML"),
        ("env:\n  id: A\n  id: B\n", "my.yaml:3: env.id: this key appears twice"),
        ("env: {id: A}\n1: 2\n", "my.yaml:2: a key in the top level is not a string"),
    ],
)
def test_malformed_files(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_overrides_that_are_not_a_list_are_refused() -> None:
    for wrong in ("steps=2", {"steps": 2}, 3):
        with pytest.raises(ConfigError, match="must be a list of settings"):
            load_config({"env": {"id": "FrozenLake-v1"}}, wrong)  # pyright: ignore[reportArgumentType]


def test_values_of_another_type_are_refused() -> None:
    for wrong in (None, 3, ["env.id=FrozenLake-v1"]):
        with pytest.raises(ConfigError, match="a YAML file, a dict or a RunConfig"):
            load_config(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="override 3: an override is text"):
        load_config({"env": {"id": "FrozenLake-v1"}}, [3])  # pyright: ignore[reportArgumentType]


def test_all_problems_are_listed_at_once() -> None:
    lines = refused("env: {idd: A}\nlearner: {lr: fast}\nrolout: {}\n").splitlines()
    assert len(lines) == 4
    assert sum("did you mean" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("engine.share_weights=true", "rollout.async_ratio=1"),
        ("engine.share_weights=true", "engine.replicas=2"),
        ("engine.share_weights=true", "engine.kind=vllm"),
        ("engine.min_replicas=3", "engine.replicas=2"),
        ("engine.tensor_parallel=2", "engine.kind=hf"),
        ("engine.share_weights=true", "learner.backend=fsdp"),
        ("engine.share_weights=true", "learner.attention=eager"),
        ("learner.offload_optimizer=true", "learner.backend=fsdp"),
        ("learner.optimizer=muon", "learner.backend=deepspeed"),
        ("learner.zero_stage=2", "learner.backend=fsdp"),
        ("learner.shard_size=2", "learner.backend=replicas"),
        ("algorithm.clip_low=0.3", "algorithm.loss=pg"),
        ("algorithm.clip_high=0.2", "algorithm.loss=gspo"),
        ("algorithm.dual_clip=3.0", "algorithm.loss=topr"),
        ("algorithm.topr_ratio=token", "algorithm.loss=ppo"),
        ("algorithm.aggregation=token_mean", "algorithm.loss=gspo"),
        ("algorithm.loss=raft", "algorithm.advantage=grpo"),
        ("algorithm.advantage=bilevel_gae", "critic=null"),
        ("algorithm.gamma_high=0.9", "algorithm.advantage=grpo"),
        ("algorithm.overlong_max=5", "algorithm.overlong_buffer=null"),
        ("algorithm.overlong_buffer=6", "algorithm.overlong_max=5"),
        ("algorithm.overlong_penalty=2.0", "algorithm.overlong_max=null"),
        ("algorithm.credit_share=0.3", "algorithm.credit=none"),
        ("engine.weights=gloo", "cluster=null"),
        ("engine.weights=shared_memory", "cluster={address: auto}"),
        ("engine.weights=nccl", "model.device=cpu"),
        ("engine.weights=ipc", "cluster.colocate=false"),
        ("cluster.colocate=true", "engine.replicas=2"),
        ("engine.verify_weights=true", "engine.replicas=1"),
        ("engine.sleep=true", "engine.kind=hf"),
    ],
)
def test_a_contradiction_names_both_keys(one: str, other: str) -> None:
    message = refused(SMALLEST, one, other)
    assert one in message
    assert other.split("=")[0] in message


@pytest.mark.parametrize(
    ("loss", "advantage"), [("topr", "grpo"), ("gspo", "grpo"), ("raft", "raft"), ("chunk_topr", "chunk_returns")]
)
def test_a_loss_is_configured_in_one_line(loss: str, advantage: str) -> None:
    config = parse_config(SMALLEST, [f"algorithm.loss={loss}"])
    assert config.algorithm.advantage == advantage
    assert parse_config(dump_config(config)) == config
    chosen = parse_config(SMALLEST, ["algorithm.loss=kimi", "algorithm.advantage=rloo"])
    assert chosen.algorithm.advantage == "rloo"


@pytest.mark.parametrize("placement", ["inline", "process"])
@pytest.mark.parametrize("section", ["engine", "learner"])
def test_a_removed_key_names_its_replacement(section: str, placement: str) -> None:
    expected = (
        f"{section}.placement: this setting was removed: engine and learner run in the process of the run; remove the "
        "key, and for separate processes add a section `cluster: {}`, which needs pip install 'agentkit-rl[ray]'"
    )
    text = f"{SMALLEST}{section}:\n  threads: 1\n  placement: {placement}\n"
    assert refused(text) == f"my.yaml:4: {expected}"
    assert refused(SMALLEST, f"{section}.placement={placement}").endswith(f"placement={placement}': {expected}")


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a configuration file nor a run directory"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as a text file"):
        load_config(tmp_path / "binary.yaml")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(
    kwargs=st.dictionaries(st.text(), json_values, max_size=4),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    name=st.text(),
)
def test_a_dumped_configuration_loads_to_an_equal_one(kwargs: dict, lr: float, name: str) -> None:
    raw = {"env": {"id": "X", "kwargs": kwargs}, "learner": {"lr": lr}, "name": name, "trackers": ("wandb",)}
    config = RunConfig.model_validate(raw)
    assert parse_config(dump_config(config)) == config


def test_other_yaml_readers_read_dumped_configurations_equally_where_possible() -> None:
    config = parse_config(SMALLEST, ["env.kwargs.a=no", "env.kwargs.b=1e5", "env.kwargs.c='1e5'", "env.kwargs.d=.inf"])
    assert config.env.kwargs == {"a": "no", "b": 1e5, "c": "1e5", "d": math.inf}
    assert yaml.safe_load(dump_config(config))["env"]["kwargs"]["c"] == "1e5"


def test_valid_keys_cover_optional_sections() -> None:
    keys = {".".join(key) for key in valid_keys()}
    assert {"learner.lr", "model.lora.rank", "critic.lr", "imitation.epochs", "env"} <= keys
