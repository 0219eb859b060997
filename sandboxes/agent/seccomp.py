"""The system call filter (seccomp) of sandboxes, as byte code for the kernel. Pure functions.

The agent installs it on itself before it starts anything, so all programs inherit it. A container engine's own filter
also applies.

Invariant: the filter refuses (``EPERM``) kernel features that namespaces do not confine, or that create new ones:
mounts, namespaces, keys, tracing of the machine, modules, io_uring, BPF, input to terminals, access to the hypervisor.
It protects the limits and the priority of process 1, the agent, which has the programs' user. Programs of another
architecture are killed, since their call numbers differ. All other calls are allowed.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Collection

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000
_NR, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
"""Offsets in the kernel's ``seccomp_data``; the low halves of arguments."""

_NEW_NAMESPACES = 0x7E020000
"""Every ``CLONE_NEW*`` that ``clone`` takes."""
_TYPE_INTO_TERMINAL = (0x5412, 0x541C)
"""``TIOCSTI``, ``TIOCLINUX``."""
_FAMILIES = (38, 40)
"""``AF_ALG``, ``AF_VSOCK``: the latter reaches the hypervisor from any network namespace."""
_X32 = 0x40000000

# The kernel gives new calls one number on all architectures.
_SHARED = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
_X86_64 = {
    "uselib": 134, "ustat": 136, "sysfs": 139, "vhangup": 153, "pivot_root": 155, "_sysctl": 156, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212, "syslog": 103,
    "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
    "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "clock_adjtime": 305, "setns": 308, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "vhangup": 58,
    "quotactl": 60, "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
    "clock_settime": 112, "syslog": 116, "reboot": 142, "sethostname": 161, "setdomainname": 162,
    "settimeofday": 170, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
    "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
    "kexec_file_load": 294,
}  # fmt: skip
_ALLOWED_BY = {
    "SYS_ADMIN": (
        "bpf", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "lookup_dcookie", "mount", "mount_setattr",
        "move_mount", "name_to_handle_at", "open_tree", "perf_event_open", "pivot_root", "quotactl", "quotactl_fd",
        "setdomainname", "sethostname", "setns", "swapoff", "swapon", "syslog", "umount2", "unshare",
    ),
    "BPF": ("bpf",),
    "DAC_READ_SEARCH": ("name_to_handle_at", "open_by_handle_at"),
    "PERFMON": ("perf_event_open",),
    "SYS_BOOT": ("kexec_file_load", "kexec_load", "reboot"),
    "SYS_MODULE": ("create_module", "delete_module", "finit_module", "init_module"),
    "SYS_PACCT": ("acct",),
    "SYS_PTRACE": ("kcmp",),
    "SYS_RAWIO": ("ioperm", "iopl"),
    "SYS_TIME": ("clock_adjtime", "clock_settime", "settimeofday"),
    "SYS_TTY_CONFIG": ("vhangup",),
    "SYSLOG": ("syslog",),
}  # fmt: skip
"""Capability → what is not refused where a sandbox was given it."""
_CLONE3 = 435
_AGENT = 1
_OF_A_USER = 2, 3
"""``PRIO_USER`` of ``setpriority``, ``IOPRIO_WHO_USER`` of ``ioprio_set``."""
_MACHINES = {
    # audit number, refused calls, clone, ioctl, socket, setpriority, ioprio_set,
    # and what names a process first: prlimit64, sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
    "x86_64": (0xC000003E, _X86_64, 56, 16, 41, 141, 251, (302, 142, 144, 203, 314)),
    "aarch64": (0xC00000B7, _AARCH64, 220, 29, 198, 140, 30, (261, 118, 119, 122, 274)),
}


def program(machine: str | None = None, capabilities: Collection[str] = ()) -> bytes | None:
    """The filter for this machine (or ``machine``); None where the numbers of its calls are not known here.

    ``capabilities`` are those that the sandbox is given, without ``CAP_``.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    arch, own, clone, ioctl, socket, setpriority, ioprio_set, steering = _MACHINES[machine]
    given = set(_ALLOWED_BY) if "ALL" in capabilities else _ALLOWED_BY.keys() & set(capabilities)
    allowed = {name for capability in given for name in _ALLOWED_BY[capability]}
    refused = {number for name, number in (own | _SHARED).items() if name not in allowed}
    code = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_EQUAL, arch, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
    ]
    if machine == "x86_64":
        code += [_op(_JUMP_AT_LEAST, _X32, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for number in sorted(refused):
        code += [_op(_JUMP_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    if "SYS_ADMIN" not in given:
        # Its flags are in memory, which a filter cannot read; without clone3, programs use `clone`.
        code += [_op(_JUMP_EQUAL, _CLONE3, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
        code += _refuse(clone, _ARG0, _JUMP_ANY_BIT, (_NEW_NAMESPACES,))
    code += _refuse(ioctl, _ARG1, _JUMP_EQUAL, _TYPE_INTO_TERMINAL)
    code += _refuse(socket, _ARG0, _JUMP_EQUAL, _FAMILIES)
    for call in steering:
        code += _refuse(call, _ARG0, _JUMP_EQUAL, (_AGENT,))
    for call, kind in zip((setpriority, ioprio_set), _OF_A_USER, strict=True):
        code += _refuse(call, _ARG0, _JUMP_EQUAL, (kind,)) + _refuse(call, _ARG1, _JUMP_EQUAL, (_AGENT,))
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _refuse(call: int, argument: int, test: int, values: tuple[int, ...]) -> list[bytes]:
    """Refuse ``call`` if its argument passes a test with any of the values; keeps the call's number loaded."""
    tests = [op for value in values for op in (_op(test, value, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM))]
    body = [_op(_LOAD, argument), *tests, _op(_LOAD, _NR)]
    return [_op(_JUMP_EQUAL, call, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
