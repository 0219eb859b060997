"""Checks of what the learner expects of policy losses, built in or not; see ``contract``.

Invariant: a loss is checked inside ``policy_objective``, as it is trained with: masked positions arrive as 0, and the
divisor is that of the whole optimiser step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from agentkit.config import AlgorithmConfig
from agentkit.plugins import LOSS
from agentkit.trainers.algorithms.contract import GARBAGE, Broken, Result, run_checks
from agentkit.trainers.algorithms.interface import TokenInputs
from agentkit.trainers.algorithms.losses import (
    needed_logprobs,
    policy_loss,
    policy_objective,
    sanitise,
)
from agentkit.trainers.learner.microbatches import plan

_DIVISOR = 7.0
"""Any divisor does: the loss is divided by it."""
_TOLERANCE = 1e-4

Loss = Callable[[TokenInputs], tuple[Tensor, Tensor]]
"""Scalar loss, and its gradient with respect to the policy's log-probabilities ``[n]``."""


def check_loss(config: AlgorithmConfig) -> Iterator[Result]:
    """Check ``config.loss``.

    Raises:
        RegistryError, ConfigError: it does not load, or its options are wrong.
    """
    LOSS.traits(config.loss)
    samples = [sample(seed) for seed in range(6)]

    def of(inputs: TokenInputs) -> tuple[Tensor, Tensor]:
        policy = inputs.logprobs["policy"].detach().clone().requires_grad_()
        loss, _ = policy_objective(replace(inputs, logprobs={**inputs.logprobs, "policy": policy}), config, _DIVISOR)
        if not loss.requires_grad:
            raise Broken("the loss does not depend on the policy's log-probabilities")
        loss.backward()
        return loss.detach(), torch.zeros_like(policy) if policy.grad is None else policy.grad

    def each(check: Callable[..., None], *further: object) -> Callable[[], None]:
        def check_all() -> None:
            for one in samples:
                check(of, one, *further)

        return check_all

    return run_checks(
        [
            ("shapes, types and finite numbers", each(_well_formed, config)),
            ("it has a gradient", lambda: _trains(of, samples[0])),
            ("masked positions have no effect", each(_same_when_masked)),
            ("a micro-batch without action tokens gives 0", each(_nothing)),
            ("micro-batches add up to the batch", each(_add_up, 1)),
            ("ranks add up to the batch", each(_add_up, 3)),
            ("the same input gives the same result", each(_repeatable)),
            ("inputs are not changed", each(_unchanged, config)),
            ("it reads only the log-probabilities that it declares", each(_declared, config)),
            ("any ratio and advantage gives finite numbers", each(_scales)),
        ]
    )


def sample(seed: int) -> TokenInputs:
    """Return tokens of 6 sequences, one of ten masked; ratios on both sides of usual clips, advantages of both signs.

    Seed 0 is on-policy; seed 1 has advantages of 0 in half of its sequences.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=generator)
    sequence_ids = torch.repeat_interleave(torch.arange(6), lengths)
    tokens = len(sequence_ids)

    def normal() -> Tensor:
        return torch.randn(tokens, generator=generator)

    behaviour = -normal().abs() - 0.5
    spread = 0.0 if seed == 0 else 0.4
    advantages = normal()
    if seed == 1:
        advantages[sequence_ids < 3] = 0.0
    return TokenInputs(
        logprobs={
            "policy": behaviour + spread * normal(),
            "behaviour": behaviour,
            "proximal": behaviour + spread * normal(),
            "reference": behaviour + spread * normal(),
        },
        advantages=advantages,
        policy_weight=torch.ones(tokens),
        entropy=normal().abs(),
        entropy_weight=torch.ones(tokens),
        mask=torch.rand(tokens, generator=generator) < 0.9,
        turn_ids=torch.arange(tokens) // 3,
        sequence_ids=sequence_ids,
    )


def _tensors(inputs: TokenInputs) -> dict[str, Tensor]:
    columns = {part.name: getattr(inputs, part.name) for part in fields(inputs)}
    return {name: column for name, column in columns.items() if isinstance(column, Tensor)}


def _changed(inputs: TokenInputs, change: Callable[[Tensor], Tensor]) -> TokenInputs:
    """Return the inputs with ``change`` applied to every column."""
    logprobs = {name: change(column) for name, column in inputs.logprobs.items()}
    return replace(inputs, logprobs=logprobs, **{name: change(column) for name, column in _tensors(inputs).items()})


def _chosen(inputs: TokenInputs, sequences: np.ndarray, *, masked: bool = False) -> TokenInputs:
    """Return the tokens of some sequences, which are numbered from 0."""
    order = torch.from_numpy(np.sort(sequences))
    keep = torch.isin(inputs.sequence_ids, order)
    part = _changed(inputs, lambda column: column[keep])
    numbered = replace(part, sequence_ids=torch.searchsorted(order, part.sequence_ids))
    return replace(numbered, mask=torch.zeros_like(part.mask)) if masked else numbered


def _compare(expected: Tensor, actual: Tensor, what: str, tolerance: float = _TOLERANCE) -> None:
    bound = tolerance * (1 + float(expected.abs().max())) if expected.numel() else 0.0
    if not torch.equal(expected, actual) and not bool(((expected - actual).abs() <= bound).all()):
        raise Broken(f"{what} differs by up to {float((expected - actual).abs().max()):.3g}")


def _well_formed(of: Loss, inputs: TokenInputs, config: AlgorithmConfig) -> None:
    token = policy_loss(config)(sanitise(inputs), config)
    for name, column, kinds in zip(
        ("loss", "clipped", "masked"),
        token,
        ((torch.float32, torch.float64), (torch.bool,), (torch.bool,)),
        strict=True,
    ):
        if column.shape != inputs.mask.shape or column.dtype not in kinds:
            raise Broken(f"{name}: {list(column.shape)} of {column.dtype} instead of {list(inputs.mask.shape)}")
    _finite(*of(inputs))


def _finite(loss: Tensor, gradient: Tensor, where: str = "") -> None:
    if not torch.isfinite(loss):
        raise Broken(f"{where}the loss is {float(loss)}")
    if wrong := int((~torch.isfinite(gradient)).sum()):
        raise Broken(f"{where}the gradient of {wrong} of {len(gradient)} tokens is NaN or infinite")


def _trains(of: Loss, inputs: TokenInputs) -> None:
    if not of(inputs)[1].any():
        raise Broken("on data of the same policy, the gradient is 0 at all tokens")


def _same_when_masked(of: Loss, inputs: TokenInputs) -> None:
    loss, gradient = of(inputs)
    if gradient[~inputs.mask].any():
        raise Broken("the gradient at masked positions is not 0")
    for garbage in GARBAGE:
        dirty = _changed(inputs, lambda c, g=garbage: torch.where(inputs.mask, c, g) if c.is_floating_point() else c)
        other, slope = of(dirty)
        _compare(loss, other, f"with {garbage:g} at masked positions, the loss", 0.0)
        _compare(gradient, slope, f"with {garbage:g} at masked positions, the gradient", 0.0)
    other, slope = of(_changed(inputs, lambda column: column[inputs.mask]))
    _compare(loss, other, "without the masked positions, the loss")
    _compare(gradient[inputs.mask], slope, "without the masked positions, the gradient")


def _nothing(of: Loss, inputs: TokenInputs) -> None:
    loss, gradient = of(replace(inputs, mask=torch.zeros_like(inputs.mask)))
    _finite(loss, gradient)
    if loss or gradient.any():
        raise Broken(f"the loss is {float(loss):.3g}, and the largest gradient {float(gradient.abs().max()):.3g}")


def _add_up(of: Loss, inputs: TokenInputs, ranks: int) -> None:
    """Compare the batch with the sum over micro-batches (8 tokens) of the ranks, with fillers as in training."""
    whole, gradient = of(inputs)
    lengths = np.bincount(inputs.sequence_ids.numpy())
    total, slopes = torch.zeros(()), torch.zeros_like(gradient)
    for micro_batches in plan(lengths, np.flatnonzero(lengths), ranks, max_tokens=8):
        for micro in micro_batches:
            loss, slope = of(_chosen(inputs, micro.contexts, masked=micro.filler))
            total += loss
            slopes[torch.isin(inputs.sequence_ids, torch.from_numpy(micro.contexts))] += slope
    _compare(whole, total, "the sum of the losses")
    _compare(gradient, slopes, "the sum of the gradients")


def _repeatable(of: Loss, inputs: TokenInputs) -> None:
    for name, one, other in zip(("loss", "gradient"), of(inputs), of(inputs), strict=True):
        _compare(one, other, f"in a second call, the {name}", 0.0)


def _unchanged(of: Loss, inputs: TokenInputs, config: AlgorithmConfig) -> None:
    given = sanitise(inputs)
    before = _changed(given, torch.clone)
    policy_loss(config)(given, config)
    after = _tensors(given) | dict(given.logprobs)
    for name, column in (_tensors(before) | dict(before.logprobs)).items():
        if not torch.equal(column, after[name]):
            raise Broken(f"it changes {name}; copy it first")


def _declared(of: Loss, inputs: TokenInputs, config: AlgorithmConfig) -> None:
    needs = needed_logprobs(config)
    declared = {name: column for name, column in inputs.logprobs.items() if name in needs}
    try:
        part = of(replace(inputs, logprobs=declared))
    except Exception as error:
        raise Broken(f"with {', '.join(sorted(needs))} alone: {error}") from error
    _compare(of(inputs)[0], part[0], "without the log-probabilities that it does not declare, the loss", 0.0)


def _scales(of: Loss, inputs: TokenInputs) -> None:
    for name in inputs.logprobs.keys() - {"policy"}:
        for distance in (-300.0, -50.0, 50.0, 300.0):
            far = {**inputs.logprobs, name: inputs.logprobs["policy"] - distance}
            _finite(*of(replace(inputs, logprobs=far)), where=f"where policy is {distance:g} nats from {name}, ")
    for scale in (0.0, 1e-6, 1e6):
        scaled = replace(inputs, advantages=inputs.advantages * scale)
        _finite(*of(scaled), where=f"with advantages times {scale:g}, ")
