"""Conformance tests of inference engines.

A test module of an engine derives from ``EngineConformance`` and provides the fixtures ``served`` (a running engine,
shared by the module's tests) and ``make`` (an engine of its own). References are transformers' own forward passes and
``generate``; nothing here knows how an engine works inside.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import EngineError
from agentkit.trainers.inference.base import Generation, InferenceEngine, PauseMode, Sampling
from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer
from agentkit.trainers.weights.base import Weights
from agentkit.trainers.weights.shared_memory import SharedStaging

ENGINE = EngineConfig(max_batch=8, max_context=192)
"""Small, so that requests wait in line and contexts fill up."""

_names = itertools.count()


def policy(seed: int) -> Any:
    """A quickstart model whose distributions are far from uniform, unlike those of fresh weights."""
    model = quickstart_model(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


def save_policy(directory: Path, seed: int) -> ModelConfig:
    policy(seed).save_pretrained(directory)
    quickstart_tokenizer().save_pretrained(directory)
    return ModelConfig(path=str(directory), device="cpu")


@dataclass
class Served:
    """A running engine beside transformers models with the same weights, one a version."""

    engine: InferenceEngine
    models: dict[int, Any] = field(default_factory=lambda: {0: policy(0)})
    version: int = 0
    staging: SharedStaging = field(default_factory=SharedStaging)
    tolerance: float = 1e-4
    """Of log-probabilities, against a plain forward pass."""

    @property
    def model(self) -> Any:
        return self.models[self.version]

    def stage(self, seed: int, version: int) -> Weights:
        """Stage weights as a learner publishes them."""
        self.models[version] = policy(seed)
        return self.staging.stage(version, [list(self.models[version].state_dict().items())])

    async def publish(self, seed: int, mode: PauseMode = "abort") -> None:
        version = self.version + 1
        weights = self.stage(seed, version)
        await self.engine.pause(mode)
        assert await self.engine.update_weights(weights) == version
        self.version = version
        await self.engine.resume()

    def check(self, prompt: Sequence[int], got: Generation, temperature: float = 1.0) -> None:
        """The result is well-formed, and re-scoring it under the weights of its versions gives its log-probs."""
        assert got.ids.dtype == np.int32
        assert got.logprobs.dtype == np.float32
        assert len(got.ids) == len(got.logprobs) == sum(count for _, count in got.versions)
        assert all(count > 0 for _, count in got.versions)
        start = 0
        for version, count in got.versions:
            expected = rescore(self.models[version], prompt, got.ids, temperature)[start : start + count]
            np.testing.assert_allclose(got.logprobs[start : start + count], expected, atol=self.tolerance)
            start += count


@torch.no_grad()
def rescore(model: Any, prompt: Sequence[int], ids: Sequence[int] | np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-probs of ``ids`` after ``prompt`` by one plain forward pass, full vocabulary, at ``temperature``."""
    tokens = torch.tensor([[*prompt, *(int(token) for token in ids)]])
    logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng((seed, length)).integers(3, 800, length).tolist()


def session() -> str:
    return f"session-{next(_names)}"


async def ticks(served: Served, tokens: int, timeout: float = 30.0) -> None:
    """Wait until the engine has generated that many more tokens."""

    async def wait() -> None:
        start = (await served.engine.stats()).generated_tokens
        while (await served.engine.stats()).generated_tokens < start + tokens:  # noqa: ASYNC110 (engines have no event)
            await asyncio.sleep(0.002)

    await asyncio.wait_for(wait(), timeout)


@pytest.mark.asyncio(loop_scope="module")
class EngineConformance:
    """Base class of engine tests; a subclass provides ``served`` and ``make``."""

    async def test_greedy_is_transformers_greedy(self, served: Served) -> None:
        prompts = [prompt_of(length) for length in (1, 2, 7, 16, 33, 50)]
        sampling = Sampling(max_tokens=20, temperature=0)
        results = await asyncio.gather(
            *(served.engine.generate(prompt, sampling, session=session()) for prompt in prompts)
        )
        for prompt, got in zip(prompts, results, strict=True):
            ids = torch.tensor([prompt])
            expected = served.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
            )
            assert got.ids.tolist() == expected[0, len(prompt) :].tolist()
            assert got.finish_reason == "length"
            served.check(prompt, got)

    @pytest.mark.parametrize("temperature", [1.0, 0.6])
    async def test_logprobs_are_those_of_a_plain_pass(self, served: Served, temperature: float) -> None:
        prompts = [prompt_of(length, seed=1) for length in range(3, 60, 5)]
        results = await asyncio.gather(
            *(
                served.engine.generate(
                    prompt, Sampling(max_tokens=5 + 7 * k, temperature=temperature), session=session()
                )
                for k, prompt in enumerate(prompts)
            )
        )
        for k, (prompt, got) in enumerate(zip(prompts, results, strict=True)):
            assert len(got.ids) == 5 + 7 * k
            assert got.versions == ((served.version, len(got.ids)),)
            served.check(prompt, got, temperature)

    async def test_logprobs_ignore_truncated_sampling(self, served: Served) -> None:
        prompt = prompt_of(9, seed=2)
        for sampling in (Sampling(16, top_k=3), Sampling(16, top_p=0.3), Sampling(16, temperature=0.8, top_k=5)):
            got = await served.engine.generate(prompt, sampling, session=session())
            served.check(prompt, got, sampling.temperature)

    async def test_turns_of_an_episode_reuse_their_prefix(self, served: Served) -> None:
        async def episode(name: str, seed: int) -> None:
            history: list[int] = []
            for turn in range(5):
                history += prompt_of(6 + turn, seed=seed)
                got = await served.engine.generate(history, Sampling(8), session=name)
                served.check(history, got)
                history += got.ids.tolist()

        before = await served.engine.stats()
        await asyncio.gather(*(episode(session(), seed) for seed in range(8)))
        after = await served.engine.stats()
        assert after.reused_tokens > before.reused_tokens
        assert after.prefilled_tokens > before.prefilled_tokens

    async def test_rewritten_history_is_not_reused(self, served: Served) -> None:
        name = session()
        prompt = prompt_of(30, seed=3)
        await served.engine.generate(prompt, Sampling(8), session=name)
        for changed in ([*prompt[:11], 5, *prompt[12:]], prompt[:9], prompt_of(40, seed=4)):
            served.check(changed, await served.engine.generate(changed, Sampling(8), session=name))

    async def test_no_prefix_survives_an_update(self, served: Served) -> None:
        name, history = session(), prompt_of(40, seed=5)
        for seed in (11, 12, 13):
            got = await served.engine.generate(history, Sampling(10), session=name)
            served.check(history, got)
            history += got.ids.tolist()
            await served.publish(seed)
            got = await served.engine.generate(history, Sampling(10), session=name)
            assert got.versions == ((served.version, 10),)
            served.check(history, got)
            history += got.ids.tolist()

    async def test_kept_requests_go_on_under_new_weights(self, served: Served) -> None:
        prompts = [prompt_of(length, seed=6) for length in (4, 20, 31, 8, 5, 6, 7, 3, 9, 11)]
        sampling = Sampling(max_tokens=120)
        tasks = [asyncio.ensure_future(served.engine.generate(p, sampling, session=session())) for p in prompts]
        for seed in (21, 22):
            await ticks(served, 40)
            await served.publish(seed, "keep")
        results = await asyncio.gather(*tasks)
        assert max(len(got.versions) for got in results) == 3
        for prompt, got in zip(prompts, results, strict=True):
            assert got.finish_reason == "length"
            assert len(got.ids) == 120
            versions = [version for version, _ in got.versions]
            assert versions == sorted(set(versions))
            served.check(prompt, got)

    async def test_pause_aborts_and_holds_back(self, served: Served) -> None:
        prompts = [prompt_of(length, seed=7) for length in (4, 20, 31, 8, 5, 6, 7, 3, 9, 11)]
        tasks = [asyncio.ensure_future(served.engine.generate(p, Sampling(150), session=session())) for p in prompts]
        await ticks(served, 12)
        await served.engine.pause("abort")
        results = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert {got.finish_reason for got in results} == {"abort"}
        assert sum(len(got.ids) for got in results) > 0
        for prompt, got in zip(prompts, results, strict=True):
            served.check(prompt, got)
        held = asyncio.ensure_future(served.engine.generate(prompts[0], Sampling(3), session=session()))
        before = await served.engine.stats()
        await asyncio.sleep(0.1)
        after = await served.engine.stats()
        assert not held.done()
        assert (before.generated_tokens, before.busy_s) == (after.generated_tokens, after.busy_s)
        await served.engine.resume()
        served.check(prompts[0], await asyncio.wait_for(held, 10))

    async def test_pause_and_resume_are_idempotent(self, served: Served) -> None:
        await served.engine.resume()
        await served.engine.pause("keep")
        await served.engine.pause("abort")
        await served.engine.resume()
        await served.engine.resume()
        prompt = prompt_of(5)
        served.check(prompt, await served.engine.generate(prompt, Sampling(3), session=session()))

    async def test_updates_under_load(self, served: Served) -> None:
        done: list[tuple[list[int], Generation]] = []

        async def worker(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for turn in range(6):
                prompt = prompt_of(int(rng.integers(2, 40)), seed=100 * seed + turn)
                sampling = Sampling(int(rng.integers(1, 40)))
                done.append((prompt, await served.engine.generate(prompt, sampling, session=f"load-{seed}")))

        workers = [asyncio.ensure_future(worker(seed)) for seed in range(10)]
        for seed, mode in ((31, "abort"), (32, "keep"), (33, "abort")):
            await ticks(served, 30)
            await served.publish(seed, mode)  # type: ignore[arg-type]
        await asyncio.wait_for(asyncio.gather(*workers), 60)
        assert len(done) == 60
        assert len({version for _, got in done for version, _ in got.versions}) >= 3
        for prompt, got in done:
            served.check(prompt, got)

    async def test_abort_ends_one_session(self, served: Served) -> None:
        prompt, name = prompt_of(10, seed=8), session()
        aborted = asyncio.ensure_future(served.engine.generate(prompt, Sampling(170), session=name))
        other = asyncio.ensure_future(served.engine.generate(prompt, Sampling(60), session=session()))
        await ticks(served, 10)
        await served.engine.abort(name)
        await served.engine.abort(name)
        await served.engine.abort("unknown")
        got = await asyncio.wait_for(aborted, 10)
        assert got.finish_reason == "abort"
        assert 0 < len(got.ids) < 170
        served.check(prompt, got)
        got = await other
        assert len(got.ids) == 60
        served.check(prompt, got)

    async def test_cancelled_calls_free_their_slots(self, served: Served) -> None:
        prompt = prompt_of(10, seed=9)
        long = [
            asyncio.ensure_future(served.engine.generate(prompt, Sampling(180), session=session())) for _ in range(16)
        ]
        await ticks(served, 8)
        for task in long:
            task.cancel()
        assert await asyncio.gather(*long, return_exceptions=True)
        got = await asyncio.wait_for(served.engine.generate(prompt, Sampling(2), session=session()), 10)
        served.check(prompt, got)
        stats = await served.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    async def test_stop_ids(self, served: Served) -> None:
        prompt = prompt_of(12, seed=10)
        free = await served.engine.generate(prompt, Sampling(40, temperature=0), session=session())
        for k in (0, 5, 23):
            stop = int(free.ids[k])
            first = free.ids.tolist().index(stop)
            got = await served.engine.generate(
                prompt, Sampling(40, temperature=0, stop_ids=(stop, 895)), session=session()
            )
            assert got.ids.tolist() == free.ids[: first + 1].tolist()
            assert got.finish_reason == "stop"
            served.check(prompt, got)

    async def test_stop_strings(self, served: Served) -> None:
        tokenizer = quickstart_tokenizer()
        prompt = prompt_of(12, seed=11)
        free = await served.engine.generate(prompt, Sampling(40, seed=1), session=session())
        for a, b in ((3, 5), (0, 1), (17, 21)):
            text = str(tokenizer.decode(free.ids[a:b]))
            if "\ufffd" in text:
                continue
            sampling = Sampling(40, seed=1, stop_strings=("never in there", text))
            got = await served.engine.generate(prompt, sampling, session=session())
            ends = next(n for n in range(1, 41) if text in str(tokenizer.decode(free.ids[:n])))
            assert got.ids.tolist() == free.ids[:ends].tolist()
            assert got.finish_reason == "stop"

    async def test_seeded_results_do_not_depend_on_traffic(self, served: Served) -> None:
        prompt = prompt_of(12, seed=12)

        def seeded(seed: int) -> Any:
            return served.engine.generate(prompt, Sampling(25, seed=seed), session=session())

        alone = await seeded(1)
        traffic = [served.engine.generate(prompt_of(n), Sampling(n), session=session()) for n in range(5, 40, 5)]
        again, other, *_ = await asyncio.gather(seeded(1), seeded(2), *traffic)
        assert again.ids.tolist() == alone.ids.tolist()
        assert other.ids.tolist() != alone.ids.tolist()

    async def test_seeded_results_do_not_depend_on_how_a_prompt_is_computed(self, served: Served) -> None:
        """Concurrent long prompts, which an engine may compute in parts, and updates that force a new computation."""
        prompts = [prompt_of(length, seed=21) for length in (90, 130, 7, 110, 150, 60)]

        async def play(name: str, update: bool) -> list[list[int]]:
            tasks = [
                asyncio.ensure_future(
                    served.engine.generate(prompt, Sampling(25, seed=k), session=f"{name}-{k}-{session()}")
                )
                for k, prompt in enumerate(prompts)
            ]
            if update:
                await ticks(served, 12)
                await served.publish(served.version, "keep")  # the seed of the weights: other weights each time
            results = await asyncio.gather(*tasks)
            for prompt, got in zip(prompts, results, strict=True):
                served.check(prompt, got)
            return [got.ids.tolist() for got in results]

        first, again = await play("a", False), await play("b", False)
        assert first == again
        await play("c", True)
        alone = [
            await served.engine.generate(prompt, Sampling(25, seed=k), session=session())
            for k, prompt in enumerate(prompts)
        ]
        assert [got.ids.tolist() for got in alone] == await play("d", False)

    async def test_unseeded_requests_differ(self, served: Served) -> None:
        prompt = prompt_of(12, seed=13)
        results = await asyncio.gather(
            *(served.engine.generate(prompt, Sampling(25), session=session()) for _ in range(4))
        )
        assert len({tuple(got.ids) for got in results}) == 4

    @pytest.mark.parametrize(
        "sampling", [Sampling(60), Sampling(60, temperature=0.5), Sampling(60, top_k=6), Sampling(60, top_p=0.5)]
    )
    async def test_samples_follow_the_softmax(self, served: Served, sampling: Sampling) -> None:
        prompts = [prompt_of(8, seed=seed) for seed in range(20)]
        results = await asyncio.gather(
            *(served.engine.generate(prompt, sampling, session=session()) for prompt in prompts)
        )
        drawn = [
            (distribution, int(token))
            for prompt, got in zip(prompts, results, strict=True)
            for distribution, token in zip(distributions(served.model, prompt, got.ids, sampling), got.ids, strict=True)
        ]
        rng = np.random.default_rng(0)
        # By probability: head and tail get their shares. By id: draws of a request do not repeat each other.
        assert_uniform([randomised_rank(p, (p > p[token]).nonzero()[0], token, rng) for p, token in drawn])
        assert_uniform([randomised_rank(p, np.arange(token), token, rng) for p, token in drawn])

    async def test_context_is_a_limit_not_a_crash(self, served: Served) -> None:
        for length in (ENGINE.max_context, ENGINE.max_context + 50):
            with pytest.raises(EngineError, match="max_context"):
                await served.engine.generate(prompt_of(length), Sampling(5), session=session())
        prompt = prompt_of(ENGINE.max_context - 3)
        got = await served.engine.generate(prompt, Sampling(50), session=session())
        assert (len(got.ids), got.finish_reason) == (3, "length")
        served.check(prompt, got)

    @pytest.mark.parametrize("prompt", [[], [3, 4, 1_000_000], [-1, 3]])
    async def test_bad_prompts_are_errors(self, served: Served, prompt: list[int]) -> None:
        with pytest.raises(EngineError):
            await asyncio.wait_for(served.engine.generate(prompt, Sampling(5), session=session()), 10)

    @pytest.mark.parametrize(
        "sampling", [Sampling(0), Sampling(3, temperature=-1.0), Sampling(3, top_p=0.0), Sampling(3, top_k=-2)]
    )
    async def test_bad_sampling_is_an_error(self, served: Served, sampling: Sampling) -> None:
        with pytest.raises(EngineError):
            await asyncio.wait_for(served.engine.generate([5, 6], sampling, session=session()), 10)

    async def test_weights_that_do_not_fit_or_are_gone_change_nothing(self, served: Served) -> None:
        version = served.version + 1
        state: dict[str, torch.Tensor] = policy(41).state_dict()
        norm = next(name for name in state if name.endswith("norm.weight"))
        missing = {name: tensor for name, tensor in state.items() if name != norm}
        misshapen = {**state, norm: torch.ones(3)}
        await served.engine.pause("abort")
        for broken, problem in ((missing, f"lack 1 .* {norm}"), (misshapen, rf"{norm} has shape \(3,\)")):
            with pytest.raises(EngineError, match=problem):
                await served.engine.update_weights(served.staging.stage(version, [list(broken.items())]))
        replaced = served.staging.stage(version, [list(state.items())])
        released = served.staging.stage(version, [list(state.items())])
        with pytest.raises(EngineError, match="publish them again"):
            await served.engine.update_weights(replaced)
        served.staging.release()
        with pytest.raises(EngineError, match="publish them again"):
            await served.engine.update_weights(released)
        await served.engine.resume()
        prompt = prompt_of(10, seed=15)
        got = await served.engine.generate(prompt, Sampling(10), session=session())
        assert got.versions == ((served.version, 10),)
        served.check(prompt, got)

    async def test_counters_count(self, served: Served) -> None:
        before = await served.engine.stats()
        prompt = prompt_of(17, seed=16)
        await asyncio.gather(*(served.engine.generate(prompt, Sampling(9), session=session()) for _ in range(6)))
        after = await served.engine.stats()
        assert after.generated_tokens - before.generated_tokens == 54
        computed = after.prefilled_tokens + after.reused_tokens - before.prefilled_tokens - before.reused_tokens
        assert computed == 6 * 17
        assert after.busy_s > before.busy_s
        assert after.request_s - before.request_s >= 0.99 * (after.busy_s - before.busy_s)
        assert (after.running, after.waiting) == (0, 0)

    async def test_close_ends_all_pending_requests(self, make: Any) -> None:
        served: Served = await make()
        pending = [
            asyncio.ensure_future(served.engine.generate(prompt_of(5), Sampling(180), session=session()))
            for _ in range(8)
        ]
        await ticks(served, 4)
        await served.engine.close()
        await served.engine.close()
        results = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 10)
        assert all(isinstance(result, EngineError) for result in results)
        with pytest.raises(EngineError):
            await served.engine.generate(prompt_of(5), Sampling(3), session=session())
        with pytest.raises(EngineError):
            await served.engine.pause("abort")


@torch.no_grad()
def distributions(model: Any, prompt: Sequence[int], ids: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the distribution of each of ``ids``, ``[n, vocabulary]``: the softmax, truncated by top-k and top-p."""
    tokens = torch.tensor([[*prompt, *ids.tolist()]])
    logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1].double() / sampling.temperature
    probabilities = logits.softmax(-1).numpy()
    for row in probabilities:
        kept, mass = 0, 0.0
        for token in np.argsort(-row):
            if (sampling.top_k and kept >= sampling.top_k) or mass >= sampling.top_p:
                row[token] = 0
            else:
                kept, mass = kept + 1, mass + row[token]
        row /= row.sum()
    return probabilities


def randomised_rank(distribution: np.ndarray, before: np.ndarray, token: int, rng: np.random.Generator) -> float:
    """Uniform on [0, 1) if ``token`` was drawn from ``distribution`` (randomised probability integral transform).

    ``before``: the tokens that precede it in any fixed order.
    """
    assert distribution[token] > 0
    return float(distribution[before].sum() + rng.random() * distribution[token])


def assert_uniform(ranks: list[float]) -> None:
    """Pearson's chi-square test at about 5 sigma."""
    cells = np.histogram(ranks, bins=20, range=(0, 1))[0]
    expected, freedom = cells.sum() / len(cells), len(cells) - 1
    statistic = float(((cells - expected) ** 2).sum() / expected)
    # Wilson and Hilferty (1931): the cube root of chi-square over its degrees of freedom is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 5, (statistic, freedom)
