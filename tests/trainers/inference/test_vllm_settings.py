"""Settings of the vLLM engine: pure functions that do not need vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import EngineError
from agentkit.trainers.inference.clock import BusyClock
from agentkit.trainers.inference.vllm_guard import OWNER, end, guard
from agentkit.trainers.inference.vllm_launch import (
    MAX_CPU_CACHE,
    check_device,
    check_options,
    cpu_cache_bytes,
    engine_arguments,
    environment,
    environment_set,
    interrupt_blocked,
)
from agentkit.trainers.inference.weights import checkpoint_shapes
from agentkit.trainers.models.quickstart import quickstart_config

MODEL = ModelConfig()


def arguments(engine: EngineConfig, *, deterministic: bool = False, on_cpu: bool = True) -> dict:
    return engine_arguments("some/model", MODEL, engine, seed=3, deterministic=deterministic, on_cpu=on_cpu)


def engine(**fields: object) -> EngineConfig:
    return EngineConfig.model_validate({"kind": "vllm", **fields})


def test_settings_become_vllms_arguments() -> None:
    got = arguments(engine(max_batch=5, max_context=77, tensor_parallel=2, options={"block_size": 64}))
    assert got["max_num_seqs"] == 5
    assert got["max_model_len"] == 77
    assert (got["seed"], got["dtype"], got["model"]) == (3, "float32", "some/model")
    assert got["logprobs_mode"] == "processed_logprobs"
    assert (got["block_size"], got["tensor_parallel_size"]) == (64, 2)
    assert "enforce_eager" not in arguments(engine(), on_cpu=False)


def test_deterministic_engines_compute_alone_and_reuse_nothing() -> None:
    got = arguments(engine(max_batch=5), deterministic=True)
    assert (got["max_num_seqs"], got["enable_prefix_caching"]) == (1, False)


@pytest.mark.parametrize(
    ("option", "words"),
    [("max_num_seqs", r"engine\.max_batch"), ("dtype", r"model\.dtype"), ("logprobs_mode", "promises")],
)
def test_options_that_agentkit_sets_are_refused(option: str, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        arguments(engine(options={option: 1}))


def test_misspelt_options_are_refused() -> None:
    check_options({"block_size": 1}, {"block_size", "model"})
    with pytest.raises(EngineError, match="did you mean block_size"):
        check_options({"blocksize": 1}, {"block_size", "model"})


@pytest.mark.parametrize(
    ("device", "on_cpu", "fits"), [("auto", True, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_the_device_must_be_vllms(device: str, on_cpu: bool, fits: bool) -> None:
    if fits:
        check_device(device, on_cpu=on_cpu)
    else:
        with pytest.raises(EngineError, match=r"model\.device"):
            check_device(device, on_cpu=on_cpu)


def test_the_environment_respects_what_the_user_has_set() -> None:
    got = environment(engine(threads=2), "auto", {"VLLM_LOGGING_LEVEL": "INFO"})
    assert got["OMP_NUM_THREADS"] == "2"
    assert "VLLM_LOGGING_LEVEL" not in got
    assert environment(engine(), "auto", {})["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(("visible", "expected"), [({}, "1"), ({"CUDA_VISIBLE_DEVICES": "4,6"}, "6")])
def test_a_gpus_number_counts_the_visible_ones(visible: dict[str, str], expected: str) -> None:
    assert environment(engine(), "cuda:1", visible)["CUDA_VISIBLE_DEVICES"] == expected
    assert "CUDA_VISIBLE_DEVICES" not in environment(engine(), "cuda", visible)


def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_A", "before")
    monkeypatch.delenv("AGENTKIT_B", raising=False)
    with environment_set({"AGENTKIT_A": "in", "AGENTKIT_B": "in"}):
        assert (os.environ["AGENTKIT_A"], os.environ["AGENTKIT_B"]) == ("in", "in")
    assert (os.environ["AGENTKIT_A"], os.environ.get("AGENTKIT_B")) == ("before", None)


def test_processes_started_inside_do_not_see_ctrl_c() -> None:
    sleeper = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    with interrupt_blocked():
        process = subprocess.Popen(sleeper, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        end(process.pid)
        assert process.poll() is not None
    finally:
        process.kill()
        process.communicate(timeout=5)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_the_cpu_cache_holds_two_full_batches_within_bounds() -> None:
    config = quickstart_config()
    heads, width, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    assert heads is not None
    got = cpu_cache_bytes(config, max_batch=64, max_context=2048, bytes_per_value=4)
    assert got == 2 * 64 * 2048 * layers * 2 * heads * width * 4
    assert cpu_cache_bytes(config, max_batch=10_000, max_context=100_000, bytes_per_value=4) == MAX_CPU_CACHE


def test_only_an_engines_own_processes_are_watched() -> None:
    assert guard({}) is None
    assert guard({OWNER: str(os.getpid())}) is None


# Checkpoints


def test_shapes_of_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint_shapes(tmp_path) == {}
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "w.safetensors")
    assert checkpoint_shapes(tmp_path) == {"a": (2, 3), "b": (5,)}
    half = tmp_path / "half.safetensors"
    save_file({"c": torch.zeros(100)}, half)
    half.write_bytes(half.read_bytes()[:120])
    assert checkpoint_shapes(tmp_path) == {}


# Clock


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "pause", "resume"]), st.integers(0, 5)), max_size=40))
def test_busy_seconds_are_those_with_requests_and_without_pause(events: list[tuple[str, int]]) -> None:
    now, in_flight, paused, expected, of_requests = 0.0, 0, False, 0.0, 0.0
    clock = BusyClock(lambda: now)
    for event, wait in events:
        if event == "leave" and in_flight == 0:
            continue
        getattr(clock, event)()
        in_flight += {"enter": 1, "leave": -1}.get(event, 0)
        paused = {"pause": True, "resume": False}.get(event, paused)
        now += wait
        expected += wait if in_flight and not paused else 0
        of_requests += wait * in_flight if not paused else 0
        assert (clock.busy_s, clock.request_s) == pytest.approx((expected, of_requests))
