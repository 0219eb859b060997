"""The reaper: a process that removes an owner's sandboxes when the owner ends, even by SIGKILL.

Invariant: the reaper runs before the owner's first sandbox is created, outside the owner's process group and session.
It detects the owner's end by the end of a pipe, and by polling in case a forked child holds the pipe open. It exits
once nothing of the owner is left. Until then it also sweeps for sandboxes of other ended owners: at its start, every
minute, and when a time to live ends. The sandboxes of a server are removed when they have been kept for a successor for
the time that its heartbeat states; if one starts meanwhile, they are left to it and to its reaper.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from agentkit.errors import SandboxError
from agentkit.sandboxes import paths
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.reaper import heartbeat, records
from agentkit.sandboxes.reaper.owner import Owner
from agentkit.sandboxes.reaper.sweep import Report, remove_free_heartbeats, sweep

SWEEP_INTERVAL = 60.0
OWNER_POLL_INTERVAL = 1.0
SUCCESSOR_POLL_INTERVAL = 0.5
DEADLINE_POLL_INTERVAL = 3.0
EMPTY_SWEEPS = 3
"""Sweeps in a row that must find nothing: a container that was being created at the owner's end is listed late."""
START_TIMEOUT = 30.0
GIVE_UP_AFTER = 600.0
"""Seconds of attempts at an engine that does not answer; other reapers try again later."""
_LOG_LIMIT = 1_000_000

# Two forks: the reaper has no parent that could end it or has to wait for it.
_LAUNCH = (
    "import os; os.fork() and os._exit(0); os.setsid(); from agentkit.sandboxes.reaper import process; process.main()"
)


# ------------------------------------------------------------------------------------------------ in the owner process


def register(backend: Backend, id: str) -> Mapping[str, str]:
    """Register sandbox ``id``, which ``backend`` is about to create; returns its labels.

    ``records.forget(id)`` ends the registration.
    """
    owner = heartbeat.current()
    watch(backend)
    records.register(owner, id, backend.name, None)
    return owner.labels(id)


def watch(backend: Backend) -> None:
    """Let the reaper remove what this process creates on ``backend``; starts the reaper if necessary."""
    recipe = backend.recipe()
    if recipe is None:
        return
    cls = type(backend)
    line = json.dumps({"module": cls.__module__, "class": cls.__qualname__, "arguments": dict(recipe)})
    with _lock:
        _reaper.send(line)


class _ReaperPipe:
    """The owner's end of the pipe."""

    def __init__(self) -> None:
        self._pipe = -1
        self._run = ""
        self._sent: list[str] = []

    def send(self, line: str) -> None:
        """Send the recipe of a back end; restarts a reaper that was killed."""
        owner = heartbeat.current()
        if owner.run != self._run or not self._is_read():
            self.drop()
            self._pipe, self._run = _launch(owner), owner.run
            for known in self._sent:
                self._write(known)
        if line not in self._sent:
            self._write(line)
            self._sent.append(line)

    def drop(self) -> None:
        """Close the descriptor; in a forked child this leaves the parent's pipe as it is."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)

    def _is_read(self) -> bool:
        if self._pipe < 0:
            return False
        poll = select.poll()
        poll.register(self._pipe, 0)
        return not poll.poll(0)  # only the loss of the reader is reported

    def _write(self, line: str) -> None:
        os.write(self._pipe, f"{line}\n".encode())


_reaper = _ReaperPipe()
_lock = threading.Lock()


def _launch(owner: heartbeat.OwnerHeartbeat) -> int:
    """Start a reaper for this process; returns the pipe that it reads."""
    reads, writes = os.pipe()
    try:
        with open(_log_path(), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, owner.run, str(owner.owner), owner.server],
                stdin=reads,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env=os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
                start_new_session=True,
            )
    except BaseException as error:
        os.close(writes)
        if isinstance(error, OSError):
            raise SandboxError(
                f"the reaper process, which removes sandboxes when this process ends, does not start: {error}"
            ) from error
        raise
    finally:
        os.close(reads)
    # The launcher exits at once; waiting for it here would block an event loop.
    threading.Thread(target=process.wait, name="agentkit-reaper-launch", daemon=True).start()
    return writes


def _forget_in_child() -> None:
    global _reaper, _lock
    _reaper.drop()
    _reaper, _lock = _ReaperPipe(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


# ----------------------------------------------------------------------------------------------- in the reaper process


def main() -> None:
    """Entry point of the reaper process: heartbeat, owner and server as arguments, the pipe as standard input."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    owner = Owner.parse(sys.argv[2])
    if owner is None:
        raise SystemExit(f"{sys.argv[2]!r} is not an owner process")
    asyncio.run(Reaper(sys.argv[1], owner, pipe=0, server=sys.argv[3]).run())


class Reaper:
    """Removes the sandboxes of one owner after its end.

    Args:
        run: name of the owner's heartbeat.
        owner: the owner process.
        pipe: descriptor of the pipe from the owner: recipes of back ends, one JSON object per line.
        server: name of the owner, if it is a sandbox server.
    """

    def __init__(self, run: str, owner: Owner, pipe: int, server: str = "") -> None:
        self._owner_run = run
        self._server = server
        self._owner = owner
        self._pipe = pipe
        self._backends: dict[str, Backend] = {}
        self._started: set[str] = set()
        self._unread = b""
        self._ended = asyncio.Event()
        self._received = asyncio.Event()

    async def run(self) -> None:
        """Run until the owner has ended and nothing of it is left."""
        os.set_blocking(self._pipe, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe, self._read)
        sweeping = loop.create_task(self._sweep_all())
        try:
            await self._wait_for_owner()
            self._read()  # what the owner sent just before its end
            succeeded = await self._wait_for_successor()
        finally:
            loop.remove_reader(self._pipe)
            sweeping.cancel()
            await asyncio.wait([sweeping], timeout=5)
        try:
            if not succeeded:
                await self._remove_all()
        finally:
            for backend in self._backends.values():
                with contextlib.suppress(Exception):
                    await backend.close()

    async def _wait_for_owner(self) -> None:
        while not self._ended.is_set() and self._owner.alive() is not False:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), OWNER_POLL_INTERVAL)

    async def _wait_for_successor(self) -> bool:
        """Return whether another process of the server has taken its sandboxes over before their time ended."""
        path = paths.heartbeat_path(self._owner_run)
        while self._server:
            gone = self._owner.alive() is False  # before the state: the pipe ends before the heartbeat does
            state = heartbeat.state(path)
            if state in ("free", "absent"):
                break
            if gone and state != "kept":
                return True
            await asyncio.sleep(SUCCESSOR_POLL_INTERVAL)
        return False

    def _read(self) -> None:
        """Read recipes from the pipe; its end sets ``_ended``."""
        try:
            data = os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        if not data:
            self._ended.set()
            asyncio.get_running_loop().remove_reader(self._pipe)
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._add_backend(line.decode())

    def _add_backend(self, line: str) -> None:
        try:
            recipe = json.loads(line)
            cls = getattr(importlib.import_module(recipe["module"]), recipe["class"])
            self._backends[line] = cls(**recipe["arguments"])
        except Exception as error:  # other back ends are swept nevertheless
            _log(self._owner_run, f"cannot create a back end from {line}: {error!r}")
        self._received.set()

    async def _sweep_all(self) -> None:
        """Sweep for sandboxes of all owners until cancelled."""
        last = float("-inf")
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._received.wait(), DEADLINE_POLL_INTERVAL)
            if not self._received.is_set() and heartbeat.now() - last < SWEEP_INTERVAL and not records.any_due():
                continue
            self._received.clear()
            last = heartbeat.now()
            try:
                with _only_sweeper() as alone:
                    if alone:
                        await self._sweep(None)
            except OSError as error:
                _log(self._owner_run, f"sweep failed: {error}")

    async def _remove_all(self) -> None:
        """Remove the owner's sandboxes."""
        empty, delay, begin = 0, 0.5, heartbeat.now()
        # A record is written before its sandbox is created: without records, one empty sweep is enough.
        enough = EMPTY_SWEEPS if records.all_of(self._owner_run) else 1
        while empty < enough and heartbeat.now() - begin < GIVE_UP_AFTER:
            report = await self._sweep(self._owner_run)
            empty = 0 if report.removed or report.failed else empty + 1
            delay = min(delay * 2, 15.0) if report.failed else 0.5
            if empty < enough:
                await asyncio.sleep(delay)
        remove_free_heartbeats()

    async def _sweep(self, run: str | None) -> Report:
        report = Report()
        for line, backend in list(self._backends.items()):
            try:
                if line not in self._started:
                    await asyncio.wait_for(backend.start(), START_TIMEOUT)
                    self._started.add(line)
            except Exception as error:
                report.failed[backend.name] = str(error) or "no answer in time"
            else:
                report.add(await sweep(backend, run=run))
        for id, reason in report.removed.items():
            _log(self._owner_run, f"removed {id}: {reason}")
        for id, problem in report.failed.items():
            _log(self._owner_run, f"{id}: {problem}")
        return report


@contextlib.contextmanager
def _only_sweeper() -> Iterator[bool]:
    """Yield whether no other process is sweeping: one sweep per minute and machine is enough."""
    fd = os.open(paths.heartbeat_directory() / ".sweep", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def _log_path() -> str:
    return str(paths.runtime_root() / "reaper.log")


def _log(run: str, text: str) -> None:
    """Append a line to ``reaper.log``."""
    with contextlib.suppress(OSError), open(_log_path(), "a") as log:
        if log.tell() > _LOG_LIMIT:
            log.truncate(0)
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {run} {text}\n")
