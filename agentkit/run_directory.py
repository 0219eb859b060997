"""Run directories: layout, locking, and rules for resuming.

Invariant: a directory contains one run, and only one process at a time writes to it. A new run in the directory of
another is refused; a resumed run keeps all settings that affect learning, so its records stay consistent. A run that
ended before its first checkpoint cannot be resumed: the next run replaces it, and its records are moved to a subfolder.

Layout::

    config.yaml        the resolved configuration
    metrics.jsonl      one line per step or evaluation
    events.jsonl       one line per event (start, failure, roll-back, …)
    episodes.sqlite    every trajectory (see ``agentkit.records``)
    checkpoints/       one folder per checkpoint
    model/             the trained policy in the format of transformers; a link into the newest checkpoint (with
                       adapters, to the adapter until the run is finished)
    tokenizer/         only in evaluations (``agentkit eval --out``), which have no ``model``
    logs/              standard output of processes; files of TensorBoard and W&B
    failed-1/          configuration, records and logs of an attempt that ended before its first checkpoint
"""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from agentkit.atomic_file import write_atomically
from agentkit.config import RunConfig
from agentkit.config_io import dump_config, load_config
from agentkit.errors import RunDirectoryError

FROZEN_ON_RESUME = (
    "env", "model", "seed", "deterministic", "imitation", "critic", "algorithm.advantage", "rollout.reward",
    "rollout.reward_options",
)  # fmt: skip
"""Settings that cannot change when a run is resumed: its records would mix two experiments."""


class RunDirectory:
    """Paths of a run and its lock. Use ``create``, ``resume`` or ``open``."""

    def __init__(self, path: Path) -> None:
        path = path.absolute()  # The caller may change the working directory.
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.episodes_file = path / "episodes.sqlite"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.logs = path / "logs"
        self.set_aside: Path | None = None
        """Folder to which ``create`` moved the records of a run without a checkpoint."""
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """Create and lock ``config.dir``. Records of a run without a checkpoint are moved to ``set_aside``.

        Raises:
            RunDirectoryError: the directory is in use, contains a run with a checkpoint or other files, or cannot be
                created.
        """
        directory = cls(config.dir)
        try:
            if not directory.config_file.exists() and directory._has_files():
                raise RunDirectoryError(
                    f"{config.dir} is not empty and not a run directory; choose another with `dir=…`"
                )
            config.dir.mkdir(parents=True, exist_ok=True)
            directory._take_lock()
            if directory.has_checkpoint():  # Check after locking: another process may have created it.
                raise RunDirectoryError(
                    f"{config.dir} already contains a run; continue it with `agentkit run --resume {config.dir}`, "
                    'start another beside it with `--again` (in Python: resume=True or "auto"), or choose another '
                    "directory with `dir=…`"
                )
            directory._set_records_aside()
            directory._write_config(config)
            directory._make_folders()
        except OSError as error:
            directory.release()
            raise RunDirectoryError(f"{config.dir} cannot be created ({error}); choose another with `dir=…`") from None
        except BaseException:
            directory.release()
            raise
        return directory

    @classmethod
    def resume(cls, path: Path, config: RunConfig) -> RunDirectory:
        """Lock the run at ``path`` to continue it with ``config``, and write ``config`` to it.

        Raises:
            RunDirectoryError: ``path`` is not a run directory, another process uses it, or ``config`` changes one of
                ``FROZEN_ON_RESUME``.
        """
        directory = cls.open(path)
        if config.dir.resolve() != path.resolve():
            raise RunDirectoryError(f"--resume {path} and dir={config.dir} are different directories; omit `dir`")
        frozen = [
            f"{key}: {old!r} → {new!r}"
            for key, old, new in changes(directory.config(), config)
            if any(key == prefix or key.startswith(prefix + ".") for prefix in FROZEN_ON_RESUME)
        ]
        if frozen:
            raise RunDirectoryError(
                f"{path} cannot be resumed with other values of these settings ({'; '.join(frozen)}); "
                "omit them, or start a new run"
            )
        directory._take_lock()
        directory._write_config(config)
        directory._make_folders()
        return directory

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run for reading. Raises ``RunDirectoryError`` if ``path`` is not a run directory."""
        directory = cls(Path(path))
        if not directory.config_file.is_file():
            raise RunDirectoryError(f"{path} is not a run directory (no config.yaml); create one with `agentkit run`")
        return directory

    def config(self) -> RunConfig:
        """Return the resolved configuration. Its ``dir`` is the current path (the directory may have been moved)."""
        return load_config(self.config_file).model_copy(update={"dir": self.path})

    def in_use(self) -> bool:
        """Return whether a process of this machine works on the run. It takes no lock, so it never stops a start."""
        try:
            inode = (self.path / ".lock").stat().st_ino
            locks = Path("/proc/locks").read_text().splitlines()
        except OSError:
            return False
        return any(" FLOCK " in lock and f":{inode} " in lock for lock in locks)

    def release(self) -> None:
        """Unlock the run. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def has_checkpoint(self) -> bool:
        """Return whether the directory contains a run that can be resumed."""
        return self.config_file.exists() and any(self.checkpoints.glob("step-*"))

    def _has_files(self) -> bool:
        # A process killed between locking and writing its configuration leaves only these files.
        return self.path.exists() and any(
            not item.name.startswith((".lock", ".config.yaml")) for item in self.path.iterdir()
        )

    def _set_records_aside(self) -> None:
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # Contains only incomplete ones.
        records = [self.metrics_file, self.events_file, *self.path.glob(f"{self.episodes_file.name}*"), self.logs]
        kept = [item for item in records if item.is_file() or (item.is_dir() and any(item.iterdir()))]
        if not kept:
            return
        names = (self.path / f"failed-{number}" for number in itertools.count(1))
        folder = next(name for name in names if not name.exists())
        folder.mkdir()
        # A copy: without a configuration this would not be a run directory if this process died here.
        shutil.copyfile(self.config_file, folder / self.config_file.name)
        for item in kept:
            item.rename(folder / item.name)
        self.set_aside = folder

    def _make_folders(self) -> None:
        for folder in (self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)

    def _take_lock(self) -> None:
        # The kernel releases the lock when the process ends.
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise RunDirectoryError(f"{self.path} is in use by another run; wait for it or stop it") from None
        self._lock = lock

    def _write_config(self, config: RunConfig) -> None:
        write_atomically(self.config_file, dump_config(config), durable=True)


def changes(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Return dotted key, old value and new value of all settings that differ, except ``dir``."""
    return [item for item in _differences(old.model_dump(), new.model_dump(), "") if item[0] != "dir"]


def _differences(old: Any, new: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new
