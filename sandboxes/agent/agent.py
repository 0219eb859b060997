"""The agent inside a sandbox: one file, for Python 3.8 or newer, which imports built-in modules only.

    python3 -I -S agent.py DIRECTORY [DESCRIPTOR]

Invariant: one event loop without threads, which never blocks. The agent starts commands, bounds their output and run
time, and kills their process trees, including processes in other sessions. It connects **out** to every ``*.sock`` in
``DIRECTORY`` (the host's, read-only) and never listens for its host. It exits after ``idle_timeout`` seconds without
contact to a host, or at the end of ``DESCRIPTOR``, which its launcher holds open. File operations that may block run in
a forked child, which can be killed like a command.

Commands have the same user as the agent and must not control it. The agent is process 1 of its namespace and has no
signal handlers, so the kernel drops signals from commands. It is made undumpable before it starts anything, so commands
cannot trace it or open its memory and descriptors; its forked children inherit this. A system call filter protects its
resource limits and its priority, which the kernel would let the same user change.

The agent's memory counts against the sandbox, and a hundred agents may share a host. It therefore does not import
``os``, ``socket``, ``json`` or ``subprocess``, which need more memory than the rest. ``protocol.py`` describes the
frames.
"""
# ruff: noqa: SIM105  (contextlib needs memory, too)
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import _ctypes
import _signal
import _socket
import _stat
import errno
import posix
import select
import sys
import time
from _collections import deque
from _struct import Struct
from _struct import error as StructError

VERSION = 1
MAX_PAYLOAD = 1 << 20
CHUNK = 1 << 18
RELAYS = 1 << 31
WINDOW = 1 << 18
"""Bytes of input that are buffered for a job or relayed connection."""

(HELLO, PING, PONG, RUN, STARTED, INPUT, INPUT_END, OUTPUT, ERRORS, CREDIT, SIGNAL, CANCEL, DONE, FAIL, RELAY, OPEN,
 OUTPUT_END) = range(1, 18)  # fmt: skip
COMMAND, PATH, TOO_LARGE, DISK_FULL, RESOURCES, BAD_REQUEST, FORGOTTEN, INTERNAL, KILLED = range(1, 10)
TIMED_OUT, TRUNCATED, OOM_KILLED, TAINTED = 1, 2, 4, 8

READ = 1 << 16
BACKLOG = 1 << 20
"""Unsent bytes above which output is not read: the program waits for the host."""
MAX_HOSTS = 4
MAX_JOBS = 512
MAX_RELAYS = 128
KEPT_KEYS, KEPT_BYTES, FORGOTTEN_KEYS = 256, 16 << 20, 4096
KEPT_OUTPUT = 1 << 16
"""Bytes of sent output that are kept of a command that another host may resume."""
MAX_DRAINS = 64
SCAN_INTERVAL = 1.0
OUTPUT_GRACE = 0.1
"""Seconds after a command's end in which its background processes may still write output."""
FLUSH_DELAY = 0.1
"""Seconds until output is sent before the result."""
KILL_TIMEOUT = 1.5
"""Seconds until processes that survive their kill taint the sandbox."""
OOM_SCORE = b"1000"
"""Of commands: higher than the agent's (500 in a container), so that the kernel kills commands first."""
LOCKS = 10
"""``RLIMIT_LOCKS``, which has no effect since Linux 2.6. Its hard limit stores a command's number: descendants inherit
it, it can be read from outside, and raising it needs a capability."""
UNNUMBERED = 1 << 62
NEVER = float("inf")

HEADER = Struct("!IBI")
INTEGER = Struct("!q")
FLOAT = Struct("!d")
LENGTH = Struct("!I")
DEFAULT_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Malformed(Exception):
    """A host violated the protocol."""


class Refused(Exception):
    """A request failed without effect: ``args`` are the error code and errno."""


# --- frames -----------------------------------------------------------------------------------------------------------


def pack(*fields):
    parts = []
    for field in fields:
        if isinstance(field, int):
            parts.append(b"i" + INTEGER.pack(field))
        elif isinstance(field, float):
            parts.append(b"f" + FLOAT.pack(field))
        else:
            parts += (b"b" + LENGTH.pack(len(field)), field)
    return b"".join(parts)


def unpack(payload, shape):
    """Return the fields of a payload; ``shape`` is a sequence of ``i`` (integer), ``f`` (float) and ``b`` (bytes)."""
    fields = []
    position = 0
    try:
        for expected in shape:
            if payload[position : position + 1] != expected.encode():
                raise Malformed(shape)
            position += 1
            if expected == "b":
                length = LENGTH.unpack_from(payload, position)[0]
                position += 4
                if length > len(payload) - position:
                    raise Malformed(shape)
                fields.append(payload[position : position + length])
                position += length
            else:
                fields.append((INTEGER if expected == "i" else FLOAT).unpack_from(payload, position)[0])
                position += 8
    except StructError:
        raise Malformed(shape)  # noqa: B904  (the cause adds nothing)
    if position != len(payload):
        raise Malformed(shape)
    return fields


def strings(blob):
    return blob[:-1].split(b"\0") if blob else []


# --- the machine ------------------------------------------------------------------------------------------------------


class _Word(_ctypes._SimpleCData):
    _type_ = "L"


class _Long(_ctypes._SimpleCData):
    _type_ = "Q"


class _Pair(_ctypes.Array):
    """``struct rlimit``: soft, hard; or ``struct sock_fprog``: count, address."""

    _type_ = _Long
    _length_ = 2


def prepared(name, *arguments):
    """Return a function of the C library and up to five arguments, for ``_ctypes.call_function``."""
    words = tuple(_Word(argument) for argument in (*arguments, 0, 0, 0, 0)[:5])
    return _ctypes.dlsym(_ctypes.dlopen(None, 2), name), words


def libc(name, *arguments):
    """Call a function of the C library; raises ``OSError`` unless it returns 0."""
    if _ctypes.call_function(*prepared(name, *arguments)) != 0:
        raise OSError(f"{name}{arguments} failed")


def install_filter(code):
    """Install a system call filter for this process and its descendants, permanently."""
    count = len(code) // 8
    words = type("_Code", (_ctypes.Array,), {"_type_": _Long, "_length_": count}).from_buffer_copy(code)
    program = _Pair(count, _ctypes.addressof(words))
    try:
        libc("prctl", 38, 1)  # PR_SET_NO_NEW_PRIVS
        libc("prctl", 22, 2, _ctypes.addressof(program))  # PR_SET_SECCOMP
    except OSError:
        raise SystemExit(  # noqa: B904
            "agentkit agent: the kernel or the container runtime refuses a system call filter (seccomp), which the "
            "isolation of sandboxes needs"
        )


def read_start(path, limit=READ):
    """Return the first bytes of a file, or None."""
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return None
    try:
        return posix.read(fd, limit)
    except OSError:
        return None
    finally:
        posix.close(fd)


def processes():
    """Return all visible processes: id → (parent, start in ticks, alive)."""
    table = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            text = read_start(f"/proc/{name}/stat", 2048)
            if text:
                fields = text[text.rindex(b")") + 2 :].split(b" ")
                table[int(name)] = (int(fields[1]), int(fields[19]), fields[0] not in (b"Z", b"X"))
    return table


def descendants(table, roots):
    """Return the descendants of ``roots``, without ``roots``."""
    children = {}
    for pid, row in table.items():
        children.setdefault(row[0], []).append(pid)
    found = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def members(table, me, main, others, born, number, last, number_of):
    """Return the running processes of one job.

    Orphans become children of ``me``. Their number identifies their job: a process can increase it, but not decrease
    it. An orphan therefore belongs to the job if it has the job's ``number``, or one above ``last``, which no job has.
    Without numbers (0), it belongs to the job if it is not older. A job without a number (None) is a file operation,
    which starts no processes.
    """
    mine = descendants(table, (main,))
    mine.add(main)
    strangers = descendants(table, (me,)) - mine - descendants(table, others) - set(others)
    for pid in strangers if number is not None else ():
        its = number_of(pid) if number else None
        if table[pid][1] >= born if its is None else its == number or its > last:
            mine.add(pid)
    return {pid for pid in mine if pid in table and table[pid][2]}


def number_of(pid):
    """Return the number of the command that started a process, or None if it cannot be read."""
    for line in (read_start(f"/proc/{pid}/limits") or b"").splitlines():
        if line.startswith(b"Max file locks "):
            hard = line.split()[4]
            return UNNUMBERED - int(hard) if hard.isdigit() and int(hard) < UNNUMBERED else None
    return None


def signal_process(pid, number):
    try:
        posix.kill(pid, number)
    except OSError:
        pass


def ticks():
    """Return the present time in the unit of processes' start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * posix.sysconf("SC_CLK_TCK"))


class Cgroup:
    """Counters of this sandbox's control group, version 2 or 1; None if a counter cannot be read."""

    def __init__(self):
        self.paths = {b"": "/sys/fs/cgroup"}
        for line in (read_start("/proc/self/cgroup") or b"").splitlines():
            _, controllers, path = line.split(b":", 2)
            for name in controllers.split(b","):
                root = "/sys/fs/cgroup/" + name.decode() if name else "/sys/fs/cgroup"
                # With a cgroup namespace or a bind mount, the group is the root of the mount.
                own = root + path.decode()
                self.paths[name] = own if read_start(own + "/cgroup.procs", 1) is not None else root
        self._oom = self._open(b"", "memory.events")
        if self._oom is None:
            self._oom = self._open(b"memory", "memory.oom_control")

    def _open(self, controller, name):
        try:
            return posix.open(self.paths.get(controller, "/") + "/" + name, posix.O_RDONLY | posix.O_CLOEXEC)
        except OSError:
            return None

    def oom_kills(self):
        if self._oom is not None:
            for line in posix.pread(self._oom, 512, 0).splitlines():
                if line.startswith(b"oom_kill "):
                    return int(line[9:])
        return None

    def number(self, controller, name, field=b""):
        text = read_start(self.paths.get(controller, "/") + "/" + name)
        for line in (text or b"").splitlines():
            if line.startswith(field):
                value = line[len(field) :].strip()
                return int(value) if value.isdigit() else None
        return None

    def usage(self):
        """Return memory, its limit, processor microseconds, processes, OOM kills; -1 if unknown."""
        cpu = self.number(b"", "cpu.stat", b"usage_usec ")
        if cpu is None:
            cpu = self.number(b"cpuacct", "cpuacct.usage")
            cpu = None if cpu is None else cpu // 1000
        limit = self._either("memory.max", "memory.limit_in_bytes")
        values = (
            self._either("memory.current", "memory.usage_in_bytes"),
            None if limit is None or limit >= 1 << 60 else limit,
            cpu,
            self._either("pids.current", "pids.current"),
            self.oom_kills(),
        )
        return [-1 if value is None else value for value in values]

    def _either(self, new, old):
        value = self.number(b"", new)
        return self.number(old.split(".")[0].encode(), old) if value is None else value


# --- file operations, run by forked children --------------------------------------------------------------------------


def failure(number):
    """Return the protocol's code of an operating system error."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DISK_FULL
    if number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return RESOURCES
    return PATH


def open_regular(path):
    fd = posix.open(path, posix.O_RDONLY | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_NOCTTY | posix.O_CLOEXEC)
    status = posix.fstat(fd)
    if not _stat.S_ISREG(status.st_mode):
        raise Refused(PATH, errno.EISDIR if _stat.S_ISDIR(status.st_mode) else errno.EINVAL)
    return fd, status.st_size


def write_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]


def make_directories(path):
    """Create ``path`` and its parents."""
    end = 0
    while end < len(path):
        end = path.find(b"/", end + 1)
        end = len(path) if end < 0 else end
        try:
            posix.mkdir(path[:end])
        except FileExistsError:
            pass
    if not _stat.S_ISDIR(posix.stat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way")


def describe(name, status):
    mode = status.st_mode
    kind = b"f" if _stat.S_ISREG(mode) else b"d" if _stat.S_ISDIR(mode) else b"l" if _stat.S_ISLNK(mode) else b"o"
    return b"%s %d %d %d %s\0" % (kind, status.st_size, mode & 0o7777, status.st_mtime_ns, name)


def try_stat(path):
    """Return the description of a file; nothing if it does not exist."""
    try:
        return describe(path, posix.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return b""


def do_read(paths, limit, _temporary):
    fd, size = open_regular(paths[0])
    if size > limit:
        raise Refused(TOO_LARGE, errno.EFBIG)
    while True:
        data = posix.read(fd, READ)
        limit -= len(data)
        if limit < 0:
            raise Refused(TOO_LARGE, errno.EFBIG)
        if not data:
            return
        write_all(1, data)


def do_write(paths, mode, temporary):
    path = paths[0]
    make_directories(path.rpartition(b"/")[0] or b"/")
    try:
        found = posix.lstat(path).st_mode
        if not _stat.S_ISREG(found):
            raise Refused(PATH, errno.EISDIR if _stat.S_ISDIR(found) else errno.EINVAL)
    except FileNotFoundError:
        pass
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
    fd = posix.open(temporary, flags, 0o600)
    try:
        while True:
            data = posix.read(0, READ)
            if not data:
                break
            write_all(fd, data)
        posix.fchmod(fd, mode)
        posix.close(fd)
        posix.rename(temporary, path)
    except BaseException:
        posix.unlink(temporary)
        raise


def do_list(paths, _limit, _temporary):
    posix.chdir(paths[0])
    parts = []
    for name in posix.listdir(b"."):
        try:
            parts.append(describe(name, posix.lstat(name)))
        except FileNotFoundError:
            continue
        if len(parts) >= 1024:
            write_all(1, b"".join(parts))
            parts = []
    write_all(1, b"".join(parts))


def do_remove(paths, _limit, _temporary):
    path = paths[0].rstrip(b"/")
    try:
        posix.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (IsADirectoryError, PermissionError):
        if not _stat.S_ISDIR(posix.lstat(path).st_mode):
            raise
        empty(path)
        posix.rmdir(path)


def empty(path):
    """Remove the content of a directory of any depth without following links, one level at a time."""
    descend(path)
    above = []
    while True:
        below = None
        for name in posix.listdir(b"."):
            if _stat.S_ISDIR(posix.lstat(name).st_mode):
                below = name
                break
            posix.unlink(name)
        if below is not None:
            here = posix.stat(".")
            above.append((here.st_dev, here.st_ino, below))
            descend(below)
        elif above:
            device, number, name = above.pop()
            posix.chdir("..")
            here = posix.stat(".")
            if (here.st_dev, here.st_ino) != (device, number):
                raise Refused(PATH, errno.ESTALE)  # Somebody moved the directory while it was being emptied.
            posix.rmdir(name)
        else:
            return


def descend(path):
    flags = posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC
    try:
        fd = posix.open(path, flags)
    except PermissionError:
        posix.chmod(path, 0o700)
        fd = posix.open(path, flags)
    posix.fchdir(fd)
    posix.close(fd)


def do_pack(paths, _limit, _temporary):
    import tarfile  # Only here, in a child that ends: it would double the agent.

    with open(1, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in paths:
            tar.add(path.decode("utf-8", "surrogateescape"))


def do_unpack(paths, _limit, _temporary):
    import tarfile

    roots = [path.decode("utf-8", "surrogateescape").strip("/") for path in paths]

    def wanted(tar):
        for member in tar:
            parts = member.name.split("/")
            if ".." in parts or not any(member.name == root or member.name.startswith(root + "/") for root in roots):
                raise Refused(BAD_REQUEST, errno.EINVAL)
            # Names come from the sandbox, and the archive is unpacked where it was packed.
            yield member

    for path in paths:
        if try_stat(path):
            empty(path)
    with open(0, "rb", closefd=False) as source, tarfile.open(fileobj=source, mode="r|") as tar:
        if hasattr(tarfile, "fully_trusted_filter"):
            tar.extraction_filter = tarfile.fully_trusted_filter
        tar.extractall("/", wanted(tar), numeric_owner=True)


QUICK_WORK = {b"stat": try_stat, b"mkdir": make_directories}
"""Operations that the agent performs itself."""
FILE_WORK = {
    b"read": do_read, b"write": do_write, b"list": do_list, b"remove": do_remove, b"pack": do_pack,
    b"unpack": do_unpack,
}  # fmt: skip


def run_file_work(work, fds, paths, limit, temporary):
    """Run a file operation in a forked child; never returns."""
    code = 1
    try:
        posix.setsid()
        for target, fd in enumerate(fds):
            posix.dup2(fd, target)
        for name in posix.listdir("/proc/self/fd"):
            if int(name) > 2:
                try:
                    posix.close(int(name))
                except OSError:
                    pass
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
        work(paths, limit, temporary)
        code = 0
    except Refused as refusal:
        write_all(2, pack(*refusal.args))
    except OSError as error:
        write_all(2, pack(failure(error.errno), error.errno or 0))
    except BaseException:
        write_all(2, pack(INTERNAL, 0))
    finally:
        posix._exit(code)


# --- one job ----------------------------------------------------------------------------------------------------------


class InputWriter:
    """Buffered input for a pipe or socket."""

    __slots__ = ("agent", "buffer", "close", "ended", "fd", "host", "id", "taken", "watched")

    def __init__(self, agent, host, id, fd, close):
        self.agent, self.host, self.id, self.fd, self.close = agent, host, id, fd, close
        self.buffer = bytearray()
        self.taken = 0
        self.ended = self.watched = False

    def put(self, data):
        if self.fd is None:
            return  # it stopped reading; the host knows
        if len(self.buffer) + len(data) > WINDOW:
            raise Malformed("more input than was asked for")
        self.buffer += data
        self.taken += len(data)
        self.write()

    def end(self):
        self.ended = True
        self.write()

    def write(self, _events=0):
        while self.buffer and self.fd is not None:
            try:
                count = posix.write(self.fd, self.buffer[:READ])
            except BlockingIOError:
                if not self.watched:
                    self.watched = True
                    self.agent.watch(self.fd, select.EPOLLOUT, self.write)
                return
            except OSError:
                self.stop()
                self.host.send(INPUT_END, self.id)
                return
            del self.buffer[:count]
            self.host.send(CREDIT, self.id, pack(count))
        if self.watched:
            self.watched = False
            self.agent.forget(self.fd)
        if self.ended:
            self.stop()

    def stop(self):
        if self.fd is not None:
            if self.watched:
                self.agent.forget(self.fd)
            fd, self.fd = self.fd, None
            self.buffer.clear()
            self.close(fd)


class JobOutput:
    """One output stream of a job: the beginning until it is sent, the end until the job has ended."""

    __slots__ = ("fd", "head", "kept", "kind", "reading", "recent", "streamed", "tail", "total")

    def __init__(self, fd, kind, streamed):
        self.fd, self.kind, self.streamed = fd, kind, streamed
        self.head = bytearray()
        self.tail = bytearray()
        self.kept = self.total = 0
        self.reading = False
        self.recent = bytearray()

    def sent(self, data):
        """Keep the end of what was sent, for a host that did not receive it."""
        self.total += len(data)
        self.recent += data
        del self.recent[:-KEPT_OUTPUT]

    def take(self, data, limit):
        self.total += len(data)
        space = limit - limit // 2 - self.kept
        if space > 0:
            self.kept += min(space, len(data))
            self.head += data[:space]
            data = data[space:]
        if data:
            self.tail += data
            if len(self.tail) > limit:
                self.trim(limit)

    def trim(self, limit):
        del self.tail[: max(0, len(self.tail) - limit // 2)]


class Job:
    """A command or file operation, from its start until its result was sent."""

    __slots__ = (
        "agent", "born", "credit", "deadline", "end", "flush_at", "grace", "host", "id", "input", "key", "kill_end",
        "limit", "linger", "number", "oom_before", "operation", "outputs", "pid", "started", "status", "stopped",
        "suspended", "tainted", "temporary", "timed_out", "waiters", "wake",
    )  # fmt: skip

    def __init__(self, agent, host, id, operation, key, timeout, limit):
        self.agent, self.host, self.id, self.operation, self.key = agent, host, id, operation, key
        self.waiters = [(host, id, limit)]
        self.limit = limit
        self.credit = None if operation == b"exec" else limit
        """Bytes that may still be sent; None if output is collected."""
        self.started = time.monotonic()
        self.deadline = self.end = self.started + timeout
        self.linger = 0
        """Seconds until a command without a host is killed."""
        self.wake = self.deadline
        self.pid = self.status = self.kill_end = self.input = self.temporary = None
        self.grace = self.flush_at = NEVER
        self.born = 0
        self.number = None
        self.stopped = set()
        self.outputs = []
        self.timed_out = self.tainted = self.suspended = False
        self.oom_before = agent.cgroup.oom_kills()

    # Starting

    def start(self, argv, env, cwd, number, stdin, complete):
        """Start the job. Raises ``Refused`` if this failed."""
        agent = self.agent
        pipes = []
        try:
            try:
                for _ in range(2 if complete and not stdin else 3):
                    pipes += posix.pipe2(posix.O_CLOEXEC)
            except OSError as error:
                raise Refused(RESOURCES, error.errno)  # noqa: B904
            fds = [pipes[4] if len(pipes) == 6 else agent.null, pipes[1], pipes[3]]
            self.born = ticks()
            agent.raise_oom_score(True)
            try:
                if self.operation in FILE_WORK:
                    self.fork(fds, argv, number)
                else:
                    self.spawn(fds, argv, env, cwd)
            finally:
                agent.raise_oom_score(False)
        except BaseException:
            for fd in pipes:
                posix.close(fd)
            raise
        for fd in fds:
            if fd != agent.null:
                posix.close(fd)
        for fd, kind in ((pipes[0], OUTPUT), (pipes[2], ERRORS)):
            posix.set_blocking(fd, False)
            # The standard error of a file operation is its error code, for this process.
            output = JobOutput(fd, kind, self.credit is not None and (kind == OUTPUT or self.operation == b"spawn"))
            self.outputs.append(output)
            self.listen(output)
        if len(pipes) == 6:
            posix.set_blocking(pipes[5], False)
            self.input = InputWriter(agent, self.host, self.id, pipes[5], posix.close)
            self.input.put(stdin)
            if complete:
                self.input.end()

    def spawn(self, fds, argv, env, cwd):
        agent = self.agent
        try:
            posix.chdir(cwd)
            environment = dict(agent.environment)
            for entry in env:
                name, _, value = entry.partition(b"=")
                environment[name] = value
            program = locate(argv[0], environment.get(b"PATH", DEFAULT_PATH))
            actions = [(posix.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(fds)]
            self.number = agent.next_number()
            self.pid = posix.posix_spawn(
                program, argv, environment, file_actions=actions, setsid=True, setsigdef=agent.ignored
            )
        except (OSError, ValueError) as error:
            number = getattr(error, "errno", None) or errno.EINVAL
            raise Refused(RESOURCES if failure(number) == RESOURCES else COMMAND, number)  # noqa: B904

    def fork(self, fds, paths, number):
        if self.operation == b"write":
            parent = paths[0].rpartition(b"/")[0]
            self.temporary = b"%s/.agentkit-%s-%d" % (parent, self.agent.boot, self.agent.count())
        try:
            self.pid = posix.fork()
        except OSError as error:
            raise Refused(RESOURCES, error.errno)  # noqa: B904
        if self.pid == 0:
            run_file_work(FILE_WORK[self.operation], fds, paths, number, self.temporary)

    # Output

    def listen(self, output):
        output.reading = True
        self.agent.watch(output.fd, select.EPOLLIN, lambda _events: self.read(output))

    def pause(self, output):
        if output.reading:
            output.reading = False
            self.agent.forget(output.fd)

    def grant(self, count):
        if self.credit is not None:
            self.credit += count
            self.resume()

    def resume(self):
        for output in self.outputs:
            if output.fd is not None and not output.reading:
                self.listen(output)

    def suspend(self):
        """Hold the output back until another host resumes the command; kill it if none does."""
        self.suspended = True
        self.credit = 0
        self.deadline = min(self.end, time.monotonic() + self.linger)
        for output in self.outputs:
            if output.fd is not None:
                self.pause(output)
        self.plan()

    def move(self, host, id, received, window):
        """Continue with ``host``, which has received these numbers of bytes. Raises ``Refused`` if some are gone."""
        missing = [output.total - count for output, count in zip(self.outputs, received)]  # noqa: B905  (Python 3.8)
        known = all(0 <= count <= len(out.recent) for count, out in zip(missing, self.outputs))  # noqa: B905
        if not known or sum(missing) > window:
            raise Refused(FORGOTTEN, 0)
        self.host.jobs.pop(self.id, None)
        host.jobs[id] = self
        self.host, self.id, self.waiters = host, id, [(host, id, window)]
        self.suspended = False
        self.deadline = self.end
        taken, waiting = 0, 0
        if self.input is not None:
            self.input.host, self.input.id = host, id
            taken, waiting = self.input.taken, len(self.input.buffer)
        host.send(STARTED, id, pack(taken, waiting))
        if self.input is None or self.input.fd is None:
            host.send(INPUT_END, id)
        for output, count in zip(self.outputs, missing):  # noqa: B905
            if count:
                host.stream(output.kind, id, output.recent[-count:])
        self.credit = window - sum(missing)
        self.resume()
        self.plan()
        if self.status is not None:
            self.conclude()

    def read(self, output):
        """Read once; return whether there was data, or the end of the stream."""
        size = READ
        if output.streamed:
            size = min(size, self.credit)
        elif not self.key and output.kept < self.limit // 2 and self.host.backlog > BACKLOG:
            self.host.held.append(self)
            size = 0
        if size <= 0:
            self.pause(output)
            return False
        try:
            data = posix.read(output.fd, size)
        except BlockingIOError:
            return False
        if not data:
            self.pause(output)
            posix.close(output.fd)
            output.fd = None
            if self.status is not None:
                self.conclude()
        elif output.streamed:
            self.credit -= len(data)  # pyright: ignore[reportOperatorIssue]
            if self.key:
                output.sent(data)
            self.host.send(output.kind, self.id, data)
        else:
            output.take(data, self.limit if self.credit is None else READ)
            if self.credit is not None or self.key:
                return True  # sent with the result
            if self.flush_at == NEVER and output.head:
                self.flush_at = time.monotonic() + FLUSH_DELAY
                self.plan()
            if len(output.head) >= CHUNK:
                self.flush()
        return True

    def flush(self):
        self.flush_at = NEVER
        for output in self.outputs:
            self.host.stream(output.kind, self.id, output.head)
            output.head = bytearray()

    # Time

    def plan(self):
        if self.kill_end is None:
            self.wake = min(self.flush_at, self.deadline if self.status is None else min(self.grace, NEVER))
        self.agent.wake_at(self.wake)

    def tick(self, now):
        if self.flush_at <= now:
            self.flush()
        if self.kill_end is not None:
            if self.wake <= now:
                self.kill_once(now)
        elif self.status is None:
            if self.deadline <= now:
                self.timed_out = True
                self.kill()
        elif self.grace <= now:
            held = any(out.fd is not None and not out.reading for out in self.outputs)
            if now < self.deadline and (held or self.suspended):
                self.grace = now + OUTPUT_GRACE  # the host has not received all output yet
            else:
                self.finish()
                return
        self.plan()

    def exited(self, status):
        self.status = status
        self.grace = time.monotonic() + OUTPUT_GRACE
        for output in self.outputs:
            reads = 0
            # The pipe contains all output of the command itself; background processes may write forever.
            while output.fd is not None and reads < 32 and self.read(output):
                reads += 1
        if self in self.agent.jobs:
            self.conclude()
            self.plan()

    def conclude(self):
        if self.kill_end is not None or self.suspended or self not in self.agent.jobs:
            return
        if all(out.fd is None for out in self.outputs):
            self.finish()

    # Killing

    def signal(self, number):
        if self.status is None and 0 < number < 65:
            try:
                posix.killpg(self.pid, number)
            except OSError:
                pass

    def kill(self):
        if self.kill_end is None:
            now = time.monotonic()
            self.kill_end = now + KILL_TIMEOUT
            self.kill_once(now)
            self.agent.wake_at(self.wake)

    def kill_once(self, now):
        """Stop all processes, so that none forks meanwhile, then kill all; repeated until none is left."""
        found = set()
        for _ in range(16):
            found = self.alive()
            moving = found - self.stopped
            if not moving:
                break
            for pid in moving:
                signal_process(pid, _signal.SIGSTOP)
            self.stopped |= moving
        for pid in found:
            signal_process(pid, _signal.SIGKILL)
        if not found and self.status is not None:
            self.kill_end = None
            self.grace = min(self.grace, now + OUTPUT_GRACE)
            self.conclude()
        elif now >= self.kill_end:
            self.tainted = True
            self.finish()
        else:
            self.wake = now + 0.01

    def alive(self):
        others = {job.pid for job in self.agent.jobs if job is not self and job.status is None}
        last = self.agent.number
        return members(processes(), posix.getpid(), self.pid, others, self.born, self.number, last, number_of)

    # End

    def finish(self):
        self.agent.jobs.discard(self)
        self.agent.pids.pop(self.pid, None)
        if self.input is not None:
            self.input.stop()
        for output in self.outputs:
            if output.fd is not None:
                self.pause(output)
                self.agent.drain(output.fd)
                output.fd = None
        if self.temporary is not None and self.status != 0:
            try:
                posix.unlink(self.temporary)
            except OSError:
                pass
        answer = self.answer()
        if self.key:
            self.agent.keep(self.key, answer)
        for host, id, limit in self.waiters:
            host.jobs.pop(id, None)
            host.answer(id, limit, answer)

    def answer(self):
        """Return ``(None, (code, signal, flags, duration), stdout, stderr)``, or ``(failure, …)``."""
        if self.operation in FILE_WORK and self.status != 0 and not self.timed_out:
            return self.refusal(), (), b"", b""
        code, number = -1, 0
        if self.status is not None:
            if posix.WIFSIGNALED(self.status):
                number = posix.WTERMSIG(self.status)
                code = 128 + number
            else:
                code = posix.WEXITSTATUS(self.status)
        flags = TIMED_OUT if self.timed_out else 0
        flags |= TAINTED if self.tainted else 0
        flags |= OOM_KILLED if self.oom_killed(number) else 0
        rest = []
        for output in self.outputs:
            if output.total > self.limit and self.credit is None:
                output.trim(self.limit)
                flags |= TRUNCATED
            rest.append(bytes(output.head + output.tail))
        return None, (code, number, flags, time.monotonic() - self.started), rest[0], rest[1]

    def refusal(self):
        """Return the error of a file operation, or the signal that killed it."""
        if self.status is not None and posix.WIFSIGNALED(self.status):
            return pack(KILLED, posix.WTERMSIG(self.status))
        try:
            unpack(bytes(self.outputs[1].head), "ii")
        except Malformed:
            return pack(INTERNAL, 0)
        return bytes(self.outputs[1].head)

    def oom_killed(self, number):
        after = self.agent.cgroup.oom_kills()
        if after is None or self.oom_before is None:
            # Without a counter: a SIGKILL that the agent did not send.
            return number == _signal.SIGKILL and not self.stopped
        return after > self.oom_before


def locate(program, path):
    """Return the file of a program; the kernel reports what is wrong with it."""
    if b"/" in program:
        return program
    for directory in path.split(b":"):
        candidate = (directory or b".") + b"/" + program
        if posix.access(candidate, posix.X_OK):
            return candidate
    raise FileNotFoundError(errno.ENOENT, "no such program")


def cut(data, limit):
    """Return the first and the last ``limit / 2`` bytes."""
    return data if len(data) <= limit else data[: limit - limit // 2] + data[len(data) - limit // 2 :]


# --- connections ------------------------------------------------------------------------------------------------------


class Relay:
    """A connection from a program to the relay port, forwarded to the host."""

    def __init__(self, agent, host, id, connection):
        self.agent, self.host, self.id, self.connection = agent, host, id, connection
        connection.setblocking(False)
        self.credit = WINDOW
        self.reading = True
        self.input = InputWriter(agent, host, id, posix.dup(connection.fileno()), self.written)
        agent.watch(connection.fileno(), select.EPOLLIN, self.read)

    def read(self, _events=0):
        try:
            data = posix.read(self.connection.fileno(), min(READ, self.credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.credit -= len(data)
            self.host.send(OUTPUT, self.id, data)
        else:
            self.host.send(OUTPUT_END, self.id)
        if not data or self.credit == 0:
            self.agent.forget(self.connection.fileno())
            self.reading = False
        if not data:
            self.credit = -1
            self.settle()

    def grant(self, count):
        if self.credit >= 0:
            self.credit += count
            if not self.reading and self.credit > 0:
                self.reading = True
                self.agent.watch(self.connection.fileno(), select.EPOLLIN, self.read)

    def written(self, fd):
        try:
            self.connection.shutdown(_socket.SHUT_WR)
        except OSError:
            pass
        posix.close(fd)
        self.settle()

    def settle(self):
        if self.credit < 0 and self.input.fd is None:
            self.kill()

    def kill(self):
        if self.host.relays.pop(self.id, None) is not None:
            if self.reading:
                self.agent.forget(self.connection.fileno())
            self.input.stop()
            self.connection.close()


class HostConnection:
    """The connection to one host."""

    def __init__(self, agent, name, connection):
        self.agent, self.name, self.connection = agent, name, connection
        self.buffer = bytearray()
        self.queue = deque()
        self.backlog = 0
        self.jobs = {}
        self.relays = {}
        self.held = []
        self.wants_relays = self.closed = False
        agent.watch(connection.fileno(), select.EPOLLIN, self.ready)
        self.send(HELLO, 0, pack(VERSION, agent.nonce, agent.boot))

    def send(self, kind, id, payload=b""):
        if self.closed:
            return
        data = HEADER.pack(len(payload), kind, id) + payload
        if self.queue:
            self.queue.append(data)
            self.backlog += len(data)
            return
        try:
            sent = self.connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self.queue.append(data[sent:])
            self.backlog += len(data) - sent
            self.agent.epoll.modify(self.connection.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def stream(self, kind, id, data):
        for start in range(0, len(data), CHUNK):
            self.send(kind, id, bytes(data[start : start + CHUNK]))

    def answer(self, id, limit, answer):
        """Send a job's result, with at most ``limit`` bytes of output; a repeated request may have a lower limit."""
        refusal, numbers, stdout, stderr = answer
        if refusal is not None:
            self.send(FAIL, id, refusal)
            return
        code, number, flags, duration = numbers
        if max(len(stdout), len(stderr)) > limit:
            stdout, stderr = cut(stdout, limit), cut(stderr, limit)
            flags |= TRUNCATED
        if len(stdout) + len(stderr) > CHUNK:
            self.stream(OUTPUT, id, stdout)
            self.stream(ERRORS, id, stderr)
            stdout = stderr = b""
        self.send(DONE, id, pack(code, number, flags, duration, stdout, stderr))

    def ready(self, events):
        if events & select.EPOLLOUT:
            self.drain()
        if events & ~select.EPOLLOUT and not self.closed:
            try:
                data = self.connection.recv(READ * 4)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self.agent.contact = time.monotonic()
            self.buffer += data
            try:
                self.parse()
            except Malformed as error:
                report_error(f"a host broke the protocol ({error}); its connection is dropped")
                self.close()

    def drain(self):
        while self.queue:
            try:
                sent = self.connection.send(self.queue[0])
            except BlockingIOError:
                break
            except OSError:
                self.close()
                return
            self.backlog -= sent
            if sent < len(self.queue[0]):
                self.queue[0] = self.queue[0][sent:]
            else:
                self.queue.popleft()
        if not self.queue:
            self.agent.epoll.modify(self.connection.fileno(), select.EPOLLIN)
        if self.backlog <= BACKLOG // 2:
            held, self.held = self.held, []
            for job in held:
                job.resume()

    def parse(self):
        start = 0
        buffer = self.buffer
        try:
            while len(buffer) - start >= 9 and not self.closed:
                length, kind, id = HEADER.unpack_from(buffer, start)
                if length > MAX_PAYLOAD:
                    raise Malformed(f"a frame of {length} bytes")
                end = start + 9 + length
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + 9 : end])
                start = end
                self.handle(kind, id, payload)
        finally:
            del buffer[:start]

    def handle(self, kind, id, payload):
        if kind == PING:
            self.send(PONG, id)
        elif kind == RUN:
            try:
                self.run(id, *unpack(payload, "bbbbfiibbi"))
            except Refused as refusal:
                self.send(FAIL, id, pack(*refusal.args))
        elif kind == RELAY:
            self.wants_relays = True
        elif id >= RELAYS:
            if id in self.relays:  # Otherwise it ended while this was under way.
                self.control(self.relays[id], kind, payload)
        elif id in self.jobs:
            self.control(self.jobs[id], kind, payload)

    def control(self, target, kind, payload):
        """Handle a frame for a job or a relayed connection."""
        if kind in (INPUT, INPUT_END):
            if target.input is not None:
                target.input.end() if kind == INPUT_END else target.input.put(payload)
        elif kind == CREDIT:
            target.grant(unpack(payload, "i")[0])
        elif kind == SIGNAL and target.id < RELAYS:
            target.signal(unpack(payload, "i")[0])
        elif kind == CANCEL:
            target.kill()
        else:
            raise Malformed(f"kind {kind}")

    def run(self, id, operation, argv, env, cwd, timeout, limit, number, key, stdin, complete):
        agent = self.agent
        words = strings(argv)
        if operation == b"stats":
            self.send(DONE, id, pack(0, 0, 0, 0.0, agent.stats(words), b""))
            return
        if not words or id in self.jobs or id >= RELAYS or limit < 0 or timeout < 0:
            raise Refused(BAD_REQUEST, errno.EINVAL)
        if operation in QUICK_WORK:
            try:
                output = QUICK_WORK[operation](words[0]) or b""
            except OSError as error:
                raise Refused(failure(error.errno), error.errno)  # noqa: B904
            self.send(DONE, id, pack(0, 0, 0, 0.0, output, b""))
            return
        if operation == b"resume":
            self.take_over(id, key, words, limit)
            return
        if operation not in FILE_WORK and operation != b"exec" and operation != b"spawn":
            raise Refused(BAD_REQUEST, errno.ENOSYS)
        if key and self.repeated(id, key, limit):
            return
        if len(agent.jobs) >= MAX_JOBS:
            raise Refused(RESOURCES, errno.EAGAIN)
        job = Job(agent, self, id, operation, key, timeout, limit)
        if operation == b"spawn":
            job.linger, number = number, 0
        job.start(words, strings(env), cwd, number, stdin, complete)
        self.jobs[id] = job
        agent.jobs.add(job)
        agent.pids[job.pid] = job
        if key:
            agent.running[key] = job
        if operation == b"spawn":
            self.send(STARTED, id, pack(job.pid))
        agent.wake_at(job.wake)

    def take_over(self, id, key, words, window):
        """Continue a command that another host has spawned with this key."""
        job = self.agent.running.get(key)
        if job is None or job.operation != b"spawn":
            raise Refused(FORGOTTEN, 0)
        if len(words) != 2 or not all(word.isdigit() for word in words):
            raise Refused(BAD_REQUEST, errno.EINVAL)
        job.move(self, id, [int(word) for word in words], window)

    def repeated(self, id, key, limit):
        """Return whether a job with this key runs or ran; its result then answers this request."""
        agent = self.agent
        if key in agent.running:
            job = agent.running[key]
            if job.operation == b"spawn":
                raise Refused(BAD_REQUEST, errno.EEXIST)
            job.waiters.append((self, id, limit))
            self.jobs[id] = job
        elif key in agent.kept:
            self.answer(id, limit, agent.kept[key])
        elif key in agent.forgotten:
            raise Refused(FORGOTTEN, 0)
        else:
            return False
        return True

    def close(self):
        if self.closed:
            return
        self.closed = True
        self.agent.forget(self.connection.fileno())
        self.connection.close()
        self.queue.clear()
        self.backlog = 0
        self.agent.hosts.pop(self.name, None)
        for relay in list(self.relays.values()):
            relay.kill()
        for job in set(self.jobs.values()):
            job.waiters = [waiter for waiter in job.waiters if waiter[0] is not self]
            # A job with a key may be asked for again by a host that comes back.
            if job.key and job.operation == b"spawn":
                job.suspend()
            elif job.key:
                job.resume()
            else:
                job.grant(NEVER)
                job.kill()
        self.jobs.clear()


# --- the loop ---------------------------------------------------------------------------------------------------------


class Agent:
    def __init__(self, directory, settings, lifeline):
        self.directory = directory
        self.nonce = settings[b"nonce"]
        self.idle_timeout = float(settings.get(b"idle_timeout", b"inf"))
        self.relay_port = int(settings.get(b"relay_port", b"0"))
        self.boot = b"".join(b"%02x" % byte for byte in posix.urandom(8))
        self.environment = {b"PATH": DEFAULT_PATH}
        self.environment.update(posix.environ)
        for name, value in settings.items():
            if name.startswith(b"env."):
                self.environment[name[4:]] = value
        self.epoll = select.epoll()
        self.handlers = {}
        self.hosts = {}
        self.jobs = set()
        self.pids = {}
        self.running, self.kept, self.forgotten = {}, {}, {}
        self.kept_bytes = 0
        self.drains = deque()
        self.counter = 0
        self.wake = NEVER
        self.next_scan = 0.0
        self.contact = time.monotonic()
        self.stopping = False
        self.number = 0
        """Number of the last started command."""
        self.limit = _Pair()
        self.set_limit = prepared("setrlimit", LOCKS, _ctypes.addressof(self.limit))
        posix.chdir("/")
        self.prepare_process(settings.get(b"filter"))
        if lifeline is not None:
            posix.set_inheritable(lifeline, False)
            self.watch(lifeline, select.EPOLLIN, lambda _events: posix.read(lifeline, READ) or self.stop())
        self.cgroup = Cgroup()
        self.listener = self.listen_for_relays() if self.relay_port else None

    def prepare_process(self, filter):
        self.null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
        while self.null <= 2:
            self.null = posix.dup(self.null)
            posix.set_inheritable(self.null, False)
        # After the next line these files are root's, as far as opening them goes.
        try:
            self.oom_fd = posix.open("/proc/self/oom_score_adj", posix.O_RDWR | posix.O_CLOEXEC)
            self.oom_score = posix.read(self.oom_fd, 16)
        except OSError:
            self.oom_fd = None
        libc("prctl", 4, 0)  # PR_SET_DUMPABLE: commands cannot trace this process or read its memory.
        libc("prctl", 36, 1)  # PR_SET_CHILD_SUBREAPER: orphans of commands become children of this process.
        # Commands start with default signal handling, independent of what this process or its parent ignores.
        self.ignored = [number for number in range(1, _signal.NSIG) if _signal.getsignal(number) == _signal.SIG_IGN]
        reader, writer = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        if posix.getpid() == 1:
            # Python's own handler would end process 1; without one, the kernel drops what comes from inside.
            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
        else:
            _signal.signal(_signal.SIGTERM, self.stop)
        self.watch(reader, select.EPOLLIN, lambda _events: self.reap(reader))
        if filter is not None:
            install_filter(bytes.fromhex(filter.decode()))

    def stop(self, *_):
        self.stopping = True

    def count(self):
        self.counter += 1
        return self.counter

    def next_number(self):
        """Return the number that the next process inherits; 0 if the kernel does not support it."""
        self.limit[0] = self.limit[1] = UNNUMBERED - self.number - 1
        if _ctypes.call_function(*self.set_limit) == 0:
            self.number += 1
        return self.number

    def raise_oom_score(self, high):
        """Set the OOM score that the next process inherits, or restore the agent's."""
        if self.oom_fd is not None:
            try:
                posix.pwrite(self.oom_fd, OOM_SCORE if high else self.oom_score, 0)
            except OSError:
                self.oom_fd = None

    # Events

    def watch(self, fd, events, handler):
        self.handlers[fd] = handler
        self.epoll.register(fd, events)

    def forget(self, fd):
        if self.handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def wake_at(self, when):
        if when < self.wake:
            self.wake = when

    def run(self):
        while not self.stopping:
            wait = min(self.wake, self.next_scan) - time.monotonic()
            for fd, events in self.epoll.poll(wait if wait > 0 else 0, 64):
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler(events)
            now = time.monotonic()
            if now >= self.wake:
                self.wake = NEVER
                for job in list(self.jobs):
                    if job.wake <= now:
                        job.tick(now)
                    self.wake_at(job.wake)
            if now >= self.next_scan:
                self.next_scan = now + SCAN_INTERVAL
                self.scan()
                if now - self.contact > self.idle_timeout:
                    report_error(f"no contact to a host for {self.idle_timeout:.0f} s: the sandbox ends")
                    self.stopping = True
        self.end()

    def reap(self, reader):
        try:
            posix.read(reader, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self.pids.pop(pid, None)
            if job is not None:
                job.exited(status)

    def drain(self, fd):
        """Read and discard output, so that a background program does not get SIGPIPE."""

        def read(_events):
            try:
                done = not posix.read(fd, READ)
            except BlockingIOError:
                done = False
            if done:
                self.drains.remove(fd)
                self.forget(fd)
                posix.close(fd)

        if len(self.drains) >= MAX_DRAINS:
            oldest = self.drains.popleft()
            self.forget(oldest)
            posix.close(oldest)
        self.drains.append(fd)
        self.watch(fd, select.EPOLLIN, read)

    def keep(self, key, answer):
        """Store the result for an idempotency key; beyond the limits only that it ran."""
        self.running.pop(key, None)
        self.kept[key] = answer
        self.kept_bytes += len(answer[2]) + len(answer[3])
        while len(self.kept) > KEPT_KEYS or (self.kept_bytes > KEPT_BYTES and len(self.kept) > 1):
            oldest = next(iter(self.kept))
            _, _, stdout, stderr = self.kept.pop(oldest)
            self.kept_bytes -= len(stdout) + len(stderr)
            self.forgotten[oldest] = None
        while len(self.forgotten) > FORGOTTEN_KEYS:
            del self.forgotten[next(iter(self.forgotten))]

    def stats(self, words):
        used = size = -1
        try:
            status = posix.statvfs(words[0])
            size = status.f_blocks * status.f_frsize
            used = size - status.f_bfree * status.f_frsize
        except (OSError, IndexError):
            pass
        return b" ".join(b"%d" % value for value in [*self.cgroup.usage(), used, size])

    # Hosts

    def scan(self):
        """Connect to new hosts."""
        if self.listener is not None and self.listener.fileno() not in self.handlers:
            self.watch(self.listener.fileno(), select.EPOLLIN, self.accept)
        try:
            names = posix.listdir(self.directory)
        except OSError:
            return
        for name in sorted(names):
            if name.endswith(b".sock") and name not in self.hosts and len(self.hosts) < MAX_HOSTS:
                connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
                connection.setblocking(False)
                try:
                    connection.connect(self.directory + b"/" + name)
                except OSError:
                    connection.close()
                    continue
                self.hosts[name] = HostConnection(self, name, connection)

    def listen_for_relays(self):
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.relay_port))
        listener.listen(64)
        listener.setblocking(False)
        return listener

    def accept(self, _events):
        try:
            fd, _ = self.listener._accept()
        except BlockingIOError:
            return
        except OSError:
            self.forget(self.listener.fileno())  # Out of file descriptors; looked at again at the next scan.
            return
        connection = _socket.socket(fileno=fd)
        for host in self.hosts.values():
            if host.wants_relays and len(host.relays) < MAX_RELAYS:
                id = RELAYS + self.count() % RELAYS
                host.send(OPEN, id)
                host.relays[id] = Relay(self, host, id, connection)
                return
        connection.close()

    def end(self):
        """Kill all processes of this sandbox and exit."""
        deadline = time.monotonic() + KILL_TIMEOUT
        while time.monotonic() < deadline:
            table = processes()
            left = [pid for pid in descendants(table, (posix.getpid(),)) if table[pid][2]]
            if not left:
                return
            for number in (_signal.SIGSTOP, _signal.SIGKILL):
                for pid in left:
                    signal_process(pid, number)
            time.sleep(0.01)


def report_error(text):
    print("agentkit agent:", text, file=sys.stderr, flush=True)


def main(directory, lifeline=None):
    directory = directory.encode("utf-8", "surrogateescape")
    text = read_start(directory + b"/config", MAX_PAYLOAD)
    if text is None:
        report_error(f"cannot read {directory!r}/config: the host writes it before it starts the sandbox")
        return 1
    settings = dict(entry.split(b"=", 1) for entry in strings(text))
    settings[b"nonce"] = read_start(directory + b"/nonce") or b""  # only now: it is gone once it was shown
    Agent(directory, settings, None if lifeline is None else int(lifeline)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
