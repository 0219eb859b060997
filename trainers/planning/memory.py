"""Bytes that each role needs: closed forms over a model's dimensions and the run configuration, without torch.

Invariant: what a role holds all the time (``held``) is exact up to padding and scalars. What it needs for a moment
(``moments``) is an upper bound for full batches of the longest sequences; moments do not coincide, so only the largest
one counts. The allocator, the libraries and the CUDA context (0.5 to 1 GB a process) come on top.

What is saved for the backward pass follows transformers' blocks with fused attention, tensor by tensor
(``saved_per_token``). Sharding follows ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5): stage 1 divides the
optimiser's states by the number of ranks, stage 2 also the gradients, stage 3 also the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentkit.config import LearnerConfig, RunConfig
from agentkit.trainers.planning.architecture import Architecture, Shape, count
from agentkit.trainers.weights.base import BUCKET_BYTES

FLOAT = 4
"""Bytes of a float32 number."""
BYTES = {"float32": 4, "bfloat16": 2}
HOST = " (host)"
"""End of the names of purposes whose bytes are in host memory."""
MAX_LOGITS = 2**26
"""As in ``trainers/learner/forward.py``: logits that the learner computes at once."""
LOGIT_COPIES = 5
"""Float32 arrays as large as the logits that exist at once when a distribution and its entropy are computed."""
MAX_SCORES = 2**26
"""As in ``trainers/learner/attention.py``: numbers of attention maps that are read at once."""
SCORE_COPIES = 2
"""Float32 arrays as large as such a block that exist at once: scores and softmax, or maps and their products."""
PASS_TOKENS = 8192
"""As in ``trainers/inference/batch.py``: prompt tokens that the hf engine computes at once."""
DEEPSPEED_BUCKET = 500_000_000
"""DeepSpeed's default ``reduce_bucket_size``, in numbers; its buffer has this size for every model."""
COLUMN_STEP = 16
"""As in ``trainers/inference/cache.py``: row lengths are multiples of this."""
IDLE_BATCHES = 4
"""As in ``trainers/inference/hf.py``: largest memory of waiting sessions, in full batches."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process of a role."""

    held: dict[str, int]
    """All the time, by purpose."""
    moments: dict[str, int] = field(default_factory=dict)
    """For a moment; the largest counts."""

    @property
    def total(self) -> int:
        return sum(self.held.values()) + max(self.moments.values(), default=0)

    @property
    def host(self) -> int:
        """Bytes of ``total`` that are in host memory also if the role computes on a GPU."""
        return sum(size for purpose, size in self.held.items() if purpose.endswith(HOST))


@dataclass(frozen=True, slots=True)
class Shards:
    """By how much weights, gradients and optimiser states are divided over ranks."""

    weights: int = 1
    gradients: int = 1
    states: int = 1

    @classmethod
    def of(cls, learner: LearnerConfig) -> Shards:
        """Return the divisors of the configured back end; FSDP divides like ZeRO's stage 3."""
        if learner.backend == "fsdp":
            stage, ranks = 3, learner.shard_size or learner.ranks
        else:
            stage, ranks = learner.zero, learner.ranks
        return cls(*(ranks if stage >= needed else 1 for needed in (3, 2, 1)))


def adapters(policy: Architecture, config: RunConfig) -> dict[str, Shape]:
    """Return name and shape of the trained adapters: ``A`` ``[rank, in]`` and ``B`` ``[out, rank]`` of each layer."""
    lora = config.model.lora
    if lora is None:
        return {}
    wanted = lora.target_modules
    shapes: dict[str, Shape] = {}
    for name, (out, width) in policy.linears.items():
        if wanted == "all-linear" or name.split(".")[-1] in wanted or name in wanted:
            for layer in range(policy.layers):
                shapes[f"layers.{layer}.{name}.lora_A"] = (lora.rank, width)
                shapes[f"layers.{layer}.{name}.lora_B"] = (out, lora.rank)
    return shapes


def optimizer_states(shapes: Mapping[str, Shape], optimizer: str) -> int:
    """Return the bytes of the optimiser's states for float32 parameters: two moments, or one for Muon's matrices.

    Muon takes the matrices inside the model; embeddings, output layer and vectors have AdamW's two moments.
    """
    total = 0
    for name, shape in shapes.items():
        inside = len(shape) == 2 and min(shape) > 1 and "embed_tokens" not in name and "lm_head" not in name
        total += math.prod(shape) * FLOAT * (1 if optimizer == "muon" and inside else 2)
    return total


def saved_per_token(model: Architecture, dtype: str) -> int:
    """Return the bytes that the blocks and the last norm save for the backward pass, per token."""
    return model.layers * saved_by_block(model, dtype) + _saved_by_rest(model)


def _saved_by_rest(model: Architecture) -> int:
    positions = 8 + 2 * model.head_width * FLOAT  # ids, cosines and sines
    return 2 * model.hidden * FLOAT + FLOAT + positions


def saved_by_block(model: Architecture, dtype: str) -> int:
    """Return the bytes that one block saves for the backward pass, per token.

    One block in float32: input, normalised input and output of two norms; queries, keys, values and output of
    attention; gate, its activation, the other factor and their product. Under bfloat16 autocast norms stay float32,
    and each of the five linear layers behind a norm saves its own bfloat16 copy of the input.
    """
    hidden, heads = model.hidden, model.heads
    small = 2 * FLOAT + heads * FLOAT  # scales of the two norms; log-sum-exp of attention
    wide = 2 * model.query + 2 * model.key_value + 4 * model.intermediate
    if dtype == "bfloat16":
        block = 2 * 2 * hidden * FLOAT + 5 * hidden * 2 + wide * 2 + small
        head_norm = FLOAT + 2
    else:
        block = 2 * 3 * hidden * FLOAT + wide * FLOAT + small
        head_norm = 2 * FLOAT
    if model.head_norms:
        block += (model.query + model.key_value) * head_norm + (heads + model.key_heads) * FLOAT
    return block


def learner(config: RunConfig, policy: Architecture, critic: Architecture | None = None) -> Memory:
    """Return the memory of one learner rank.

    Args:
        config: settings of the run.
        policy: the policy's architecture.
        critic: the critics', if the run has any; all of them have the same one.
    """
    settings = config.learner
    shards = Shards.of(settings)
    trained: Mapping[str, Shape] = adapters(policy, config) or policy.tensors
    lora, dtype = config.model.lora is not None, config.model.dtype
    base = count(policy.tensors) * BYTES[dtype] if lora else 0
    held = _model(trained, settings, shards, base)
    if config.algorithm.kl != "none":
        held["reference"] = FLOAT * count(trained) // shards.weights
    tokens = _tokens(config, settings.ranks)
    moments = {"forward and backward": _pass(policy, config, shards, tokens, head=True)}
    if config.algorithm.credit != "none":
        moments["reading of attention maps"] = _reading(policy, config, tokens)
    if critic is not None and config.critic is not None:
        shapes = {**critic.trunk, "output.weight": (1, critic.hidden), "output.bias": (1,)}
        one, name = _model(shapes, settings, shards), "critic" if config.critic.count == 1 else "critics"
        held |= {f"{name} {purpose}": config.critic.count * size for purpose, size in one.items()}
        moments["critic forward and backward"] = _pass(critic, config, shards, tokens, head=False)
    moments["optimizer step"] = FLOAT * max(math.prod(shape) for shape in trained.values()) * 2
    published = count(policy.tensors) * BYTES[dtype]
    if not config.engine.share_weights:
        sent = config.engine.weights in ("nccl", "gloo", "ipc")
        moments["bucket of published weights"] = min(published, BUCKET_BYTES) * (1 + sent)
        if not sent:
            held[f"published weights{HOST}"] = published
    return Memory(held, moments)


def _model(trained: Mapping[str, Shape], learner: LearnerConfig, shards: Shards, base: int = 0) -> dict[str, int]:
    """Return the bytes of a model with its optimiser on one rank; ``base``: bytes of weights that are not trained."""
    weights = FLOAT * count(trained)
    host = HOST if learner.offload_optimizer else ""
    held = {
        "weights": (base + weights) // shards.weights,
        "gradients": weights // shards.gradients,
        f"optimizer states{host}": optimizer_states(trained, learner.optimizer) // shards.states,
    }
    if learner.backend == "deepspeed" and shards.states > 1:  # AdamW steps on flat partitions beside the parameters
        held[f"flat weights{host}"] = weights // shards.states
        held["communication buffer"] = FLOAT * DEEPSPEED_BUCKET
    return held


def engine(config: RunConfig, policy: Architecture) -> Memory:
    """Return the memory of one process of an engine: weights, keys and values of a full batch, and the largest pass.

    ``engine.tensor_parallel`` processes share weights, keys and values.
    """
    settings, size = config.engine, BYTES[config.model.dtype]
    parts = settings.tensor_parallel
    rows = 1 if config.deterministic else settings.max_batch
    per_token = 2 * policy.layers * policy.key_value * size
    columns = -(-settings.max_context // COLUMN_STEP) * COLUMN_STEP
    held = {
        "weights": 0 if settings.share_weights else count(policy.tensors) * size // parts,
        "KV cache": rows * columns * per_token // parts,
    }
    if settings.kind == "hf" and not config.deterministic:
        held["KV cache of waiting sessions"] = IDLE_BATCHES * rows * settings.max_context * per_token
    tokens = min(PASS_TOKENS, rows * settings.max_context)
    wide = 2 * policy.hidden + 3 * policy.intermediate
    return Memory(held, {"forward": tokens * wide * size + 3 * rows * policy.vocabulary * FLOAT})


def _tokens(config: RunConfig, ranks: int) -> int:
    """Return the most tokens of one of the learner's forward passes: a full micro-batch, or all that a rank gets."""
    longest = config.engine.max_context
    share = -(-config.rollout.groups * config.rollout.group_size // ranks)
    return min(max(config.learner.max_tokens, longest), share * longest)


def _reading(model: Architecture, config: RunConfig, tokens: int) -> int:
    """Return the bytes of the forward pass that reads attention maps: a block of them with the inputs of one layer's
    attention, or one layer's MLP."""
    scores = min(MAX_SCORES, model.heads * tokens * config.engine.max_context)
    inputs = tokens * (5 * model.hidden + 5 * model.query + 3 * model.key_value)  # keys and values once per query head
    mlp = tokens * (2 * model.hidden + 3 * model.intermediate)
    return FLOAT * max(SCORE_COPIES * scores + inputs, mlp)


def _pass(model: Architecture, config: RunConfig, shards: Shards, tokens: int, *, head: bool) -> int:
    """Return the bytes of activations of a forward and a backward pass over ``tokens``, of which all are actions.

    Sharded weights are gathered for two blocks, of which one is computed, or for embedding and output layer.
    """
    dtype, fsdp = config.model.dtype, config.learner.backend == "fsdp"
    again = config.learner.activation_checkpointing
    inputs = model.layers * model.hidden * FLOAT + _saved_by_rest(model)
    saved = tokens * (inputs if again else saved_per_token(model, dtype))
    if dtype == "bfloat16" and not fsdp:  # autocast keeps a copy of each matrix until the backward pass
        saved += BYTES[dtype] * model.layers * sum(math.prod(shape) for shape in model.linears.values())
    if shards.weights > 1:
        ends = count(model.tensors) - model.layers * count(model.block)
        saved += max(2 * count(model.block), ends) * (BYTES[dtype] if fsdp else FLOAT)
    backward = tokens * (3 * model.intermediate + 2 * model.hidden) * FLOAT
    if again:  # one block at a time computes what it would have saved
        backward += tokens * saved_by_block(model, dtype)
    if not head:
        return saved + backward
    rows = min(tokens, max(1, MAX_LOGITS // model.vocabulary))
    logits = LOGIT_COPIES * rows * model.vocabulary * FLOAT + 2 * tokens * model.hidden * FLOAT
    return saved + max(backward, logits)
