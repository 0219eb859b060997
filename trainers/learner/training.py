"""The computation of a learner, without threads, files and event loops.

Invariant: the result of a step depends only on the batch and the state, not on the number of micro-batches or ranks (up
to the order of float additions). Every rank is given the whole batch, makes the same plan and computes
its own share; advantages are estimated over the whole batch by every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentkit.config import ModelConfig, RunConfig
from agentkit.errors import LearnerError
from agentkit.model_files import ADAPTER
from agentkit.trainers.algorithms.advantages import Estimate, estimate
from agentkit.trainers.algorithms.aggregate import aggregate, denominator
from agentkit.trainers.algorithms.interface import TokenInputs
from agentkit.trainers.algorithms.losses import (
    aggregation,
    kl_estimate,
    needed_logprobs,
    needs_whole_sequences,
    policy_objective,
)
from agentkit.trainers.algorithms.uncertainty import deal, disagreement
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.backends.base import Snapshot
from agentkit.trainers.learner.backends.choose import build_backend
from agentkit.trainers.learner.credit import Credit
from agentkit.trainers.learner.critic import Critic
from agentkit.trainers.learner.files import read_state, write_state
from agentkit.trainers.learner.forward import check_packing, why_not_shared
from agentkit.trainers.learner.metrics import (
    Sums,
    critic_metrics,
    disagreement_metrics,
    policy_metrics,
    product_sums,
)
from agentkit.trainers.learner.microbatches import Layout, MicroBatch, lay_out, share
from agentkit.trainers.learner.policy import PolicyModel
from agentkit.trainers.learner.ranks import Ranks
from agentkit.trainers.learner.schedule import schedule_factor
from agentkit.trainers.models.load import resolve_device
from agentkit.types import FloatArray

Columns = dict[str, Tensor]
"""Per-token inputs of the losses, each ``[N]``, on the CPU."""


class Training:
    """The policy, the critics and the reference, on one rank."""

    def __init__(self, config: RunConfig, rank: int, world_size: int, init_method: str | None):
        self.config = config
        torch.manual_seed(config.seed)
        model = _rank_device(config.model, rank, world_size)
        device = resolve_device(model.device)
        if config.learner.backend != "replicas":
            model = model.model_copy(update={"device": "cpu"})  # each rank's device gets its part only
        self.policy = PolicyModel(model, config.seed)
        self.ranks = Ranks(rank, world_size, init_method, device)
        torch.manual_seed(config.seed + rank)
        credit = config.algorithm.credit != "none"
        if config.learner.packing:
            check_packing(self.policy.causal_lm)
        learner = config.learner
        self.share_prefixes = learner.share_prefixes is not False and not learner.packing and not credit
        self._share_prefixes_unless(why_not_shared(self.policy.causal_lm, learner.attention))
        self.credit = Credit(config.algorithm, self.policy.causal_lm, self.ranks) if credit else None
        self.backend = build_backend(self.policy.scorer, config.learner, self.ranks, "policy's")
        self.backend.adapter = self.policy.adapter
        self.critics: list[Critic] = []
        self.token_credit: dict[str, FloatArray] = {}
        """Of each action token of the last batch, float32 ``[action tokens]``, before the update: ``advantage`` and
        ``weight`` in the policy loss; ``value_M`` of critic M for the state in which the token was chosen, and the
        ``disagreement`` of several; with attention-rhythm credit ``waad``, ``fai``, the ``factor`` in the advantage,
        and ``marks`` (see ``agentkit.trainers.algorithms.rhythm.mark_bits``)."""
        self.reference: Snapshot | None = None
        self.batches = 0
        """Batches trained on since reinforcement learning began."""
        self.policy_steps = 0
        """Optimiser steps of the policy since then: what the schedule counts."""

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def imitate(self, batch: Batch, lr: float) -> dict[str, float]:
        """One optimiser step on the mean negative log-likelihood of the action tokens."""
        sequences = _trainable_sequences(batch)
        divisor = denominator("token_mean", batch.action_counts)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.policy.train_mode(True)
        for layout, last in self._layouts(batch, sequences):
            logprobs, _ = self._forward(layout)
            loss = aggregate("token_mean", -logprobs, layout.mask, layout.sequences, divisor)
            self.backend.backward(loss, last=last)
            total += loss.detach()
        self.policy.train_mode(False)
        loss = self.ranks.sum_metrics({"loss": total.item()})["loss"]
        norm = self.backend.step(loss=loss, lr=lr)
        return {"imitation/loss": loss, "imitation/grad_norm": norm, "imitation/lr": lr}

    def train(self, batch: Batch, step: int) -> dict[str, float]:
        """All epochs and minibatches over one batch; returns the metrics."""
        config = self.config
        sequences = _trainable_sequences(batch)
        if self.batches == 0:
            self._begin()
        columns, values, estimated = self._columns(batch, sequences)
        only_critics = config.critic is not None and self.batches < config.critic.warmup_steps
        metrics: dict[str, float] = {}
        if self.credit is not None and not only_critics:
            metrics |= self._give_credit(self.credit, batch, sequences, columns)
        self.token_credit = self._token_credit(batch, columns, with_rhythm=not only_critics)
        policy_parts: list[Sums] = []
        critic_parts: list[list[Sums]] = [[] for _ in self.critics]
        for number, minibatch in enumerate(self._minibatches(batch, sequences, step)):
            for index, parts in enumerate(critic_parts):
                parts += self._critic_updates(index, batch, minibatch, columns, number)
            if not only_critics:
                policy_parts.append(self._policy_update(batch, minibatch, columns))
        self.batches += 1
        metrics |= policy_metrics(policy_parts)
        if self.critics:
            metrics |= critic_metrics(critic_parts, values, estimated, batch.mask)
        if len(self.critics) > 1:
            metrics |= disagreement_metrics(columns["disagreement"].numpy(), estimated, batch.mask)
        return metrics

    def save(self, directory: Path) -> None:
        """Write the state for an exact continuation; all ranks take part, rank 0 writes."""
        self.backend.save(directory / "policy", self._adapter_files(directory))
        for index, critic in enumerate(self.critics):
            critic.backend.save(directory / f"critic-{index}")
        if self.reference is not None:
            with self.backend.swapped(self.reference):
                self.backend.save_weights(directory / "reference")
        random = self.ranks.collect(self._random_state())
        if self.ranks.rank == 0:
            heads = self.credit.state() if self.credit else None
            state = {"batches": self.batches, "policy_steps": self.policy_steps, "random": random, "heads": heads}
            write_state(directory / "learner.pt", state)

    def load(self, directory: Path) -> None:
        """Restore a state that any number of ranks saved; only rank 0 reads files.

        Raises ``CheckpointError`` if it cannot be read, ``LearnerError`` if it is of another model.
        """
        state = self.ranks.from_first(lambda: read_state(directory / "learner.pt"))
        adapted = self.ranks.from_first((directory / ADAPTER).is_dir)
        if adapted != (self.policy.adapter is not None):
            raise LearnerError(
                f"the saved weights are of another model: {'adapters' if adapted else 'no adapters'}, and model.lora "
                f"asks for {'none' if adapted else 'them'}"
            )
        self.backend.load(directory / "policy", self._adapter_files(directory))
        self.batches, self.policy_steps = state["batches"], state["policy_steps"]
        self.reference, self.critics = None, []
        if self.credit is not None:
            self.credit.restore(state.get("heads"))
        if self.batches > 0:
            self._add_models()
            if self.reference is not None and self.ranks.from_first((directory / "reference").is_dir):
                with self.backend.swapped(self.reference):
                    self.backend.load_weights(directory / "reference")
            saved = self.ranks.from_first(lambda: len(list(directory.glob("critic-*"))))
            if saved != len(self.critics):
                raise LearnerError(
                    f"the checkpoint has {saved} critics, and critic.count asks for {len(self.critics)}: set "
                    f"critic.count={saved}, or start a new run"
                )
            for index, critic in enumerate(self.critics):
                critic.backend.load(directory / f"critic-{index}")
        if self.ranks.rank < len(state["random"]):
            self._set_random_state(state["random"][self.ranks.rank])
        else:  # a rank that the saved run did not have
            seed = np.random.SeedSequence([self.config.seed, self.policy_steps, self.ranks.rank])
            torch.manual_seed(int(seed.generate_state(1)[0]))

    def _adapter_files(self, directory: Path) -> Path | None:
        return None if self.policy.adapter is None else directory / ADAPTER

    def _random_state(self) -> dict[str, Tensor]:
        cuda = {"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}
        return {"cpu": torch.get_rng_state()} | cuda

    def _set_random_state(self, state: dict[str, Tensor]) -> None:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def close(self) -> None:
        self.ranks.close()

    def _begin(self) -> None:
        """Start reinforcement learning, with a fresh optimiser."""
        self.backend.forget()
        self._add_models()

    def _add_models(self) -> None:
        """Make the current policy the reference and the start of critics."""
        config = self.config
        if config.algorithm.kl != "none":
            self.reference = self.backend.snapshot()
        if (critic := config.critic) is not None:
            self.critics = [
                Critic(critic, config.learner, self.policy, self.backend, config.seed, index)
                for index in range(critic.count)
            ]
            for built in self.critics:
                self._share_prefixes_unless(built.why_not_shared)

    def _share_prefixes_unless(self, problem: str | None) -> None:
        """Stop sharing prefixes if there is a problem, or raise ``LearnerError`` if the configuration asks for it."""
        if problem is not None and self.config.learner.share_prefixes:
            raise LearnerError(f"learner.share_prefixes=true is impossible: {problem}. Set learner.share_prefixes=null")
        self.share_prefixes = self.share_prefixes and problem is None

    def _forward(self, layout: Layout, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        temperature = self.config.rollout.temperature
        return self.backend.module(layout, temperature, entropy_gradient=entropy_gradient)

    def _plan(self, batch: Batch, sequences: np.ndarray, **wanted: bool) -> list[MicroBatch]:
        learner, ranks = self.config.learner, self.ranks
        hidden_size = self.policy.causal_lm.config.get_text_config().hidden_size if self.share_prefixes else None
        return share(
            batch,
            sequences,
            ranks.rank,
            ranks.size,
            learner.max_tokens,
            packed=learner.packing,
            share_prefixes_of=hidden_size,
            **wanted,
        )

    def _layouts(self, batch: Batch, sequences: np.ndarray, **wanted: bool) -> Iterator[tuple[Layout, bool]]:
        """This rank's micro-batches, each with whether it is the last one; ``wanted``: see ``share``."""
        micro_batches = self._plan(batch, sequences, **wanted)
        for index, micro in enumerate(micro_batches):
            yield lay_out(batch, micro, self.device), index == len(micro_batches) - 1

    def _minibatches(self, batch: Batch, sequences: np.ndarray, step: int) -> Iterator[np.ndarray]:
        """Return the sequences of each optimiser step: whole groups, in an order that depends on seed, step and
        epoch."""
        learner = self.config.learner
        groups = np.unique(batch.group_ids)
        for epoch in range(learner.epochs):
            order = np.random.default_rng([self.config.seed, step, epoch]).permutation(groups)
            for chosen in np.array_split(order, learner.minibatches):
                yield sequences[np.isin(batch.group_ids[sequences], chosen)]

    def _columns(self, batch: Batch, sequences: np.ndarray) -> tuple[Columns, FloatArray, Estimate]:
        """Score the batch where the algorithm needs it, and estimate advantages over the whole batch.

        Returns the inputs of the losses, the critics' values of each token's state ``[M, N]``, and the estimate.
        """
        algorithm, columns = self.config.algorithm, {}
        behaviour = np.where(batch.mask, batch.logprobs, 0).astype(np.float32)
        columns["behaviour"] = behaviour
        needs = needed_logprobs(algorithm)
        if self.reference is not None:
            with self.backend.swapped(self.reference):
                columns["reference"] = self._scored(batch, sequences, self._logprobs_at)
            if algorithm.kl_in == "reward":
                penalty = kl_estimate(algorithm.kl, torch.from_numpy(behaviour - columns["reference"])).numpy()
                batch = replace(batch, rewards=batch.rewards - algorithm.kl_coef * penalty)
        if "proximal" in needs and self._steps_per_batch > 1:
            columns["proximal"] = self._scored(batch, sequences, self._logprobs_at)
        scored = [self._scored(batch, sequences, critic.values_at, states=True) for critic in self.critics]
        values = np.array(scored, np.float32).reshape(len(scored), batch.num_tokens)
        estimated = estimate(batch, values, algorithm)
        columns |= estimated._asdict()
        values = np.roll(values, 1, axis=1)
        columns |= {f"old_values_{index}": value for index, value in enumerate(values)}
        if len(values) > 1:
            columns["disagreement"] = disagreement(values)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
        return tensors, values, estimated

    def _give_credit(self, credit: Credit, batch: Batch, sequences: np.ndarray, columns: Columns) -> dict[str, float]:
        """Multiply the final advantages by what the policy's attention says about each token; return metrics."""
        factors, metrics = credit.factors(
            batch,
            lambda: (layout for layout, _ in self._layouts(batch, sequences)),
            lambda layout: self.backend.module(layout, self.config.rollout.temperature, trunk_only=True),
            self.batches,
        )
        columns["advantages"] = columns["advantages"] * factors
        return metrics

    def _token_credit(self, batch: Batch, columns: Columns, *, with_rhythm: bool) -> dict[str, FloatArray]:
        names = {"advantages": "advantage", "policy_weight": "weight", "disagreement": "disagreement"}
        names |= {f"old_values_{index}": f"value_{index}" for index in range(len(self.critics))}
        found = {name: columns[column].numpy() for column, name in names.items() if column in columns}
        if self.credit is not None and with_rhythm:
            found |= self.credit.tokens
        return {name: column[batch.mask].astype(np.float32) for name, column in found.items()}

    def _logprobs_at(self, layout: Layout) -> tuple[Tensor, Tensor]:
        return layout.positions, self._forward(layout)[0]

    @torch.no_grad()
    def _scored(
        self,
        batch: Batch,
        sequences: np.ndarray,
        score: Callable[[Layout], tuple[Tensor, Tensor]],
        *,
        states: bool = False,
    ) -> FloatArray:
        """Per-token scores of the whole batch ``[N]``: each rank computes its share, all get the union."""
        scores = np.zeros(batch.num_tokens, np.float32)
        for layout, _ in self._layouts(batch, sequences, states=states):
            positions, computed = score(layout)
            if not layout.filler:
                scores[positions.numpy()] = computed.cpu().numpy()
        return self.ranks.sum_array(scores)

    @property
    def _steps_per_batch(self) -> int:
        return self.config.learner.minibatches * self.config.learner.epochs

    def _critic_updates(
        self, index: int, batch: Batch, sequences: np.ndarray, columns: Columns, number: int
    ) -> list[Sums]:
        """The optimiser steps of one critic on its own members of a minibatch, the ``number``-th one of the batch."""
        critic, config = self.critics[index], self.critics[index].config
        own = sequences[deal(batch.group_ids, batch.members, config.count)[sequences] == index]
        if not len(own):
            return []
        done, total = self.batches * self._steps_per_batch + number, self.config.steps * self._steps_per_batch
        lr = config.lr * schedule_factor(done, config.schedule, 0, total)
        micro_batches, old = self._plan(batch, own), columns[f"old_values_{index}"]
        return [critic.step(batch, micro_batches, own, columns["returns"], old, lr) for _ in range(config.updates)]

    def _policy_update(self, batch: Batch, sequences: np.ndarray, columns: Columns) -> Sums:
        """One optimiser step of the policy; returns sums over its tokens, with ``loss``, ``grad_norm`` and ``lr``."""
        algorithm, device = self.config.algorithm, self.device
        divisor = denominator(aggregation(algorithm), batch.action_counts[sequences], _constant_length(self.config))
        sums: dict[str, Tensor] = {}
        self.policy.train_mode(True)
        for layout, last in self._layouts(batch, sequences, whole=needs_whole_sequences(algorithm)):
            logprobs, entropy = self._forward(layout, entropy_gradient=algorithm.entropy_coef > 0)
            at = {name: column[layout.positions].to(device) for name, column in columns.items()}
            inputs = TokenInputs(
                logprobs={"proximal": logprobs.detach()}
                | {name: at[name] for name in ("behaviour", "proximal", "reference") if name in at}
                | {"policy": logprobs},
                advantages=at["advantages"],
                policy_weight=at["policy_weight"],
                entropy=entropy,
                entropy_weight=at["entropy_weight"],
                mask=layout.mask,
                turn_ids=torch.from_numpy(batch.turn_ids[layout.positions.numpy()]).to(device),
                sequence_ids=layout.sequences,
            )
            loss, part = policy_objective(inputs, algorithm, divisor)
            self.backend.backward(loss, last=last)
            part |= {"loss": loss.detach().double(), "tokens": layout.mask.sum().double()}
            if "disagreement" in at:
                part |= product_sums(at["disagreement"], entropy, layout.mask)
            sums = {name: sums.get(name, 0.0) + value for name, value in part.items()}
        self.policy.train_mode(False)
        learner = self.config.learner
        warming = self.config.critic.warmup_steps if self.config.critic else 0
        total = (self.config.steps - warming) * self._steps_per_batch
        lr = learner.lr * schedule_factor(self.policy_steps, learner.schedule, learner.warmup_steps, total)
        summed = self.ranks.sum_metrics({name: value.item() for name, value in sums.items()})
        norm = self.backend.step(loss=summed["loss"], lr=lr)
        self.policy_steps += 1
        return summed | {"grad_norm": norm, "lr": lr}


def _rank_device(model: ModelConfig, rank: int, world_size: int) -> ModelConfig:
    """Assign each of several ranks a separate GPU, if there are GPUs."""
    if world_size > 1 and model.device in ("auto", "cuda") and torch.cuda.is_available():
        return model.model_copy(update={"device": f"cuda:{rank % torch.cuda.device_count()}"})
    return model


def _trainable_sequences(batch: Batch) -> np.ndarray:
    """Indices of the sequences that have an action token. Raises ``LearnerError`` when none has."""
    sequences = np.flatnonzero(batch.action_counts)
    if not len(sequences):
        raise LearnerError("the batch has no action token: no episode reached an answer")
    return sequences


def _constant_length(config: RunConfig) -> int:
    """Dr.GRPO's constant: the most action tokens that an episode may have."""
    if config.algorithm.aggregation != "constant":
        return 1
    if config.env.max_turns is None:
        raise LearnerError(
            "algorithm.aggregation=constant divides by the most tokens that an episode may have, and the learner was "
            "not given the number of turns: set env.max_turns"
        )
    return config.rollout.max_tokens * config.env.max_turns
