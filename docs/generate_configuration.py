"""Write ``configuration.md`` from the models of the configuration.

``python docs/generate_configuration.py`` rewrites the page; a test checks that it is up to date.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentkit.config import RunConfig
from agentkit.config_io import section_model
from agentkit.plugins import Kind

PAGE = Path(__file__).parent / "configuration.md"
INTRODUCTION = """\
# Configuration

One YAML file describes a run. Every setting can also be given on the command line as `section.key=value`; the value is
read as YAML. The smallest file names an environment:

```yaml
env: {id: FrozenLake-v1}
```

A section that is `null` by default (`model.lora`, `imitation`, `critic`) is enabled by naming it: `imitation: {}`
enables it with its defaults. Numbers follow YAML 1.2: `3e-5` is a number, and `no` and `off` are texts.

Misspelt keys, wrong types and contradictory settings are errors before anything starts. `agentkit run CONFIG --dry-run`
prints the complete configuration, and every run stores it as `config.yaml`.

This page is generated from the models in `agentkit/config.py`.
"""
SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def page() -> str:
    """Return the page."""
    return "\n".join([INTRODUCTION, *_section(RunConfig, "", _sentence(RunConfig.__doc__))])


def _section(model: type[BaseModel], key: str, meaning: str) -> list[str]:
    """Return a heading, a table of a model's fields, and the sections below it."""
    lines = [f"## `{key}`" if key else "## Top level", "", meaning, ""]
    sections: list[str] = []
    rows: list[str] = []
    for name, field in model.model_fields.items():
        dotted = f"{key}.{name}" if key else name
        below = section_model(field.annotation)
        if below is None:
            rows.append(f"| `{dotted}` | {_type(field)} | {_default(field)} | {_sentence(field.description)} |")
        else:
            off = " `null` by default." if field.default is None else ""
            sections += _section(below, dotted, _sentence(field.description or below.__doc__) + off)
    lines += ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""] if rows else []
    return lines + sections


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _type(field: FieldInfo) -> str:
    return _bounded(field.annotation, field.metadata)


def _names(constraints: Sequence[Any]) -> str:
    """Return the built-in names of a setting that may name a plug-in; empty for any other setting."""
    kinds = (getattr(one.func, "__self__", None) for one in constraints if isinstance(one, AfterValidator))
    for kind in kinds:
        if isinstance(kind, Kind):
            return " or ".join([*(f"`{name}`" for name in kind.built_in), "[plug-in](plugins.md)"])
    return ""


def _bounded(annotation: Any, constraints: Sequence[Any]) -> str:
    """Return the name of a type, with the bounds among ``constraints``."""
    if names := _names(constraints):
        return names
    bounds = []
    for constraint in constraints:
        if isinstance(constraint, tuple(SIGNS)):
            (bound,) = dataclasses.astuple(constraint)
            bounds.append(f"{SIGNS[type(constraint)]} {bound}")
    return ", ".join([_type_name(annotation), " and ".join(bounds)] if bounds else [_type_name(annotation)])


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        metadata = [one for field in arguments[1:] for one in getattr(field, "metadata", [field])]
        return _bounded(arguments[0], metadata)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}" if arguments[-1] is ... else f"list of {len(arguments)} numbers"
    if origin is dict:
        return "mapping"
    names = {
        type(None): "`null`",
        str: "text",
        int: "integer",
        float: "number",
        bool: "`true` or `false`",
        Path: "path",
    }
    return names[annotation]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
