"""Run a program in name spaces, with the standard library only.

    python3 -I -S namespaces.py DESCRIPTOR

``DESCRIPTOR`` contains the plan as JSON: ``info``, ``release`` (descriptors), ``lasting``, ``user`` (uid, gid),
``files``, ``hidden`` (names below /proc), ``environment`` and ``command``.

Invariant: the command is process 1 of a PID name space, sees only the files of the plan, has no capabilities and cannot
gain any, and dies with this process, which dies with its parent unless the plan is ``lasting``. If a step fails,
nothing runs.
"""

import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import warnings  # noqa: F401  (other modules import it late, when the file system is already hidden)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
MNT_DETACH = 2
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY, NOSUID, NODEV = 1, 2, 4
PDEATHSIG, CAPBSET_DROP, NO_NEW_PRIVS = 1, 24, 38
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
         "ptmx": "pts/ptmx"}  # fmt: skip
WRITABLE_PROC = ("bus", "fs", "irq", "sys", "sysrq-trigger")

libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source, target, kind, flags, options=""):
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind, options or None)]
    check(libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]), f"mount {source or kind} at {target}")


def restrict(target, attributes, recursive=True):
    """Restrict a mount and all mounts below it."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    call = libc.syscall(MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE if recursive else 0, wanted, 32)
    check(call, f"mount_setattr {target}")


def pivot_root(new, old):
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"unknown number of pivot_root on {os.uname().machine}")
    check(libc.syscall(number, os.fsencode(new), os.fsencode(old)), f"pivot_root {new}")


def prctl(option, value, more=0):
    check(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(more), 0, 0), f"prctl {option}")


def unshare(user):
    """Enter new name spaces; without root, as ``user`` of a user name space."""
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP
    root = os.geteuid() == 0
    uid, gid = os.geteuid(), os.getegid()
    check(libc.unshare(flags if root else flags | NEWUSER), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user[0]} {uid} 1"), ("gid_map", f"{user[1]} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build(files, hidden):
    """Build the file system of the plan and make it the root."""
    mount(None, "/", None, MS_REC | MS_SLAVE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    mount("/tmp/new", "/tmp/new", None, MS_BIND)
    pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for entry in files:
        target = "/new" + entry["target"]
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        PLACE[entry["kind"]](target, entry)
    for name in hidden:
        if os.path.exists(f"/new/proc/{name}"):
            mount("/old/dev/null", f"/new/proc/{name}", None, MS_BIND)
    os.chdir("/new")
    check(libc.umount2(b"/old", MNT_DETACH), "umount of the host's files")
    pivot_root(".", ".")
    check(libc.umount2(b".", MNT_DETACH), "umount of the temporary root")
    os.chdir("/")
    restrict("/", READ_ONLY | NOSUID | NODEV, recursive=False)


def place_bind(target, entry):
    source = "/old" + entry["source"]
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, None, MS_BIND | MS_REC)
    restrict(target, NOSUID | NODEV | (READ_ONLY if entry["read_only"] else 0))


def place_link(target, entry):
    os.symlink(entry["source"], target)


def place_text(target, entry):
    with open(target, "w") as file:
        file.write(entry["source"])
    os.chmod(target, 0o644)


def place_tmpfs(target, entry):
    os.makedirs(target, exist_ok=True)
    mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={entry['size']}")


def place_proc(target, entry):
    os.makedirs(target, exist_ok=True)
    mount("proc", target, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in WRITABLE_PROC:
        path = f"{target}/{name}"
        if os.path.exists(path):
            mount(path, path, None, MS_BIND | MS_REC)
            restrict(path, READ_ONLY | NOSUID | NODEV)


def place_devices(target, entry):
    os.makedirs(target, exist_ok=True)
    mount("tmpfs", target, "tmpfs", MS_NOSUID, "mode=0755,size=65536")
    for name in DEVICES:
        os.close(os.open(f"{target}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        mount(f"/old/dev/{name}", f"{target}/{name}", None, MS_BIND)
    for name, source in LINKS.items():
        os.symlink(source, f"{target}/{name}")
    os.mkdir(f"{target}/pts")
    mount("devpts", f"{target}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.mkdir(f"{target}/shm")
    place_tmpfs(f"{target}/shm", entry)
    restrict(target, READ_ONLY | NOSUID, recursive=False)


PLACE = {
    "bind": place_bind, "link": place_link, "text": place_text, "tmpfs": place_tmpfs, "proc": place_proc,
    "devices": place_devices,
}  # fmt: skip


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sH22x", b"lo", 0x49)  # up, loopback, running
        fcntl.ioctl(control, 0x8914, request)


def drop_privileges(user):
    """Become ``user`` without capabilities, permanently."""
    for capability in range(64):
        if libc.prctl(CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    if os.geteuid() == 0 and user[0] != 0:
        os.setgroups([])
        os.setresgid(user[1], user[1], user[1])
        os.setresuid(user[0], user[0], user[0])
    nothing = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(libc.capset(header, nothing), "capset")
    prctl(PDEATHSIG, signal.SIGKILL)  # the change of the user has reset it
    prctl(NO_NEW_PRIVS, 1)


def inside(plan):
    """Run as process 1: wait until the limits are set, then execute the command."""
    prctl(PDEATHSIG, signal.SIGKILL)
    if not os.read(plan["release"], 1):
        os._exit(1)  # the parent is gone
    os.setsid()
    build(plan["files"], plan["hidden"])
    loopback_up()
    socket.sethostname("sandbox")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    drop_privileges(plan["user"])
    os.execvpe(plan["command"][0], plan["command"], plan["environment"])


def main():
    os.umask(0o022)
    with open(int(sys.argv[1])) as file:
        plan = json.load(file)
    if not plan["lasting"]:
        prctl(PDEATHSIG, signal.SIGKILL)
    unshare(plan["user"])
    child = os.fork()
    if child == 0:
        try:
            os.close(plan["info"])
            inside(plan)
        except BaseException as error:
            print(f"name spaces: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os.close(plan["release"])
    os.write(plan["info"], json.dumps({"child-pid": child}).encode())
    os.close(plan["info"])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
