"""EnvironmentFactory: what TRL's trainer gets to see of an environment. TRL itself is in test_trl_training.py."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from local_sandboxes import local_sandboxes
from requiring import require

import agentkit
from agentkit.envs.base import TextEnv, expert_actions
from agentkit.envs.invoice import Invoice
from agentkit.errors import ConfigError, EnvFailureBudgetExceeded, RegistryError
from agentkit.integrations.trl import EnvironmentFactory
from agentkit.integrations.trl_tools import tool_method


class Door(TextEnv):
    """Its actions say what it does; counts the environments that are open."""

    instructions = "Open the door.\nReturns: nothing."
    max_turns = 3
    actions_per_turn = 2
    concurrency = "inline"
    deterministic = False
    made: ClassVar[int] = 0
    opened: ClassVar[int] = 0
    broken: ClassVar[int] = 0
    """Resets that fail from now on."""

    def __init__(self) -> None:
        super().__init__()
        Door.made += 1
        Door.opened += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if Door.broken:
            Door.broken -= 1
            raise OSError("jammed")
        return f"door {seed}", {}

    def step(self, action: str) -> Any:
        if action == "break":
            raise OSError("the handle fell off")
        valid = action in ("push", "open")
        return action, 0.5, action == "open", False, {"success": action == "open", "action_valid": valid}

    def close(self) -> None:
        Door.opened -= 1


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    if "Door-v0" not in {entry.id for entry in agentkit.list_envs()}:
        agentkit.register("Door-v0", Door)
    for name in ("made", "opened", "broken"):
        monkeypatch.setattr(Door, name, 0)


@pytest.fixture
def door() -> Iterator[EnvironmentFactory]:
    factory = EnvironmentFactory("Door-v0", retries=1)
    yield factory
    factory.close()
    assert Door.opened == 0


def tool_names(instance: Any) -> list[str]:
    """As TRL lists them (trl/trainer/grpo_trainer.py)."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [name for name, _ in members if name not in ("reset", "get_reward") and not name.startswith("_")]


# -- tools ------------------------------------------------------------------------------------------------------------


def schema(method: Any) -> dict[str, Any]:
    require("transformers", "install the extra `train`")
    from transformers.utils.chat_template_utils import get_json_schema

    declared = get_json_schema(method)
    assert declared["function"].pop("return") == {"type": "string"}
    return declared


def taken(instance: Any, action: str) -> str:
    return action


def test_the_declared_tools_are_the_methods() -> None:
    instance = EnvironmentFactory("Invoice-v0")()
    assert sorted(tool_names(instance)) == ["calculate", "price", "submit"]
    for tool in Invoice.tools:
        declared = schema(getattr(instance, tool["function"]["name"]))
        for name, argument in declared["function"]["parameters"]["properties"].items():
            assert argument.pop("description") == name  # transformers requires one; Invoice has none
        assert declared == tool


def test_schemas_survive_the_way_through_a_docstring() -> None:
    properties = {
        "path": {"type": "string", "description": "Which file."},
        "lines": {"type": "array", "items": {"type": "integer"}, "description": "Numbers: 1 is the first."},
        "mode": {"type": "string", "enum": ["read", "write"], "description": "What to do."},
        "ratio": {"type": "number", "description": "Args: none."},
        "force": {"type": "boolean", "description": "Whether."},
        "either": {"type": ["integer", "string"], "description": "Both."},
        "names": {"type": ["array", "null"], "items": {"type": "string"}, "description": "One (choices: a, b)."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["mode", "path"]}
    function = {"name": "edit", "description": "Edit a file.\n\n  Raises: no flag.", "parameters": parameters}
    found = schema(tool_method({"type": "function", "function": function}, taken))
    assert sorted(found["function"]["parameters"].pop("required")) == ["mode", "path"]
    assert found["function"].pop("description") == "Edit a file.\n\n  Raises : no flag."  # else a section would begin
    assert found["function"]["parameters"]["properties"]["ratio"].pop("description") == "Args : none."
    assert found["function"]["parameters"]["properties"]["names"].pop("description") == "One (choices : a, b)."
    found["function"]["parameters"]["properties"]["names"].pop("nullable", None)
    properties["ratio"].pop("description")
    properties["names"] |= {"type": "array"}
    properties["names"].pop("description")
    assert found["function"] == {"name": "edit", "parameters": {"type": "object", "properties": properties}}


def test_what_a_type_cannot_express_is_described() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    function = {
        "name": "go",
        "description": "Go.",
        "parameters": {"type": "object", "properties": {"to": point, "any": {}}},
    }
    found = schema(tool_method({"type": "function", "function": function}, taken))
    described = found["function"]["parameters"]["properties"]
    assert described["to"]["type"] == "object"
    assert '"properties": {"x": {"type": "integer"}}' in described["to"]["description"]
    assert described["any"] == {"description": "any"}


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("reset", "x", "no tool of the name 'reset'"),
        ("_hidden", "x", "no tool of the name '_hidden'"),
        ("go", "class", "'class', a name that Python or its docstrings do not allow"),
        ("go", "Returns", "'Returns', a name that Python or its docstrings do not allow"),
        ("go", "a-b", "'a-b', a name that Python or its docstrings do not allow"),
    ],
)
def test_names_that_python_or_trl_do_not_allow(name: str, argument: str, said: str) -> None:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    function = {"name": name, "description": "Go.", "parameters": parameters}
    with pytest.raises(ConfigError, match=said):
        tool_method({"type": "function", "function": function}, taken)


def test_text_actions_are_one_tool_with_the_instructions(door: EnvironmentFactory) -> None:
    instance = door()
    assert tool_names(instance) == ["step"]
    assert type(instance).__name__ == "Door-v0"  # TRL's name of its reward
    declared = schema(instance.step)["function"]
    assert declared["description"] == "Open the door.\nReturns : nothing."
    assert declared["parameters"]["required"] == ["action"]


# -- episodes ---------------------------------------------------------------------------------------------------------


def test_the_same_episodes_as_without_trl() -> None:
    here = agentkit.make("FrozenLake-v1", size=3)
    factory = EnvironmentFactory("FrozenLake-v1", kwargs={"size": 3})
    for seed in range(3):
        instance = factory()
        assert instance.reset(seed=seed) == here.reset(seed=seed)[0]
        total = 0.0
        for action in expert_actions(here):
            observation, reward, terminated, _, _ = here.step(action)
            total += reward
            assert instance.step(action=action) == observation + "\nThe episode is over." * terminated
        assert instance.get_reward() == total == 1.0
    factory.close()


def test_tools_get_their_arguments_and_errors_are_answers() -> None:
    here = Invoice(lines=2)
    factory = EnvironmentFactory("Invoice-v0", kwargs={"lines": 2})
    instance = factory()
    shown = instance.reset(seed=5, prompt=[{"role": "user", "content": "Work."}])
    assert shown == f"\n\n{Invoice.instructions}\n\n{here.reset(seed=5)[0]}"
    assert instance.price(item=next(iter(here.order))) == str(here.prices[next(iter(here.order))])
    assert "the argument 'item' is missing" in instance.price(thing="lamp")
    assert instance.submit(total=here.total) == "Correct.\nThe episode is over."
    assert instance.get_reward() == pytest.approx(1.0 - 0.1)  # a call that does not fit costs `format_penalty`
    factory.close()


def test_the_prompt_is_separated_from_what_follows(door: EnvironmentFactory) -> None:
    instance = door()
    assert instance.reset(seed=1) == instance.reset(seed=1, prompt=[{"role": "user", "content": ""}]) == "door 1"
    assert instance.reset(seed=1, prompt=[{"role": "user", "content": "Go."}]) == "\n\ndoor 1"


def test_an_episode_ends_once(door: EnvironmentFactory) -> None:
    instance = door()
    assert instance.step("push") == "The episode is over."  # it has not begun
    instance.reset(seed=0)
    assert instance.step("open") == "open\nThe episode is over."
    assert instance.step("push") == "The episode is over."
    assert [instance.get_reward(), instance.get_reward()] == [0.5, 0.5]
    instance.reset(seed=0)
    said = [instance.step("push") for _ in range(6)]
    assert said[4:] == ["push", "push\nThe episode is over."]  # max_turns * actions_per_turn
    assert instance.get_reward() == 3.0
    instance.reset(seed=0)
    instance.step({"not": "text"})  # a model may write anything
    assert instance.get_reward() == pytest.approx(0.5 - 0.1)
    instance.reset(seed=0)
    instance.step(move="open")
    assert instance.get_reward() == pytest.approx(0.5 - 0.1)


def test_a_failure_is_none_and_never_zero(door: EnvironmentFactory) -> None:
    instance = door()
    instance.reset(seed=0)
    instance.step("push")
    assert instance.step("break") == "The environment failed. This episode does not count."
    assert instance.step("open") == "The environment failed. This episode does not count."
    assert instance.get_reward() is None
    assert instance.reset(seed=0) == "door 0"  # in a fresh environment
    assert Door.made == 2
    assert instance.step("open") == "open\nThe episode is over."
    assert instance.get_reward() == 0.5


def test_a_reset_is_tried_again(door: EnvironmentFactory) -> None:
    instance = door()
    Door.broken = 1
    assert instance.reset(seed=0) == "door 0"
    assert instance.get_reward() == 0.0
    Door.broken = 2
    assert "failed" in instance.reset(seed=0)
    assert instance.step("open") == "The environment failed. This episode does not count."
    assert instance.get_reward() is None


def test_too_many_failures_end_the_training(door: EnvironmentFactory) -> None:
    instance = door()
    Door.broken = 1000
    with pytest.raises(EnvFailureBudgetExceeded, match="jammed"):  # noqa: PT012
        for _ in range(40):
            instance.reset(seed=0)
            assert instance.get_reward() is None


def test_a_mistake_in_a_row_is_no_failure_of_the_environment(door: EnvironmentFactory) -> None:
    with pytest.raises(ConfigError, match="needs a column 'seed'"):
        door().reset(prompt="go")


# -- pooled instances -------------------------------------------------------------------------------------------------


def test_instances_hold_an_environment_only_during_an_episode(door: EnvironmentFactory) -> None:
    instances = [door() for _ in range(8)]
    for _ in range(3):
        for instance in instances[:4]:
            instance.reset(seed=0)
        for instance in instances[:4]:
            instance.get_reward()
    instances[7].reset(seed=0)
    instances[7].reset(seed=1)  # no `get_reward` before: the first environment is given back
    assert Door.made == Door.opened == 4
    assert instances[7].get_reward() == 0.0


def test_a_closed_factory(door: EnvironmentFactory) -> None:
    instance = door()
    instance.reset(seed=0)
    door.close()
    door.close()
    assert Door.opened == 0
    with pytest.raises(RuntimeError, match="closed"):
        instance.reset(seed=0)


def test_collected_instances_are_closed() -> None:
    factory = EnvironmentFactory("Door-v0")
    instances = [factory(), factory()]
    assert all(instance.reset(seed=0) for instance in instances)
    del factory
    gc.collect()
    assert Door.opened == 2  # TRL still has the instances
    instances.clear()
    gc.collect()
    deadline = time.monotonic() + 10
    while Door.opened and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Door.opened == 0


def test_the_end_of_the_interpreter_closes_episodes() -> None:
    script = """
        from typing import Any
        import agentkit
        from agentkit.integrations.trl import EnvironmentFactory

        class Loud(agentkit.AsyncTextEnv):
            async def reset(self, *, seed=None, options=None):
                return "", {}
            async def step(self, action):
                raise NotImplementedError
            async def close(self):
                print("closed", flush=True)

        agentkit.register("Loud-v0", Loud)
        instance = EnvironmentFactory("Loud-v0")()
        instance.reset(seed=0)
        raise SystemExit("in the middle of an episode")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "in the middle" in done.stderr
    assert done.stdout == "closed\n"


def test_another_process_makes_its_own(door: EnvironmentFactory) -> None:
    copy = pickle.loads(pickle.dumps(EnvironmentFactory("FrozenLake-v1", kwargs={"size": 3}, max_turns=2)))
    instance = copy()
    assert instance.reset(seed=0).count("\n") == 2
    instance.get_reward()
    copy.close()


def test_sandboxes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    assert asyncio.run(local_sandboxes()) == 0
    here = agentkit.make("Invoice-v0")
    factory = EnvironmentFactory("Invoice-v0", sandbox="local", reset_timeout=300.0)
    instance = factory()
    assert sorted(tool_names(instance)) == ["calculate", "price", "submit"]  # declared by the sandbox
    assert instance.reset(seed=2).endswith(here.reset(seed=2)[0])
    assert instance.submit(total=here.total) == "Correct.\nThe episode is over."
    assert asyncio.run(local_sandboxes()) > 0
    assert instance.get_reward() == 1.0
    factory.close()
    assert asyncio.run(local_sandboxes()) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"env": "Frozenlake-v1"}, RegistryError, "FrozenLake-v1"),
        ({"env": "FrozenLake-v1", "max_turn": 3}, ConfigError, "max_turns"),
        ({"env": "FrozenLake-v1", "parser": "plain"}, ConfigError, "parser has no effect"),
        ({"env": "FrozenLake-v1", "kwargs": {"sise": 3}}, RegistryError, "size"),
        ({"env": "FrozenLake-v1", "retries": -1}, ConfigError, "retries"),
    ],
)
def test_mistakes_are_reported_at_once(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        EnvironmentFactory(**arguments)
