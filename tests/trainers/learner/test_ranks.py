"""Two gloo ranks in real processes give the same loss, gradients and weights as one."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import rank_worker

from agentkit.errors import LearnerError
from agentkit.trainers.learner.ranks import _buckets


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_are_one(configure, make_batch, tmp_path):
    """With a critic, a reference, minibatches and a number of micro-batches that does not divide evenly."""
    config = configure(
        algorithm={"advantage": "gae", "loss": "tis", "kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.01},
        critic={},
        learner={"minibatches": 3, "max_tokens": 64},
        rollout={"groups": 3},
    )
    batches = [make_batch(seed, groups=3, members=3) for seed in (20, 21)]
    (tmp_path / "input").write_bytes(pickle.dumps((config, batches)))
    processes = []
    for rank in range(2):
        arguments = [tmp_path / "input", rank, 2, tmp_path / "store", tmp_path / f"{rank}.npz"]
        command = [sys.executable, rank_worker.__file__, *map(str, arguments)]
        processes.append(subprocess.Popen(command, cwd=tmp_path))
    expected = rank_worker.run(config, batches, 0, 1, None)
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = [np.load(tmp_path / f"{rank}.npz") for rank in range(2)]

    for name, value in expected.items():
        assert np.array_equal(ranks[0][name], ranks[1][name]), f"the ranks disagree on {name}"
        close = {"rtol": 1e-2, "atol": 1e-4 * np.abs(value).max()}
        if name == "weights":
            # Adam divides by the gradient's size: float noise on a vanishing gradient moves a weight by up to a step.
            close = {"rtol": 0, "atol": 2e-3}
            assert np.abs(ranks[0][name] - value).mean() < 1e-5
        np.testing.assert_allclose(ranks[0][name], value, err_msg=name, **close)


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
