"""Read and write run configurations: YAML files, dicts and dotted overrides.

Invariant: ``load_config`` returns a complete ``RunConfig``; from the output of ``dump_config`` it returns an equal one.
Invalid input raises one ``ConfigError`` that lists all problems, each with its place (file and line, or the
override), its dotted key, the problem and, for a misspelt key, the nearest valid ones.

Scalars follow the core schema of YAML 1.2, not PyYAML's YAML 1.1: ``3e-5`` is a number, ``no`` and
``off`` are strings, and a key that appears twice is an error.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from agentkit.config import RunConfig
from agentkit.errors import ConfigError

_RESOLVERS: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+0123456789.")),
    ("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", list("-+.")),
)


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = node.value.lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # In other styles, PyYAML writes Unicode line separators unescaped and reads them back as line feeds.
    style = '"' if any(separator in text for separator in "\r\n\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(tuple, _Dumper.represent_list)
_Dumper.add_multi_representer(Path, lambda dumper, path: _represent_text(dumper, str(path)))

_PLACEMENT = (
    "this setting was removed: engine and learner run in the process of the run; remove the key, and for separate "
    "processes add a section `cluster: {}`, which needs pip install 'agentkit-rl[ray]'"
)
_REMOVED = {"engine.placement": _PLACEMENT, "learner.placement": _PLACEMENT}
"""Keys of earlier versions, and what replaces them."""

Key = tuple[str, ...]
Places = dict[Key, str]
"""Place where each key is set: ``file.yaml:12`` or ``override 'learner.lr=x'``."""


def load_config(config: Path | str | Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated configuration of a run.

    Args:
        config: a YAML file, a dict of the same structure, or a ``RunConfig``.
        overrides: settings that replace those of ``config``, as ``"section.key=value"``, applied in order. The value
            is YAML.

    Returns:
        The complete configuration, with defaults for all settings that are not given.

    Raises:
        ConfigError: lists every problem with its place: file and line, override, or key.
    """
    if isinstance(config, RunConfig):
        return _validate(config.model_dump(), {}, overrides, "RunConfig") if overrides else config
    if isinstance(config, Mapping):
        return _validate(copy.deepcopy(dict(config)), {}, overrides, "configuration")
    if not isinstance(config, str | Path):
        raise ConfigError(f"a configuration is a YAML file, a dict or a RunConfig, not {config!r:.200}")
    path = Path(config)
    if path.is_dir():
        raise ConfigError(f"{path} is neither a configuration file nor a run directory; give a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file; see `examples/` for ones to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a text file ({error}); give a YAML file") from None
    return parse_config(text, overrides, source=str(path))


def parse_config(text: str, overrides: Sequence[str] = (), *, source: str = "configuration") -> RunConfig:
    """Like ``load_config``, from YAML text, which errors call ``source``."""
    return _validate(*_read_yaml(text, source), overrides, source)


def _validate(data: dict[str, Any], places: Places, overrides: Sequence[str], source: str) -> RunConfig:
    if isinstance(overrides, str | Mapping) or not isinstance(overrides, Iterable):
        raise ConfigError(f'overrides={overrides!r} must be a list of settings, such as ["learner.lr=3e-5"]')
    for override in overrides:
        _apply_override(data, places, override)
    try:
        # In JSON mode, strict models accept a list for a tuple and a string for a Path.
        text = json.dumps(data, default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}; use numbers, texts, lists and dicts") from None
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(details, places, source) for details in error.errors(include_url=False)))
    raise ConfigError("\n".join(problems))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BaseModel):
        return value.model_dump()
    raise TypeError(f"{value!r} is not plain data")


def dump_config(config: RunConfig) -> str:
    """Return the complete configuration, including defaults, as YAML for ``load_config``."""
    # Not pydantic's JSON mode, which writes infinity as null.
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def valid_keys(model: type[BaseModel] = RunConfig, prefix: Key = ()) -> Iterator[Key]:
    """Yield all valid keys, sections before their fields."""
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        section = section_model(field.annotation)
        if section is not None:
            yield from valid_keys(section, (*prefix, name))


def section_model(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation such as ``LoraConfig | None``; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        for option in typing.get_args(annotation):
            if (found := section_model(option)) is not None:
                return found
    return None


def _read_yaml(text: str, source: str) -> tuple[dict[str, Any], Places]:
    """Return data and the place of each key. Raises ``ConfigError`` unless it is a mapping with unique string keys."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}:1: the file must contain `key: value` lines, not a list or a value")
        places: Places = {}
        _walk(node, (), source, places)
        return loader.construct_document(node), places
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if mark else source
        raise ConfigError(f"{place}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    finally:
        loader.dispose()


def _walk(node: yaml.Node, key: Key, source: str, places: Places) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _walk(item, key, source, {})
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for name_node, value_node in node.value:
        place = f"{source}:{name_node.start_mark.line + 1}"
        if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != "tag:yaml.org,2002:str":
            dotted = ".".join(key) or "the top level"
            raise ConfigError(f"{place}: a key in {dotted} is not a string; put it in quotes")
        child = (*key, name_node.value)
        if name_node.value in seen:
            raise ConfigError(f"{place}: {'.'.join(child)}: this key appears twice; keep one of them")
        seen.add(name_node.value)
        places[child] = place
        _walk(value_node, child, source, places)


def _apply_override(data: dict[str, Any], places: Places, override: str) -> None:
    if not isinstance(override, str):
        raise ConfigError(f"override {override!r:.200}: an override is text, such as `learner.lr=3e-5`")
    place = f"override '{override}'"
    dotted, equals, value_text = override.partition("=")
    key = tuple(part.strip() for part in dotted.split("."))
    if not equals or not all(key):
        raise ConfigError(f"{place}: an override has the form `section.key=value`, such as `learner.lr=3e-5`")
    try:
        value, _ = _read_yaml_value(value_text, place)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{place}: {dotted}: the value is not valid YAML ({getattr(error, 'problem', None) or error}); "
            "quote it for your shell and for YAML, such as `name='\"a: b\"'`"
        ) from None
    section = data
    for depth, part in enumerate(key[:-1], 1):
        child = section.get(part)
        if child is None:
            child = section[part] = {}
        if not isinstance(child, dict):
            parent = ".".join(key[:depth])
            raise ConfigError(f"{place}: {dotted}: {parent} is the value {child!r}, not a section")
        places.setdefault(key[:depth], place)
        section = child
    section[key[-1]] = value
    for old in [known for known in places if known[: len(key)] == key]:
        del places[old]
    places[key] = place


def _read_yaml_value(text: str, place: str) -> tuple[Any, Places]:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        places: Places = {}
        _walk(node, (), place, places)
        return loader.construct_document(node), places
    finally:
        loader.dispose()


def _problem(details: Mapping[str, Any], places: Places, source: str) -> str:
    """Format an error of pydantic as one line: place, key, problem, remedy."""
    location = [str(part) for part in details["loc"]]
    key, model = _known_part(location)
    if details["type"] == "extra_forbidden":
        key = tuple(location)
        dotted = ".".join(key)
        problem = _REMOVED.get(dotted) or f"no such key{_suggestion(key, model)}"
        return f"{_place(key, places, source)}: {dotted}: {problem}"
    if details["type"] == "missing":
        place = _place(key[:-1], places, source)
        dotted = ".".join(key)
        return f"{place}: {dotted}: this key is required; add it (the smallest file is `env: {{id: FrozenLake-v1}}`)"
    message = details["msg"].removeprefix("Value error, ")
    if not key:
        return f"{source}: {message}"
    message = message[:1].lower() + message[1:]
    return f"{_place(key, places, source)}: {'.'.join(key)}: {message}{_got(details)}"


def _got(details: Mapping[str, Any]) -> str:
    value = details.get("input")
    if isinstance(value, dict):
        return ", not a section with keys"
    return f", not {json.dumps(value, default=str)}"


def _known_part(location: Sequence[str]) -> tuple[Key, type[BaseModel] | None]:
    """Return the key in an error's location (unions add their branch), and the model of its last part."""
    key: list[str] = []
    model: type[BaseModel] | None = RunConfig
    for part in location:
        if model is not None:
            field = model.model_fields.get(part)
            if field is None:
                break
            key.append(part)
            model = section_model(field.annotation)
        elif part.isdigit():
            key.append(part)
        else:
            break
    return tuple(key), model


def _place(key: Key, places: Places, source: str) -> str:
    while key:
        if key in places:
            return places[key]
        key = key[:-1]
    return source


def _suggestion(key: Key, model: type[BaseModel] | None) -> str:
    """Return the nearest valid keys: in the same section, of the same name, or of a similar spelling."""
    wrong = key[-1]
    parent = key[:-1]
    beside = list(model.model_fields) if model is not None else []
    near = [".".join((*parent, name)) for name in difflib.get_close_matches(wrong, beside, n=2, cutoff=0.6)]
    if not near:
        near = [".".join(known) for known in valid_keys() if known[-1] == wrong]
    if not near:
        near = difflib.get_close_matches(".".join(key), [".".join(known) for known in valid_keys()], n=2, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near[:3])}?"
    return f"; {'.'.join(parent) or 'the top level'} has: {', '.join(beside)}"
