"""Attention-rhythm credit by plain loops over whole maps: the independent reference of the tests."""

from __future__ import annotations

import math
import statistics

import numpy as np


def middle_layers(count: int) -> list[int]:
    low, high = count // 3, min(count - 1, 2 * count // 3)
    layers = []
    for i in range(5):
        layer = low + i * (high - low) // 4
        if layer not in layers:
            layers.append(layer)
    return layers


def span_sums(maps: np.ndarray, mask: np.ndarray) -> list[float]:
    """Of each head of ``maps`` ``[heads, T, T]``, over the rows of action tokens."""
    return [sum(float(one[t, s]) * (t - s) for t in range(len(mask)) if mask[t] for s in range(t + 1)) for one in maps]


def head_sets(spans: list[float]) -> tuple[list[int], list[int]]:
    count = max(1, math.floor(0.3 * len(spans) + 1e-9))
    smallest = sorted(range(len(spans)), key=lambda head: (spans[head], head))[:count]
    largest = sorted(range(len(spans)), key=lambda head: (-spans[head], head))[:count]
    return smallest, largest


def waad(map_: np.ndarray, t: int) -> float:
    return sum(float(map_[t, s]) * min(t - s, 10) for s in range(t + 1))


def fai_rows(mask: np.ndarray, s: int) -> list[int]:
    return [t for t in range(len(mask)) if mask[t] and s + 10 <= t <= s + 100]


def highest(scores: dict[int, float], share: float) -> set[int]:
    count = math.floor(share * len(scores) + 1e-9)
    descending = sorted(scores.values(), reverse=True)
    if count == len(scores):
        return set(scores)
    return {t for t, score in scores.items() if count > 0 and score > descending[count]}


def gamma(
    waads: dict[int, float],
    fais: dict[int, float],
    turns: dict[int, int],
    credit: str,
    amplification: float = 1.5,
    share: float = 0.4,
) -> dict[int, float]:
    """Of one sequence: position of each action token to its factor. ``fais`` holds only tokens with a score."""
    changes = {t: abs(waads[t] - waads[t + 1]) for t in waads if t + 1 in waads and turns[t] == turns[t + 1]}
    local, anchors = highest(changes, share), highest(fais, share)
    if credit != "coupled":
        marked = local if credit == "local" else anchors
        return {t: amplification if t in marked else 1.0 for t in waads}
    median = statistics.median(waads.values())
    dependent, introducing = set(), set()
    for t in anchors:
        before = [u for u in (t - 3, t - 2, t - 1) if turns.get(u) == turns[t]]
        if waads[t] <= median and any(u in local for u in before):
            dependent.add(t)
            introducing.add(max(before, key=lambda u: (changes[u], -u)))
    return {
        t: 1
        + (amplification - 1)
        * ((t in anchors and t not in dependent) + 0.6 * (t in dependent) + 0.4 * (t in introducing))
        for t in waads
    }
