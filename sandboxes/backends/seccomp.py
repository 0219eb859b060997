"""A filter of system calls for sandboxes without a container engine: what no program in a sandbox needs is refused.

Invariant: the filter refuses (``EPERM``) what reaches kernel features that name spaces do not confine or that open new
ones: mounting, name spaces, keys, tracing the machine, modules, io_uring, BPF, typing into terminals, talking to the
hypervisor. Programs of another architecture are killed, since their calls have other numbers. Everything else passes.
Pure: the result is the byte code that the kernel takes.
"""

from __future__ import annotations

import errno
import platform
import struct

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
"""``AF_ALG``, ``AF_VSOCK``: the latter reaches the hypervisor from any network name space."""
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
_CLONE3 = 435
_MACHINES = {
    # audit number, refused calls, clone, ioctl, socket
    "x86_64": (0xC000003E, _X86_64, 56, 16, 41),
    "aarch64": (0xC00000B7, _AARCH64, 220, 29, 198),
}


def program(machine: str | None = None) -> bytes | None:
    """The filter for this machine (or ``machine``); None where the numbers of its calls are not known here."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        return None
    arch, refused, clone, ioctl, socket = _MACHINES[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_JUMP_EQUAL, arch, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NR),
    ]
    if machine == "x86_64":
        code += [_op(_JUMP_AT_LEAST, _X32, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for number in sorted({*refused.values(), *_SHARED.values()}):
        code += [_op(_JUMP_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    # Its flags lie in memory, where a filter cannot look; without it programs use `clone`.
    code += [_op(_JUMP_EQUAL, _CLONE3, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    code += _refuse(clone, _ARG0, _JUMP_ANY_BIT, (_NEW_NAMESPACES,))
    code += _refuse(ioctl, _ARG1, _JUMP_EQUAL, _TYPE_INTO_TERMINAL)
    code += _refuse(socket, _ARG0, _JUMP_EQUAL, _FAMILIES)
    code.append(_op(_RETURN, _ALLOW))
    return b"".join(code)


def _refuse(call: int, argument: int, test: int, values: tuple[int, ...]) -> list[bytes]:
    """Refuse ``call`` where its argument passes a test with any of the values; leaves the call's number loaded."""
    tests = [op for value in values for op in (_op(test, value, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM))]
    body = [_op(_LOAD, argument), *tests, _op(_LOAD, _NR)]
    return [_op(_JUMP_EQUAL, call, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
