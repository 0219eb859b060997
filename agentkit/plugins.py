"""Parts of the trainer that other packages can provide: advantages, losses, rewards, filters, parsers and summaries.

A configuration names such a part in one of three ways: a built-in name, the name of an entry point of an installed
distribution (group ``agentkit.advantages``, ``agentkit.losses``, ``agentkit.rewards``, ``agentkit.filters``,
``agentkit.parsers`` or ``agentkit.summaries``), or ``package.module:function``. A plug-in is a function (or a class);
``docs/plugins.md`` describes the arguments and the result of each kind.

Invariant: a name is checked without running code of a plug-in; ``Kind.load`` imports the one that is named. An
exception in a plug-in always arrives as a ``PluginError`` that names it. A plug-in is trusted code: it runs in the
controller and in the learner with all their rights.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from agentkit import entry_points
from agentkit.errors import ConfigError, PluginError, RegistryError

Signal = Literal["returns", "turns", "rewards", "nonzero_return", "positive_return", "always"]
"""When a group carries signal: its members' returns differ; that, or the returns of two turns in the same state differ;
a reward is not 0; a return is not 0; a return is above 0; always, because the advantage compares a group with the rest
of the batch."""
Logprobs = Literal["policy", "behaviour", "proximal", "reference"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]

_DECLARED = "__agentkit_plugin__"
"""Attribute of a decorated function: what it declares."""


@dataclass(frozen=True)
class AdvantageTraits:
    """What an advantage estimator declares."""

    needs_critic: bool = False
    """It reads ``values``, so a run needs a critic section."""
    group_baseline: bool = False
    """It compares the members of a group with each other, so a group of one learns nothing."""
    signal: Signal = "always"


@dataclass(frozen=True)
class LossTraits:
    """What a policy loss declares."""

    needs: frozenset[Logprobs]
    """Log-probabilities that it reads."""
    aggregation: Aggregation | None = None
    """Aggregation that it is defined with; None: any, by default the mean over tokens."""
    options: frozenset[str] | None = None
    """Settings of ``algorithm`` that it uses, of those that not every loss uses; None: it may use any."""
    advantage: str | None = None
    """Built-in advantage that it is defined with, and brings unless one is set."""
    whole: bool = True
    """Whether the loss of a token depends on other turns of its episode, which must then be in one forward pass."""


Function = TypeVar("Function", bound=Callable[..., Any])


def advantage(*, needs_critic: bool = False, group_baseline: bool = False) -> Callable[[Function], Function]:
    """Declare what an advantage estimator needs. A function without this decorator needs nothing.

    Args:
        needs_critic: the estimator reads ``values``; a run without a critic is refused.
        group_baseline: all advantages of a group are 0 if its members have the same return; groups of one are
            refused, and ``rollout.dynamic_sampling`` replaces groups of equal returns.
    """
    signal: Signal = "returns" if group_baseline else "always"
    return _declaring(AdvantageTraits(needs_critic, group_baseline, signal))


def loss(
    *, needs: Collection[Logprobs] = ("behaviour",), aggregation: Aggregation | None = None
) -> Callable[[Function], Function]:
    """Declare what a policy loss needs.

    Args:
        needs: log-probabilities that it reads: ``behaviour`` (recorded by the engine), ``proximal`` (the policy at the
            start of the batch), ``reference`` (the policy when reinforcement learning began; only with
            ``algorithm.kl``). Those of the policy are always there.
        aggregation: the aggregation that the loss is defined with; another ``algorithm.aggregation`` is refused. None:
            any.
    """
    known = get_args(Logprobs)
    if unknown := set(needs).difference(known):
        raise ValueError(f"needs={sorted(needs)}: {sorted(unknown)[0]!r} is none of {', '.join(known)}")
    if aggregation not in (None, *get_args(Aggregation)):
        raise ValueError(f"aggregation={aggregation!r}: it is none of {', '.join(get_args(Aggregation))}")
    return _declaring(LossTraits(frozenset({*needs, "policy"}), aggregation))


def _declaring(traits: object) -> Callable[[Function], Function]:
    def declare(function: Function) -> Function:
        setattr(function, _DECLARED, traits)
        return function

    return declare


@dataclass(frozen=True)
class Kind:
    """One kind of part, and the setting that names it."""

    name: str
    group: str
    """Group of entry points."""
    key: str
    """Setting that names the part."""
    options_key: str
    """Setting with its options."""
    arguments: tuple[str, ...]
    """Positional arguments of a plug-in."""
    built_in: Mapping[str, Any] = field(default_factory=dict)
    """Built-in names, with what they declare."""
    default: Any = None
    """What a plug-in without a decorator declares."""

    def __hash__(self) -> int:
        return hash(self.group)

    def claims(self) -> dict[str, entry_points.Claim]:
        """Return the plug-ins that installed distributions declare; imports none of them."""
        return _claims(self)

    def check_name(self, name: str) -> str:
        """Return ``name``; raise ``ValueError`` if nothing has it. Imports nothing."""
        if name in self.built_in or name in self.claims():
            return name
        if ":" in name:
            module, _, attribute = name.partition(":")
            if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
                return name
            raise ValueError("a plug-in is named as package.module:function")
        hint = entry_points.nearest(name, [*self.built_in, *self.claims()])
        raise ValueError(f"there is no {self.name} of this name; {hint}, or name a function as package.module:function")

    def load(self, name: str) -> Plugin:
        """Import the plug-in ``name``.

        Raises:
            RegistryError: it cannot be imported, is claimed twice, or is not a function of this kind.
        """
        return _load(self, name)

    def traits(self, name: str) -> Any:
        """Return what a built-in name or a plug-in declares; imports the plug-in."""
        return self.built_in[name] if name in self.built_in else self.load(name).traits


@functools.cache
def _claims(kind: Kind) -> dict[str, entry_points.Claim]:
    return entry_points.claims(importlib.metadata.entry_points(group=kind.group), kind.built_in)


@functools.cache
def _load(kind: Kind, name: str) -> Plugin:
    claim = kind.claims().get(name)
    target, origin = (claim.target, f" of {claim.distribution}") if claim else (name, "")
    title = f"{kind.name} {name!r}" + (f" ({target}{origin})" if claim else "")
    if claim is not None and claim.refusal is not None:
        raise RegistryError(f"{title} cannot be used: {claim.refusal}")
    try:
        function = entry_points.load(target)
        if not callable(function):
            raise TypeError(f"it is {type(function).__name__!r}, not a function")
        plugin = Plugin(kind, title, function, getattr(function, _DECLARED, kind.default))
        plugin.check_signature()
    except (Exception, SystemExit) as error:
        raise RegistryError(f"{title} does not load: {type(error).__name__}: {error}") from error
    return plugin


@dataclass(frozen=True)
class Plugin:
    """A loaded plug-in."""

    kind: Kind
    title: str
    """Kind, name and origin, for messages."""
    function: Callable[..., Any]
    traits: Any

    def check_signature(self) -> None:
        """Raise ``TypeError`` unless it is called with the kind's arguments and declares its options."""
        if inspect.iscoroutinefunction(self.function):
            raise TypeError("it is asynchronous; write a plain function")
        if self.traits is not None and type(self.traits) is not type(self.kind.default):
            raise TypeError(f"its decorator is not the one for {self.kind.group}")
        signature = inspect.signature(self.function)
        options = self._keyword_only(signature)
        try:
            signature.bind(*self.kind.arguments, **dict.fromkeys(options))
        except TypeError as error:
            expected = ", ".join(self.kind.arguments)
            raise TypeError(
                f"it must accept ({expected}), and its options as keyword-only arguments: {error}"
            ) from None
        hints = self._hints()
        for name in options:
            if name not in hints:
                raise TypeError(f"its option {name!r} has no annotation, so it cannot be validated")

    def _keyword_only(self, signature: inspect.Signature) -> list[str]:
        return [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]

    def _hints(self) -> dict[str, Any]:
        function = self.function
        return get_type_hints(function.__init__ if inspect.isclass(function) else function)

    @functools.cached_property
    def _whole(self) -> Any:
        """The model or dataclass of an argument ``options``; None if each option is an argument of its own."""
        if self._keyword_only(inspect.signature(self.function)) != ["options"]:
            return None
        from pydantic import BaseModel

        annotation = self._hints()["options"]
        is_model = inspect.isclass(annotation) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))
        return annotation if is_model else None

    @functools.cached_property
    def options(self) -> Mapping[str, str]:
        """Names of its options, each with its type and default as text."""
        if self._whole is None:
            signature = inspect.signature(self.function)
            found = {name: signature.parameters[name] for name in self._keyword_only(signature)}
            return {name: str(p).partition(": ")[2] for name, p in found.items()}
        if is_dataclass(self._whole):
            return {one.name: str(one.type) for one in dataclass_fields(self._whole) if one.init}
        return {name: str(one) for name, one in self._whole.model_fields.items()}

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Validate those of ``options`` that this plug-in has, and return the keyword arguments of its function.

        Raises:
            ConfigError: an option is wrong or missing. Options that it does not have are ignored; see ``unknown``.
        """
        from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

        mine = {name: value for name, value in options.items() if name in self.options}
        if self._whole is None:
            signature, hints = inspect.signature(self.function), self._hints()
            defaults = {name: signature.parameters[name].default for name in self.options}
            fields: dict[str, Any] = {
                name: (hints[name], ... if default is inspect.Parameter.empty else default)
                for name, default in defaults.items()
            }
            settings = ConfigDict(strict=True, arbitrary_types_allowed=True, protected_namespaces=())
            adapter = TypeAdapter(create_model("Options", __config__=settings, **fields))
        else:
            adapter = TypeAdapter(self._whole)
        try:
            # In JSON mode, strict models accept a list for a tuple.
            valid = adapter.validate_json(json.dumps(mine))
        except ValidationError as error:
            lines = [self._problem(details) for details in error.errors(include_url=False)]
            raise ConfigError("\nerror: ".join(lines)) from None
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.kind.options_key}: {error}; use numbers, texts, lists and maps") from None
        return {"options": valid} if self._whole is not None else {name: getattr(valid, name) for name in self.options}

    def _problem(self, details: Any) -> str:
        key = ".".join([self.kind.options_key, *(str(part) for part in details["loc"])])
        message = details["msg"].removeprefix("Value error, ")
        got = "" if details["type"] == "missing" else f", not {json.dumps(details.get('input'), default=str)}"
        return f"{key}: {message[:1].lower() + message[1:]}{got} (option of {self.title})"

    def bind(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function with its options; it raises ``PluginError`` for any exception in the plug-in.

        Raises:
            ConfigError: an option is wrong or missing.
        """
        return self.guard(functools.partial(self.function, **self.arguments(options)))

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, a part of this plug-in, so that any exception in it becomes a ``PluginError``."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                raise self.error(f"raised {type(error).__name__}: {error}{_place(error)}") from error

        return call

    def error(self, problem: str) -> PluginError:
        """Return the error for a plug-in that ``problem`` (a verb and more)."""
        return PluginError(f"{self.title} {problem}")


def _place(error: BaseException) -> str:
    """Return where an exception was raised; empty if its traceback has no frame below ``guard``."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


ADVANTAGE = Kind(
    "advantage",
    "agentkit.advantages",
    "algorithm.advantage",
    "algorithm.options",
    ("batch", "values", "config"),
    {
        "reinforce": AdvantageTraits(signal="rewards"),
        "chunk_returns": AdvantageTraits(signal="nonzero_return"),
        "raft": AdvantageTraits(signal="positive_return"),
        "batch_mean": AdvantageTraits(),
        "grpo": AdvantageTraits(group_baseline=True, signal="returns"),
        "gigpo": AdvantageTraits(group_baseline=True, signal="turns"),
        "dr_grpo": AdvantageTraits(group_baseline=True, signal="returns"),
        "rloo": AdvantageTraits(group_baseline=True, signal="returns"),
        "reinforce_pp": AdvantageTraits(),
        "reinforce_pp_baseline": AdvantageTraits(group_baseline=True, signal="returns"),
        "gae": AdvantageTraits(needs_critic=True),
        "bilevel_gae": AdvantageTraits(needs_critic=True),
    },
    AdvantageTraits(),
)
_ON_POLICY: frozenset[Logprobs] = frozenset({"policy"})
_BEHAVIOUR: frozenset[Logprobs] = frozenset({"policy", "behaviour"})
_PROXIMAL: frozenset[Logprobs] = frozenset({"policy", "proximal"})
_ALL: frozenset[Logprobs] = frozenset({"policy", "behaviour", "proximal"})
_NONE: frozenset[str] = frozenset()
_CLIPS = frozenset({"clip_low", "clip_high"})
_SURROGATE = _CLIPS | {"dual_clip"}
_CAPPED = _SURROGATE | {"is_cap"}
LOSS = Kind(
    "loss",
    "agentkit.losses",
    "algorithm.loss",
    "algorithm.options",
    ("inputs", "config"),
    {
        "pg": LossTraits(_ON_POLICY, options=_NONE, whole=False),
        "ppo": LossTraits(_BEHAVIOUR, options=_SURROGATE, whole=False),
        "cispo": LossTraits(_BEHAVIOUR, options=_CLIPS, whole=False),
        "gspo": LossTraits(_PROXIMAL, "sequence_mean", _CLIPS),
        "sapo": LossTraits(_BEHAVIOUR, "sequence_mean", _NONE, whole=False),
        "decoupled_ppo": LossTraits(_ALL, options=_CAPPED, whole=False),
        "tis": LossTraits(_ALL, options=_CAPPED, whole=False),
        "mis": LossTraits(_ALL, options=_CAPPED | {"is_floor"}, whole=False),
        "seq_tis": LossTraits(_ALL, options=_CAPPED),
        "seq_mis": LossTraits(_ALL, options=_CAPPED | {"is_floor"}),
        "dis": LossTraits(_BEHAVIOUR, options=_CLIPS, whole=False),
        "topr": LossTraits(_BEHAVIOUR, options=frozenset({"topr_ratio"})),
        "chunk_topr": LossTraits(_ALL, options=frozenset({"is_cap"}), advantage="chunk_returns", whole=False),
        "raft": LossTraits(_ON_POLICY, options=_NONE, advantage="raft", whole=False),
        "raft_pp": LossTraits(_BEHAVIOUR, options=frozenset({"clip_high"}), advantage="raft", whole=False),
        "flash_reinforce": LossTraits(
            _BEHAVIOUR, "sequence_mean", options=frozenset({"kl_gate"}), advantage="batch_mean"
        ),
        "kimi": LossTraits(_BEHAVIOUR, options=_NONE, advantage="dr_grpo", whole=False),
    },
    LossTraits(_BEHAVIOUR),
)
REWARD = Kind("reward", "agentkit.rewards", "rollout.reward", "rollout.reward_options", ("episode",))
FILTER = Kind("filter", "agentkit.filters", "rollout.filter", "rollout.filter_options", ("group",))
PARSER = Kind(
    "parser",
    "agentkit.parsers",
    "env.parser",
    "env.parser_options",
    ("actions_per_turn",),
    dict.fromkeys(("tagged", "plain", "number")),
)
SUMMARY = Kind(
    "summary",
    "agentkit.summaries",
    "model.summary",
    "model.summary_options",
    ("turns",),
    dict.fromkeys(("actions",)),
)
KINDS = (ADVANTAGE, LOSS, REWARD, FILTER, PARSER, SUMMARY)
