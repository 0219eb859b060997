"""Answers to the page's questions, as JSON. The server and the static copy use the same ones.

Invariant: a run is named by the page and looked up among the runs that were found; a name is never used as a path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentkit.dashboard import queries
from agentkit.dashboard.credit import token_credit
from agentkit.dashboard.drawings import draw_episode, drawing_of
from agentkit.dashboard.pipeline import pipeline
from agentkit.dashboard.sandboxes import sandboxes
from agentkit.errors import AgentkitError, RunDirectoryError
from agentkit.jsonl import finite
from agentkit.run_directory import RunDirectory

_SEARCH_PAUSES = 20
"""Time between two searches for runs, as a multiple of the time that one takes: large folders are searched rarely."""


class Answers:
    """Answers about the runs at and below ``places``. May be used from several threads.

    Raises:
        RunDirectoryError: a place is not a folder.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = list(places)
        self.runs = queries.find_runs(self._places)
        self._search_at = 0.0
        self._summaries: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._texts: dict[Path, Callable[[list[int]], str]] = {}
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._known: dict[str, Callable[[Mapping[str, str]], str]] = {
            "runs": self._runs,
            "settings": lambda asked: queries.to_json(queries.read_settings(self._run(asked))),
            "metrics": lambda asked: queries.to_json(queries.metrics(self._run(asked))),
            "alerts": lambda asked: queries.to_json(queries.alerts(self._run(asked))),
            "pipeline": lambda asked: queries.to_json(pipeline(self._run(asked))),
            "sandboxes": lambda asked: queries.to_json(sandboxes(self._run(asked))),
            "episodes": self._episodes,
            "episode": self._episode,
            "readings": self._readings,
            "drawings": lambda asked: queries.to_json(draw_episode(self._run(asked), _number(asked, "id"))),
            "credit": lambda asked: queries.to_json(finite(token_credit(self._run(asked), _number(asked, "id")))),
        }

    def answer(self, question: str, asked: Mapping[str, str]) -> str:
        """Return an answer as JSON.

        Args:
            question: ``runs``, ``settings``, ``metrics``, ``alerts``, ``pipeline``, ``sandboxes``, ``episodes``,
                ``episode``, ``credit``, ``drawings`` or ``readings``.
            asked: ``run``, the name of a run; ``id`` of an episode; ``after``, ``at`` and ``count`` of
                ``queries.episode_table``.

        Raises:
            AgentkitError: the question or the run is unknown, or the run cannot be read.
        """
        if question not in self._known:
            raise RunDirectoryError(f"the question {question!r} is unknown; known are {', '.join(self._known)}")
        return self._known[question](asked)

    def page(self, asked: Mapping[str, str]) -> str:
        """Return the HTML that an environment draws of one state of an episode. It is not trusted.

        Args:
            asked: ``run``, ``id``, and ``state``: the number of the state, from 0.

        Raises:
            AgentkitError: there is no such page.
        """
        pages, state = drawing_of(self._run(asked), _number(asked, "id")).pages, _number(asked, "state")
        if state >= len(pages):
            raise RunDirectoryError(f"the episode has {len(pages)} pages, and none with the number {state}")
        return pages[state]

    def place(self, asked: Mapping[str, str]) -> tuple[Path, int]:
        """Return the run and the id of an episode.

        Args:
            asked: ``run`` and ``id``.

        Raises:
            RunDirectoryError: there is no such run, or the id is not a number.
        """
        return self._run(asked), _number(asked, "id")

    def readable(self, run: str) -> bool:
        """Return whether the records of a run can be read; the answer to ``runs`` has the error otherwise."""
        return self._summary(self.runs[run])["status"] != "unreadable"

    def _run(self, asked: Mapping[str, str]) -> Path:
        name = asked.get("run", "")
        if name not in self.runs:
            raise RunDirectoryError(f"there is no run {name!r}; reload the list of runs")
        return self.runs[name]

    def _runs(self, _: Mapping[str, str]) -> str:
        if time.monotonic() >= self._search_at:
            began = time.monotonic()
            self.runs = queries.find_runs([place for place in self._places if place.is_dir()])
            ended = time.monotonic()
            self._search_at = ended + _SEARCH_PAUSES * (ended - began)
        return queries.to_json([{"name": name, **self._summary(path)} for name, path in self.runs.items()])

    def _summary(self, path: Path) -> dict[str, Any]:
        with self._lock:
            stamp = queries.signature(path)
            known = self._summaries.get(path)
            if known is None or known[0] != stamp:
                try:
                    found = {"path": str(path), **queries.summary(path)}
                except Exception as error:  # a folder can contain anything
                    text = str(error) if isinstance(error, AgentkitError) else f"{type(error).__name__}: {error}"
                    found = {"path": str(path), "status": "unreadable", "error": text}
                known = self._summaries[path] = stamp, found
            return known[1]

    def _episodes(self, asked: Mapping[str, str]) -> str:
        try:
            at = float(asked["at"]) if asked.get("at") else None
        except ValueError:
            raise RunDirectoryError(f"at={asked['at']!r} must be a time") from None
        return queries.episode_table(
            self._run(asked), after=_number(asked, "after"), at=at, count=_number(asked, "count")
        )

    def _episode(self, asked: Mapping[str, str]) -> str:
        path = self._run(asked)
        text_of = self._texts.get(path) or queries.token_texts(RunDirectory(path))
        if text_of is not None:
            self._texts[path] = text_of
        return queries.to_json(queries.episode(path, _number(asked, "id"), text_of))

    def _readings(self, asked: Mapping[str, str]) -> str:
        from agentkit.dashboard.readings import token_readings

        with self._reading:  # models take memory
            return queries.to_json(finite(token_readings(self._run(asked), _number(asked, "id"))))


def _number(asked: Mapping[str, str], name: str) -> int:
    text = asked.get(name, "0")
    if not text.isdecimal() or len(text) > 18:  # SQLite stores no larger ones
        raise RunDirectoryError(f"{name}={text!r} must be a number")
    return int(text)
