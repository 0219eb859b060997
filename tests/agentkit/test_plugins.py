"""Plug-ins: names, precedence, validated options, and errors that name their cause."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from plugin_packages import Install
from typer.testing import CliRunner

from agentkit import plugins
from agentkit.cli import algorithm
from agentkit.config import RunConfig
from agentkit.config_io import dump_config, load_config, parse_config
from agentkit.errors import ConfigError, PluginError, RegistryError
from agentkit.preflight import plugin_problems

SOURCE = """
    from dataclasses import dataclass

    from pydantic import BaseModel, Field

    from agentkit.plugins import advantage, loss

    @advantage(group_baseline=True)
    def mine(batch, values, config, *, power: float = 1.0, names: tuple[str, ...] = ()):
        return power, names

    @advantage(needs_critic=True)
    def critical(batch, values, config):
        return None

    class Bounded(BaseModel):
        low: int = Field(ge=0)
        high: int = 9

    def modelled(batch, values, config, *, options: Bounded):
        return options

    @dataclass
    class Plain:
        low: int
        high: int = 9

    def with_dataclass(batch, values, config, *, options: Plain):
        return options

    @loss(needs={"reference"})
    def pull(inputs, config, *, power: float = 2.0):
        return power

    @loss(aggregation="sequence_mean")
    def by_sequence(inputs, config):
        return inputs.advantages

    def shape(episode, *, bonus: float):
        return [1 / bonus]

    def bare(batch, values, config, *, power=1.0):
        pass

    def short(batch):
        pass

    async def later(batch, values, config):
        pass

    number = 3
"""
POINTS = {"agentkit.advantages": {"mine": "credit:mine", "critical": "credit:critical"}}


def run(**sections: Any) -> RunConfig:
    return load_config({"env": {"id": "FrozenLake-v1"}, **sections})


def problems(**sections: Any) -> list[str]:
    return list(plugin_problems(run(**sections)))


def test_a_plugin_is_named_by_entry_point_or_path(install: Install) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    for name in ("mine", "credit:mine"):
        config = run(algorithm={"advantage": name, "options": {"power": 3.0, "names": ["a"]}})
        assert parse_config(dump_config(config)) == config
        assert list(plugin_problems(config)) == []
        plugin = plugins.ADVANTAGE.load(name)
        assert plugin.bind(config.algorithm.options)(None, None, None) == (3.0, ("a",))
        assert plugin.traits == plugins.AdvantageTraits(group_baseline=True, signal="returns")
    assert "credit-pack 1.0" in plugins.ADVANTAGE.load("mine").title


def test_reading_a_configuration_runs_no_plugin(install: Install) -> None:
    install("credit-pack", POINTS, {"credit": "raise SystemExit('imported')"})
    config = run(algorithm={"advantage": "mine", "loss": "credit:pull"})
    assert "credit" not in sys.modules
    (first, second) = plugin_problems(config)
    assert first.startswith("algorithm.advantage: advantage 'mine' (credit:mine of credit-pack 1.0) does not load")
    assert second == "algorithm.loss: loss 'credit:pull' does not load: SystemExit: imported"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm": {"advantage": "grop"}}, "algorithm.advantage: there is no advantage .* did you mean grpo"),
        ({"algorithm": {"advantage": "min"}}, "did you mean mine"),
        ({"algorithm": {"loss": "pp0"}}, "algorithm.loss: there is no loss of this name; did you mean ppo"),
        ({"env": {"id": "FrozenLake-v1", "parser": "tag"}}, "env.parser: .*did you mean tagged"),
        ({"rollout": {"reward": "no module:f"}}, "rollout.reward: a plug-in is named as package.module:function"),
        ({"rollout": {"filter": 3}}, "rollout.filter: input should be a valid string"),
    ],
)
def test_unknown_names_are_errors_with_a_suggestion(install: Install, section: Any, message: str) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    with pytest.raises(ConfigError, match=message):
        run(**section)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"algorithm": {"advantage": "mine", "options": {"powr": 1.0}}},
         "algorithm.options.powr: no such option of advantage 'mine' (credit:mine of credit-pack 1.0); did "
         "you mean power?"),
        ({"algorithm": {"advantage": "mine", "options": {"power": "big"}}},
         'algorithm.options.power: input should be a valid number, not "big" (option of advantage \'mine\' '
         "(credit:mine of credit-pack 1.0))"),
        ({"algorithm": {"options": {"power": 1.0}}},
         "algorithm.options.power: only plug-ins have options, and no plug-in that loads is named for it"),
        ({"algorithm": {"advantage": "credit:modelled", "options": {"low": -1}}},
         "algorithm.options.low: input should be greater than or equal to 0, not -1 (option of advantage "
         "'credit:modelled')"),
        ({"algorithm": {"advantage": "credit:modelled", "options": {}}},
         "algorithm.options.low: field required (option of advantage 'credit:modelled')"),
        ({"algorithm": {"advantage": "credit:with_dataclass", "options": {"low": 1, "hi": 2}}},
         "algorithm.options.hi: no such option of advantage 'credit:with_dataclass'; did you mean high?"),
        ({"rollout": {"reward": "credit:shape"}},
         "rollout.reward_options.bonus: field required (option of reward 'credit:shape')"),
        ({"algorithm": {"advantage": "critical"}},
         "algorithm.advantage=critical needs a critic: add `critic: {}` or choose another advantage"),
        ({"algorithm": {"advantage": "mine"}, "rollout": {"group_size": 1}},
         "rollout.group_size=1 with algorithm.advantage=mine: the baseline of a group of one is its own reward, so "
         "nothing would be learnt; use group_size >= 2 or reinforce"),
        ({"algorithm": {"loss": "credit:pull"}},
         "algorithm.loss=credit:pull needs the reference policy: set algorithm.kl to k1, k2 or k3"),
        ({"algorithm": {"loss": "credit:by_sequence", "aggregation": "constant"}},
         "algorithm.aggregation=constant and algorithm.loss=credit:by_sequence contradict: this loss is defined with "
         "sequence_mean; remove algorithm.aggregation"),
        ({"algorithm": {"advantage": "credit:number"}},
         "algorithm.advantage: advantage 'credit:number' does not load: TypeError: it is 'int', not a function"),
        ({"algorithm": {"advantage": "credit:bare"}},
         "algorithm.advantage: advantage 'credit:bare' does not load: TypeError: its option 'power' has no "
         "annotation, so it cannot be validated"),
        ({"algorithm": {"advantage": "credit:later"}},
         "algorithm.advantage: advantage 'credit:later' does not load: TypeError: it is asynchronous; write "
         "a plain function"),
        ({"algorithm": {"advantage": "credit:pull"}},
         "algorithm.advantage: advantage 'credit:pull' does not load: TypeError: its decorator is not the "
         "one for agentkit.advantages"),
    ],
)  # fmt: skip
def test_wrong_options_and_contradictions_are_found_before_a_run(
    install: Install,
    sections: dict[str, Any],
    expected: str,
) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    assert problems(**sections) == [expected]


def test_a_wrong_signature_names_the_arguments(install: Install) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    (problem,) = problems(algorithm={"advantage": "credit:short"})
    assert "it must accept (batch, values, config), and its options as keyword-only arguments" in problem


def test_an_option_that_two_plugins_have_goes_to_both(install: Install) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    algorithm = {"advantage": "mine", "loss": "credit:pull", "kl": "k3", "options": {"power": 4.0}}
    assert problems(algorithm=algorithm) == []
    assert plugins.LOSS.load("credit:pull").bind(algorithm["options"])(None, None) == 4.0


def test_options_may_be_a_model_or_a_dataclass(install: Install) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    for name in ("credit:modelled", "credit:with_dataclass"):
        options = plugins.ADVANTAGE.load(name).bind({"low": 3})(None, None, None)
        assert (options.low, options.high) == (3, 9)


def test_an_exception_names_the_plugin_and_its_line(install: Install) -> None:
    install("credit-pack", POINTS, {"credit": SOURCE})
    shape = plugins.REWARD.load("credit:shape").bind({"bonus": 0.0})
    with pytest.raises(
        PluginError, match=r"reward 'credit:shape' raised ZeroDivisionError: .* \(in shape, .*credit.py:"
    ):
        shape(None)


def test_precedence_of_names(install: Install) -> None:
    install("one", {"agentkit.advantages": {"grpo": "credit:mine", "both": "credit:mine"}}, {"credit": SOURCE})
    install("two", {"agentkit.advantages": {"both": "credit:mine"}, "agentkit.losses": {"both": "credit:pull"}}, {})
    with pytest.warns(UserWarning, match="one 1.0 declares 'grpo', which is agentkit's own; it is ignored"):
        assert list(plugins.ADVANTAGE.claims()) == ["both"]
    with pytest.raises(
        RegistryError, match=r"claimed by both (one|two) 1.0 .* and (one|two) 1.0 .*; uninstall one of them"
    ):
        plugins.ADVANTAGE.load("both")
    assert plugins.LOSS.load("both").title == "loss 'both' (credit:pull of two 1.0)"


def test_the_list_shows_plugins_and_survives_broken_ones(install: Install) -> None:
    broken = {"agentkit.advantages": {"broken": "not_there:f"}, "agentkit.parsers": {"json": "credit:short"}}
    install("credit-pack", POINTS, {"credit": SOURCE})
    install("broken-pack", broken, {})
    result = CliRunner().invoke(algorithm.app, ["list"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    lines = {line.split("│")[2].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    assert "a critic" in lines["critical"]
    assert "power: float = 1.0" in lines["mine"]
    assert "error: advantage 'broken'" in lines["broken"]
    assert "built-in" in lines["gae"]
    assert "proximal" in lines["tis"]


def test_a_loss_may_declare_its_aggregation_and_use_any_setting(install: Install) -> None:
    from agentkit.trainers.algorithms.losses import aggregation, needed_logprobs

    install("credit-pack", {}, {"credit": SOURCE})
    used = {"clip_high": 0.1, "is_cap": 3.0, "gamma_high": 0.5}
    algorithm = {"loss": "credit:by_sequence", "advantage": "credit:mine", "options": {"power": 2.0}, **used}
    assert problems(algorithm=algorithm) == []
    config = run(algorithm=algorithm).algorithm
    assert aggregation(config) == "sequence_mean"
    assert needed_logprobs(config) == {"policy", "behaviour"}


def test_the_configuration_knows_the_built_in_names_without_torch() -> None:
    from agentkit.trainers.algorithms.advantages import ESTIMATORS
    from agentkit.trainers.algorithms.losses import POLICY_LOSSES

    assert plugins.ADVANTAGE.built_in.keys() == ESTIMATORS.keys()
    assert plugins.LOSS.built_in.keys() == POLICY_LOSSES.keys()
    code = "import sys, agentkit.config; assert not {'torch', 'numpy', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
