"""Which environments exist, under which names, and how to make one.

Invariant: explicit ``register()`` > built-in > third-party entry point. Knowing that a name exists never runs the code
behind it: only ``env_class``, ``make`` and ``Entry.load`` import an environment, and one that does not load spoils its
own name alone.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentkit.errors import ConfigError, RegistryError

if TYPE_CHECKING:  # sandboxes are reached only when one is asked for
    from agentkit.sandboxes.backend import Backend
    from agentkit.sandboxes.spec import SandboxSpec

GROUP = "agentkit.envs"
"""The entry-point group: ``Name-vN = package.module:Class``, or a function that returns an ``EnvSpec``."""
DISTRIBUTION = "agentkit-rl"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*-v\d+")

Source = Literal["explicit", "built-in", "plugin"]
EntryPoint = str | Callable[..., Any]
"""``"package.module:Class"``, or the class itself."""


@dataclass(frozen=True)
class EnvSpec:
    """How to make an environment: a class, and arguments that the name stands for."""

    entry_point: EntryPoint
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Entry:
    """One name of the registry."""

    id: str
    spec: EnvSpec
    source: Source
    distribution: str | None = None
    """Name and version of the distribution that brought it; None for explicit registrations."""
    refusal: str | None = None
    """Why the name is not to be used at all: it is malformed, or claimed twice."""
    error: str | None = None
    """Why it did not load, when that was last tried."""

    @property
    def target(self) -> str:
        """The entry point as text."""
        point = self.spec.entry_point
        return point if isinstance(point, str) else f"{point.__module__}:{point.__qualname__}"

    def diagnose(self) -> str | None:
        """Why it cannot be made, as far as can be told without importing it; None if nothing is known against it."""
        from agentkit.entry_points import diagnose

        point = self.spec.entry_point
        return self.refusal or self.error or (diagnose(point) if isinstance(point, str) else None)

    def load(self) -> EnvSpec:
        """Import the environment; returns a spec whose entry point is the class.

        Raises:
            RegistryError: it does not import, or is no environment. The reason is kept in ``error``.
        """
        if self.refusal is not None:
            raise RegistryError(f"environment {self.id!r} cannot be made: {self.refusal}")
        try:
            spec = _resolve(self.spec)
        except Exception as problem:
            self.error = f"{type(problem).__name__}: {problem}"
            origin = f" of {self.distribution}" if self.distribution else ""
            raise RegistryError(
                f"environment {self.id!r} ({self.target}{origin}) does not load: {self.error}"
            ) from problem
        self.error = None
        return spec


_explicit: dict[str, Entry] = {}
_installed: dict[str, Entry] | None = None
_lock = threading.RLock()


def register(id: str, entry_point: EntryPoint, **kwargs: Any) -> None:
    """Give an environment a name, in this process.

    Args:
        id: ``Name-vN``.
        entry_point: ``"package.module:Class"`` (imported on first use) or the class itself.
        kwargs: arguments that the name stands for; ``make`` may override them.

    Raises:
        RegistryError: the name is malformed, or registered already with something else.
    """
    if not _NAME.fullmatch(id):
        raise RegistryError(
            f"environment name {id!r} is not of the form Name-vN (letters, digits, _ . -), as in Maze-v0"
        )
    entry = Entry(id, EnvSpec(entry_point, kwargs), "explicit")
    known = _explicit.get(id)
    if known is not None and known.spec != entry.spec:
        raise RegistryError(f"environment {id!r} is registered already, as {known.target}; raise the version number")
    shadowed = installed().get(id)
    if known is None and shadowed is not None and shadowed.source == "built-in":
        warnings.warn(f"register({id!r}) shadows agentkit's own environment of that name", stacklevel=2)
    _explicit[id] = entry
    from agentkit import gymnasium_bridge

    gymnasium_bridge.sync()


def installed() -> dict[str, Entry]:
    """The names that installed distributions declare, read once; imports none of their code."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = collect(importlib.metadata.entry_points(group=GROUP))
        return _installed


def collect(points: importlib.metadata.EntryPoints | list[importlib.metadata.EntryPoint]) -> dict[str, Entry]:
    """Decide which entry point a name belongs to: a built-in one wins (with a warning), two plugins spoil it."""
    entries: dict[str, Entry] = {}
    described = [(point, point.dist.name if point.dist is not None else "?") for point in points]
    for point, name in sorted(described, key=lambda pair: pair[1] != DISTRIBUTION):
        version = f" {point.dist.version}" if point.dist is not None else ""
        source: Source = "built-in" if name == DISTRIBUTION else "plugin"
        entry = Entry(point.name, EnvSpec(point.value), source, name + version)
        holder = entries.get(point.name)
        if not _NAME.fullmatch(point.name):
            entry.refusal = f"its name, given by {entry.distribution}, is not of the form Name-vN"
        if holder is None:
            entries[point.name] = entry
        elif holder.source == "built-in":
            warnings.warn(
                f"{entry.distribution} declares {point.name!r}, which is agentkit's own; it is ignored", stacklevel=2
            )
        else:
            both = f"{holder.distribution} ({holder.target}) and {entry.distribution} ({entry.target})"
            holder.refusal = f"it is claimed by both {both}; uninstall one of them"
    return dict(sorted(entries.items()))


def list_envs() -> list[Entry]:
    """Every known name, sorted; imports no environment."""
    return sorted({**installed(), **_explicit}.values(), key=lambda entry: entry.id)


def entry(id: str) -> Entry:
    """The entry of a name.

    Raises:
        RegistryError: nobody knows the name; the message says what is near it.
    """
    found = _explicit.get(id) or installed().get(id)
    if found is not None:
        return found
    names = [known.id for known in list_envs()]
    lowered = {name.lower(): name for name in names} | {name.lower().rsplit("-v", 1)[0]: name for name in names}
    near = list(dict.fromkeys(lowered[n] for n in difflib.get_close_matches(id.lower(), lowered, n=3, cutoff=0.5)))
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names) or 'none'}"
    raise RegistryError(f"there is no environment {id!r}; {hint} (`agentkit env list` shows all)")


def env_class(id: str) -> type[Any]:
    """The class behind a name, imported now; a ``TextEnv`` or an ``AsyncTextEnv``.

    Raises:
        RegistryError: the name is unknown, or what it names does not load.
    """
    return entry(id).load().entry_point  # pyright: ignore[reportReturnType]


def make(
    id: str,
    *,
    sandbox: str | SandboxSpec | Backend | None = None,
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Make an environment, without any wrapper.

    Args:
        id: a registered name.
        sandbox: run it inside a sandbox: ``"docker"``, ``"local"``, the name of another back end, a back end that is
            started, or a ``SandboxSpec`` (for docker). Its code is then not imported here. None: in this process. Some
            (CodeContest, SWEBench) hold hidden tests: they stay here, and what they run goes into such sandboxes.
        sandbox_spec: fields of the sandbox's specification, instead of the defaults.
        kwargs: arguments of the environment; plain data if it runs in a sandbox.

    Raises:
        RegistryError: the name is unknown, what it names does not load, or it takes no such argument.
        ConfigError, SandboxError, EnvError: there is no such sandbox, or the environment cannot be made in it.
    """
    if sandbox is None and sandbox_spec is not None:
        raise ConfigError("sandbox_spec describes a sandbox and there is none: give sandbox='docker', say")
    here = arguments_here(id, kwargs, sandbox, sandbox_spec)
    if here is None:
        from agentkit.envs.sandboxed import SandboxedTextEnv

        return SandboxedTextEnv(id, kwargs, sandbox=sandbox, sandbox_spec=sandbox_spec)
    spec = entry(id).load()
    arguments = {**spec.kwargs, **here}
    check_arguments(id, spec.entry_point, arguments)
    return spec.entry_point(**arguments)  # pyright: ignore[reportCallIssue]


def arguments_here(
    id: str,
    kwargs: Mapping[str, Any],
    sandbox: str | SandboxSpec | Backend | None,
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The arguments with which an environment is made in this process; None if it is put into ``sandbox`` as a whole.

    One that makes sandboxes itself stays here, and is told to make them in ``sandbox``. A plugin's code is not imported
    to find out: it is refused inside.

    Raises:
        ConfigError: such an environment is told two back ends, or given a specification, which it writes itself.
    """
    if sandbox is None:
        return dict(kwargs)
    known = _explicit.get(id) or installed().get(id)
    if known is None or (known.source != "built-in" and isinstance(known.spec.entry_point, str)):
        return None
    spec = known.load()
    cls: Any = spec.entry_point
    name = cls.own_sandboxes(**{**spec.kwargs, **kwargs})
    if name is None:
        return None
    if sandbox_spec or not isinstance(sandbox, str):
        raise ConfigError(
            f"{id} makes its sandboxes itself, to its own specification: give sandbox the name of a back end, such as "
            "'docker', and no sandbox_spec"
        )
    if kwargs.get(name, sandbox) != sandbox:
        raise ConfigError(
            f"{id} makes sandboxes itself, and sandbox={sandbox!r} and {name}={kwargs[name]!r} contradict"
        )
    return {**kwargs, name: sandbox}


def check_arguments(id: str, factory: Any, arguments: dict[str, Any]) -> None:
    """Raise ``RegistryError`` if ``factory`` takes no argument of one of these names."""
    parameters = inspect.signature(factory).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in arguments:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(parameters) or 'none'}"
            raise RegistryError(f"environment {id!r} takes no argument {name!r}; {hint}")


def _resolve(spec: EnvSpec) -> EnvSpec:
    """Import until there is a class: strings are imported, functions are called for their spec."""
    from agentkit.envs.base import AsyncTextEnv, TextEnv

    kwargs = dict(spec.kwargs)
    point: Any = spec.entry_point
    for _ in range(3):  # a name, a function behind it, and the name that its spec may hold
        if isinstance(point, str):
            module, _, attribute = point.partition(":")
            if not attribute:
                raise RegistryError(f"entry point {point!r} names no class; write package.module:Class")
            point = importlib.import_module(module)
            for part in attribute.split("."):
                point = getattr(point, part)
        if inspect.isclass(point):
            if not issubclass(point, TextEnv | AsyncTextEnv):
                raise RegistryError(f"{point.__qualname__} is neither a TextEnv nor an AsyncTextEnv")
            return EnvSpec(point, kwargs)
        inner = point()
        if not isinstance(inner, EnvSpec):
            raise RegistryError(f"{point.__qualname__}() returned {type(inner).__name__}, not an agentkit.EnvSpec")
        kwargs = {**inner.kwargs, **kwargs}
        point = inner.entry_point
    raise RegistryError("specs are nested too deeply")
