"""Attention-rhythm credit in the learner: one extra forward pass per batch that reads attention maps (``actor_attn``).

Invariant: heads are classified, and maps read, with the weights at the start of the update. Results do not depend on
micro-batches and ranks: sums are taken over the whole batch, and a rank reads only its own sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkit.config import AlgorithmConfig
from agentkit.trainers.algorithms import rhythm
from agentkit.trainers.batch import Batch
from agentkit.trainers.learner.attention import Read, check_readable, reading
from agentkit.trainers.learner.microbatches import Layout
from agentkit.trainers.learner.ranks import Ranks
from agentkit.types import FloatArray

REFRESH = 20
"""Batches after which heads are classified again."""

Forward = Callable[[Layout], Any]
"""One forward pass of the model, through the module that the back end wraps."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The layers that are read, and the heads of both sets as ``(layer, head)``."""

    layers: list[int]
    local: list[tuple[int, int]]
    global_: list[tuple[int, int]]


class Credit:
    """Head sets of a model, and the factors that its attention gives to the advantages of a batch.

    Raises ``LearnerError`` when the attention of ``model`` cannot be read. Call it before a back end wraps ``model``.
    """

    def __init__(self, config: AlgorithmConfig, model: PreTrainedModel, ranks: Ranks):
        self.config, self.model, self.ranks = config, model, ranks
        self.heads: Heads | None = None
        self.tokens: dict[str, FloatArray] = {}
        """WAAD, FAI, factor and marks of each token of the last batch, ``[N]``."""
        self.layers = rhythm.middle_layers(model.config.get_text_config().num_hidden_layers)
        check_readable(model, self.layers)

    def factors(
        self, batch: Batch, layouts: Callable[[], Iterable[Layout]], forward: Forward, number: int
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the factor of each token's advantage, float32 ``[N]``, and metrics.

        Args:
            batch: the whole batch.
            layouts: this rank's micro-batches of it, each time from the start.
            forward: computes one of them, without gradients.
            number: batches before this one.
        """
        began = time.perf_counter()
        if self.heads is None or number % REFRESH == 0:
            self.heads = self.classified(layouts(), forward)
        waad, fai_sums = self.read(batch, layouts(), forward)
        marks = rhythm.rhythm(batch, waad, fai_sums, self.config.credit_share)
        gamma = rhythm.factors(marks, self.config.credit, self.config.credit_amplification)
        scores = {"waad": marks.waad.astype(np.float32), "fai": marks.fai.astype(np.float32)}
        self.tokens = {**scores, "factor": gamma, "marks": rhythm.mark_bits(marks)}
        anchors = marks.local if self.config.credit == "local" else marks.anchors
        seconds = self.ranks.sum_metrics({"seconds": time.perf_counter() - began})["seconds"] / self.ranks.size
        metrics = {
            "credit/anchor_share": float(anchors[batch.mask].mean()),
            "credit/gamma": float(gamma[batch.mask].mean()),
            "credit/seconds": seconds,
        }
        if self.config.credit == "coupled":
            metrics["credit/dependent_share"] = float(marks.dependent[batch.mask].mean())
        return torch.from_numpy(gamma), metrics

    def classified(self, layouts: Iterable[Layout], forward: Forward) -> Heads:
        """Return the head sets by the mean spans over all action tokens of all ranks."""
        sums: dict[int, Tensor] = {}
        for layout in layouts:
            self._read(layout, forward, _SpanSums(_action_rows(layout), sums))
        spans = self.ranks.sum_array(torch.cat([sums[layer] for layer in self.layers]).numpy())
        names = [(layer, head) for layer in self.layers for head in range(len(sums[layer]))]
        sets = rhythm.head_sets(spans)  # sums order heads as means do
        return Heads(self.layers, *([names[index] for index in chosen] for chosen in sets))

    def read(self, batch: Batch, layouts: Iterable[Layout], forward: Forward) -> tuple[FloatArray, FloatArray]:
        """Return WAAD and the sums of FAI of all action tokens, float32 ``[N]`` each, with the current head sets."""
        assert self.heads is not None
        scores = np.zeros((2, batch.num_tokens), np.float32)
        for layout in layouts:
            read = _TokenScores(_action_rows(layout), self.heads)
            self._read(layout, forward, read)
            if layout.mask.any():
                scores[:, layout.positions.numpy()] = read.scores[:, layout.rows, layout.columns + 1].cpu().numpy()
        waad, fai_sums = self.ranks.sum_array(scores)
        return waad, fai_sums

    @torch.no_grad()
    def _read(self, layout: Layout, forward: Forward, read: Read) -> None:
        with reading(self.model, self.layers, read):
            forward(layout)

    def state(self) -> dict[str, Any] | None:
        """Head sets as plain values, or None before the first batch."""
        heads = self.heads
        return {"layers": heads.layers, "local": heads.local, "global": heads.global_} if heads else None

    def restore(self, state: dict[str, Any] | None) -> None:
        self.heads = Heads(state["layers"], state["local"], state["global"]) if state else None


class _SpanSums:
    """Adds the spans of all action rows to ``sums``: float64 ``[heads]`` per layer."""

    def __init__(self, action_rows: Tensor, sums: dict[int, Tensor]):
        self.action_rows, self.sums = action_rows, sums

    def __call__(self, layer: int, first: int, maps: Tensor) -> None:
        rows = self.action_rows[:, first : first + maps.shape[2]]
        spans = rhythm.row_spans(maps, first).double() * rows[:, None]
        self.sums[layer] = self.sums.get(layer, 0.0) + spans.sum((0, 2)).cpu()


class _TokenScores:
    """Adds WAAD and sums of FAI to ``scores``, float32 ``[2, B, T]``, from maps averaged over each head set."""

    def __init__(self, action_rows: Tensor, heads: Heads):
        self.action_rows, self.heads = action_rows, heads
        self.scores = torch.zeros((2, *action_rows.shape), device=action_rows.device)

    def __call__(self, layer: int, first: int, maps: Tensor) -> None:
        last = first + maps.shape[2]
        waad, fai = self.scores
        waad[:, first:last] += rhythm.row_waad(_share_of_mean(maps, self.heads.local, layer), first)
        far, rows = _share_of_mean(maps, self.heads.global_, layer), self.action_rows[:, first:last]
        fai[:, : maps.shape[3]] += rhythm.column_fai(far, first, rows)


def _share_of_mean(maps: Tensor, heads: Sequence[tuple[int, int]], layer: int) -> Tensor:
    """What one layer adds to the mean map over ``heads``: ``[B, rows, columns]``."""
    return maps[:, [head for of, head in heads if of == layer]].sum(1) / len(heads)


def _action_rows(layout: Layout) -> Tensor:
    """Bool ``[B, T]``: where the input is an action token; False in a filler."""
    rows = torch.zeros(layout.ids.shape, dtype=torch.bool, device=layout.ids.device)
    rows[layout.rows, layout.columns + 1] = layout.mask
    return rows
