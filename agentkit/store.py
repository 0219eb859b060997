"""The recorder: what a run measures and does, written down while it runs.

Invariant: the caller does not wait for the disk. Records are handed to one writer thread in the order of the calls;
``flush`` returns when everything handed over before it is on disk, so that a checkpoint never knows more than the
records. What cannot be written is raised by the next call, never lost silently. A tracker that fails is given up and
reported as an event; it never stops a run.
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
_LINE = 8192
"""Records in line before a caller has to wait after all: memory is finite, and a disk may be slower than a run."""
_PATIENCE_S = 120.0


class Recorder:
    """Writes a run's metrics, episodes and events. Close it, or use it as a context manager.

    Every method raises ``RunDirectoryError`` once the disk has refused something.
    """

    def __init__(self, directory: RunDirectory, trackers: Sequence[Tracker] = ()) -> None:
        self._line: queue.Queue[tuple[str, tuple]] = queue.Queue(_LINE)
        self._writer = _Writer(directory, trackers)
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="agentkit-recorder", daemon=True)
        self._thread.start()

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One line of ``metrics.jsonl`` and one call of each tracker. NaN is allowed (null in the file)."""
        self._hand_over("metrics", step, {name: float(value) for name, value in values.items()}, time.time())

    def episode(self, step: int, trajectory: Trajectory, ending: str, reason: str = "") -> None:
        """A whole trajectory, not to be changed any more; ``step`` is the training step in progress."""
        self._hand_over("episode", records.PendingEpisode(step, trajectory, ending, reason))

    def begin_evaluation(self, step: int) -> None:
        """Forget the evaluation episodes of ``step``: an evaluation that was interrupted is about to be repeated."""
        self._hand_over("begin_evaluation", step)

    def event(self, kind: str, **fields: Any) -> None:
        """One line of ``events.jsonl``; a field that JSON does not know is written as its text."""
        self._hand_over("event", kind, fields, time.time())

    def flush(self) -> None:
        """Returns when everything recorded so far is on disk. Call it before a checkpoint counts as made."""
        self._wait_for("flush")

    def rollback(self, step: int) -> None:
        """Forget metrics and episodes of steps after ``step``, and say so in an event: a resumed run repeats them."""
        self._wait_for("rollback", step)

    def close(self) -> None:
        """Write what is left and stop. Idempotent; raises like every method."""
        if self._closed:
            return
        try:
            self._wait_for("close")
        finally:
            self._closed = True
            self._thread.join(_PATIENCE_S)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hand_over(self, kind: str, *arguments: Any) -> None:
        if self._closed:
            raise RunDirectoryError("the recorder is closed; nothing can be recorded any more")
        if self._error is not None and kind != "close":
            raise RunDirectoryError(f"records cannot be written: {self._error}; is the disk full?") from self._error
        try:
            self._line.put((kind, arguments), timeout=_PATIENCE_S)
        except queue.Full:
            raise RunDirectoryError(f"the disk took no record for {_PATIENCE_S:.0f} s; is it full or away?") from None

    def _wait_for(self, kind: str, *arguments: Any) -> None:
        done = threading.Event()
        self._hand_over(kind, *arguments, done)
        if not done.wait(_PATIENCE_S):
            raise RunDirectoryError(f"the disk did not finish writing in {_PATIENCE_S:.0f} s; is it full or away?")
        if self._error is not None:
            raise RunDirectoryError(f"records cannot be written: {self._error}; is the disk full?") from self._error

    def _run(self) -> None:
        while True:
            try:
                kind, arguments = self._line.get(timeout=self._writer.patience())
            except queue.Empty:
                kind, arguments = "commit", ()
            try:
                # After an error nothing more is written, but the line must go on moving: others wait in it.
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
    """What the thread does with each kind of record. Made in the caller's thread, so that a bad place raises there."""

    def __init__(self, directory: RunDirectory, trackers: Sequence[Tracker]) -> None:
        self._database = records.open_for_writing(directory.episodes_file)
        self._metrics = JsonlWriter(directory.metrics_file)
        self._events = JsonlWriter(directory.events_file)
        self._trackers = list(trackers)
        self._pending: list[records.PendingEpisode] = []
        self._commit_at = 0.0

    def patience(self) -> float | None:
        """Seconds until the next commit is due; None when nothing waits for one."""
        return max(self._commit_at - time.monotonic(), 0.0) if self._pending else None

    def metrics(self, step: int, values: dict[str, float], now: float) -> None:
        self._metrics.write({"step": step, "time": now, **values})
        self._each_tracker("log", step, values)

    def event(self, kind: str, fields: dict[str, Any], now: float) -> None:
        self._events.write({"event": kind, "time": now, **fields})

    def episode(self, episode: records.PendingEpisode) -> None:
        if not self._pending:
            self._commit_at = time.monotonic() + _COMMIT_EVERY_S
        self._pending.append(episode)
        if len(self._pending) >= _BATCH or time.monotonic() >= self._commit_at:
            self.commit()

    def begin_evaluation(self, step: int) -> None:
        self.commit()
        records.delete_evaluation(self._database, step)

    def commit(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            records.insert(self._database, pending)

    def flush(self) -> None:
        self.commit()
        self._metrics.sync()
        self._events.sync()
        # In WAL mode a commit survives the process; only a checkpoint of the log makes it survive the machine.
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
        if not measured:  # an evaluation after the checkpoint, which was interrupted
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
            except Exception as error:  # whatever a third party's client raises
                self._trackers.remove(tracker)
                self.event("tracker_failed", {"tracker": tracker.name, "error": repr(error)}, time.time())
