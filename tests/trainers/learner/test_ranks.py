"""Gloo ranks in real processes give the same gradients, weights and continuations as one, with every back end."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_worker
from requiring import require
from rerendering import rerendered
from safetensors.torch import load_file

from agentkit.errors import LearnerError
from agentkit.trainers.batch import flatten
from agentkit.trainers.learner.ranks import _buckets

CHUNKS: dict[str, Any] = {"max_logits": 48 * 5}
"""Computes the logits of five tokens at a time, so that the ranks have different numbers of chunks."""
RICH = {
    "algorithm": {
        "advantage": "gae",
        "loss": "tis",
        "kl": "k3",
        "kl_coef": 0.1,
        "entropy_coef": 0.01,
        "credit": "local",
    },
    "critic": {"count": 2, "layers": 1, "hidden_size": 24, "updates": 2, "schedule": "linear"},
    "rollout": {"groups": 3},
}
LORA = {
    "algorithm": {"advantage": "grpo", "kl": "k1", "kl_in": "reward", "credit": "coupled"},
    "rollout": {"groups": 3},
}
LORA["model"] = {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0}}

Result = dict[str, np.ndarray]
Jobs = list[tuple[tuple[Any, ...], dict[str, Any]]]


def sections(base: dict[str, Any], **learner: Any) -> dict[str, Any]:
    """Minibatches, and a number of micro-batches that does not divide evenly."""
    return base | {"learner": {"minibatches": 3, "max_tokens": 64} | learner}


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[[int, Jobs], list[Result]]:
    """``on_ranks(size, jobs)``: the result of each job, on which all ranks must agree."""

    def run(size: int, jobs: Jobs) -> list[Result]:
        directory = tmp_path / f"{size}-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        (directory / "input").write_bytes(pickle.dumps(jobs))
        processes = []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(size):
            arguments = [directory / "input", rank, size, directory / "store", directory]
            command = [sys.executable, rank_worker.__file__, *map(str, arguments)]
            processes.append(subprocess.Popen(command, cwd=directory, env=environment))
        try:
            assert [process.wait(timeout=480) for process in processes] == [0] * size
        finally:
            for process in processes:
                process.kill()
                process.wait()
        results = []
        for number in range(len(jobs)):
            ranks = [dict(np.load(directory / f"{number}-{rank}.npz")) for rank in range(size)]
            for other in ranks[1:]:
                for name, value in ranks[0].items():
                    assert np.array_equal(other[name], value), f"the ranks disagree on {name} of job {number}"
            results.append(ranks[0])
        return results

    return run


def check(actual: Result, expected: Result) -> None:
    """Compare the first gradient within 1e-6, its update within 1 %, and everything later up to Adam's noise."""
    assert actual.keys() == expected.keys()
    np.testing.assert_array_equal(actual["weights-start"], expected["weights-start"])
    np.testing.assert_allclose(actual["gradient-0"], expected["gradient-0"], rtol=0, atol=1e-6)
    update = expected["weights-imitated"] - expected["weights-start"]
    difference = actual["weights-imitated"] - expected["weights-imitated"]
    assert np.linalg.norm(difference) <= 0.01 * np.linalg.norm(update)
    for name, value in expected.items():
        if name.endswith("credit/seconds"):
            continue
        # Adam divides by the gradient's size: float noise on a vanishing gradient moves a weight by up to a step.
        moved = name.startswith(("weights", "plain"))
        close = {"rtol": 0, "atol": 2e-3} if moved else {"rtol": 1e-2, "atol": 1e-4 * np.abs(value).max()}
        np.testing.assert_allclose(actual[name], value, err_msg=name, **close)
        if moved:
            assert np.abs(actual[name] - value).mean() < 1e-5, name


def check_continuation(actual: Result, expected: Result, before: Result, gradient: float = 1e-6) -> None:
    """Compare the first gradient after loading, and the weights after the third step of which two were ``before``."""
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose(actual["gradient-0"], expected["gradient-0"], rtol=0, atol=gradient)
    update = expected["weights-2"] - before["weights-1"]
    assert np.linalg.norm(actual["weights-2"] - expected["weights-2"]) <= 0.01 * np.linalg.norm(update)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "size"), [("replicas", 2), ("fsdp", 2), ("fsdp", 3)])
def test_several_ranks_are_one(configure, make_batch, make_groups, on_ranks, backend, size):
    """With a critic, a reference, adapters, unequal micro-batches and chunks, and a batch with a context for each turn;
    an infinite loss is not applied."""
    apart = flatten(rerendered(make_groups(21, groups=3, members=3)))
    batches = [make_batch(20, groups=3, members=3), apart]
    kinds = [RICH, LORA]
    options = {"backend": backend, "activation_checkpointing": backend == "fsdp"}
    jobs = [((configure(**sections(kind, **options)), batches), CHUNKS | {"poison": True}) for kind in kinds]
    for kind, result in zip(kinds, on_ranks(size, jobs), strict=True):
        assert result.pop("refused")
        check(result, rank_worker.run(configure(**sections(kind)), batches, 0, 1, None, **CHUNKS))


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "kind", "settings"),
    [
        (2, LORA, {"zero_stage": 1}),
        (2, RICH, {"zero_stage": 2, "offload_optimizer": True}),
        (3, RICH, {"zero_stage": 3, "activation_checkpointing": True}),
        (1, LORA, {"zero_stage": 3, "offload_optimizer": True}),
    ],
    ids=["1-lora", "2-offload", "3", "3-lora-offload"],
)
def test_deepspeed_is_one_rank(configure, make_batch, on_ranks, tmp_path, size, kind, settings):
    """Also after it loads a checkpoint of another back end, and the other way around."""
    require("deepspeed", "pip install 'agentkit-rl[deepspeed]'")
    batches = [make_batch(seed, groups=3, members=3) for seed in (20, 21)]
    plain, sharded = (configure(**sections(kind, **more)) for more in ({}, {"backend": "deepspeed"} | settings))
    expected = rank_worker.run(plain, batches, 0, 1, None, **CHUNKS, save=tmp_path / "plain")
    [result] = on_ranks(size, [((sharded, batches), CHUNKS | {"poison": True, "save": tmp_path / "sharded"})])
    assert result.pop("refused")
    check(result, expected)

    then = [make_batch(26, groups=3, members=3)]
    expected_then = rank_worker.run(plain, then, 0, 1, None, load=tmp_path / "plain")
    [of_plain] = on_ranks(size, [((sharded, then), {"load": tmp_path / "plain"})])
    check_continuation(of_plain, expected_then, expected)
    of_sharded = rank_worker.run(plain, then, 0, 1, None, load=tmp_path / "sharded")
    check_continuation(of_sharded, expected_then, expected, gradient=1e-4)  # the weights differ by float noise


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hybrid_shards_are_one(configure, make_batch, on_ranks):
    """Also in bfloat16, up to its rounding: shards are float32, and gathered in bfloat16."""
    batches = [make_batch(22, groups=3, members=3)]
    settings = {"backend": "fsdp", "shard_size": 2, "ranks": 4}
    half = RICH | {"model": {"dtype": "bfloat16"}}
    configs = [configure(**sections(kind, **settings), cluster={}) for kind in (RICH, half)]
    result, in_half = on_ranks(4, [((config, batches), {}) for config in configs])
    check(result, rank_worker.run(configure(**sections(RICH)), batches, 0, 1, None))

    expected = rank_worker.run(configure(**sections(half)), batches, 0, 1, None)
    for index in range(3):
        gradient = expected[f"gradient-{index}"]
        assert np.linalg.norm(in_half[f"gradient-{index}"] - gradient) <= 0.03 * np.linalg.norm(gradient)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [RICH, LORA], ids=["full", "lora"])
def test_checkpoints_of_two_ranks_continue_on_any_number(configure, make_batch, on_ranks, tmp_path, kind):
    batches = [make_batch(seed, groups=3, members=3) for seed in (23, 24)]
    plain, sharded = (configure(**sections(kind, backend=backend)) for backend in ("replicas", "fsdp"))
    whole = rank_worker.run(plain, batches, 0, 1, None, save=tmp_path / "one")
    on_ranks(2, [((sharded, batches), {"save": tmp_path / "two"})])
    if kind is LORA:
        files = list((tmp_path / "two").rglob("*.safetensors"))
        assert files
        assert all(".lora_" in name for file in files for name in load_file(file))
    then = [make_batch(25, groups=3, members=3)]
    expected = rank_worker.run(plain, then, 0, 1, None, load=tmp_path / "two")
    results = on_ranks(3, [((config, then), {"load": tmp_path / "two"}) for config in (sharded, plain)])
    for result in results:
        check_continuation(result, expected, whole)


def test_ranks_need_a_meeting_point(configure):
    with pytest.raises(LearnerError, match="need an init_method"):
        rank_worker.run(configure(), [], 0, 2, None)


def test_buckets_hold_every_parameter_once(monkeypatch):
    import torch

    monkeypatch.setattr("agentkit.trainers.learner.ranks.BUCKET", 10)
    parameters = [torch.zeros(size) for size in (4, 5, 6, 20, 1, 1)]
    buckets = list(_buckets(parameters))
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[4, 5], [6], [20], [1, 1]]
    assert list(_buckets([])) == []
