"""Sampling equals brute force: truncation, inversion, independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.sampling import Sampler, truncate, uniforms

CPU = torch.device("cpu")


def slow_truncate(probabilities: list[float], top_p: float, top_k: int) -> list[float]:
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    if top_k:
        order = order[:top_k]
    total, mass, kept = math.fsum(probabilities[token] for token in order), 0.0, set()
    for token in order:
        kept.add(token)
        mass += probabilities[token]
        if mass >= top_p * total:
            break
    return [p if token in kept else 0.0 for token, p in enumerate(probabilities)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=12, unique=True),
    st.sampled_from([1.0, 0.9, 0.5, 0.123, 1e-6]),
    st.integers(0, 14),
)
def test_truncation(weights: list[int], top_p: float, top_k: int) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    got = truncate(torch.tensor([probabilities], dtype=torch.float64), torch.tensor([[top_p]]), torch.tensor([[top_k]]))
    expected = slow_truncate(probabilities, top_p, top_k)
    if top_p == 1.0:
        expected = slow_truncate(probabilities, 2.0, top_k)
    # A mass that equals top_p but for rounding may fall on either side.
    mass = np.cumsum(sorted(expected, reverse=True)) / sum(expected)
    if np.abs(mass - top_p).min() > 1e-9:
        np.testing.assert_allclose(got[0].numpy(), expected)


@pytest.mark.parametrize(
    "sampling", [Sampling(1), Sampling(1, temperature=0.7), Sampling(1, top_k=3), Sampling(1, top_p=0.6)]
)
def test_every_token_owns_its_share_of_the_unit_interval(sampling: Sampling) -> None:
    """An even grid of numbers gives each token in proportion to its probability, and none with probability 0."""
    logits = torch.tensor([2.0, -1.0, 0.5, -math.inf, 1.0, -3.0])
    grid = (torch.arange(20_000) + 0.5) / 20_000
    sampler = Sampler([sampling] * len(grid), CPU)
    ids, logprobs = sampler(logits.expand(len(grid), -1), grid)
    full = (logits / sampling.temperature).log_softmax(-1)
    expected = np.array(slow_truncate(full.exp().tolist(), sampling.top_p if sampling.top_p < 1 else 2, sampling.top_k))
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(ids, minlength=6) / len(grid), expected, atol=1e-4)
    np.testing.assert_allclose(logprobs, full[ids], atol=1e-6)


def test_extreme_numbers_never_pick_an_impossible_token() -> None:
    logits = torch.tensor([[-math.inf, 0.0, 0.1, -math.inf]]).repeat(3, 1)
    numbers = torch.tensor([0.0, 0.5, float(np.float32(1 - 2**-22) * np.float32(1 - 2**-24))])
    ids, _ = Sampler([Sampling(1)] * 3, CPU)(logits, numbers)
    assert set(ids.tolist()) <= {1, 2}


def test_greedy_rows_among_sampled_ones() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    settings_ = [Sampling(1, temperature=0), Sampling(1, top_k=1), Sampling(1)]
    ids, logprobs = Sampler(settings_, CPU)(logits, torch.full((3,), 0.999))
    assert ids[:2].tolist() == logits[:2].argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, logits.log_softmax(-1).gather(1, ids[:, None])[:, 0], atol=1e-6)


def test_uniforms_depend_only_on_the_seed() -> None:
    assert np.array_equal(uniforms(3, 10), uniforms(3, 20)[:10])
    assert not np.array_equal(uniforms(3, 10), uniforms(4, 10))
    assert uniforms((0, 1), 5).dtype == np.float32
    assert uniforms(0, 100_000).max() < 1
