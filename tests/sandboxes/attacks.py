"""Attack other processes from inside a sandbox; each attempt prints one line with its name and outcome.

    python3 attacks.py PID ...

``refused``: the kernel denied it. ``worked``: the kernel allowed it. Standard library only.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
KEPT = []
ARM = platform.machine() == "aarch64"
KCMP, VM_READ, VM_WRITE, KILL, TGKILL = (272, 270, 271, 129, 131) if ARM else (312, 310, 311, 62, 234)
PRLIMIT, SETPRIORITY, SET_SCHEDULER, SET_AFFINITY, IOPRIO_SET = (
    (261, 140, 119, 122, 30) if ARM else (302, 141, 144, 203, 251)
)
PIDFD_SEND_SIGNAL, PIDFD_OPEN, PIDFD_GETFD, PROCESS_MADVISE = 424, 434, 438, 440
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206


def call(number, *arguments):
    result = libc.syscall(number, *(ctypes.c_long(argument) for argument in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def memory(data):
    """The address of a copy that stays."""
    KEPT.append(ctypes.create_string_buffer(data, len(data)))
    return ctypes.addressof(KEPT[-1])


def vector():
    """The address of an ``iovec`` of eight bytes."""
    return memory(struct.pack("PN", memory(bytes(8)), 8))


def read_or_write_memory(number, pid):
    call(number, pid, vector(), 1, vector(), 1, 0)


def read(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        file.read(1)


def take_descriptor(pid):
    pidfd = call(PIDFD_OPEN, pid, 0)
    for fd in range(64):
        with contextlib.suppress(OSError):
            return call(PIDFD_GETFD, pidfd, fd, 0)
    raise PermissionError("refused")


def trace(request, pid):
    if libc.ptrace(request, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), "refused")


ATTEMPTS = {
    "open mem": lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDWR),
    "read mem": lambda pid: os.open(f"/proc/{pid}/mem", os.O_RDONLY),
    "read environ": lambda pid: read(pid, "environ"),
    "read maps": lambda pid: read(pid, "maps"),
    "follow root": lambda pid: os.listdir(f"/proc/{pid}/root"),
    "follow cwd": lambda pid: os.readlink(f"/proc/{pid}/cwd"),
    "follow exe": lambda pid: os.readlink(f"/proc/{pid}/exe"),
    "open descriptors": lambda pid: [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)],
    "read syscall": lambda pid: read(pid, "syscall"),
    "attach": lambda pid: trace(PTRACE_ATTACH, pid),
    "seize": lambda pid: trace(PTRACE_SEIZE, pid),
    "process_vm_readv": lambda pid: read_or_write_memory(VM_READ, pid),
    "process_vm_writev": lambda pid: read_or_write_memory(VM_WRITE, pid),
    "pidfd_getfd": take_descriptor,
    "kcmp": lambda pid: call(KCMP, pid, os.getpid(), 2, 0, 0),
    "process_madvise": lambda pid: call(PROCESS_MADVISE, call(PIDFD_OPEN, pid, 0), vector(), 1, 21, 0),
}


def limit(kind, pid):
    call(PRLIMIT, pid, kind, memory(struct.pack("QQ", 3, 3)), 0)


STARVING = {
    "few files": lambda pid: limit(7, pid),
    "little time": lambda pid: limit(0, pid),
    "a low priority": lambda pid: call(SETPRIORITY, 0, pid, 19),
    "a low priority of its group": lambda pid: call(SETPRIORITY, 1, pid, 19),
    "a low priority of its user": lambda _pid: call(SETPRIORITY, 2, 0, 19),
    "idle time alone": lambda pid: call(SET_SCHEDULER, pid, 5, memory(bytes(8))),
    "one processor": lambda pid: call(SET_AFFINITY, pid, 8, memory(b"\1" + bytes(7))),
    "idle disks alone": lambda pid: call(IOPRIO_SET, 1, pid, 3 << 13),
    "idle disks for its user": lambda _pid: call(IOPRIO_SET, 3, os.getuid(), 3 << 13),
}
"""What a process may do to another of its user, unless a filter of system calls refuses it."""


def attempt(name, pid):
    child = os.fork()  # what one leaves behind (an attached process) does not help the next
    if child == 0:
        try:
            {**ATTEMPTS, **STARVING}[name](pid)
        except OSError:
            os._exit(0)
        except BaseException:
            os._exit(2)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    return {0: "refused", 1: "worked"}.get(status >> 8, "failed") if status & 0xFF == 0 else f"died of {status & 0x7F}"


def signals(pid):
    """Send every signal in every way there is."""
    pidfd = call(PIDFD_OPEN, pid, 0)
    for number in range(1, 65):
        for send, *target in ((KILL, pid), (TGKILL, pid, pid), (PIDFD_SEND_SIGNAL, pidfd)):
            with contextlib.suppress(OSError):
                call(send, *target, number, 0, 0)
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        reader, writer = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
            fcntl.fcntl(reader, 10, number)  # F_SETSIG
            fcntl.fcntl(reader, fcntl.F_SETOWN, pid)
            os.write(writer, b"x")


if __name__ == "__main__":
    for target in map(int, sys.argv[1:]):
        for what in [*ATTEMPTS, *(STARVING if target == 1 else ())]:
            print(f"{what}: {attempt(what, target)}", flush=True)
        signals(target)
        print("signals: sent", flush=True)
