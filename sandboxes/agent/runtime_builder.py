"""Build the agent's runtime bundle: the interpreter, its modules and the agent, for images without Python.

Runs in a container of an image with Python 3.8 or newer, as text for ``python3 -I -c``, as root, with the standard
library only.

    runtime_builder PLACE NAME SOURCE   # directory that outlives the container; name of the bundle; source of the agent

Invariant: the bundle gets its name when it is complete, also with concurrent builders. Its own loader starts it and
reads nothing from the image; only root can write to it.
"""

import ast
import importlib.util
import marshal
import os
import py_compile
import shutil
import subprocess
import sys

LEFT_OUT = ("zlib", "bz2", "lzma", "_bz2", "_lzma", "_compression")
"""Optional modules of ``tarfile``; the agent's archives are not compressed."""
USE = """
import sys
for name in {left_out!r}:
    sys.modules.setdefault(name, None)
import encodings.ascii, encodings.latin_1, {modules}, os, tarfile
place = "/tmp/bundle-%d" % os.getpid()
os.mkdir(place)
os.symlink("nowhere", place + "/l\\u00e4nk")
for mode in ("w|", "r|"):
    with open(place + "/tar", mode[0] + "b") as file, tarfile.open(fileobj=file, mode=mode) as tar:
        tar.add(place + "/l\\u00e4nk") if mode == "w|" else tar.extractall(place)
with open("/proc/self/maps") as maps:
    print(*sorted({{line.split(None, 5)[5].strip() for line in maps if line.count("/")}}), sep="\\n")
print()
print(*(getattr(module, "__file__", None) or "" for module in sys.modules.values()), sep="\\n")
"""
"""Uses all features that the agent uses, and prints the files that are open or imported."""
SEARCHED = {
    b"/etc/ld.so.preload\0": b"/proc/-/ld.preload\0",
    b"/etc/ld.so.cache\0": b"/proc/-/ld.cache\0",
    b"/usr/lib/": b"/proc/-_/",
}
"""Paths that a loader and the C library search, and replacements of equal length that never exist: a program with a
writable root could otherwise inject code into the agent after a restart."""


def modules_of(source):
    """Return the modules that the agent imports."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module)
    return ", ".join(found)


def in_use(command, modules):
    """Return the mapped files, and the files of the modules."""
    program = USE.format(left_out=LEFT_OUT, modules=modules)
    said = subprocess.check_output([*command, "-I", "-S", "-c", program], env={}, cwd="/").decode()
    mapped, _, loaded = said.partition("\n\n")
    return mapped.split("\n"), {name for name in loaded.split("\n") if name}


def libraries(loader, files):
    """Return the libraries of ``files``: name → path."""
    found = {}
    for file in files:
        for line in subprocess.check_output([loader, "--list", file], env={}).decode().splitlines():
            name, arrow, path = line.strip().partition(" => ")
            if arrow:
                found[name] = path.rsplit(" (", 1)[0]
    return found


def put(source, target):
    """Copy a program or library without its search paths."""
    with open(source, "rb") as file:
        data = file.read()
    for old, new in SEARCHED.items():
        data = data.replace(old, new)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "wb") as file:
        file.write(data)
    os.chmod(target, 0o755)


def build(place, source):
    """Build the bundle in ``place``."""
    modules = modules_of(source)
    program, library = os.path.realpath(sys.executable), os.path.dirname(os.path.realpath(os.__file__))
    prefix = os.path.dirname(os.path.dirname(library))  # lib/python3.11 lies two below it
    mapped, loaded = in_use([program], modules)
    loader = next(path for path in mapped if os.path.basename(path).startswith("ld-"))
    extensions = [name for name in loaded if not name.endswith(".py")]
    for name in loaded | {os.__file__}:
        target = f"{place}/py/{os.path.relpath(os.path.realpath(name), prefix)}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if name in extensions:
            put(name, target)
        else:
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(name, target + "c", doraise=True, optimize=2, invalidation_mode=mode)
    os.makedirs(f"{place}/py/{os.path.relpath(library, prefix)}/lib-dynload", exist_ok=True)
    put(program, f"{place}/py/bin/python3")
    put(loader, f"{place}/ld.so")
    for name, path in libraries(loader, [program, *extensions]).items():
        put(path, f"{place}/lib/{os.path.basename(name)}")
    code = marshal.dumps(compile(source, "agent.py", "exec", dont_inherit=True, optimize=2))
    with open(f"{place}/agent.{importlib.util.MAGIC_NUMBER.hex()}", "wb") as file:
        file.write(code)
    mapped, loaded = in_use([f"{place}/ld.so", "--library-path", f"{place}/lib", f"{place}/py/bin/python3"], modules)
    strange = [path for path in (*mapped, *loaded) if not path.startswith(place)]
    if strange:
        raise SystemExit(f"the bundle needs files outside of it: {', '.join(strange)}")


def main(place, name, source):
    os.umask(0o022)
    hidden, final = f"{place}/.{name}-{os.uname().nodename}", f"{place}/{name}"
    try:
        if not os.path.exists(final):
            build(hidden, source)
            os.rename(hidden, final)
    except OSError:
        if not os.path.exists(final):
            raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    print("bundled")


if __name__ == "__main__":
    main(*sys.argv[1:])
