"""The recorder of a run: metrics, episodes and events.

Invariant: callers do not wait for the disk. One writer thread writes the records in the order of the calls; ``flush``
returns when all earlier records are on disk, so a checkpoint is never newer than the records. A write error is raised
by the next call. A tracker that fails is closed and reported as an event; it never stops a run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentkit import records
from agentkit.codec import decode_group, encode_group
from agentkit.errors import RunDirectoryError
from agentkit.jsonl import JsonlWriter
from agentkit.run_directory import RunDirectory
from agentkit.trackers import Tracker
from agentkit.types import Trajectory

__all__ = ["Recorder", "decode_group", "encode_group"]

_COMMIT_EVERY_S = 0.5
_BATCH = 256
_SAMPLES = 4
"""Episodes of each evaluation, and of each table of samples, that trackers receive."""
_QUEUE_LENGTH = 8192
"""Maximum length of the queue; callers wait when it is full, because the disk is slower than the run."""
_TIMEOUT_S = 120.0


class Recorder:
    """Writer of a run's metrics, episodes and events. Close it, or use it as a context manager.

    Every method raises ``RunDirectoryError`` after a write has failed.

    Args:
        directory: the run.
        trackers: receive metrics, and some episodes.
        sample_every: training steps between two tables of sample episodes for the trackers; 0: none.
    """

    def __init__(self, directory: RunDirectory, trackers: Sequence[Tracker] = (), *, sample_every: int = 0) -> None:
        self._queue: queue.Queue[tuple[str, tuple]] = queue.Queue(_QUEUE_LENGTH)
        self._writer = _Writer(directory, trackers, sample_every)
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="agentkit-recorder", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one line to ``metrics.jsonl`` and to each tracker. NaN is allowed (null in the file)."""
        self._hand_over("metrics", step, {name: float(value) for name, value in values.items()}, time.time())

    def episode(self, step: int, trajectory: Trajectory, ending: str, reason: str = "") -> None:
        """Write a trajectory, which must not change afterwards; ``step`` is the training step in progress."""
        self._hand_over("episode", records.PendingEpisode(step, trajectory, ending, reason))

    def credit(self, credit: Sequence[records.TokenCredit]) -> None:
        """Write what the learner gave the tokens of the episodes of a batch; the arrays must not change afterwards."""
        self._hand_over("credit", credit)

    def begin_evaluation(self, step: int) -> None:
        """Remove the episodes and metrics of an earlier evaluation of ``step``, which is repeated."""
        self._hand_over("begin_evaluation", step)

    def event(self, kind: str, **fields: Any) -> None:
        """Write one line to ``events.jsonl``; values that are not JSON types are written as text."""
        self._hand_over("event", kind, fields, time.time())

    def flush(self) -> None:
        """Wait until all records so far are on disk. Call it before a checkpoint is committed."""
        self._wait_for("flush")

    def rollback(self, step: int) -> None:
        """Remove metrics and episodes of steps after ``step``, which a resumed run repeats; write an event."""
        self._wait_for("rollback", step)

    def close(self) -> None:
        """Write all remaining records and stop. Idempotent."""
        if self._closed:
            return
        try:
            self._wait_for("close")
        finally:
            self._closed = True
            self._thread.join(_TIMEOUT_S)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_over(self, kind: str, *arguments: Any) -> None:
        if self._closed:
            raise RunDirectoryError("the recorder is closed")
        if self._error is not None and kind != "close":
            raise RunDirectoryError(f"records cannot be written: {self._error}; is the disk full?") from self._error
        try:
            self._queue.put((kind, arguments), timeout=_TIMEOUT_S)
        except queue.Full:
            raise RunDirectoryError(f"no record was written for {_TIMEOUT_S:.0f} s; is the disk full?") from None

    def _wait_for(self, kind: str, *arguments: Any) -> None:
        done = threading.Event()
        self._hand_over(kind, *arguments, done)
        if not done.wait(_TIMEOUT_S):
            raise RunDirectoryError(f"writing did not finish in {_TIMEOUT_S:.0f} s; is the disk full?")
        if self._error is not None:
            raise RunDirectoryError(f"records cannot be written: {self._error}; is the disk full?") from self._error

    def _run(self) -> None:
        while True:
            try:
                kind, arguments = self._queue.get(timeout=self._writer.seconds_to_commit())
            except queue.Empty:
                kind, arguments = "commit", ()
            try:
                # After an error nothing is written, but the queue is still emptied: callers may be waiting.
                if self._error is None or kind == "close":
                    getattr(self._writer, kind)(*[item for item in arguments if not isinstance(item, threading.Event)])
            except Exception as error:
                self._error = self._error or error
            for item in arguments:
                if isinstance(item, threading.Event):
                    item.set()
            if kind == "close":
                return


class _Writer:
    """Methods of the writer thread. Created in the caller's thread, so an unusable directory raises there."""

    def __init__(self, directory: RunDirectory, trackers: Sequence[Tracker], sample_every: int) -> None:
        self._file, self._sample_every = directory.episodes_file, sample_every
        self._database = records.open_for_writing(directory.episodes_file)
        self._metrics = JsonlWriter(directory.metrics_file)
        self._events = JsonlWriter(directory.events_file)
        self._trackers = list(trackers)
        self._pending: list[records.PendingEpisode] = []
        self._commit_at = 0.0
        self._samples: list[Trajectory] = []

    def seconds_to_commit(self) -> float | None:
        """Return seconds until the next commit; None if nothing is pending."""
        return max(self._commit_at - time.monotonic(), 0.0) if self._pending else None

    def metrics(self, step: int, values: dict[str, float], now: float) -> None:
        self._metrics.write({"step": step, "time": now, **values})
        self._each_tracker("log", step, values)
        if self._samples and "eval/success" in values:
            self._each_tracker("log_episodes", step, self._samples)
            self._samples = []
        due = self._sample_every > 0 and step > 0 and step % self._sample_every == 0
        if due and self._trackers and "eval/success" not in values:
            self.commit()  # gives the episodes their numbers
            ids = records.first_of_groups(self._database, step, _SAMPLES)
            samples = [(id, records.read_episode(self._file, id)[1]) for id in ids]
            if samples:
                self._each_tracker("log_samples", step, samples)

    def event(self, kind: str, fields: dict[str, Any], now: float) -> None:
        self._events.write({"event": kind, "time": now, **fields})

    def episode(self, episode: records.PendingEpisode) -> None:
        if not self._pending:
            self._commit_at = time.monotonic() + _COMMIT_EVERY_S
        self._pending.append(episode)
        played = episode.ending == records.EVALUATION and episode.trajectory.outcome != "voided"
        if played and self._trackers and len(self._samples) < _SAMPLES:
            self._samples.append(episode.trajectory)
        if len(self._pending) >= _BATCH or time.monotonic() >= self._commit_at:
            self.commit()

    def credit(self, credit: Sequence[records.TokenCredit]) -> None:
        records.insert_credit(self._database, credit)

    def begin_evaluation(self, step: int) -> None:
        self._samples = []
        self.commit()
        self._metrics.keep(lambda record: record["step"] != step or "eval/success" not in record)
        records.delete_evaluation(self._database, step)

    def commit(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            records.insert(self._database, pending)

    def flush(self) -> None:
        self.commit()
        self._metrics.sync()
        self._events.sync()
        # In WAL mode a commit survives a crash of the process; only a checkpoint survives a crash of the machine.
        self._database.execute("pragma wal_checkpoint(passive)").fetchall()

    def rollback(self, step: int) -> None:
        self.commit()
        measured = False

        def keep(record: dict[str, Any]) -> bool:
            nonlocal measured
            measured = measured or (record["step"] == step and "eval/success" in record)
            return record["step"] <= step

        lines = self._metrics.keep(keep)
        episodes = records.delete_after(self._database, step)
        if not measured:  # an evaluation after the checkpoint was interrupted
            episodes += records.delete_evaluation(self._database, step)
        self._each_tracker("rollback", step)
        self.event("rollback", {"to_step": step, "episodes_removed": episodes, "metrics_removed": lines}, time.time())
        self.flush()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._each_tracker("close")
            self._metrics.close()
            self._events.close()
            self._database.close()

    def _each_tracker(self, method: str, *arguments: Any) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:  # third-party clients can raise any exception
                self._trackers.remove(tracker)
                self.event("tracker_failed", {"tracker": tracker.name, "error": repr(error)}, time.time())
