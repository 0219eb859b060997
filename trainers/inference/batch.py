"""The running batch: decoding and joining rows in one forward pass.

Invariant: between two steps the running requests sit in rows ``0 … n-1``; row ``i`` of the cache holds the keys and
values of all tokens of request ``i`` but the last one, which is fed in the next step. No threads, no clocks here.

A prompt that several requests share, such as the first one of a group, is computed once: a joining request copies the
keys and values of its longest prefix that is known, and waits one step if another joining request is about to compute
more of it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentkit.trainers.inference.cache import RowCache, Segment, Step
from agentkit.trainers.inference.request import GenerationRequest
from agentkit.trainers.inference.sampling import Sampler
from agentkit.trainers.inference.sessions import SessionStore, Stored, common_prefix
from agentkit.types import FinishReason, IntArray

_ROW_COST = 300
"""A separate attention call costs about as much as this many extra keys in the common call."""
_PASS_TOKENS = 8192
"""Maximum prompt tokens per pass, except for a single longer prompt; bounds the memory of activations."""
_WORTH = 16
"""A request waits one step for the prompt of another if it can reuse at least this many tokens more."""


@dataclass(slots=True)
class BatchCounters:
    generated: int = 0
    prefilled: int = 0
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended in a step; ``reason`` None: the weights gave non-finite numbers."""

    request: GenerationRequest
    reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class _Joiner:
    request: GenerationRequest
    start: int
    """Leading tokens whose keys and values are in the row."""
    suffix: np.ndarray


class RunningBatch:
    """The computation of the engine: one token per running request and step."""

    def __init__(self, model: Any, cache: RowCache, rows: int, store: SessionStore) -> None:
        self.rows: list[GenerationRequest] = []
        self.counters = BatchCounters()
        self._model, self._cache, self._capacity, self._store = model, cache, rows, store
        self._device = cache.keys.device
        self._columns = torch.arange(cache.columns, device=self._device)
        self._mask = torch.full((rows, cache.columns), -math.inf, dtype=cache.keys.dtype, device=self._device)
        self._changed = True
        self._ids = self._positions = self._places = self._outputs = torch.empty(0, dtype=torch.int64)
        self._sampler: Sampler | None = None
        self._lengths: list[int] = []
        self._common = 0

    def room(self) -> int:
        return self._capacity - len(self.rows)

    @torch.inference_mode()
    def step(self, waiting: deque[GenerationRequest]) -> list[Finished]:
        """Let requests of ``waiting`` join, then sample one token for every running request; return the finished ones.

        ``waiting`` keeps the requests that do not join.
        """
        later: list[GenerationRequest] = []
        try:
            joiners = self._join(waiting, later)
        finally:
            waiting.extendleft(reversed(later))
        if not self.rows:
            return []
        old = len(self.rows) - len(joiners)
        if self._changed:
            self._rebuild(old)
        logits = self._forward(old, joiners)
        if self._sampler is None:
            self._sampler = Sampler([request.sampling for request in self.rows], self._device)
        numbers = [r.numbers[len(r.ids)] if len(r.numbers) else 0.0 for r in self.rows]
        ids, logprobs = self._sampler(logits, torch.tensor(np.asarray(numbers, np.float32), device=self._device))
        # One copy to the host per step: float64 represents every id and every float32 exactly.
        drawn = torch.stack([ids.double(), logprobs.double()]).tolist()
        self.counters.generated += len(self.rows)
        self._ids = ids
        if joiners:
            self._changed = True
        else:
            self._positions += 1
            self._places += 1
            self._lengths = [length + 1 for length in self._lengths]
            self._common += 1
        return self._record([int(token) for token in drawn[0]], drawn[1])

    def remove(self, request: GenerationRequest, *, remember: bool) -> bool:
        """Remove a request from the batch, if present; ``remember`` its keys and values for its session."""
        try:
            row = self.rows.index(request)
        except ValueError:
            return False
        self._free(row, remember=remember)
        return True

    def clear(self) -> list[GenerationRequest]:
        """Remove all requests, in the order of rows, without remembering their keys and values."""
        rows, self.rows = self.rows, []
        self._changed, self._sampler = True, None
        return rows

    def _join(self, waiting: deque[GenerationRequest], later: list[GenerationRequest]) -> list[_Joiner]:
        """Take requests from ``waiting``; those that wait for a prompt that another computes now go to ``later``."""
        joiners: list[_Joiner] = []
        running, tokens = len(self.rows), 0
        while waiting and self.room() > len(later) and tokens < _PASS_TOKENS:
            request = waiting.popleft()
            sequence = request.tokens
            prefix, start = self._known(request.session, sequence, running)
            start = min(start, len(sequence) - 1)
            coming = max((common_prefix(joiner.request.prompt, sequence) for joiner in joiners), default=0)
            if min(coming, len(sequence) - 1) >= start + _WORTH:
                later.append(request)
                continue
            if isinstance(prefix, Stored):
                self._cache.insert(len(self.rows), prefix.memory, start)
            elif prefix is not None:
                self._cache.move(prefix, len(self.rows), start)
            self._store.forget(request.session)
            joiners.append(_Joiner(request, start, sequence[start:]))
            self.rows.append(request)
            self.counters.reused += start
            self.counters.prefilled += len(sequence) - start
            tokens += len(sequence) - start
        if joiners:
            self._sampler = None
        return joiners

    def _known(self, session: str, sequence: IntArray, running: int) -> tuple[Stored | int | None, int]:
        """Return what holds the longest known prefix of ``sequence``, and its length: the store, a row, or nothing.

        The session's own earlier turn is taken without a search. ``running``: rows whose prompts are computed.
        """
        own = self._store.get(session)
        if own is not None:
            return own, common_prefix(own.ids, sequence)
        rows = [(row, common_prefix(request.prompt, sequence)) for row, request in enumerate(self.rows[:running])]
        idle = [(stored, common_prefix(stored.ids, sequence)) for stored in self._store.latest()]
        return max([*rows, *idle], key=lambda found: found[1], default=(None, 0))

    def _rebuild(self, rows: int) -> None:
        """Return the state of the first ``rows`` rows, which feed their last token."""
        last = [(request.ids or request.prompt)[-1] for request in self.rows[:rows]]
        self._lengths = [request.length for request in self.rows[:rows]]
        self._ids = torch.tensor(last, dtype=torch.int64, device=self._device)
        self._positions = torch.tensor(self._lengths, dtype=torch.int64, device=self._device) - 1
        self._outputs = torch.arange(rows, device=self._device)
        self._places = self._outputs * self._cache.columns + self._positions
        self._mask[:rows].fill_(-math.inf).masked_fill_(self._columns < self._positions[:, None], 0.0)
        self._common = common_length(self._lengths) if rows else 0
        self._changed = False

    def _forward(self, rows: int, joiners: list[_Joiner]) -> torch.Tensor:
        """Return the logits ``[rows + joiners, vocabulary]`` of all next tokens."""
        segments = self._decode_segments(rows)
        if not joiners:
            return self._cache.run(self._model, self._ids, self._positions, Step(self._places, segments, self._outputs))
        positions, places, outputs = [self._positions], [self._places], []
        first = rows
        for row, joiner in enumerate(joiners, start=rows):
            piece = self._cache.piece(row, joiner.start, joiner.start + len(joiner.suffix), first)
            first = piece.segment.last_token
            segments.append(piece.segment)
            positions.append(piece.positions)
            places.append(piece.places)
            outputs.append(first - 1)
        new = torch.from_numpy(np.concatenate([joiner.suffix for joiner in joiners])).to(self._device, torch.int64)
        ends = torch.tensor(outputs, device=self._device)
        step = Step(torch.cat(places), segments, torch.cat([self._outputs, ends]))
        return self._cache.run(self._model, torch.cat([self._ids, new]), torch.cat(positions), step)

    def _decode_segments(self, rows: int) -> list[Segment]:
        """Attention of the decoding rows: one masked call for all, and one more for each row that is much longer.

        The common call covers the columns that most rows need; separate calls overwrite its results for longer rows.
        """
        if rows == 0:
            return []
        if rows == 1:
            return [Segment(0, 1, 0, 1, self._lengths[0], None)]
        self._mask.view(-1).index_fill_(0, self._places, 0.0)
        width = self._cache.aligned(self._common)
        segments = [Segment(0, rows, 0, rows, width, self._mask[:rows, None, None, :width])]
        segments += [
            Segment(row, row + 1, row, row + 1, length, None)
            for row, length in enumerate(self._lengths)
            if length > width
        ]
        return segments

    def _record(self, ids: list[int], logprobs: list[float]) -> list[Finished]:
        finished = []
        for row in reversed(range(len(self.rows))):
            request = self.rows[row]
            if not math.isfinite(logprobs[row]):
                finished.append(Finished(request, None))
                self._cache.wipe(row)
                self._free(row, remember=False)
            elif (reason := request.add(ids[row], logprobs[row])) is not None:
                finished.append(Finished(request, reason))
                self._free(row, remember=True)
        return finished

    def _free(self, row: int, *, remember: bool) -> None:
        """Empty a row and move the last row into it."""
        request, last = self.rows[row], self.rows.pop()
        held = request.length - 1
        if remember and self._store.fits(held):
            self._store.put(request.session, Stored(request.tokens[:held], self._cache.extract(row, held)))
        if last is not request:
            self.rows[row] = last
            self._cache.move(len(self.rows), row, last.length)
        self._changed, self._sampler = True, None


def common_length(lengths: list[int]) -> int:
    """Return the number of columns of the common attention call that minimises the total cost."""
    longest_first = sorted(lengths, reverse=True)
    cost = [len(lengths) * length + alone * _ROW_COST for alone, length in enumerate(longest_first)]
    return longest_first[cost.index(min(cost))]
