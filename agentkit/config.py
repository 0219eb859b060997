"""The run configuration: strict models, one field one line of documentation, no torch.

Invariant: a configuration that validates can start. A misspelt key, a wrong type or a contradiction between two
settings raises before anything runs. ``agentkit.config_io`` reads files and overrides and words the errors;
``docs/configuration.md`` is generated from the docstrings below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Base: unknown keys are errors, values are never coerced from another type, instances are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class EnvConfig(Strict):
    """Which environment, and how the model talks to it."""

    id: str
    """Registered name, such as `FrozenLake-v1` (`agentkit env list`)."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment (`agentkit env info ID`)."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns after which an episode is truncated; null is the environment's own limit."""
    actions_per_turn: int | None = Field(default=None, ge=1)
    """Most actions that one answer may hold, separated by `||`; null is the environment's own number."""
    parser: Literal["tagged", "plain"] = "tagged"
    """How an answer is read: inside `<answer>…</answer>`, or the whole text as one action."""
    format_penalty: float = Field(default=-0.1, le=0)
    """Added to the reward of a turn whose answer has no valid format or names an action that does not exist."""
    first_seed: int = Field(default=0, ge=0)
    """Seed of the first training task; the k-th task has seed `first_seed + k`."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Tasks after which the seeds start again; null never repeats one."""
    concurrency: Literal["inline", "thread", "process"] | None = None
    """Where steps run; null is what the environment declares. What may hang belongs in a process."""
    step_timeout: float = Field(default=30.0, gt=0)
    """Seconds that one `step` may take before the environment counts as hung."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds that making and resetting an environment may take."""
    recovery: Literal["retry", "replay", "void"] = "retry"
    """What becomes of an episode whose environment died or hung: played anew from its seed (`retry`, at most
    `rollout.retries` times), brought back by its seed and actions and continued (`replay`, for deterministic
    environments), or voided at once."""
    sandbox: Literal["none", "local", "docker"] = "none"
    """Where environments run: in this run's own processes, or isolated (`agentkit sandbox build` makes the image)."""
    sandbox_spec: dict[str, Any] = Field(default_factory=dict)
    """Fields of the sandboxes' specification, such as `{image: mine, resources: {memory: 2g}}`."""
    sandbox_share: int = Field(default=64, ge=1)
    """Most environments in one sandbox, if they declare to run `inline`; all others have one each."""
    sandbox_spread: int = Field(default=8, ge=1)
    """One sandbox holds at most this part (1/8) of the running environments, so that losing it loses no more. Makes up
    to 15 sandboxes, each with the environment's data in memory; 1 makes as few as `sandbox_share` allows."""


class LoraConfig(Strict):
    """Train low-rank adapters instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input while training."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Which modules get adapters."""


class ModelConfig(Strict):
    """The policy."""

    path: str = "quickstart"
    """`quickstart` (a small model that agentkit builds itself), a run directory, or any Hugging Face causal LM."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto` takes a GPU where there is one."""
    lora: LoraConfig | None = None
    """Low-rank adapters; null trains every weight."""


class EngineConfig(Strict):
    """The inference engine."""

    kind: Literal["hf", "vllm"] = "hf"
    """`hf` is the embedded engine over transformers; `vllm` needs the extra of that name."""
    max_batch: int = Field(default=64, ge=1)
    """Most requests computed at once; more wait in line."""
    max_context: int = Field(default=1024, ge=16)
    """Tokens of the longest sequence; an episode that outgrows it is truncated."""
    placement: Literal["inline", "process"] = "inline"
    """In the controller's process or in one of its own."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch for this role; null leaves torch's default."""
    share_weights: bool = False
    """Use the learner's weights in place instead of a copy: less memory, but generation and training then exclude
    each other."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for vLLM's engine, passed through."""


class RolloutConfig(Strict):
    """How episodes are gathered."""

    groups: int = Field(default=16, ge=1)
    """Groups that one training step consumes."""
    group_size: int = Field(default=8, ge=1)
    """Episodes of one task in a group."""
    extra_groups: int = Field(default=0, ge=0)
    """Redundant groups: the first `groups` that finish are used, the rest is cancelled."""
    extra_members: int = Field(default=0, ge=0)
    """Redundant episodes in a group: the first `group_size` that finish are used, the rest is cancelled."""
    async_ratio: float = Field(default=0.0, ge=0)
    """How far rollout may run ahead of training; 0 is synchronous. No sample older than its ceiling is trained on."""
    in_flight: Literal["retry", "continue"] = "retry"
    """What a weight update does to turns being generated: generate the turn again, or go on with the new weights."""
    max_tokens: int = Field(default=32, ge=1)
    """Most tokens of one answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probabilities are recorded at this temperature."""
    retries: int = Field(default=2, ge=0)
    """Fresh environments that a member may get after a failed one, before its group is voided."""
    max_failure_share: float = Field(default=0.5, gt=0, le=1)
    """The run stops when more than this share of the last episodes had a failing environment."""
    dynamic_sampling: bool = False
    """Replace groups that carry no signal for the advantage: under a group baseline, those whose members all earned
    the same; with `gigpo`, only if no two turns in the same state had different returns either."""
    max_refills: float = Field(default=2.0, ge=0)
    """Most zero-signal groups replaced in a step, as a multiple of `groups`; beyond it they are used as they are."""


class GateConfig(Strict):
    """What happens to episodes that are about to become too old."""

    policy: Literal["wait", "drop"] = "wait"
    """`wait`: the learner waits for them, so that long episodes are trained on like short ones. `drop`: they are
    dropped and replaced."""


class CriticConfig(Strict):
    """A value model, needed by the `gae` advantage."""

    path: str | None = None
    """Model to start from; null copies the policy's initial weights."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of the critic. The default suits pretrained models; small models that learn from scratch need about
    1e-3."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """Clip of the value loss around the old values; null is off."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps in which only the critic learns."""


class AlgorithmConfig(Strict):
    """The maths: advantage, loss, regularisation."""

    advantage: Literal[
        "reinforce", "grpo", "gigpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"
    ] = "grpo"
    """Advantage estimator."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount: per turn for `reinforce` and `gigpo`, per action token for `reinforce_pp` and `gae`."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """GAE's lambda."""
    loss: Literal["ppo", "decoupled_ppo", "tis", "cispo", "pg"] = "ppo"
    """Policy loss."""
    clip_low: float = Field(default=0.2, ge=0)
    """Lower clip: the ratio is kept above `1 - clip_low`."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip: the ratio is kept below `1 + clip_high`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of negative advantages (3 is usual); null is off."""
    is_cap: float = Field(default=2.0, gt=0)
    """Bound on importance weights: `tis` and the KL loss truncate to it, `decoupled_ppo` masks tokens beyond it."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over tokens, mean of sequences' means, or sum over a constant length (`max_tokens` times turns)."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL divergence to the initial policy."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Clip of advantages; null is off."""


class LearnerConfig(Strict):
    """How batches become weights."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (for the matrices, AdamW for the rest) learns from several times fewer samples when a model is young."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of the policy. The default suits the full training of pretrained models; adapters
    (`model.lora`) need about 1e-5, small models that learn from scratch about 1e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps that one batch is split into, by whole groups."""
    epochs: int = Field(default=1, ge=1)
    """Passes over one batch."""
    max_tokens: int = Field(default=16384, ge=64)
    """Tokens, padding included, of one forward pass; affects memory and speed, never the result."""
    placement: Literal["inline", "process"] = "inline"
    """In the controller's process or in one of its own."""
    ranks: int = Field(default=1, ge=1)
    """Data-parallel processes; more than one needs `placement: process`."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch for this role; null leaves torch's default."""


class ImitationConfig(Strict):
    """Behaviour cloning of the environment's expert before (or instead of) reinforcement learning."""

    episodes: int = Field(default=512, ge=1)
    """Expert episodes."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of the expert's actions that a random one takes the place of. Who imitates a noisy expert hesitates where
    who imitates a perfect one for too short a time errs: exploration that reinforcement learning can build on."""
    epochs: int = Field(default=1, ge=1)
    """Passes over them."""
    batch_episodes: int = Field(default=32, ge=1)
    """Episodes of one optimiser step."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of this stage."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate; the last two end at 0, which makes most of a given number of episodes."""
    stop_success: float | None = Field(default=None, gt=0, le=1)
    """Stop early once the success on training tasks reaches this share of the demonstrations'; null never stops."""
    check_every: int = Field(default=20, ge=1)
    """Optimiser steps between two measurements for `stop_success`."""
    check_episodes: int = Field(default=64, ge=1)
    """Episodes of one such measurement."""


class EvaluationConfig(Strict):
    """Measurements on tasks that are not trained on."""

    every: int = Field(default=0, ge=0)
    """Training steps between evaluations; 0 evaluates before and after training only."""
    episodes: int = Field(default=128, ge=1)
    """Episodes of one evaluation."""
    first_seed: int = Field(default=1_000_000, ge=0)
    """Seed of the first evaluation task."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment that differ from training (`split: test`, say)."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class CheckpointConfig(Strict):
    """When to save, and how much to keep."""

    every: int = Field(default=10, ge=0)
    """Training steps between checkpoints; 0 saves at the end only."""
    keep: int = Field(default=2, ge=1)
    """Latest checkpoints that are kept."""


class RunConfig(Strict):
    """One run of `agentkit run`."""

    env: EnvConfig
    name: str = "run"
    """Name of the run, shown by trackers."""
    dir: Path = Field(default=Path("runs/run"), strict=False)
    """Run directory; one that holds a run with a checkpoint needs `--resume` or `--again`."""
    seed: int = Field(default=0, ge=0)
    """The one seed from which every random number of the run follows."""
    steps: int = Field(default=20, ge=0)
    """Training steps; 0 is imitation only."""
    deterministic: bool = False
    """Two runs of one seed are equal bit for bit, at the price of speed."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    gate: GateConfig = GateConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    """The value model; needed by, and only by, the `gae` advantage."""
    learner: LearnerConfig = LearnerConfig()
    imitation: ImitationConfig | None = None
    """Behaviour cloning before reinforcement learning; null starts from the model as it is."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Besides `metrics.jsonl`, which is always written."""

    @model_validator(mode="after")
    def _contradictions(self) -> RunConfig:
        for problem in contradictions(self):
            raise ValueError(problem)
        return self


def attempts(config: RunConfig) -> int:
    """Environments that one member of a group may use up before it counts as lost."""
    return 1 if config.env.recovery == "void" else config.rollout.retries + 1


def contradictions(config: RunConfig) -> Iterator[str]:
    """Pairs of settings that cannot both hold, each as one sentence that names both keys and the way out."""
    yield from _engine_contradictions(config)
    yield from _algorithm_contradictions(config)
    rollout, env = config.rollout, config.env
    if env.sandbox == "none" and env.sandbox_spec:
        yield "env.sandbox_spec describes sandboxes, and env.sandbox=none has none: set env.sandbox or drop it"
    if env.sandbox != "none" and env.concurrency is not None:
        yield (
            f"env.concurrency={env.concurrency} and env.sandbox={env.sandbox} contradict: in a sandbox steps run "
            "as the environment declares; drop one of them"
        )
    if config.learner.ranks > 1 and config.learner.placement != "process":
        yield f"learner.ranks={config.learner.ranks} needs learner.placement=process: each rank is a process"
    if config.deterministic and (rollout.async_ratio > 0 or rollout.extra_groups > 0 or rollout.extra_members > 0):
        yield (
            "deterministic=true needs rollout.async_ratio=0, rollout.extra_groups=0 and rollout.extra_members=0: "
            "whatever finishes first is decided by the clock"
        )
    if config.imitation is None and config.steps == 0:
        yield "steps=0 without an imitation section leaves nothing to do: set steps or add `imitation: {}`"


def _engine_contradictions(config: RunConfig) -> Iterator[str]:
    engine, rollout = config.engine, config.rollout
    if engine.share_weights and rollout.async_ratio > 0:
        yield (
            f"engine.share_weights=true and rollout.async_ratio={rollout.async_ratio} contradict: an engine that uses "
            "the learner's weights in place would generate with half-updated ones; set one of them to false or 0"
        )
    if engine.share_weights and (engine.kind != "hf" or "process" in (engine.placement, config.learner.placement)):
        yield (
            "engine.share_weights=true needs engine.kind=hf with engine.placement and learner.placement inline: "
            "memory is shared within one process"
        )
    if engine.share_weights and config.model.lora is not None:
        yield "engine.share_weights=true and model.lora contradict: the engine serves merged weights; drop one of them"
    if config.deterministic and engine.kind != "hf":
        yield f"deterministic=true needs engine.kind=hf, not {engine.kind}: its batches depend on arrival times"
    if rollout.max_tokens >= engine.max_context:
        yield (
            f"rollout.max_tokens={rollout.max_tokens} leaves no room for a prompt in "
            f"engine.max_context={engine.max_context}"
        )


def _algorithm_contradictions(config: RunConfig) -> Iterator[str]:
    algorithm, rollout, minibatches = config.algorithm, config.rollout, config.learner.minibatches
    if rollout.groups % minibatches:
        yield (
            f"rollout.groups={rollout.groups} is not divisible by learner.minibatches={minibatches}: "
            "a minibatch holds whole groups; change one of them"
        )
    if algorithm.advantage == "gae" and config.critic is None:
        yield "algorithm.advantage=gae needs a critic: add `critic: {}` or choose another advantage"
    if algorithm.advantage != "gae" and config.critic is not None:
        yield (
            f"a critic section without algorithm.advantage=gae (it is {algorithm.advantage}) would train for nothing: "
            "drop the section or set algorithm.advantage=gae"
        )
    group_baseline = algorithm.advantage in ("grpo", "gigpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
    if rollout.group_size < 2 and group_baseline:
        yield (
            f"rollout.group_size={rollout.group_size} with algorithm.advantage={algorithm.advantage}: a group baseline "
            "of one member is its own reward, so that nothing would be learnt; use group_size >= 2 or reinforce"
        )
    if rollout.dynamic_sampling and algorithm.advantage in ("reinforce_pp", "gae"):
        yield (
            f"rollout.dynamic_sampling=true with algorithm.advantage={algorithm.advantage} replaces nothing: this "
            "advantage compares a group with the rest of the batch, so every group carries signal; drop the setting "
            "or choose an advantage with a group baseline"
        )
    if algorithm.kl_coef > 0 and algorithm.kl == "none":
        yield f"algorithm.kl_coef={algorithm.kl_coef} but algorithm.kl=none: choose k1, k2 or k3, or set kl_coef=0"
