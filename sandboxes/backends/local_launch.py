"""Starting and ending the processes of local sandboxes.

Invariant: nothing runs in a sandbox before its limits are set. Launchers are started by one thread that lives as long
as this process: the kernel kills them with the thread that started them, and other threads come and go. Whatever was
started is killed if its start fails or is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from agentkit.errors import StartTimeout
from agentkit.sandboxes.backends.local_cages import Cage, Launch
from agentkit.sandboxes.backends.local_state import Known, LocalState, log_path
from agentkit.sandboxes.backends.local_view import ENVIRONMENT
from agentkit.sandboxes.owner import boot_id

_SETUP_TIMEOUT = 20.0
_LOG_LIMIT = 1 << 20
_END = 20.0
"""Seconds until killed processes must be gone."""


class Spawner:
    """The thread that starts launchers; made when first needed."""

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], Callable[[], subprocess.Popen[bytes]]]]
        self._wanted = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, make: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Run ``make`` in the thread and wait for what it made."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="agentkit-local-spawner", daemon=True)
                self._thread.start()
        made: Future[subprocess.Popen[bytes]] = Future()
        self._wanted.put((made, make))
        return made.result()

    def _work(self) -> None:
        while True:
            made, make = self._wanted.get()
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)


_spawner = Spawner()


def _new_spawner() -> None:
    global _spawner
    _spawner = Spawner()  # a forked child has none of its parent's threads


os.register_at_fork(after_in_child=_new_spawner)


def launch(cage: Cage, state: LocalState, directory: Path) -> tuple[subprocess.Popen[bytes], Known]:
    """Start the sandbox of ``state``: the launcher, and the first process inside, limited and let go. Blocks.

    Raises ``StartTimeout`` (with what the launcher said) or ``OSError``; nothing runs then.
    """
    info, info_writer = os.pipe()
    gate, gate_writer = os.pipe()
    given = Launch(state.spec, directory, state.group, info_writer, gate)
    process = None
    try:
        argv = cage.command(given, cage.agent(given))
        with open(log_path(state.id), "wb") as log:
            process = _spawner.start(
                lambda: subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=given.fds,
                    cwd="/",
                    env=ENVIRONMENT,
                    restore_signals=False,  # bwrap writes its end into a pipe that may have no reader
                )
            )
        given.close()
        main = _first_process(info, state.id)
        try:
            if state.group is not None:
                state.group.add(main.pid)
            os.write(gate_writer, b"\n")
        except (ProcessLookupError, BrokenPipeError):  # it met a problem, and has ended
            process.wait(_END)
            raise _not_set_up(state.id) from None
        return process, main
    except BaseException:
        if process is not None:
            process.kill()
            process.wait(_END)
        raise
    finally:
        given.close()
        for fd in (info, gate_writer):
            os.close(fd)


def _first_process(info: int, id: str) -> Known:
    """What the launcher says of the first process inside; it waits at the gate."""
    text, deadline = b"", time.monotonic() + _SETUP_TIMEOUT
    while True:
        readable, _, _ = select.select([info], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(info, 4096) if readable else b""
        text += data
        if not data:
            break
    try:
        main = Known.of(int(json.loads(text)["child-pid"]))
    except (ValueError, KeyError, TypeError):
        main = None
    if main is None:
        raise _not_set_up(id)
    return main


def _not_set_up(id: str) -> StartTimeout:
    said = tail(id, 20).decode("utf-8", "replace").strip()
    return StartTimeout(
        f"sandbox {id} was not set up: {said or 'its launcher said nothing'}", phase="create", log_tail=said
    )


async def ended(known: Known) -> None:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(known.pid)
    except OSError:
        return
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.add_reader(fd, lambda: over.done() or over.set_result(None))
    try:
        if known.runs:  # otherwise its number was given to another before it was opened
            await over
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def exit_code(launcher: subprocess.Popen[bytes]) -> int | None:
    """How a launcher ended whose sandbox has ended: ``128 + signal`` for signals. Blocks for twenty seconds at most."""
    try:
        code = launcher.wait(_END)
    except subprocess.TimeoutExpired:
        return None
    return 128 - code if code < 0 else code


def end(state: LocalState) -> bool:
    """Kill everything that runs in a sandbox; whether nothing is left. Blocks for twenty seconds at most."""
    deadline = time.monotonic() + _END
    if state.owns_workdir:
        stop(state, True)  # without name spaces nobody dies with process 1: let nobody fork on while others die
    while True:
        left = living(state)
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        if state.group is not None and state.group.freezes:
            with contextlib.suppress(OSError):
                state.group.freeze(False)  # frozen processes do not die
        # While the first process inside dies, the kernel ends its name space, and an agent that would report how the
        # others died ends with it. Without name spaces they are stopped, and nobody can report.
        first = state.processes[-1]
        for known in left if state.owns_workdir or not first.runs else [first]:
            _signal(known, signal.SIGKILL)
        time.sleep(0.002)


def stop(state: LocalState, stopped: bool) -> bool:
    """Stop all processes of a sandbox, or let them go on, where no control group can; whether it came to be so."""
    number = signal.SIGSTOP if stopped else signal.SIGCONT
    seen = {launcher.pid for launcher in state.processes[:-1]}  # which has to wait for the first process inside
    for _ in range(100):
        fresh = [known for known in living(state) if known.pid not in seen]
        if not fresh:
            return True
        for known in fresh:
            _signal(known, number)
            seen.add(known.pid)
    return False


def living(state: LocalState) -> list[Known]:
    """The processes of a sandbox that run, the launcher first, parents before children."""
    if state.boot != boot_id():
        return []
    known = [process for process in state.processes if process.runs]
    pids = [process.pid for process in known]
    found = dict.fromkeys(pids)
    for pid in _descendants(pids) | (state.group.processes() if state.group is not None else set()):
        found.setdefault(pid)
    return known + [process for pid in list(found)[len(pids) :] if (process := Known.of(pid)) is not None]


def _descendants(roots: list[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                stat = Path("/proc", name, "stat").read_bytes()
                children.setdefault(int(stat[stat.rindex(b")") + 2 :].split()[1]), []).append(int(name))
    found: set[int] = set()
    todo = list(roots)
    while todo:
        fresh = set(children.get(todo.pop(), ())) - found
        found |= fresh
        todo += fresh
    return found - set(roots)


def _signal(known: Known, number: int) -> None:
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(known.pid)
        try:
            if known.runs:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def tail(id: str, lines: int) -> bytes:
    """The end of what a sandbox's main process wrote."""
    try:
        with open(log_path(id), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_LIMIT))
            return b"".join(log.readlines()[-lines:]) if lines > 0 else b""
    except FileNotFoundError:
        return b""
