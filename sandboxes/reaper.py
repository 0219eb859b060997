"""The reaper: a process of its own that removes an owner's sandboxes when the owner dies, however it dies.

Invariant: an owner has a reaper from before its first sandbox is made. The reaper belongs to no process group, session
or parent of the owner's, learns of its death by the end of a pipe (and by looking, in case a forked child holds the
pipe open), and ends by itself once nothing of the owner is left. While the owner lives it sweeps for what others left
behind, at its start, every minute, and whenever a time to live ends.
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
from agentkit.sandboxes import lease as leases
from agentkit.sandboxes import paths, records
from agentkit.sandboxes.backend import Backend
from agentkit.sandboxes.owner import Owner
from agentkit.sandboxes.sweep import Report, forget_leases, sweep

SWEEP_EVERY = 60.0
LOOK_EVERY = 1.0
"""Seconds between two looks at the owner, should the pipe not tell."""
DEADLINES_EVERY = 3.0
QUIET_ROUNDS = 3
"""Listings in a row that must show nothing: what the engine was making when the owner died shows up late."""
START_TIMEOUT = 30.0
GIVE_UP_AFTER = 600.0
"""Seconds for which an engine that does not answer is tried; later sweeps of others go on."""
_LOG_LIMIT = 1_000_000

# Two forks: the reaper is a child of nobody who might end it or have to wait for it.
_LAUNCH = "import os; os.fork() and os._exit(0); os.setsid(); from agentkit.sandboxes import reaper; reaper.main()"


# ------------------------------------------------------------------------------------------------ in the owner process


def claim(backend: Backend, id: str, ttl: float | None) -> Mapping[str, str]:
    """Take responsibility for sandbox ``id``, which is about to be made on ``backend``; returns its labels.

    Call ``records.forget(id)`` when nothing is left of it.
    """
    lease = leases.current()
    watch(backend)
    records.register(lease, id, backend.name, ttl)
    return lease.labels(id)


def watch(backend: Backend) -> None:
    """Have what this process makes on ``backend`` removed when it dies; starts the reaper if there is none."""
    recipe = backend.recipe()
    if recipe is None:
        return
    cls = type(backend)
    line = json.dumps({"module": cls.__module__, "class": cls.__qualname__, "arguments": dict(recipe)})
    with _lock:
        _watch.tell(line)


class _Watch:
    """The owner's end of the pipe."""

    def __init__(self) -> None:
        self._pipe = -1
        self._run = ""
        self._told: list[str] = []

    def tell(self, line: str) -> None:
        """Let the reaper know of a back end; whoever ended an earlier reaper, there is one now."""
        lease = leases.current()
        if lease.run != self._run or not self._is_read():
            self.drop()
            self._pipe, self._run = _launch(lease), lease.run
            for known in self._told:
                self._write(known)
        if line not in self._told:
            self._write(line)
            self._told.append(line)

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


_watch = _Watch()
_lock = threading.Lock()


def _launch(lease: leases.Lease) -> int:
    """Start a reaper for this process; returns the pipe whose end tells it of our death."""
    reads, writes = os.pipe()
    try:
        with open(_log_path(), "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, lease.run, str(lease.owner)],
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
                f"the reaper, which removes sandboxes should this process die, does not start: {error}"
            ) from error
        raise
    finally:
        os.close(reads)
    # The launcher ends at once; waiting for it here would hold up an event loop.
    threading.Thread(target=process.wait, name="agentkit-reaper-launch", daemon=True).start()
    return writes


def _forget_in_child() -> None:
    global _watch, _lock
    _watch.drop()
    _watch, _lock = _Watch(), threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


# ----------------------------------------------------------------------------------------------- in the reaper process


def main() -> None:
    """Entry point of the reaper process: lease and owner as arguments, the pipe as standard input."""
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    owner = Owner.parse(sys.argv[2])
    if owner is None:
        raise SystemExit(f"{sys.argv[2]!r} names no owner process")
    asyncio.run(Reaper(sys.argv[1], owner, pipe=0).live())


class Reaper:
    """Watches over the sandboxes of one owner. ``pipe`` brings the back ends, one JSON object a line, and ends with
    the owner."""

    def __init__(self, run: str, owner: Owner, pipe: int) -> None:
        self._run = run
        self._owner = owner
        self._pipe = pipe
        self._backends: dict[str, Backend] = {}
        self._started: set[str] = set()
        self._unread = b""
        self._ended = asyncio.Event()
        self._news = asyncio.Event()

    async def live(self) -> None:
        """Until the owner has ended and nothing of it is left."""
        os.set_blocking(self._pipe, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe, self._read)
        sweeping = loop.create_task(self._sweep_all())
        try:
            await self._owner_ends()
        finally:
            self._read()  # the owner may have been killed right after its last word
            loop.remove_reader(self._pipe)
            sweeping.cancel()
            await asyncio.wait([sweeping], timeout=5)
        try:
            await self._prune()
        finally:
            for backend in self._backends.values():
                with contextlib.suppress(Exception):
                    await backend.close()

    async def _owner_ends(self) -> None:
        while not self._ended.is_set() and self._owner.alive() is not False:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), LOOK_EVERY)

    def _read(self) -> None:
        """Take what the owner says; ``_ended`` if that was all."""
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
            self._learn(line.decode())

    def _learn(self, line: str) -> None:
        try:
            recipe = json.loads(line)
            cls = getattr(importlib.import_module(recipe["module"]), recipe["class"])
            self._backends[line] = cls(**recipe["arguments"])
        except Exception as error:  # the others are to be swept all the same
            _say(self._run, f"no back end can be made of {line}: {error!r}")
        self._news.set()

    async def _sweep_all(self) -> None:
        """For ever: what nobody owns, and whose time has ended."""
        last = float("-inf")
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), DEADLINES_EVERY)
            if not self._news.is_set() and leases.now() - last < SWEEP_EVERY and not records.any_due():
                continue
            self._news.clear()
            last = leases.now()
            try:
                with _only_sweeper() as alone:
                    if alone:
                        await self._sweep(None)
            except OSError as error:
                _say(self._run, f"no sweep: {error}")

    async def _prune(self) -> None:
        """Remove what the owner has left."""
        quiet, delay, begin = 0, 0.5, leases.now()
        # Each sandbox is written down before it is made: without records there is nothing, and no need to look twice.
        enough = QUIET_ROUNDS if records.all_of(self._run) else 1
        while quiet < enough and leases.now() - begin < GIVE_UP_AFTER:
            report = await self._sweep(self._run)
            quiet = 0 if report.removed or report.failed else quiet + 1
            delay = min(delay * 2, 15.0) if report.failed else 0.5
            if quiet < enough:
                await asyncio.sleep(delay)
        forget_leases()

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
            _say(self._run, f"removed {id}: {reason}")
        for id, problem in report.failed.items():
            _say(self._run, f"{id}: {problem}")
        return report


@contextlib.contextmanager
def _only_sweeper() -> Iterator[bool]:
    """Whether no other process sweeps just now: once a minute is enough for all of them."""
    fd = os.open(paths.lease_directory() / ".sweep", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def _log_path() -> str:
    return str(paths.runtime_root() / "reaper.log")


def _say(run: str, text: str) -> None:
    """One line for whoever wants to know what became of a sandbox."""
    with contextlib.suppress(OSError), open(_log_path(), "a") as log:
        if log.tell() > _LOG_LIMIT:
            log.truncate(0)
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {run} {text}\n")
