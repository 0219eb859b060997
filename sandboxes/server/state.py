"""Files of a sandbox server, from which its next process adopts its sandboxes and snapshots.

Invariant: one process at a time has the name of a server. There is one file per sandbox and snapshot, replaced as a
whole. A file that cannot be read does not prevent a start: its sandbox or snapshot is removed. Times are seconds of
``heartbeat.now``, which is also the clock of event loops.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from agentkit.atomic_file import write_atomically
from agentkit.errors import ConfigError, ProtocolError
from agentkit.sandboxes import paths
from agentkit.sandboxes.reaper import heartbeat
from agentkit.sandboxes.server.protocol import pack_json, unpack
from agentkit.sandboxes.spec import SandboxSpec
from agentkit.sandboxes.types import Snapshot

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedSandbox:
    """A sandbox of a client, as its server saves it."""

    id: str
    tenant: str
    spec: SandboxSpec
    key: str
    """The key of its channel."""
    clients: list[str]
    deadline: float | None


@dataclass(frozen=True)
class SavedSnapshot:
    """A snapshot of a client, as its server saves it."""

    snapshot: Snapshot
    tenant: str
    client: str


class ServerState:
    """The files of the server ``name`` of this user.

    Args:
        name: the server; its next process has the same name.
        keep: seconds for which the sandboxes are kept after the end of this process.

    Raises:
        ConfigError: the name is not usable as a file name.
    """

    def __init__(self, name: str, keep: float) -> None:
        self.name = name
        self.keep = keep
        self.boot = ""
        """Identifies the server in the view of its clients, from its first process on."""
        try:
            self._directory = paths.server_directory(name)
        except ValueError as error:
            raise ConfigError(f"--name: {error}") from None

    def open(self) -> None:
        """Become the server. Raises ``ConfigError`` if it runs already."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            os.close(self._lock)
            raise ConfigError(
                f"the sandbox server {self.name} already runs as process {pid}: stop it first, or give this one "
                "another --name"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        heartbeat.claim(self.name, self.keep)
        for kind in ("sandboxes", "snapshots"):
            (self._directory / kind).mkdir(mode=0o700, exist_ok=True)
        boot = self._directory / "boot"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            self.boot = boot.read_text().strip()
        if not self.boot.isalnum():
            self.boot = secrets.token_hex(8)
            write_atomically(boot, self.boot, mode=0o600)

    def close(self, *, keep: bool) -> None:
        """End the ownership of this process.

        Args:
            keep: what is left waits for the next process; otherwise the reaper removes it.
        """
        with contextlib.suppress(OSError):
            heartbeat.release(keep=keep)
        os.close(self._lock)

    @property
    def run(self) -> str:
        """Name of the heartbeat, which marks all sandboxes of the server."""
        return heartbeat.run_of(self.name)

    def save_sandbox(self, saved: SavedSandbox) -> None:
        fields = vars(saved) | {"spec": saved.spec.model_dump(mode="json")}
        self._save("sandboxes", saved.id, fields)

    def save_snapshot(self, saved: SavedSnapshot) -> None:
        self._save("snapshots", saved.snapshot.id, vars(saved))

    def forget(self, kind: Literal["sandboxes", "snapshots"], id: str) -> None:
        """Delete the file of a sandbox or snapshot that was removed, if it exists."""
        (self._directory / kind / paths.checked_id(id)).unlink(missing_ok=True)

    def sandboxes(self) -> Iterator[SavedSandbox]:
        """Yield the sandboxes of earlier processes, whether they still exist or not."""
        return self._load("sandboxes", SavedSandbox, lambda saved: saved.id)

    def snapshots(self) -> Iterator[SavedSnapshot]:
        """Yield the snapshots of earlier processes, whether they still exist or not."""
        return self._load("snapshots", SavedSnapshot, lambda saved: saved.snapshot.id)

    def load_images(self) -> dict[str, float]:
        """Return when each image that earlier processes fetched was last used, in seconds since 1970."""
        try:
            return unpack(dict[str, float], (self._directory / "images").read_bytes())
        except (OSError, ProtocolError):
            return {}

    def save_images(self, used: Mapping[str, float]) -> None:
        write_atomically(self._directory / "images", pack_json(dict(used)), mode=0o600)

    def _save(self, kind: str, id: str, fields: dict[str, Any]) -> None:
        write_atomically(self._directory / kind / paths.checked_id(id), pack_json(fields), mode=0o600)

    def _load(self, kind: str, shape: type[T], id_of: Callable[[T], str]) -> Iterator[T]:
        for path in sorted((self._directory / kind).iterdir()):
            try:
                saved: T = unpack(shape, path.read_bytes())
                if id_of(saved) != path.name:
                    raise ProtocolError(f"it describes {id_of(saved)}")
            except (OSError, ProtocolError) as error:
                _log.warning("%s cannot be read, so what it describes is removed: %s", path, error)
                path.unlink(missing_ok=True)
            else:
                yield saved
