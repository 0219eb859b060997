"""Worker process that generates and scores the items of reasoning-gym.

Invariant: an answer is scored in a forked child with limits of processor time and memory, because some scorers evaluate
it as an expression. If the scorer fails with an answer but not with the known one, the answer is the cause; otherwise
the library has failed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
import signal
from functools import lru_cache
from typing import Any

import psutil

from agentkit.entry_points import nearest
from agentkit.envs.workers.fork_server import Handler
from agentkit.errors import ConfigError
from agentkit.integrations.library import serve

_FACTORY: Any = importlib.import_module("reasoning_gym").factory  # of an extra that type checkers may not find
_DATASETS: dict[str, tuple[Any, Any]] = _FACTORY.DATASETS
_RANGES = {"seed": (0, (1 << 31) - 1), "size": (1, 1_000_000)}
"""Values of the options of all datasets: numpy accepts seeds below 2^32, and items have numbers below 2^31."""
_CPU_SECONDS = 2
_MEMORY = 1 << 30
"""Bytes that scoring may allocate."""


def make_handler() -> Handler:
    """Return what answers ``options``, ``item`` and ``score``."""
    return serve(options, item, score)


def options(dataset: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return all options of a dataset with their values.

    Raises:
        ConfigError: there is no such dataset or option, or a value is wrong.
    """
    if dataset not in _DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset {dataset!r}; {nearest(dataset, sorted(_DATASETS))}")
    config = _DATASETS[dataset][1]
    names = [field.name for field in dataclasses.fields(config)]
    for name in given:
        if name not in names:
            raise ConfigError(f"the dataset {dataset} has no option {name!r}; {nearest(name, names)}")
    for name, (least, most) in _RANGES.items():
        value = given.get(name, least)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(
                f"{name}={value!r} of the dataset {dataset} must be a whole number from {least} to {most}"
            )
    try:
        made = config(**{"seed": 0, **given})
        if hasattr(made, "validate"):
            made.validate()
    except Exception as error:
        told = str(error) or type(error).__name__
        raise ConfigError(f"the dataset {dataset} cannot be made with {given}: {told}") from error
    return json.loads(json.dumps({name: getattr(made, name) for name in names}, default=str))


def item(dataset: str, given: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the number, the question and the known answer of an item."""
    entry = _entry(dataset, json.dumps(given), number)[1]
    answer = entry["answer"]
    return {"number": number, "question": entry["question"], "answer": None if answer is None else str(answer)}


def score(dataset: str, given: dict[str, Any], number: int, answer: str) -> tuple[float, str]:
    """Return the score of an answer, and why it cannot be scored; the reason is empty if it can.

    Raises:
        RuntimeError: the known answer cannot be scored either.
    """
    generated, entry = _entry(dataset, json.dumps(given), number)
    result, problem = _score_in_child(generated, entry, answer)
    if result is not None:
        return result, ""
    if _score_in_child(generated, entry, entry["answer"])[0] is None:
        raise RuntimeError(f"{dataset} cannot score item {number}: {problem}")
    return 0.0, problem


@lru_cache(maxsize=1)
def _entry(dataset: str, given: str, number: int) -> tuple[Any, dict[str, Any]]:
    """Return item ``number``, and the part of the dataset that contains it.

    reasoning-gym generates most items from the sum of the dataset's seed and the index, and some for the whole dataset
    at once. In parts of ``size`` items, each with the seed of its first item, the first part is reasoning-gym's
    dataset, and every item has another seed.
    """
    options = {"seed": 0, **json.loads(given)}
    size = len(_part(dataset, json.dumps(options)))
    part, index = divmod(number, size)
    generated = _part(dataset, json.dumps({**options, "seed": options["seed"] + part * size}))
    return generated, generated[index]


@lru_cache(maxsize=2)
def _part(dataset: str, options: str) -> Any:
    return _FACTORY.create_dataset(dataset, **json.loads(options))


def _score_in_child(generated: Any, entry: dict[str, Any], answer: str | None) -> tuple[float | None, str]:
    """Return the score, or None and why there is none."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(sending, json.dumps(_score(generated, entry, answer)).encode())
        finally:
            os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return None, f"the scorer was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return json.loads(said) if said else (None, "the scorer ended without a score")


def _score(generated: Any, entry: dict[str, Any], answer: str | None) -> tuple[float | None, str]:
    """As ``_score_in_child``, in this process, which it limits."""
    try:
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        return float(generated.score_answer(answer, entry)), ""
    except BaseException as error:
        return None, f"the scorer raised {type(error).__name__}: {error}"[:500]
