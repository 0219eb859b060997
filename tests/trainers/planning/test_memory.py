"""Planned bytes against those of real learners and engines on the CPU."""

from __future__ import annotations

import unittest.mock
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM

from agentkit.config import RunConfig
from agentkit.trainers.batch import Batch, flatten
from agentkit.trainers.inference import batch as engine_batch
from agentkit.trainers.inference import cache, hf
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.learner import attention, forward
from agentkit.trainers.learner.training import Training
from agentkit.trainers.planning import memory
from agentkit.trainers.planning.architecture import critic_architecture, read_architecture
from agentkit.types import Group, Trajectory, Turn

LENGTH, GROUPS, SIZE = 128, 4, 2


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights; the embedding of Qwen3 is tied, that of Llama is not."""
    config = AutoConfig.for_model(
        request.param,
        vocab_size=400,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=request.param == "qwen3",
    )
    directory = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def configure(model: Path) -> Callable[..., RunConfig]:
    def build(**sections: Any) -> RunConfig:
        base: dict[str, Any] = {
            "env": {"id": "Test-v0", "max_turns": 4},
            "rollout": {"groups": GROUPS, "group_size": SIZE, "max_tokens": LENGTH - 8},
            "engine": {"max_context": LENGTH, "max_batch": 4},
            "learner": {"max_tokens": 4 * LENGTH},
            "model": {"path": str(model), "device": "cpu"},
        }
        return RunConfig.model_validate({**base, **{key: base.get(key, {}) | new for key, new in sections.items()}})

    return build


def full_batch(vocabulary: int = 400) -> Batch:
    """Episodes of the greatest length, almost all of it actions."""
    rng = np.random.default_rng(0)
    actions = LENGTH - 8

    def episode(group: int, member: int) -> Trajectory:
        turn = Turn(
            prompt_ids=rng.integers(0, vocabulary, 8).astype(np.int32),
            action_ids=rng.integers(0, vocabulary, actions).astype(np.int32),
            action_logprobs=np.full(actions, -6.0, np.float32),
            versions=((0, actions),),
            reward=float(rng.normal()),
        )
        return Trajectory(group, member, "test", 0, 0, [turn], np.empty(0, np.int32), "terminated")

    return flatten([Group(g, 0, 0, [episode(g, m) for m in range(SIZE)]) for g in range(GROUPS)])


def size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def states(optimizer: Any) -> int:
    """Bytes of an optimiser's states, without the counters of its steps."""
    parts = getattr(optimizer, "parts", [optimizer])
    return size(value for part in parts for state in part.state.values() for value in state.values() if value.ndim)


def planned_tensors(training: Training) -> Iterator[torch.Tensor]:
    """What a learner holds between two steps."""
    yield from training.policy.scorer.parameters()
    yield from (training.reference or {}).values()
    optimizers = [training.backend.optimizer]
    for critic in training.critics:
        yield from critic.model.parameters()
        optimizers.append(critic.backend.optimizer)
    for optimizer in optimizers:
        for part in getattr(optimizer, "parts", [optimizer]):
            yield from (value for state in part.state.values() for value in state.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that exist: those of ``held``, and those that operations make."""

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.now = self.peak = 0
        for tensor in held:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._add(value)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, size: int) -> None:
        self.now -= size


CASES: dict[str, tuple[dict[str, Any], float]] = {
    # name: (settings, largest planned peak relative to the measured one)
    "float32": ({}, 1.1),
    "bfloat16": ({"model": {"dtype": "bfloat16"}}, 1.1),
    "reference and muon": ({"algorithm": {"kl": "k3", "kl_coef": 0.1}, "learner": {"optimizer": "muon"}}, 1.1),
    "critic": ({"algorithm": {"advantage": "gae"}, "critic": {}}, 1.15),
    "critics": ({"algorithm": {"advantage": "gae"}, "critic": {"count": 2, "layers": 1, "hidden_size": 40}}, 1.15),
    "attention credit": ({"algorithm": {"credit": "coupled"}}, 1.1),
    "adapters": ({"model": {"lora": {"rank": 4}}}, 1.35),
    "checkpointing": ({"learner": {"activation_checkpointing": True}}, 1.2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_learner_holds_what_is_planned_and_peaks_below_it(case: str, configure: Callable[..., RunConfig]) -> None:
    sections, slack = CASES[case]
    config = configure(**sections)
    policy = read_architecture(config.model.path)
    planned = memory.learner(config, policy, critic_architecture(config, policy))
    batch = full_batch()
    training = Training(config, 0, 1, None)
    training.train(batch, 0)  # the optimisers, the reference and the critic exist from here on
    critics = training.critics
    assert planned.held["weights"] == size(training.policy.scorer.parameters())
    assert planned.held["gradients"] == size(training.backend.parameters.values())
    assert planned.held["optimizer states"] == states(training.backend.optimizer)
    assert planned.held.get("reference", 0) == size((training.reference or {}).values())
    name = "critics" if len(critics) > 1 else "critic"
    assert planned.held.get(f"{name} weights", 0) == size(p for critic in critics for p in critic.model.parameters())
    assert planned.held.get(f"{name} optimizer states", 0) == sum(states(c.backend.optimizer) for c in critics)

    with LiveBytes(planned_tensors(training)) as live:
        training.train(batch, 1)
    needed = planned.total - planned.held["published weights (host)"]
    assert live.peak <= needed <= slack * live.peak, f"{needed / live.peak:.3f}"


def test_reading_attention_maps_peaks_below_the_plan(configure: Callable[..., RunConfig]) -> None:
    """The pass alone, on a batch of the longest sequences, in blocks that are smaller than a map."""
    config = configure(algorithm={"credit": "coupled"})
    policy, batch = read_architecture(config.model.path), full_batch()
    training = Training(config, 0, 1, None)
    held = size(training.policy.scorer.parameters())
    for scores in (memory.MAX_SCORES, 20_000):
        with (
            unittest.mock.patch.object(memory, "MAX_SCORES", scores),
            unittest.mock.patch.object(attention, "MAX_SCORES", scores),
        ):
            planned = memory.learner(config, policy).moments["reading of attention maps"]
            with LiveBytes(planned_tensors(training)) as live:
                assert training.credit is not None
                training._give_credit(training.credit, batch, np.arange(8), {"advantages": torch.zeros(8 * LENGTH)})
        assert live.peak - held <= planned <= 1.35 * (live.peak - held), f"{planned / (live.peak - held):.3f}"


SHARDED = {
    # back end: divisors of weights, gradients and optimiser states by 4 ranks
    ("replicas", 0): (1, 1, 1),
    ("deepspeed", 0): (1, 1, 1),
    ("deepspeed", 1): (1, 1, 4),
    ("deepspeed", 2): (1, 4, 4),
    ("deepspeed", 3): (4, 4, 4),
    ("fsdp", 0): (4, 4, 4),
}


@pytest.mark.parametrize(("backend", "stage"), SHARDED)
def test_ranks_share_what_their_back_end_divides(backend: str, stage: int, configure: Callable[..., RunConfig]) -> None:
    zero = {"zero_stage": stage} if backend == "deepspeed" else {}
    alone, shared = configure(), configure(learner={"ranks": 4, "backend": backend, **zero}, cluster={})
    policy = read_architecture(alone.model.path)
    whole, part = memory.learner(alone, policy).held, memory.learner(shared, policy).held
    for purpose, divisor in zip(("weights", "gradients", "optimizer states"), SHARDED[backend, stage], strict=True):
        assert part[purpose] == whole[purpose] // divisor


async def test_engine_allocates_the_planned_cache(configure: Callable[..., RunConfig]) -> None:
    config = configure(engine={"max_context": 100, "max_batch": 3}, rollout={"max_tokens": 16})
    planned = memory.engine(config, read_architecture(config.model.path))
    engine = HFEngine(config.model, config.engine, seed=0)
    await engine.start()
    try:
        core = engine._core
        assert core is not None
        rows = core._batch._cache
        assert planned.held["KV cache"] == rows.keys.nbytes + rows.values.nbytes
        assert planned.held["weights"] == size(core._model.parameters())
        per_token = planned.held["KV cache"] // (3 * 112)
        assert planned.held["KV cache of waiting sessions"] == core._store._budget * per_token
    finally:
        await engine.close()


def test_constants_are_those_of_learner_and_engine() -> None:
    assert memory.MAX_LOGITS == forward.MAX_LOGITS
    assert memory.PASS_TOKENS == engine_batch._PASS_TOKENS
    assert memory.COLUMN_STEP == cache._COLUMN_STEP
    assert memory.IDLE_BATCHES == hf._IDLE_BATCHES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_activations_are_counted_to_the_byte(model: Path, dtype: str) -> None:
    """What autograd saves in the trunk, apart from weights, against the closed form."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        kept = policy.base_model(input_ids=ids, use_cache=False).last_hidden_state
    architecture = read_architecture(str(model))
    planned = LENGTH * memory.saved_per_token(architecture, dtype)
    if dtype == "bfloat16":
        planned += 2 * architecture.layers * sum(out * width for out, width in architecture.linears.values())
    assert kept.requires_grad
    assert sum(found.values()) == planned
