"""Start and end the processes of local sandboxes.

Invariant: nothing runs in a sandbox before its limits are set. One thread, which lives as long as this process, starts
all launchers: the kernel kills them together with the thread that started them, except those of a sandbox server,
whose sandboxes may outlive it. If a start fails or is cancelled, its processes are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil

from agentkit.errors import StartTimeout
from agentkit.sandboxes.backends.local.filesystem import ENVIRONMENT
from agentkit.sandboxes.backends.local.isolation import Isolation, LaunchContext
from agentkit.sandboxes.backends.local.state import LocalState, ProcessIdentity, log_path
from agentkit.sandboxes.reaper.labels import SERVER
from agentkit.sandboxes.reaper.owner import boot_id
from agentkit.sandboxes.threads import DaemonThreadPool

_SETUP_TIMEOUT = 20.0
_LOG_LIMIT = 1 << 20
_END_TIMEOUT = 20.0
"""Seconds until killed processes must have ended."""


_launcher_thread = DaemonThreadPool("agentkit-local-launcher", 1, lambda: None, lambda _: None)


def launch(isolation: Isolation, state: LocalState, directory: Path) -> tuple[subprocess.Popen[bytes], ProcessIdentity]:
    """Start the launcher and the first process of a sandbox, with its limits; return both. Blocks.

    Raises ``StartTimeout`` (with the launcher's output) or ``OSError``, and then leaves no process.
    """
    info, info_writer = os.pipe()
    release, release_writer = os.pipe()
    lasting = SERVER in state.labels
    context = LaunchContext(state.spec, directory, state.group, info_writer, release, lasting=lasting)
    process = None
    try:
        argv = isolation.command(context, isolation.agent(context))
        with open(log_path(state.id), "wb") as log:
            process = _launcher_thread.submit(
                lambda _: subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=context.fds,
                    cwd="/",
                    env=ENVIRONMENT,
                    start_new_session=lasting,
                    restore_signals=False,  # bwrap writes its end into a pipe that may have no reader
                )
            ).result()
        context.close()
        main = _first_process(info, state.id)
        try:
            if state.group is not None:
                state.group.add(main.pid)
            os.write(release_writer, b"\n")
        except (ProcessLookupError, BrokenPipeError):  # it failed and has ended
            process.wait(_END_TIMEOUT)
            raise _not_set_up(state.id) from None
        return process, main
    except BaseException:
        if process is not None:
            process.kill()
            process.wait(_END_TIMEOUT)
        raise
    finally:
        context.close()
        for fd in (info, release_writer):
            os.close(fd)


def _first_process(info: int, id: str) -> ProcessIdentity:
    """Read the number of the first process inside, which waits for its release."""
    text, deadline = b"", time.monotonic() + _SETUP_TIMEOUT
    while True:
        readable, _, _ = select.select([info], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(info, 4096) if readable else b""
        text += data
        if not data:
            break
    try:
        main = ProcessIdentity.of(int(json.loads(text)["child-pid"]))
    except (ValueError, KeyError, TypeError):
        main = None
    if main is None:
        raise _not_set_up(id)
    return main


def _not_set_up(id: str) -> StartTimeout:
    output = last_output(id)
    return StartTimeout(f"sandbox {id} could not be set up: {output or 'no output'}", phase="create", log_tail=output)


async def wait_for_end(process: ProcessIdentity) -> None:
    """Wait until a process has ended."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.add_reader(fd, lambda: over.done() or over.set_result(None))
    try:
        if process.runs:  # otherwise its number was reused
            await over
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def exit_code(launcher: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a launcher whose sandbox has ended: ``128 + signal`` for signals. Blocks up to 20 s."""
    try:
        code = launcher.wait(_END_TIMEOUT)
    except subprocess.TimeoutExpired:
        return None
    return 128 - code if code < 0 else code


def end(state: LocalState) -> bool:
    """Kill all processes of a sandbox; return whether none is left. Blocks for up to 20 s."""
    deadline = time.monotonic() + _END_TIMEOUT
    if state.owns_workdir:
        stop(state, True)  # without name spaces, processes must not fork while others are killed
    while True:
        left = running(state)
        if not left:
            return True
        if time.monotonic() > deadline:
            return False
        if state.group is not None and state.group.freezes:
            with contextlib.suppress(OSError):
                state.group.freeze(False)  # frozen processes do not die
        # When the first process inside dies, the kernel kills its name space, including an agent that could otherwise
        # report how the others died. Without name spaces they are stopped, and none can report.
        first = state.processes[-1]
        for process in left if state.owns_workdir or not first.runs else [first]:
            _signal(process, signal.SIGKILL)
        time.sleep(0.002)


def stop(state: LocalState, stopped: bool) -> bool:
    """Stop or continue all processes of a sandbox, where no control group can; return whether that succeeded."""
    number = signal.SIGSTOP if stopped else signal.SIGCONT
    seen = {launcher.pid for launcher in state.processes[:-1]}  # it has to wait for the first process inside
    for _ in range(100):
        fresh = [process for process in running(state) if process.pid not in seen]
        if not fresh:
            return True
        for process in fresh:
            _signal(process, number)
            seen.add(process.pid)
    return False


def running(state: LocalState) -> list[ProcessIdentity]:
    """Return the running processes of a sandbox, the launcher first."""
    if state.boot != boot_id():
        return []
    known = [process for process in state.processes if process.runs]
    others = state.group.processes() if state.group is not None else set()
    for process in known:
        with contextlib.suppress(psutil.Error):
            others |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    found = map(ProcessIdentity.of, others - {process.pid for process in known})
    return known + [process for process in found if process is not None]


def _signal(process: ProcessIdentity, number: int) -> None:
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            if process.runs:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


def last_output(id: str) -> str:
    """Return the end of the main process's output for an error."""
    return tail(id, 20).decode("utf-8", "replace").strip()


def tail(id: str, lines: int) -> bytes:
    """Return the last lines of the main process's output."""
    try:
        with open(log_path(id), "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_LIMIT))
            return b"".join(log.readlines()[-lines:]) if lines > 0 else b""
    except FileNotFoundError:
        return b""
