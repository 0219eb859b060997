"""The run configuration, as strict models.

Invariant: misspelt keys, wrong types and contradictory settings raise before anything starts. ``agentkit.config_io``
reads files and overrides and formats the errors; ``docs/configuration.md`` is generated from the docstrings below.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from agentkit import plugins
from agentkit.tool_calls import ToolFormatName


class Strict(BaseModel):
    """Base class: unknown keys are errors, values are not converted from other types, instances are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class HealthConfig(Strict):
    """Health checks of the run's sandboxes. Times are in seconds. A hung sandbox is detected after at most
    `ping_interval + ping_failures * ping_timeout`."""

    ping_interval: float = Field(default=2.0, gt=0)
    """Time between two pings of a sandbox."""
    ping_timeout: float = Field(default=0.9, gt=0)
    """Time without a sign of life after which a ping is missed."""
    ping_failures: int = Field(default=3, ge=1)
    """Missed pings in a row after which a sandbox is replaced."""
    canary_interval: float = Field(default=30.0, gt=0)
    """Time between two test commands in a spare sandbox."""
    canary_timeout: float = Field(default=5.0, gt=0)
    """Time that a test command may take."""
    reconcile_interval: float = Field(default=15.0, gt=0)
    """Time between two comparisons with the list of sandboxes of the engine or the servers."""
    watermark: float = Field(default=0.9, gt=0, le=1)
    """Share of this machine's memory or disk in use from which no sandbox is created here; sandbox servers have
    watermarks of their own."""


class EnvConfig(Strict):
    """The environment, and how it runs."""

    id: str
    """Registered name, such as `FrozenLake-v1` (`agentkit env list`), `openenv:URL` of an OpenEnv server, or
    `harbor:FOLDER` with tasks of Harbor."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment (`agentkit env info ID`)."""
    max_turns: int | None = Field(default=None, ge=1)
    """Turns after which an episode is truncated; null uses the environment's limit."""
    actions_per_turn: int | None = Field(default=None, ge=1)
    """Maximum number of actions in one answer, separated by `||`; null uses the environment's number."""
    parser: Annotated[str, AfterValidator(plugins.PARSER.check_name)] = "tagged"
    """How actions are read: from `<answer>…</answer>` (`tagged`), the whole answer as one action (`plain`), as the
    last number of the answer (`number`), or by a plug-in."""
    parser_options: dict[str, Any] = Field(default_factory=dict)
    """Options of a plug-in `parser`."""
    format_penalty: float = Field(default=-0.1, le=0)
    """Added to the reward of a turn whose answer has an invalid format or an unknown action."""
    first_seed: int = Field(default=0, ge=0)
    """Seed of the first training task; the k-th task has seed `first_seed + k`."""
    num_tasks: int | None = Field(default=None, ge=1)
    """Number of tasks, after which the seeds repeat; null never repeats a task."""
    concurrency: Literal["inline", "thread", "process"] | None = None
    """Where steps run; null uses the environment's declaration. Use `process` for environments that may hang."""
    step_timeout: float = Field(default=30.0, gt=0)
    """Seconds that one `step` may take before the environment counts as hung."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds that making and resetting an environment may take."""
    recovery: Literal["retry", "replay", "void"] | None = None
    """What to do if an environment dies or hangs: start the episode again from its seed (`retry`, at most
    `rollout.retries` times), continue it in another environment that repeats its actions (`replay`, for deterministic
    environments), or void the episode (`void`). null: `replay` for deterministic environments, otherwise `retry`.
    Environments that make sandboxes themselves hold hidden tests and are not replayed."""
    sandbox: Literal["none", "local", "docker", "remote"] = "none"
    """Where environments run: in the run's own processes, or isolated on this machine or on sandbox servers (`agentkit
    sandbox build` makes the image for `docker` and `remote`)."""
    servers: tuple[str, ...] | None = None
    """URLs of the sandbox servers for `sandbox: remote`; null uses `$AGENTKIT_SANDBOX_URL`, or this machine's server.
    Tokens come from the environment or from files, never from here."""
    sandbox_spec: dict[str, Any] = Field(default_factory=dict)
    """Fields of the sandbox specification, such as `{image: mine, resources: {memory: 2g}}`."""
    sandbox_share: int = Field(default=64, ge=1)
    """Maximum number of environments in one sandbox, if they declare `inline`; others get one sandbox each."""
    sandbox_spread: int = Field(default=8, ge=1)
    """One sandbox holds at most 1/`sandbox_spread` of the running environments, to limit the loss if it fails. With
    8, there are up to 15 sandboxes, each with the environment's data in memory; with 1, as few as `sandbox_share`
    allows."""
    spares: int = Field(default=1, ge=0)
    """Environments in sandboxes that are kept ready to replace those that fail."""
    standbys: int = Field(default=0, ge=0)
    """Environments in other sandboxes that follow each episode and take it over at once if its sandbox fails; they
    need `recovery: replay` and multiply the number of environments."""
    hedge: Literal["p50", "p90", "p95", "p99"] | Annotated[float, Field(ge=0)] | None = None
    """When a second attempt of a slow creation or reset begins (of a step only with `recovery: replay`): a quantile of
    past durations, or seconds; null never begins one. No gain was measured with FrozenLake at 2 % faults per minute, so
    the default is null; use it where creations and resets take seconds."""
    health: HealthConfig = HealthConfig()

    @property
    def backend(self) -> str | None:
        """The sandboxes' back end, with its servers; None without sandboxes."""
        if self.sandbox == "none":
            return None
        return self.sandbox if self.servers is None else f"{self.sandbox}:{','.join(self.servers)}"


class LoraConfig(Strict):
    """Train low-rank adapters instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapters' input during training."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Modules that get adapters."""


class ModelConfig(Strict):
    """The policy."""

    path: str = "quickstart"
    """`quickstart` (a small built-in model), `smollm2` (a pretrained one; needs the extra `smollm2`), a run directory,
    or a causal language model of Hugging Face (directory or name)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto` uses a GPU if there is one."""
    lora: LoraConfig | None = None
    """Low-rank adapters; null trains all weights."""
    chat_template: str | None = Field(default=None, min_length=1)
    """The chat template, instead of the one of `path`: a file, or the text of the template."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, such as `{enable_thinking: false}`."""
    history: Literal["auto", "append", "rerender", "window"] = "auto"
    """How earlier turns are shown to the model (see Models and history). `append`: new messages are added to the tokens
    so far, and an episode is one training sequence. `rerender`: the chat template renders the whole conversation for
    each turn, and each turn is a training sequence. `window`: the same with the latest turns only. `auto`: `append` if
    the chat template leaves earlier turns alone, otherwise `rerender`."""
    window: int = Field(default=4, ge=0)
    """With `history: window`: number of earlier turns that the model sees, besides the first observation."""
    summary: Annotated[str, AfterValidator(plugins.SUMMARY.check_name)] | None = None
    """With `history: window`: what the model sees of the other turns. `actions` lists their actions; a plug-in makes a
    text of them. null: only their number."""
    summary_options: dict[str, Any] = Field(default_factory=dict)
    """Options of a plug-in `summary`."""
    summary_length: int = Field(default=500, ge=40)
    """Maximum number of characters of the summary. `actions` leaves out the oldest ones; the text of a plug-in is cut
    at its end."""
    tool_format: Literal["auto", ToolFormatName] = "auto"
    """How the model writes tool calls, for environments with tools. `auto`: as its chat template does. `hermes`
    also fits templates that write none: the system message then describes the tools."""

    @property
    def shown_turns(self) -> int | None:
        """Maximum number of earlier turns that the model sees; None: all."""
        return self.window if self.history == "window" else None


class EngineConfig(Strict):
    """The inference engine."""

    kind: Literal["hf", "vllm"] = "hf"
    """`hf`: the built-in engine, based on transformers. `vllm`: vLLM; needs the extra `vllm`."""
    max_batch: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests; others wait."""
    max_context: int = Field(default=1024, ge=16)
    """Maximum number of tokens of a sequence; a longer episode is truncated."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads with which torch computes in each engine, also if the learner in the same process has another number;
    in a cluster also the CPUs that each engine reserves. null: torch's default."""
    replicas: int = Field(default=1, ge=1)
    """Number of engines behind a router. Each is a process in a cluster, or computes in a thread of the run. One that
    dies or hangs is replaced; others compute its requests."""
    min_replicas: int = Field(default=1, ge=1)
    """The run ends if fewer engines than this are left, and those that were lost cannot be started again."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of each engine, which holds a part of the model on each of them; only for `vllm`."""
    share_weights: bool = False
    """Use the learner's weights in place, without a copy: saves memory, but generation and training cannot overlap."""
    weights: Literal["auto", "shared_memory", "object_store", "nccl", "gloo", "ipc"] = "auto"
    """How updated weights reach the engines. `shared_memory`: a copy in the memory of one machine; `object_store`: a
    copy in Ray's object store, on any number of machines. `nccl`, `gloo`: broadcast from the learner, between GPUs or
    between CPUs, without a copy of the model. `ipc`: through a buffer on the GPU that learner and engine share (on
    CPUs: in the memory of the machine). `auto`: `object_store` with a `cluster` section, otherwise `shared_memory`."""
    verify_weights: bool = False
    """Compare checksums of the weights that the engines serve after each update. An engine that differs from most is
    replaced. Takes as long as hashing the weights."""
    sleep: bool = False
    """Free the engine's memory on the GPU while the learner trains, if both use the same GPU; only for `vllm`."""
    resources: dict[str, float] = Field(default_factory=dict)
    """What an engine reserves in a cluster, in addition to `threads` CPUs and `tensor_parallel` GPUs (if `model.device`
    is a GPU): custom resources, or other amounts of `CPU` and `GPU`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine."""


class RolloutConfig(Strict):
    """How episodes are played and collected."""

    groups: int = Field(default=16, ge=1)
    """Groups per training step."""
    group_size: int = Field(default=8, ge=1)
    """Episodes per group; all have the same task."""
    extra_groups: int = Field(default=0, ge=0)
    """Redundant groups: the first `groups` to finish are used, the others are cancelled."""
    extra_members: int = Field(default=0, ge=0)
    """Redundant episodes per group: the first `group_size` to finish are used, the others are cancelled."""
    async_ratio: float = Field(default=0.0, ge=0)
    """Training steps that rollout may run ahead of training; 0 is synchronous. No sample is staler than this ratio,
    rounded up."""
    in_flight: Literal["retry", "continue"] = "retry"
    """Effect of a weight update on turns being generated: generate the turn again, or continue with the new weights."""
    max_tokens: int = Field(default=32, ge=1)
    """Maximum number of tokens of one answer."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; log-probabilities are recorded at this temperature."""
    retries: int = Field(default=2, ge=0)
    """Fresh environments for an episode after a failed one, before its group is voided, or the episode of the expert is
    left out."""
    max_failure_share: float = Field(default=0.5, gt=0, le=1)
    """The run stops if the environment failed in more than this share of the latest episodes."""
    dynamic_sampling: bool = False
    """Replace groups without signal for the advantage. With a group baseline: groups whose members all have the same
    return; with `gigpo`: only if, in addition, no two turns in the same state have different returns; with `raft`,
    `reinforce` and `chunk_returns`: groups without a return that the advantage keeps."""
    filter: Annotated[str, AfterValidator(plugins.FILTER.check_name)] | None = None
    """A plug-in that decides for each complete group whether it is used or replaced, in addition to
    `dynamic_sampling`; null uses all groups."""
    filter_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `filter`."""
    max_refills: float = Field(default=2.0, ge=0)
    """Maximum number of groups replaced per step, by `dynamic_sampling` and `filter` together, as a multiple of
    `groups`; further ones are used."""
    reward: Annotated[str, AfterValidator(plugins.REWARD.check_name)] | None = None
    """A plug-in that replaces the rewards of each finished training episode; null uses those of the environment."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """Options of `reward`."""


class GateConfig(Strict):
    """What to do with episodes that would become too stale."""

    policy: Literal["wait", "drop"] = "wait"
    """`wait`: the learner waits for them, so long episodes are trained on like short ones. `drop`: they are dropped and
    replaced."""


class CriticConfig(Strict):
    """The value models, needed for the advantages `gae` and `bilevel_gae`. They read the policy's tokens, and may be
    smaller."""

    count: int = Field(default=1, ge=1)
    """Number of critics; 1 is plain PPO, 2 is AsyPPO. All value all episodes; the members of each group are dealt out
    in turn, and each critic trains only on its own."""
    path: str | None = None
    """Initial model of every critic, with the policy's tokenizer; null copies the policy's initial weights."""
    layers: int | None = Field(default=None, ge=1)
    """Layers of fresh critics (3 if only `hidden_size` is given); null, with `hidden_size`, makes no fresh critics."""
    hidden_size: int | None = Field(default=None, ge=8)
    """Width of fresh critics (96 if only `layers` is given)."""
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of the critics. The default is for pretrained models; small models trained from scratch need
    about 1e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule of the critics, over all training steps."""
    updates: int = Field(default=1, ge=1)
    """Optimiser steps of each critic per optimiser step of the policy, on the same minibatch."""
    value_clip: float | None = Field(default=0.5, gt=0)
    """Clip range of the value loss around the old values; null disables it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Initial training steps in which only the critics are trained. The policy's schedule begins after them."""

    @property
    def fresh(self) -> tuple[int, int] | None:
        """Layers and width of fresh critics; None if they start from a model."""
        if self.layers is None and self.hidden_size is None:
            return None
        return self.layers or 3, self.hidden_size or 96


class AlgorithmConfig(Strict):
    """Advantage, loss and regularisation."""

    advantage: Annotated[str, AfterValidator(plugins.ADVANTAGE.check_name)] = "grpo"
    """Advantage estimator. If it is not set, some losses bring their own: `raft` and `raft_pp` the advantage `raft`,
    `chunk_topr` `chunk_returns`, `flash_reinforce` `batch_mean`, `kimi` `dr_grpo`."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount: per turn for `reinforce`, `gigpo` and `chunk_returns`, per action token for `reinforce_pp`, `gae` and
    (within a turn) `bilevel_gae`."""
    lam: Annotated[float, Field(ge=0, le=1)] | Literal["length"] = 1.0
    """GAE's lambda for the policy; `length`: `max(0, 1 - 1/(1.5·n))` for an episode of `n` action tokens."""
    critic_lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of `gae` for the targets of the critics; `bilevel_gae` uses `lam`."""
    advantage_mask: float = Field(default=0.2, ge=0, lt=1)
    """With several critics: share of the action tokens, those on which they agree most, that lose their policy loss."""
    entropy_mask: float = Field(default=0.2, ge=0, lt=1)
    """With several critics: share of the action tokens, those on which they agree least, that lose their entropy
    bonus."""
    gamma_high: float = Field(default=0.95, gt=0, le=1)
    """Discount per turn of `bilevel_gae`."""
    loss: Annotated[str, AfterValidator(plugins.LOSS.check_name)] = "ppo"
    """Policy loss."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of plug-ins that `advantage` and `loss` name; an option that both have goes to both."""
    clip_low: float | None = Field(default=None, ge=0)
    """Lower clip: the ratio is kept above `1 - clip_low`. null: the loss's own default, 0.2 for most of them (see
    Algorithms)."""
    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip: the ratio is kept below `1 + clip_high`. null: the loss's own default."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of negative advantages (usually 3); null disables it."""
    is_cap: float | None = Field(default=None, gt=0)
    """Bound on importance weights: `tis`, `seq_tis` and the KL loss truncate to it; `decoupled_ppo`, `mis`, `seq_mis`
    and `chunk_topr` mask tokens, sequences or turns beyond it. null: 5 for `mis`, otherwise 2."""
    is_floor: float | None = Field(default=None, ge=0)
    """Importance weights below it are masked by `mis` and `seq_mis`. null: 0.5 for `mis`, otherwise 0."""
    topr_ratio: Literal["product", "geometric", "token"] = "product"
    """Importance ratio of `topr`: the product over the tokens of the sequence, their geometric mean, or the ratio of
    each token."""
    kl_gate: float = Field(default=3e-3, gt=0)
    """`flash_reinforce` masks sequences whose mean binary KL divergence from the behaviour policy exceeds this."""
    aggregation: plugins.Aggregation | None = None
    """Mean over tokens, mean over sequences of their means, or sum divided by a constant length (`max_tokens` times
    turns). null: `sequence_mean` for `gspo`, `sapo` and `flash_reinforce`, which are defined so, otherwise
    `token_mean`."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the KL divergence to the initial policy."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term is added."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Clip range of advantages; null disables it."""
    overlong_max: int | None = Field(default=None, ge=1)
    """Action tokens of an episode from which the length penalty is full; null: no length penalty."""
    overlong_buffer: int | None = Field(default=None, ge=1)
    """The length penalty grows linearly over the last `overlong_buffer` tokens before `overlong_max`."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """Full length penalty, subtracted from the reward before advantages are estimated."""
    credit: Literal["none", "local", "global", "coupled"] = "none"
    """Attention-rhythm credit: amplifies the advantages of tokens that start a local chunk of the text, of anchors that
    later tokens look back at, or of anchors together with the tokens that introduce them. Costs one more forward pass
    per batch."""
    credit_amplification: float = Field(default=1.5, ge=1)
    """Factor of the advantages of these tokens."""
    credit_share: float = Field(default=0.4, gt=0, le=1)
    """Share of an answer's tokens that are amplified, of those that have a score."""

    @model_validator(mode="before")
    @classmethod
    def _advantage_of_the_loss(cls, settings: Any) -> Any:
        if not isinstance(settings, dict) or "advantage" in settings or not isinstance(settings.get("loss"), str):
            return settings
        traits = plugins.LOSS.built_in.get(settings["loss"])
        own = None if traits is None else traits.advantage
        return settings if own is None else {**settings, "advantage": own}


class LearnerConfig(Strict):
    """Optimiser and training."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` (for matrices; AdamW for other weights) needs several times fewer samples when a model is trained from
    scratch."""
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of the policy. The default is for full training of pretrained models; adapters (`model.lora`)
    need about 1e-5, small models trained from scratch about 1e-3."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient."""
    minibatches: int = Field(default=1, ge=1)
    """Minibatches per batch, of whole groups; each is one optimiser step."""
    epochs: int = Field(default=1, ge=1)
    """Passes over one batch."""
    max_tokens: int = Field(default=16384, ge=64)
    """Tokens per forward pass, including padding; affects memory and speed, not the result."""
    packing: bool = False
    """Put the sequences of a forward pass one after the other instead of padding them. The result is the same. It saves
    time with `attention: flash_attention_2`; other kernels compute the attention between sequences and mask it."""
    share_prefixes: bool | None = None
    """Compute the common prefix of sequences once, for example the prompt of a group, where this is less work. The
    result is the same. It needs full attention with the kernel `sdpa`. null: where the model can."""
    backend: Literal["replicas", "fsdp", "deepspeed"] = "replicas"
    """`replicas`: every rank holds the whole model and its optimiser. `fsdp`: the ranks share them (torch's FSDP2).
    `deepspeed`: ZeRO; needs the extra `deepspeed`."""
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    """What the ranks of `deepspeed` share: nothing (0), the optimiser's state (1), gradients too (2), parameters too
    (3); null: 2."""
    offload_optimizer: bool = False
    """Keep the optimiser's state in the memory of the CPU (`deepspeed`)."""
    shard_size: int | None = Field(default=None, ge=2)
    """Ranks that share one copy of the model (`fsdp`); null: all. Groups of this size replicate each other, for example
    one group per machine."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block in the forward pass and compute the rest again in the backward pass: less
    memory, about a third more computation."""
    attention: str | None = None
    """Attention implementation of transformers, such as `sdpa`, `eager` or `flash_attention_2`; null: its default."""
    ranks: int = Field(default=1, ge=1)
    """Number of data-parallel processes; more than one needs a `cluster` section."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads with which torch computes in each rank, also if an engine in the same process has another number; in
    a cluster also the CPUs that each rank reserves. null: torch's default."""
    resources: dict[str, float] = Field(default_factory=dict)
    """What a rank reserves in a cluster, in addition to `threads` CPUs and one GPU (if `model.device` is a GPU): custom
    resources, or other amounts of `CPU` and `GPU`."""

    @property
    def zero(self) -> int:
        """The stage of ZeRO; 0 with back ends other than DeepSpeed."""
        if self.backend != "deepspeed":
            return 0
        return 2 if self.zero_stage is None else self.zero_stage


class AgentConfig(Strict):
    """An agent of your own plays the episodes, and asks the policy at a recording endpoint. Give `python`, `command` or
    `url`."""

    python: str | None = Field(default=None, pattern=r"^[\w.]+:[\w.]+$")
    """A coroutine function `package.module:function` of a task and an endpoint, which returns the answer or None."""
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A program and its arguments, run for each episode: it reads the task from standard input, finds the endpoint in
    `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL`, and writes the answer to standard output."""
    url: str | None = Field(default=None, pattern=r"^https?://[^/\s]+")
    """A service that gets a POST request with the task and the endpoint for each episode, and responds with the
    answer."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds for one episode."""
    sandbox: Literal["none", "local", "docker"] = "none"
    """Where `command` runs: with your rights, or in a sandbox whose only network access is the endpoint. `docker` is
    the safe choice."""
    sandbox_spec: dict[str, Any] = Field(default_factory=dict)
    """Fields of the sandbox specification, such as `{image: mine}`. The image or `mounts` hold the agent."""
    host: str = "127.0.0.1"
    """The address of this machine at which agents find the endpoint; other than loopback, it needs a certificate."""
    certificate: str | None = None
    """Path of the endpoint's TLS certificate."""
    key: str | None = None
    """Path of the key of this certificate."""


class ImitationConfig(Strict):
    """Behaviour cloning of the environment's expert before (or instead of) reinforcement learning."""

    episodes: int = Field(default=512, ge=1)
    """Expert episodes."""
    noise: float = Field(default=0.0, ge=0, lt=1)
    """Share of the expert's actions that are replaced by random ones. Imitating a noisy expert leaves entropy that
    reinforcement learning can exploit."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the expert episodes."""
    batch_episodes: int = Field(default=32, ge=1)
    """Episodes per optimiser step."""
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate of this stage."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule; `linear` and `cosine` end at 0, which uses a given number of episodes best."""
    stop_success: float | None = Field(default=None, gt=0, le=1)
    """Stop early when the success rate on training tasks reaches this share of the demonstrations' rate; null never
    stops early."""
    check_every: int = Field(default=20, ge=1)
    """Optimiser steps between measurements for `stop_success`."""
    check_episodes: int = Field(default=64, ge=1)
    """Episodes per measurement for `stop_success`."""


class EvaluationConfig(Strict):
    """Evaluation on tasks that are not used for training."""

    every: int = Field(default=0, ge=0)
    """Training steps between evaluations; 0 evaluates only before and after training."""
    episodes: int = Field(default=128, ge=1)
    """Episodes per evaluation."""
    first_seed: int = Field(default=1_000_000, ge=0)
    """Seed of the first evaluation task."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment that differ from training, such as `split: test`."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class CheckpointConfig(Strict):
    """When to save checkpoints, and how many to keep."""

    every: int = Field(default=10, ge=0)
    """Training steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints to keep."""


class ClusterConfig(Strict):
    """The Ray cluster in which engine and learner run; needs the extra `ray`."""

    address: str = Field(default="local", min_length=1)
    """`local`: a cluster on this machine, which starts and ends with the run. Otherwise an existing cluster of which
    this machine is a node: `auto`, or `host:port`."""
    colocate: bool = False
    """Place engine `k` beside rank `k` of the learner, so that both use one GPU, half of it each unless `resources` say
    otherwise."""


class RunConfig(Strict):
    """One run of `agentkit run`."""

    env: EnvConfig
    name: str = "run"
    """Name of the run, shown by trackers."""
    dir: Path = Field(default=Path("runs/run"), strict=False)
    """Run directory; if it contains a run with a checkpoint, `--resume` or `--again` is needed."""
    seed: int = Field(default=0, ge=0)
    """Seed of all random numbers of the run."""
    steps: int = Field(default=20, ge=0)
    """Training steps; 0 is imitation only."""
    deterministic: bool = False
    """Make two runs with the same seed bit-identical; slower."""
    cluster: ClusterConfig | None = None
    """Runs engine and learner as actors of a Ray cluster; null runs them in this process."""
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    gate: GateConfig = GateConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    """The value models; only for the advantages `gae` and `bilevel_gae`, which need them."""
    learner: LearnerConfig = LearnerConfig()
    agent: AgentConfig | None = None
    """An agent that plays the episodes; null: the built-in loop."""
    imitation: ImitationConfig | None = None
    """Behaviour cloning before reinforcement learning; null skips it."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers in addition to `metrics.jsonl`, which is always written."""
    sample_every: int = Field(default=10, ge=0)
    """Training steps between two tables of sample episodes in `trackers`; 0 sends none."""

    @model_validator(mode="after")
    def _contradictions(self) -> RunConfig:
        for problem in contradictions(self):
            raise ValueError(problem)
        return self


def attempts(config: RunConfig) -> int:
    """Return the maximum number of attempts of an episode whose environment fails."""
    return 1 if config.env.recovery == "void" else config.rollout.retries + 1


def contradictions(config: RunConfig) -> Iterator[str]:
    """Yield contradictions between settings, each as a sentence with both keys and the remedy."""
    yield from _model_contradictions(config.model)
    yield from _engine_contradictions(config)
    yield from _algorithm_contradictions(config)
    rollout, env = config.rollout, config.env
    yield from _sandbox_contradictions(env)
    yield from _agent_contradictions(config)
    yield from _weights_contradictions(config)
    yield from _cluster_contradictions(config)
    yield from _backend_contradictions(config)
    if config.deterministic and (rollout.async_ratio > 0 or rollout.extra_groups > 0 or rollout.extra_members > 0):
        yield (
            "deterministic=true needs rollout.async_ratio=0, rollout.extra_groups=0 and rollout.extra_members=0: "
            "otherwise results depend on timing"
        )
    if config.imitation is None and config.steps == 0:
        yield "steps=0 without an imitation section does nothing: set steps or add `imitation: {}`"


def _agent_contradictions(config: RunConfig) -> Iterator[str]:
    agent = config.agent
    if agent is None:
        return
    if sum(kind is not None for kind in (agent.python, agent.command, agent.url)) != 1:
        yield "agent needs agent.python, agent.command or agent.url: set one of them"
    if agent.sandbox != "none" and agent.command is None:
        yield f"agent.sandbox={agent.sandbox} is for agent.command: set it, or remove agent.sandbox"
    if agent.sandbox == "none" and agent.sandbox_spec:
        yield "agent.sandbox_spec needs a sandbox, and agent.sandbox is none: set agent.sandbox or remove it"
    if "network" in agent.sandbox_spec:
        yield "agent.sandbox_spec.network is set by agentkit, because the agent may reach only the endpoint: remove it"
    if agent.command is not None and agent.host != "127.0.0.1":
        yield f"agent.host={agent.host} has no effect on a command, which runs on this machine: remove it"
    if config.imitation is not None:
        yield "imitation teaches conversations of the built-in loop; those of an agent differ: remove one of them"
    if config.model.history != "auto":
        yield (
            f"model.history={config.model.history} has no effect with an agent, which chooses what it shows: remove it"
        )


def _model_contradictions(model: ModelConfig) -> Iterator[str]:
    if model.history != "window" and model.window != ModelConfig.model_fields["window"].default:
        yield f"model.window={model.window} has no effect with model.history={model.history}: set history to window"
    if model.history != "window" and model.summary is not None:
        yield f"model.summary={model.summary} has no effect with model.history={model.history}: set history to window"
    if model.summary is None and model.summary_length != ModelConfig.model_fields["summary_length"].default:
        yield (
            f"model.summary_length={model.summary_length} has no effect without model.summary: set model.summary, for "
            "example to actions"
        )
    own = ("add_generation_prompt", "continue_final_message", "conversation", "messages", "return_dict", "tokenize")
    for name in own:
        if name in model.template_arguments:
            yield f"model.template_arguments.{name} is set by agentkit: remove it"


def _backend_contradictions(config: RunConfig) -> Iterator[str]:
    learner = config.learner
    if learner.packing and config.algorithm.credit != "none":
        yield (
            f"learner.packing=true and algorithm.credit={config.algorithm.credit} contradict: attention maps are read "
            "of padded sequences; remove one"
        )
    if learner.share_prefixes and (learner.packing or config.algorithm.credit != "none"):
        other = "learner.packing=true" if learner.packing else f"algorithm.credit={config.algorithm.credit}"
        yield f"learner.share_prefixes=true and {other} contradict: both determine the attention; remove one"
    if config.engine.share_weights and learner.backend != "replicas":
        yield (
            f"engine.share_weights=true needs the whole model on the learner's rank, and learner.backend is "
            f"{learner.backend}: set learner.backend=replicas or engine.share_weights=false"
        )
    if config.engine.share_weights and learner.attention is not None:
        yield "engine.share_weights=true shares the engine's attention: remove learner.attention or share_weights"
    if learner.zero_stage is not None and learner.backend != "deepspeed":
        yield (
            f"learner.zero_stage={learner.zero_stage} needs learner.backend=deepspeed, not {learner.backend}: set it "
            "or remove learner.zero_stage"
        )
    if learner.offload_optimizer and learner.zero == 0:
        yield "learner.offload_optimizer=true needs learner.backend=deepspeed with learner.zero_stage of at least 1"
    if learner.zero > 0 and learner.optimizer == "muon":
        yield (
            f"learner.optimizer=muon needs whole matrices, and learner.zero_stage={learner.zero} flattens them: "
            "use adamw, learner.backend=fsdp, or learner.zero_stage=0"
        )
    if learner.shard_size is None:
        return
    if learner.backend != "fsdp":
        yield (
            f"learner.shard_size={learner.shard_size} needs learner.backend=fsdp, not {learner.backend}: set it or "
            "remove learner.shard_size"
        )
    if learner.ranks % learner.shard_size:
        yield (
            f"learner.ranks={learner.ranks} is not divisible by learner.shard_size={learner.shard_size}: "
            "all groups that share a copy of the model have the same size"
        )


def _weights_contradictions(config: RunConfig) -> Iterator[str]:
    engine, cluster = config.engine, config.cluster
    colocated = cluster is not None and cluster.colocate
    if engine.weights == "auto":
        return
    if engine.weights == "nccl" and config.model.device == "cpu":
        yield "engine.weights=nccl needs GPUs, and model.device is cpu: set engine.weights=gloo"
    if engine.share_weights:
        yield f"engine.share_weights=true and engine.weights={engine.weights} contradict: remove one"
    if cluster is None and engine.weights != "shared_memory":
        yield (
            f"engine.weights={engine.weights} needs engines and learner in processes of a cluster: add a section "
            "`cluster: {}`, or remove it"
        )
    if cluster is not None and engine.weights == "shared_memory" and cluster.address != "local":
        yield (
            f"engine.weights=shared_memory needs one machine, and cluster.address is {cluster.address}: set "
            "engine.weights=object_store"
        )
    if engine.weights == "nccl" and colocated:
        yield (
            "engine.weights=nccl and cluster.colocate=true contradict: NCCL connects different GPUs; set "
            "engine.weights=ipc"
        )
    if engine.weights == "ipc" and not colocated:
        yield "engine.weights=ipc needs each engine on a GPU of the learner: set cluster.colocate=true"


def _cluster_contradictions(config: RunConfig) -> Iterator[str]:
    learner, engine, cluster = config.learner, config.engine, config.cluster
    if cluster is None:
        if learner.ranks > 1:
            yield f"learner.ranks={learner.ranks} needs processes: add a section `cluster: {{}}`"
        for name, role in (("engine", engine), ("learner", learner)):
            if role.resources:
                yield f"{name}.resources are reserved in a cluster: add a cluster section, or remove it"
        return
    if cluster.address.startswith("ray://"):
        yield (
            f"cluster.address={cluster.address}: a run is itself a part of the cluster and cannot use Ray's client; "
            "start it on a node of the cluster, with address auto or host:port"
        )
    if config.model.device.startswith("cuda:"):
        yield (
            f"model.device={config.model.device} and cluster contradict: Ray gives each process its GPU; set "
            "model.device=cuda"
        )
    if cluster.colocate:
        yield from _colocation_contradictions(config)
    elif engine.sleep:
        yield "engine.sleep=true leaves a GPU to a learner that has its own: set cluster.colocate=true, or remove sleep"
    if engine.share_weights:
        yield "engine.share_weights=true and cluster contradict: memory is shared within one process; remove one"


def _colocation_contradictions(config: RunConfig) -> Iterator[str]:
    learner, engine = config.learner, config.engine
    if engine.replicas != learner.ranks or engine.tensor_parallel > 1:
        yield (
            "cluster.colocate=true places one engine beside each rank of the learner: set engine.replicas="
            f"{learner.ranks}, as learner.ranks, and engine.tensor_parallel=1"
        )
    gpus = sum(role.resources.get("GPU", 0.5) for role in (learner, engine))
    if gpus > 1:
        yield (
            f"cluster.colocate=true shares one GPU, and learner.resources and engine.resources reserve {gpus:g} of it: "
            "reserve 1 in total"
        )


def _sandbox_contradictions(env: EnvConfig) -> Iterator[str]:
    if env.sandbox == "none" and env.sandbox_spec:
        yield "env.sandbox_spec needs a sandbox, and env.sandbox is none: set env.sandbox or remove env.sandbox_spec"
    if env.sandbox != "none" and env.concurrency is not None:
        yield (
            f"env.concurrency={env.concurrency} and env.sandbox={env.sandbox} contradict: in a sandbox, steps run "
            "as the environment declares; remove one of them"
        )
    if env.servers is not None and env.sandbox != "remote":
        yield f"env.servers needs env.sandbox=remote, and it is {env.sandbox}: set it or remove env.servers"
    if env.servers is not None and (problem := _server_problem(env.servers)):
        yield f"env.servers: {problem}"
    if env.standbys and env.sandbox == "none":
        yield f"env.standbys={env.standbys} needs a sandbox, and env.sandbox is none: set env.sandbox or env.standbys=0"
    if env.standbys and env.recovery in ("retry", "void"):
        yield (
            f"env.standbys={env.standbys} and env.recovery={env.recovery} contradict: a standby continues an episode; "
            "set env.recovery=replay or env.standbys=0"
        )


def _server_problem(servers: tuple[str, ...]) -> str:
    if not servers:
        return "the list is empty; name a server, or use null for this machine's"
    if len({url.rstrip("/") for url in servers}) < len(servers):
        return "a server is listed twice; list each once"
    for url in servers:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "," in url:
            return f"{url!r} is not the URL of a server; write https://host:port"
        if parts.username is not None or parts.password is not None or parts.query:
            return (
                "a URL contains a user, a password or a query; write https://host:port, and put the token into "
                "AGENTKIT_SANDBOX_TOKEN or a token file"
            )
    return ""


def _engine_contradictions(config: RunConfig) -> Iterator[str]:
    engine, rollout = config.engine, config.rollout
    if engine.share_weights and rollout.async_ratio > 0:
        yield (
            f"engine.share_weights=true and rollout.async_ratio={rollout.async_ratio} contradict: an engine that uses "
            "the learner's weights in place would generate with partly updated ones; set one of them to false or 0"
        )
    if engine.share_weights and engine.kind != "hf":
        yield f"engine.share_weights=true needs engine.kind=hf, not {engine.kind}: memory is shared within one process"
    if engine.share_weights and engine.replicas > 1:
        yield (
            f"engine.share_weights=true and engine.replicas={engine.replicas} contradict: only one engine can use the "
            "learner's weights in place; remove one"
        )
    if engine.min_replicas > engine.replicas:
        yield f"engine.min_replicas={engine.min_replicas} is more than engine.replicas={engine.replicas}: lower it"
    if engine.tensor_parallel > 1 and engine.kind != "vllm":
        yield f"engine.tensor_parallel={engine.tensor_parallel} needs engine.kind=vllm; engine.kind is {engine.kind}"
    if engine.verify_weights and engine.replicas == 1:
        yield "engine.verify_weights=true compares engines, and engine.replicas=1: raise it, or remove verify_weights"
    if engine.sleep and engine.kind != "vllm":
        yield f"engine.sleep=true needs engine.kind=vllm, not {engine.kind}, which keeps its memory: remove it"
    if engine.sleep and rollout.async_ratio > 0:
        yield (
            f"engine.sleep=true and rollout.async_ratio={rollout.async_ratio} contradict: the engine generates while "
            "the learner trains; set one of them to false or 0"
        )
    if engine.share_weights and config.model.lora is not None:
        yield "engine.share_weights=true and model.lora contradict: the engine serves merged weights; remove one"
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
    if algorithm.advantage in plugins.ADVANTAGE.built_in:
        yield from advantage_contradictions(config, plugins.ADVANTAGE.built_in[algorithm.advantage])
        if algorithm.advantage != "bilevel_gae" and algorithm.gamma_high != _default("gamma_high"):
            yield (
                f"algorithm.gamma_high={algorithm.gamma_high} is not used by algorithm.advantage="
                f"{algorithm.advantage}: remove it or set algorithm.advantage=bilevel_gae"
            )
    if algorithm.loss in plugins.LOSS.built_in:
        yield from loss_contradictions(algorithm, plugins.LOSS.built_in[algorithm.loss])
    if config.critic is not None:
        yield from _critic_contradictions(config.critic, config)
    if algorithm.kl_coef > 0 and algorithm.kl == "none":
        yield f"algorithm.kl_coef={algorithm.kl_coef} but algorithm.kl=none: choose k1, k2 or k3, or set kl_coef=0"
    yield from _overlong_contradictions(algorithm)
    yield from _credit_contradictions(algorithm)


def advantage_contradictions(config: RunConfig, traits: plugins.AdvantageTraits) -> Iterator[str]:
    """Yield contradictions between the settings and what ``algorithm.advantage`` declares."""
    advantage, rollout = config.algorithm.advantage, config.rollout
    if traits.needs_critic and config.critic is None:
        yield f"algorithm.advantage={advantage} needs a critic: add `critic: {{}}` or choose another advantage"
    if not traits.needs_critic and config.critic is not None:
        yield (
            f"algorithm.advantage={advantage} does not use a critic: remove the critic section, or choose an advantage "
            "that needs one, such as gae"
        )
    if rollout.group_size < 2 and traits.group_baseline:
        yield (
            f"rollout.group_size={rollout.group_size} with algorithm.advantage={advantage}: the baseline "
            "of a group of one is its own reward, so nothing would be learnt; use group_size >= 2 or reinforce"
        )
    if rollout.dynamic_sampling and traits.signal == "always":
        yield (
            f"rollout.dynamic_sampling=true with algorithm.advantage={advantage} replaces nothing: this "
            "advantage compares a group with the rest of the batch, so every group has signal; remove the setting "
            "or choose an advantage with a group baseline"
        )


def loss_contradictions(algorithm: AlgorithmConfig, traits: plugins.LossTraits) -> Iterator[str]:
    """Yield contradictions between the settings and what ``algorithm.loss`` declares."""
    loss = algorithm.loss
    if "reference" in traits.needs and algorithm.kl == "none":
        yield f"algorithm.loss={loss} needs the reference policy: set algorithm.kl to k1, k2 or k3"
    if traits.aggregation is not None and algorithm.aggregation not in (None, traits.aggregation):
        yield (
            f"algorithm.aggregation={algorithm.aggregation} and algorithm.loss={loss} contradict: this loss is "
            f"defined with {traits.aggregation}; remove algorithm.aggregation"
        )
    if traits.options is not None:
        yield from _unused_options(algorithm, traits.options)
    for clip in ("clip_low", "clip_high"):
        if loss == "gspo" and getattr(algorithm, clip) == 0.2:
            yield (
                f"algorithm.{clip}=0.2 is PPO's, and algorithm.loss=gspo would hardly ever reach it: its ratio is a "
                f"mean over the sequence; remove algorithm.{clip} for its own clips, 3e-4 and 4e-4"
            )
    if loss in ("raft", "raft_pp") and algorithm.advantage != "raft":
        other = "pg" if loss == "raft" else "ppo"
        yield (
            f"algorithm.loss={loss} with algorithm.advantage={algorithm.advantage} is {other} with that advantage: "
            f"remove algorithm.advantage, or set algorithm.loss={other}"
        )


def _unused_options(algorithm: AlgorithmConfig, used: frozenset[str]) -> Iterator[str]:
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss":
        used = used | {"is_cap"}
    options = {name: traits.options or () for name, traits in plugins.LOSS.built_in.items()}
    for option in sorted({option for names in options.values() for option in names} - used):
        value = getattr(algorithm, option)
        if value != _default(option):
            users = ", ".join(name for name, names in options.items() if option in names)
            yield (
                f"algorithm.{option}={value} is not used by algorithm.loss={algorithm.loss}: remove it, or choose a "
                f"loss that uses it ({users})"
            )


def _default(setting: str) -> Any:
    return AlgorithmConfig.model_fields[setting].default


def _overlong_contradictions(algorithm: AlgorithmConfig) -> Iterator[str]:
    longest, buffer = algorithm.overlong_max, algorithm.overlong_buffer
    if (longest is None) != (buffer is None):
        yield (
            f"algorithm.overlong_max={longest} and algorithm.overlong_buffer={buffer}: the length penalty needs both; "
            "set both or neither"
        )
    if longest is None and algorithm.overlong_penalty != 1:
        yield (
            f"algorithm.overlong_penalty={algorithm.overlong_penalty} needs algorithm.overlong_max and "
            "algorithm.overlong_buffer: set them or remove it"
        )
    if longest is not None and buffer is not None and buffer > longest:
        yield f"algorithm.overlong_buffer={buffer} is more than algorithm.overlong_max={longest}: lower it"


def _critic_contradictions(critic: CriticConfig, config: RunConfig) -> Iterator[str]:
    if critic.path is not None and critic.fresh is not None:
        key = "layers" if critic.layers is not None else "hidden_size"
        yield (
            f"critic.path={critic.path} and critic.{key} contradict: one loads a model, the other makes a fresh one; "
            "remove one"
        )
    size = config.rollout.group_size
    if critic.count > size:
        yield (
            f"critic.count={critic.count} is more than rollout.group_size={size}: each critic needs a member of every "
            "group for itself; lower critic.count or raise rollout.group_size"
        )
    if 0 < config.steps <= critic.warmup_steps:
        yield (
            f"critic.warmup_steps={critic.warmup_steps} leaves no training step for the policy in "
            f"steps={config.steps}: lower critic.warmup_steps or raise steps"
        )


def _credit_contradictions(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.credit == "none":
        for name in ("credit_amplification", "credit_share"):
            if (value := getattr(algorithm, name)) != AlgorithmConfig.model_fields[name].default:
                yield (
                    f"algorithm.{name}={value} has no effect with algorithm.credit=none: choose local, global or "
                    f"coupled, or remove {name}"
                )
