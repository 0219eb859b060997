"""The registry of environments.

Invariant: precedence is explicit ``register()``, then built-in, then third-party entry point, then the prefixes of
other libraries. Listing names runs no code of environments: only ``env_class``, ``make`` and ``Entry.load`` import one,
and an environment that does not load affects no other.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentkit import entry_points, prefixes
from agentkit.errors import ConfigError, RegistryError

if TYPE_CHECKING:  # sandboxes are reached only when one is asked for
    from agentkit.envs.isolation.redundancy import Redundancy
    from agentkit.sandboxes.backend import Backend
    from agentkit.sandboxes.spec import SandboxSpec

GROUP = "agentkit.envs"
"""The entry-point group: ``Name-vN = package.module:Class``, or a function that returns an ``EnvSpec``."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*-v\d+")

Source = Literal["explicit", "built-in", "plugin"]
EntryPoint = str | Callable[..., Any]
"""``"package.module:Class"``, or the class itself."""


@dataclass(frozen=True)
class EnvSpec:
    """Definition of an environment: its class and preset arguments.

    Attributes:
        entry_point: ``"package.module:Class"``, or the class.
        kwargs: arguments of the class; arguments of ``make`` override them.
    """

    entry_point: EntryPoint
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Entry:
    """One name of the registry."""

    id: str
    spec: EnvSpec
    source: Source
    distribution: str | None = None
    """Name and version of its distribution; None for explicit registrations."""
    refusal: str | None = None
    """Why the name cannot be used: it is malformed, or two distributions claim it."""
    error: str | None = None
    """Error of the last attempt to load it."""

    @property
    def target(self) -> str:
        """The entry point as text."""
        point = self.spec.entry_point
        return point if isinstance(point, str) else f"{point.__module__}:{point.__qualname__}"

    def diagnose(self) -> str | None:
        """Return why it cannot be made, without importing it; None if no problem is known."""
        point = self.spec.entry_point
        return self.refusal or self.error or (entry_points.diagnose(point) if isinstance(point, str) else None)

    def load(self) -> EnvSpec:
        """Import the environment, and return a spec whose entry point is the class.

        Raises:
            RegistryError: it cannot be imported, or is not an environment. ``error`` keeps the reason.
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
    """Register an environment in this process.

    Args:
        id: its name, of the form ``Name-vN``.
        entry_point: ``"package.module:Class"`` (imported on first use) or the class itself.
        kwargs: preset arguments of the environment; arguments of ``make`` override them.

    Raises:
        RegistryError: the name is malformed, or already registered with another definition.
    """
    if not isinstance(id, str) or not _NAME.fullmatch(id):
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
    """Return the environments declared by installed distributions. Reads them once, and imports no code of theirs."""
    global _installed
    with _lock:
        if _installed is None:
            _installed = collect(importlib.metadata.entry_points(group=GROUP))
        return _installed


def collect(points: Iterable[importlib.metadata.EntryPoint]) -> dict[str, Entry]:
    """Resolve conflicts of names: built-in ones win with a warning; a name claimed by two plugins is refused."""
    entries: dict[str, Entry] = {}
    for name, claim in entry_points.claims(points).items():
        source: Source = "built-in" if claim.built_in else "plugin"
        entry = entries[name] = Entry(name, EnvSpec(claim.target), source, claim.distribution, claim.refusal)
        if not _NAME.fullmatch(name) and entry.refusal is None:
            entry.refusal = f"its name, given by {claim.distribution}, is not of the form Name-vN"
    return entries


def list_envs() -> list[Entry]:
    """Return all registered environments, sorted by name; imports none of them."""
    return sorted({**installed(), **_explicit}.values(), key=lambda entry: entry.id)


def entry(id: str) -> Entry:
    """Return the entry of a name.

    Raises:
        RegistryError: the name is unknown; the message suggests similar ones.
    """
    _check_name(id)
    found = _explicit.get(id) or installed().get(id) or _of_prefix(id)
    if found is not None:
        return found
    hint = entry_points.nearest(id, [known.id for known in list_envs()])
    raise RegistryError(f"there is no environment {id!r}; {hint} (`agentkit env list` shows all)")


def _of_prefix(id: str) -> Entry | None:
    """Return the entry of a name that starts with a prefix of another library or server, otherwise None."""
    found = prefixes.split(id)
    if found is None:
        return None
    prefix, name = found
    return Entry(id, EnvSpec(prefix.entry_point, {prefix.argument: name}), "built-in", entry_points.DISTRIBUTION)


def env_class(id: str) -> type[Any]:
    """Import and return the class of an environment, a subclass of ``TextEnv`` or ``AsyncTextEnv``.

    Args:
        id: a registered name.

    Raises:
        RegistryError: the name is unknown, or the environment does not load.
    """
    return entry(id).load().entry_point  # pyright: ignore[reportReturnType]


def make(
    id: str,
    *,
    sandbox: str | SandboxSpec | Backend | None = None,
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
    redundancy: Redundancy | None = None,
    **kwargs: Any,
) -> Any:
    """Make an environment, without wrappers.

    Args:
        id: a registered name, such as ``"FrozenLake-v1"``, one of another library, such as
            ``"reasoning_gym:leg_counting"`` or ``"gymnasium:Taxi-v4"``, ``"harbor:FOLDER"`` for task directories of
            Harbor, or ``"openenv:URL"`` for the environment of an OpenEnv server.
        sandbox: where to run the environment. None: in this process. ``"docker"``, ``"local"``, ``"remote"``,
            ``"remote:URL,URL"`` (on these sandbox servers), the name of another back end, a started back end, or a
            ``SandboxSpec`` (for docker): in a sandbox; its code is then not imported here. Environments with hidden
            tests (CodeContest, SWEBench) stay in this process, and run the policy's programs in such sandboxes.
        sandbox_spec: fields of the sandbox's specification that differ from the defaults.
        redundancy: how the sandbox survives failures. None: an episode whose sandbox fails is replayed in a new one if
            the environment is deterministic.
        kwargs: arguments of the environment; plain data if it runs in a sandbox.

    Returns:
        A ``TextEnv``, or an ``AsyncTextEnv`` if the environment is asynchronous.

    Raises:
        RegistryError: the name is unknown, the environment does not load, or it has no such argument.
        ConfigError: the arguments contradict each other, or an option of another library is wrong.
        MissingExtra: the library of a prefix is not installed.
        SandboxError: the sandbox cannot be started.
        EnvError: the environment cannot be made in the sandbox.
    """
    if sandbox is None and sandbox_spec is not None:
        raise ConfigError("sandbox_spec needs a sandbox; add one, such as sandbox='docker'")
    here = arguments_here(id, kwargs, sandbox, sandbox_spec)
    if here is None:
        from agentkit.envs.isolation.env import SandboxedTextEnv

        return SandboxedTextEnv(id, kwargs, sandbox=sandbox, sandbox_spec=sandbox_spec, redundancy=redundancy)
    spec = entry(id).load()
    arguments = {**spec.kwargs, **here}
    check_arguments(id, spec.entry_point, arguments)
    if redundancy is not None:
        arguments = with_redundancy(spec.entry_point, arguments, redundancy)
        if "redundancy" not in arguments:
            raise ConfigError(
                f"redundancy needs a sandbox, and {id} runs without one; add one, such as sandbox='docker'"
            )
    return spec.entry_point(**arguments)  # pyright: ignore[reportCallIssue]


def arguments_here(
    id: str,
    kwargs: Mapping[str, Any],
    sandbox: str | SandboxSpec | Backend | None,
    sandbox_spec: SandboxSpec | Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Return the arguments for making an environment in this process; None if it runs inside ``sandbox``.

    An environment that makes sandboxes itself stays in this process and makes them with the back end ``sandbox``. The
    code of plugins is not imported to find out; they always run inside.

    Raises:
        ConfigError: such an environment gets two back ends, or a specification, which it defines itself.
    """
    if sandbox is None:
        return dict(kwargs)
    _check_name(id)
    found = prefixes.split(id)
    if found is not None and found[0].served:
        raise ConfigError(f"{id} runs in its server, not in a sandbox of this process: leave the sandbox out")
    known = _explicit.get(id) or installed().get(id) or _of_prefix(id)
    if known is None or (known.source != "built-in" and isinstance(known.spec.entry_point, str)):
        return None
    spec = known.load()
    cls: Any = spec.entry_point
    name = cls.own_sandboxes(**{**spec.kwargs, **kwargs})
    if name is None:
        return None
    if sandbox_spec or not isinstance(sandbox, str):
        raise ConfigError(
            f"{id} makes its sandboxes itself, with its own specification; set sandbox to the name of a back end, such "
            "as 'docker', and omit sandbox_spec"
        )
    if kwargs.get(name, sandbox) != sandbox:
        raise ConfigError(
            f"{id} makes sandboxes itself, and sandbox={sandbox!r} and {name}={kwargs[name]!r} contradict"
        )
    return {**kwargs, name: sandbox}


def with_redundancy(cls: Any, arguments: dict[str, Any], redundancy: Redundancy) -> dict[str, Any]:
    """Return the arguments, with ``redundancy`` if the environment makes sandboxes itself and has such an argument.

    Raises:
        ConfigError: such an environment would have to be replayed, or its ``redundancy`` is no ``Redundancy``.
    """
    if cls.own_sandboxes(**arguments) is None:
        return arguments
    from agentkit.envs.isolation.redundancy import check_redundancy

    check_redundancy(arguments.get("redundancy", redundancy))
    if redundancy.recovery == "replay" or redundancy.standbys:
        raise ConfigError(
            f"{cls.__name__} makes its sandboxes itself, and its episodes cannot be replayed: set recovery to retry or "
            "void, and standbys to 0"
        )
    if "redundancy" not in inspect.signature(cls).parameters:
        return arguments
    return {"redundancy": redundancy, **arguments}


def check_arguments(id: str, factory: Any, arguments: dict[str, Any]) -> None:
    """Check the names of the arguments, and for a class with ``**kwargs`` those that ``options_for`` checks.

    Raises:
        RegistryError: ``factory`` has no parameter with one of these names.
        ConfigError: ``options_for`` refuses an argument.
    """
    parameters = inspect.signature(factory).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        factory.options_for(**arguments)
        return
    for name in arguments:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(parameters) or 'none'}"
            raise RegistryError(f"environment {id!r} takes no argument {name!r}; {hint}")


def _check_name(id: object) -> None:
    if not isinstance(id, str):
        raise RegistryError(f"the name of an environment must be text, such as 'FrozenLake-v1', not {id!r:.200}")


def _resolve(spec: EnvSpec) -> EnvSpec:
    """Resolve an entry point to a class: import strings, and call functions that return a spec."""
    from agentkit.envs.base import AsyncTextEnv, TextEnv

    kwargs = dict(spec.kwargs)
    point: Any = spec.entry_point
    for _ in range(3):  # a name, a function behind it, and the name that its spec may hold
        if isinstance(point, str):
            if not point.partition(":")[2]:
                raise RegistryError(f"entry point {point!r} has no class; write package.module:Class")
            point = entry_points.load(point)
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
