"""What the exec transport lets a sandbox's shell do, as POSIX shell, and how its answers are read. Pure.

Invariant: no text of a caller's becomes part of a script: paths and commands are arguments. The scripts use what every
image with a shell has (busybox included). An answer is data: the worst that a hostile sandbox can forge is its own.
"""

from __future__ import annotations

import re
import stat as modes
from collections.abc import Mapping
from dataclasses import dataclass

from agentkit.errors import DiskFull, FileTooLarge, PathError, ProtocolError, SandboxError
from agentkit.sandboxes.types import FileInfo, Stats

MARK = "AGENTKIT_EXEC"
"""Environment variable that tells the processes of one command from all others, wherever they run off to."""

_OOM = """
f=/sys/fs/cgroup/memory.events
[ -r "$f" ] || f=/sys/fs/cgroup/memory/memory.oom_control
oom() { v=; [ -r "$f" ] && while read -r k x; do [ "$k" = oom_kill ] && v=$x; done <"$f"; }
"""

# Arguments: nonce, working directory, command. The trailers end the command's part of both streams: what runs on in the
# background may hold them open. Standard error of the shell itself goes nowhere, or it would comment on signals.
RUN = (
    """n=$1 d=$2; shift 2
exec 3>&2 2>/dev/null
"""
    + _OOM
    + r"""
end() { printf '\001agentkit %s\001' "$n"; printf '\001agentkit %s %s %s %s\001' "$n" "$1" "${b:--}" "${v:--}" >&3; }
cd "$d" || { end cwd; exit 0; }
case $1 in
*/*) [ -f "$1" ] && [ -x "$1" ] || { end command; exit 0; } ;;
*)
    p=; IFS=:
    for q in $PATH; do [ -f "${q:-.}/$1" ] && [ -x "${q:-.}/$1" ] && p=1 && break; done
    unset IFS
    [ -n "$p" ] || { end command; exit 0; } ;;
esac
oom; b=$v
(exec "$@" 2>&3 3>&-)
r=$?
oom
end "$r"
"""
)

# Arguments: the mark with its value, the name of a signal. A process belongs to the command if it has the mark, or is
# in a session of one that has. KILL repeats until nothing is left, since what is being killed may fork. Exit status 1:
# something survived.
KILL = """
m=$1 g=$2 i=0
look() { l=; read -r l <"$1/stat" || return 1; l=${l##*) }; set -- $l; s=$4; [ "$1" != Z ]; }
look /proc/$$; own=$s
exec 2>/dev/null
while [ $i -lt 50 ]; do
    i=$((i + 1)) any= sessions=" "
    for e in $(grep -lsF "$m" /proc/[0-9]*/environ); do
        p=${e#/proc/} p=${p%/environ}
        look "/proc/$p" && [ "$s" -gt 1 ] && [ "$s" != "$own" ] && sessions="$sessions$s "
        kill -s "$g" "$p" && any=1
    done
    [ "$sessions" = " " ] || for e in /proc/[0-9]*; do
        look "$e" || continue
        case $sessions in *" $s "*) kill -s "$g" "${e#/proc/}" && any=1 ;; esac
    done
    [ -n "$any" ] && [ "$g" = KILL ] || exit 0
done
exit 1
"""

MISSING, KIND, DENIED, LARGE, SHORT, TOOL = 40, 41, 42, 43, 44, 45

# Arguments: path, limit in bytes.
READ = f"""
[ -e "$1" ] || [ -L "$1" ] || exit {MISSING}
[ -f "$1" ] || exit {KIND}
[ -r "$1" ] || exit {DENIED}
s=$(stat -L -c %s "$1") || exit {TOOL}
[ "$s" -le "$2" ] || exit {LARGE}
exec head -c "$(($2 + 1))" "$1"
"""

# Arguments: path, its parent, a temporary name beside it, mode, size. Input: the content.
WRITE = f"""
[ -d "$1" ] && exit {KIND}
mkdir -p "$2" || exit {DENIED}
umask 077
cat >"$3" && [ "$(stat -c %s "$3")" = "$5" ] && chmod "$4" "$3" && mv -f "$3" "$1" && exit 0
rm -f "$3"
exit {SHORT}
"""

# Argument: path. For each batch: how many, a line of attributes each, a name each.
LIST = f"""
[ -e "$1" ] || [ -L "$1" ] || exit {MISSING}
[ -d "$1" ] || exit {KIND}
[ -r "$1" ] && [ -x "$1" ] || exit {DENIED}
cd "$1" && exec find . -mindepth 1 -maxdepth 1 -exec sh -c '
    echo $#
    stat -c "%f %s %Y" -- "$@" || exit 1
    for n; do printf "%s\\\\0" "${{n#./}}"; done' sh {{}} +
"""

STAT = f"""
[ -e "$1" ] || [ -L "$1" ] || exit {MISSING}
exec stat -c '%f %s %Y' "$1"
"""

REMOVE = 'exec rm -rf -- "$1"'

MKDIR = f"""
[ -d "$1" ] && exit 0
[ -e "$1" ] && exit {KIND}
exec mkdir -p "$1"
"""

# Arguments: directories, to be emptied.
EMPTY = """
for d; do find "$d" -mindepth 1 -maxdepth 1 -exec rm -rf -- {} + || exit 1; done
"""

# Argument: the working directory.
STATS = """
c=/sys/fs/cgroup
say() { [ -r "$2" ] && read -r x <"$2" && echo "$1 $x"; }
find_in() { [ -r "$2" ] && while read -r k x; do [ "$k" = "$3" ] && echo "$1 $x"; done <"$2"; }
if [ -r $c/memory.current ]; then
    say memory $c/memory.current; say limit $c/memory.max; say pids $c/pids.current
    find_in cpu_us $c/cpu.stat usage_usec; find_in oom $c/memory.events oom_kill
else
    say memory $c/memory/memory.usage_in_bytes; say limit $c/memory/memory.limit_in_bytes
    say pids $c/pids/pids.current; say cpu_ns $c/cpuacct/cpuacct.usage
    find_in oom $c/memory/memory.oom_control oom_kill
fi
df -kP "$1" | while read -r a size used rest; do
    case $size in *[0-9]) echo "size_kb $size"; echo "used_kb $used" ;; esac
done
"""


class Trailer:
    """Finds the end of a command in one of its streams, however it is cut into pieces."""

    def __init__(self, nonce: str) -> None:
        self._start = b"\x01agentkit " + nonce.encode()
        self._held = b""
        self.found: tuple[str, ...] | None = None
        """What the trailer says."""

    def feed(self, data: bytes) -> bytes:
        """What of the stream is certainly the command's. After the trailer, nothing is."""
        if self.found is not None:
            return b""
        data = self._held + data
        start = data.find(self._start)
        if start >= 0:
            end = data.find(b"\x01", start + len(self._start))
            if end < 0 and len(data) - start < 200:
                self._held = data[start:]
                return data[:start]
            self.found = tuple(data[start + len(self._start) : end].decode("ascii", "replace").split())
            self._held = b""
            return data[:start]
        # The longest end of the data with which a trailer could begin.
        keep = next((n for n in range(min(len(self._start), len(data)), 0, -1) if data.endswith(self._start[:n])), 0)
        self._held = data[len(data) - keep :]
        return data[: len(data) - keep]

    def rest(self) -> bytes:
        """What was held back, once it is known that no trailer comes."""
        held, self._held = self._held, b""
        return held


_COUNT = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class End:
    """How a command ended, by the shell that ran it."""

    code: int
    oom_kills: int | None = None
    """Of the whole sandbox, when it ended."""
    oom: bool = False
    problem: str = ""
    """Why it was not started: ``cwd`` or ``command``."""

    @classmethod
    def parse(cls, fields: tuple[str, ...]) -> End:
        """Raises ``ProtocolError`` for what the script does not write."""
        if len(fields) == 3:
            status, before, after = fields
            if status in ("cwd", "command"):
                return cls(127, problem=status)
            if _COUNT.fullmatch(status) and int(status) < 256:
                first, last = (int(count) if _COUNT.fullmatch(count) else None for count in (before, after))
                return cls(int(status), last, oom=first is not None and last is not None and last > first)
        raise ProtocolError(f"a command's end makes no sense: {' '.join(fields)[:100]!r}")


def file_error(operation: str, path: str, code: int | None, stderr: str) -> SandboxError:
    """What went wrong with a path, by the script's exit status and by what its tools said."""
    where = f"cannot {operation} {path!r}"
    known = {
        MISSING: "there is nothing there",
        KIND: "it is not of the right kind",
        DENIED: "permission denied",
    }
    if code in known:
        return PathError(f"{where}: {known[code]}", path=path)
    if code == LARGE:
        return FileTooLarge(f"{where}: it is larger than the limit of this call", path=path)
    said = stderr.strip()[-300:]
    if "No space left" in said or "Disk quota" in said:
        return DiskFull(f"{where}: the sandbox's disk is full ({said})", path=path)
    if code == TOOL or "not found" in said:
        return SandboxError(f"{where}: the image lacks a tool that files need without Python: {said}", path=path)
    return PathError(f"{where}: {said or f'exit status {code}'}", path=path)


def parse_stat(path: str, line: str) -> FileInfo:
    """One line of attributes. Raises ``ProtocolError``."""
    try:
        raw, size, modified = line.split()
        mode = int(raw, 16)
        kinds = {modes.S_IFREG: "file", modes.S_IFDIR: "directory", modes.S_IFLNK: "symlink"}
        kind = kinds.get(modes.S_IFMT(mode), "other")
        return FileInfo(path, kind, int(size), modes.S_IMODE(mode), float(modified))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ProtocolError(f"the attributes of {path!r} make no sense: {line[:100]!r}") from error


def parse_list(directory: str, output: bytes) -> list[FileInfo]:
    """What ``LIST`` wrote, by name. Raises ``ProtocolError``."""
    found: list[FileInfo] = []
    try:
        while output:
            count, _, output = output.partition(b"\n")
            *lines, output = output.split(b"\n", int(count))
            *names, output = output.split(b"\0", int(count))
            if not len(lines) == len(names) == int(count) > 0:
                raise ValueError
            for line, name in zip(lines, names, strict=True):
                path = f"{directory.rstrip('/')}/{name.decode('utf-8', 'surrogateescape')}"
                found.append(parse_stat(path, line.decode("ascii")))
    except ValueError as error:
        raise ProtocolError(f"the list of {directory!r} makes no sense") from error
    return sorted(found, key=lambda info: info.path)


def parse_stats(output: str) -> Stats:
    """What ``STATS`` wrote; what is missing or makes no sense is None."""
    values: Mapping[str, int] = {
        fields[0]: int(fields[1])
        for fields in map(str.split, output.splitlines())
        if len(fields) == 2 and _COUNT.fullmatch(fields[1])
    }
    micro, nano = values.get("cpu_us"), values.get("cpu_ns")
    used, size = values.get("used_kb"), values.get("size_kb")
    return Stats(
        memory=values.get("memory"),
        memory_limit=values.get("limit"),
        cpu_seconds=micro / 1e6 if micro is not None else nano / 1e9 if nano is not None else None,
        processes=values.get("pids"),
        oom_kills=values.get("oom"),
        workspace_used=None if used is None else used * 1024,
        workspace_size=None if size is None else size * 1024,
    )
