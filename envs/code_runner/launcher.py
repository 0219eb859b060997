"""Set the limits of an untrusted program inside a sandbox, then become it.

Invariant: the program cannot raise its limits, and cannot signal the agent of the sandbox, which has the same user; so
it cannot take the sandbox down. A failure before the program starts counts as a failure of the program; ``runner``
first tries an empty one.

Sent as text and run by ``python3 -I -S -c``; needs only the standard library.

    launcher SECONDS BYTES PROGRAM      # of processor time, of address space
"""

import os
import platform
import resource
import struct
import sys

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | 1
NUMBER, ARCH, ARGUMENT = 0, 4, 16
SIGNALLING = "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open"
MACHINES = {
    # audit number, calls that name a process first, pidfd_send_signal, fcntl, ioctl
    "x86_64": (0xC000003E, (62, 200, 234, 129, 297, 434), 424, 72, 16),
    "aarch64": (0xC00000B7, (129, 130, 131, 138, 240, 434), 424, 25, 29),
}
OWNER_BY_FCNTL = 8, 15  # F_SETOWN, F_SETOWN_EX: a descriptor's events become signals to its owner
OWNER_BY_IOCTL = 0x8901, 0x8902  # FIOSETOWN, SIOCSPGRP
X32 = 0x40000000
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
PYTHON = {"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8:replace"}
"""Environment of the program's interpreter: fixed order of sets, UTF-8 output."""


def guard(machine, agent, group):
    """Return the system call filter that prevents signals to ``agent``, as BPF byte code."""
    if machine not in MACHINES:
        return b""
    arch, signalling, by_descriptor, fcntl, ioctl = MACHINES[machine]
    targets = (agent, -group, -1)
    code = [op(LOAD, ARCH), op(EQUAL, arch, 1, 0), op(RETURN, KILL), op(LOAD, NUMBER)]
    if machine == "x86_64":  # the same calls under other numbers
        code += [op(0x35, X32, 0, 1), op(RETURN, REFUSE)]
    code += [op(EQUAL, by_descriptor, 0, 1), op(RETURN, REFUSE)]
    for call in signalling:
        code += refuse(call, 0, targets)
    code += refuse(fcntl, 1, OWNER_BY_FCNTL) + refuse(ioctl, 1, OWNER_BY_IOCTL)
    return b"".join([*code, op(RETURN, ALLOW)])


def refuse(call, argument, values):
    tests = [one for value in values for one in (op(EQUAL, value, 0, 1), op(RETURN, REFUSE))]
    body = [op(LOAD, ARGUMENT + 8 * argument), *tests, op(LOAD, NUMBER)]
    return [op(EQUAL, call, 0, len(body)), *body]


def op(code, value, if_true=0, if_false=0):
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def install(code):
    import ctypes  # not available in every Python

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def main(seconds, memory, path):
    parent = os.getppid()
    code = guard(platform.machine(), parent, os.getpgid(parent))
    if code:
        install(code)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))  # a signal, then the end
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    os.execve(sys.executable, [sys.executable, "-s", path], {**inherited, **PYTHON})  # -I would ignore these


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except Exception as error:
        sys.exit(repr(error))
