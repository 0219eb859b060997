"""A run's directory on disk: what it holds, and who may write to it.

Invariant: a directory holds one run, and one process at a time writes to it. Making a run where one is already is
refused unless the run is resumed; resuming never changes what the run learns from, so that its records stay one story.
A run that ended before its first checkpoint cannot be resumed: the next one takes its place, and its records are kept
in a folder of their own.

Layout::

    config.yaml        the resolved configuration
    metrics.jsonl      one line a step
    events.jsonl       one line for whatever happened besides (starts, failures, roll-backs)
    episodes.sqlite    every trajectory (see ``agentkit.records``)
    checkpoints/       one folder a checkpoint
    weights/           weights on their way from the learner to the engines
    model/             the trained policy, as transformers loads it
    tokenizer/         only of an evaluation (``agentkit eval --out``), which has no ``model``
    logs/              standard output of processes; files of TensorBoard and W&B
    failed-1/          configuration, records and logs of an attempt that ended before its first checkpoint
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from agentkit.config import RunConfig
from agentkit.config_io import dump_config, load_config
from agentkit.errors import RunDirectoryError

FROZEN_ON_RESUME = ("env", "model", "seed", "deterministic", "imitation", "critic", "algorithm.advantage")
"""Settings that a resumed run keeps: changing one would make its records two different experiments."""


class RunDirectory:
    """Paths of a run, and the lock that keeps a second process out. Use ``create``, ``resume`` or ``open``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.episodes_file = path / "episodes.sqlite"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.model = path / "model"
        self.logs = path / "logs"
        self.set_aside: Path | None = None
        """Where ``create`` put the records of a run that had no checkpoint."""
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Make ``config.dir`` and lock it.

        The records of a run without a checkpoint are moved to ``set_aside``. Raises ``RunDirectoryError`` when the
        directory is in use, or holds a run with a checkpoint, or anything else.
        """
        directory = cls(config.dir)
        try:
            if not directory.config_file.exists() and directory._holds_anything():
                raise RunDirectoryError(f"{config.dir} is not empty and holds no run; choose another place by `dir=…`")
            config.dir.mkdir(parents=True, exist_ok=True)
            directory._take_lock()
            if directory.has_checkpoint():  # Not before the lock: another process may have made it meanwhile.
                raise RunDirectoryError(
                    f"{config.dir} holds a run already; go on with it by `agentkit run --resume {config.dir}`, "
                    "start one beside it by `--again`, or choose another place by `dir=…`"
                )
            directory._set_records_aside()
            directory._write_config(config)
            directory._make_folders()
        except OSError as error:
            directory.release()
            raise RunDirectoryError(f"{config.dir} cannot be made ({error}); choose another place by `dir=…`") from None
        except BaseException:
            directory.release()
            raise
        return directory

    @classmethod
    def resume(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Lock the run at ``path`` to go on with it under ``config``, which is written to it.

        Raises ``RunDirectoryError`` when there is no run, another process works on it, or ``config`` changes one of
        ``FROZEN_ON_RESUME``.
        """
        directory = cls.open(path)
        if config.dir.resolve() != path.resolve():
            raise RunDirectoryError(f"--resume {path} and dir={config.dir} are two places; leave out `dir`")
        frozen = [
            f"{key}: {old!r} → {new!r}"
            for key, old, new in changes(directory.config(), config)
            if any(key == prefix or key.startswith(prefix + ".") for prefix in FROZEN_ON_RESUME)
        ]
        if frozen:
            raise RunDirectoryError(
                f"{path} cannot go on with other settings than it began with ({'; '.join(frozen)}); "
                "leave them out, or start a new run"
            )
        directory._take_lock()
        directory._write_config(config)
        directory._make_folders()
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """An existing run, to read. Raises ``RunDirectoryError`` when ``path`` holds none."""
        directory = cls(Path(path))
        if not directory.config_file.is_file():
            raise RunDirectoryError(f"{path} holds no run (it has no config.yaml); `agentkit run` makes one")
        return directory

    def config(self) -> RunConfig:
        """The resolved configuration, with ``dir`` as where the run lies now (it may have been moved)."""
        return load_config(self.config_file).model_copy(update={"dir": self.path})

    def release(self) -> None:
        """Let other processes write to the run again. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def has_checkpoint(self) -> bool:
        """Whether the directory holds a run that can be resumed."""
        return self.config_file.exists() and any(self.checkpoints.glob("step-*"))

    def _holds_anything(self) -> bool:
        # A process that was killed between its lock and its configuration leaves nothing else.
        return self.path.exists() and any(
            not item.name.startswith((".lock", ".config.yaml")) for item in self.path.iterdir()
        )

    def _set_records_aside(self) -> None:
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # At most a half-written one.
        records = [self.metrics_file, self.events_file, *self.path.glob(f"{self.episodes_file.name}*"), self.logs]
        kept = [item for item in records if item.is_file() or (item.is_dir() and any(item.iterdir()))]
        if not kept:
            return
        names = (self.path / f"failed-{number}" for number in itertools.count(1))
        folder = next(name for name in names if not name.exists())
        folder.mkdir()
        # A copy: without its configuration, the directory would not be taken for a run if this process died here.
        shutil.copyfile(self.config_file, folder / self.config_file.name)
        for item in kept:
            item.rename(folder / item.name)
        self.set_aside = folder

    def _make_folders(self) -> None:
        for folder in (self.checkpoints, self.weights, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def _take_lock(self) -> None:
        # The kernel drops the lock with the process, however it dies.
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise RunDirectoryError(f"{self.path} is in use by another process; wait for it or stop it") from None
        self._lock = lock

    def _write_config(self, config: RunConfig) -> None:
        write_atomically(self.config_file, dump_config(config).encode())


def changes(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Dotted key, old and new value of every setting that differs, ``dir`` apart."""
    return [item for item in _differences(old.model_dump(), new.model_dump(), "") if item[0] != "dir"]


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: after a crash at any instant it holds all of the old or all of the new bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
