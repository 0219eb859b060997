"""Values that a specification accepts and refuses."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentkit.sandboxes import Mount, Resources, SandboxSpec


def test_lists_are_accepted_for_tuples() -> None:
    spec = SandboxSpec(mounts=[Mount(source="/a", target="/b")], cap_add=["NET_RAW"])  # pyright: ignore[reportArgumentType]
    assert (spec.mounts, spec.cap_add) == ((Mount(source="/a", target="/b"),), ("NET_RAW",))
    with pytest.raises(ValidationError, match="cap_add"):
        SandboxSpec(cap_add="NET_RAW")  # pyright: ignore[reportArgumentType]


def test_a_string_command_is_run_by_the_shell() -> None:
    spec = SandboxSpec(setup="touch a && touch b", ready=["test", "-e", "a"])  # pyright: ignore[reportArgumentType]
    assert (spec.setup, spec.ready) == (("/bin/sh", "-c", "touch a && touch b"), ("test", "-e", "a"))
    assert SandboxSpec.model_validate_json(spec.model_dump_json()) == spec


def test_another_type_than_a_specification_is_an_error() -> None:
    with pytest.raises(TypeError, match="not Resources; give fields by name"):
        SandboxSpec.of(Resources(cpus=2))  # pyright: ignore[reportArgumentType]
