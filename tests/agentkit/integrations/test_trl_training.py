"""TRL's own GRPOTrainer with EnvironmentFactory and RolloutFunc."""

from __future__ import annotations

import asyncio
import inspect
import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from local_sandboxes import local_sandboxes

import agentkit
from agentkit.envs.base import TextEnv
from agentkit.envs.invoice import Invoice
from agentkit.errors import ConfigError, EngineError
from agentkit.integrations.trl import EnvironmentFactory, RolloutFunc, episode_reward
from agentkit.trainers.models.quickstart import build_quickstart, quickstart_model, quickstart_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VOIDED = {"none": (), "odd": (1, 3), "all": (0, 1, 2, 3)}
PAID: list[str] = []
"""What the policy wrote in the environments of this process."""


class Letters(TextEnv):
    """Pays for the letter e; fails in the given turn of the tasks that ``fails`` names."""

    instructions = "Write."
    max_turns = 3
    concurrency = "inline"
    deterministic = False
    open: ClassVar[int] = 0

    def __init__(self, fails: str = "none", turn: int = 2) -> None:
        super().__init__()
        self._fails, self._turn = VOIDED[fails], turn
        Letters.open += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._seed, self._turns = seed, 0
        return f"Task {seed}.", {}

    def step(self, action: str) -> Any:
        self._turns += 1
        if self._turns == self._turn and self._seed in self._fails:
            raise OSError("no ink")
        PAID.append(action)
        reward = action.count("e") / max(1, len(action))
        return f"You wrote {len(action)} letters.", reward, False, False, {"success": False, "action_valid": True}

    def close(self) -> None:
        Letters.open -= 1


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    if "Letters-v0" not in {entry.id for entry in agentkit.list_envs()}:
        agentkit.register("Letters-v0", Letters)
    monkeypatch.setattr(Letters, "open", 0)
    PAID.clear()
    torch.manual_seed(0)


def trainer_of(tmp_path: Path, dataset: dict[str, Any], **arguments: Any) -> Any:
    """A trainer of the quickstart model; settings of GRPOConfig and arguments of GRPOTrainer."""
    # TRL's modules load slowly, and this file is also read to select other tests.
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer_arguments = ("model", "processing_class", "reward_funcs", "rollout_func", "environment_factory")
    given: dict[str, Any] = {name: arguments.pop(name) for name in trainer_arguments if name in arguments}
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "out"),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "num_generations": 2,
        "shuffle_dataset": False,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
    }
    given.setdefault("model", quickstart_model(0))
    given.setdefault("processing_class", quickstart_tokenizer())
    return GRPOTrainer(args=GRPOConfig(**{**settings, **arguments}), train_dataset=Dataset.from_dict(dataset), **given)


def run_example(name: str, model: Path, output: Path) -> None:
    """Run an example for one step."""
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / name))["main"](str(model), "1", str(output))
    assert (output / "model.safetensors").exists()


def weights(trainer: Any) -> Any:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])


# -- rollout_func -----------------------------------------------------------------------------------------------------


@pytest.fixture
def letters() -> Iterator[Any]:
    made: list[RolloutFunc] = []

    def make(fails: str = "none", **settings: Any) -> RolloutFunc:
        settings = {"max_tokens": 4, "parser": "plain", "retries": 0, **settings}
        made.append(RolloutFunc("Letters-v0", quickstart_tokenizer(), kwargs={"fails": fails}, **settings))
        return made[-1]

    yield make
    for rollout in made:
        rollout.close()
    assert Letters.open == 0


def rollout_trainer(tmp_path: Path, rollout: RolloutFunc, **settings: Any) -> Any:
    seeds = {"prompt": [str(seed) for seed in range(4)]}
    return trainer_of(tmp_path, seeds, rollout_func=rollout, reward_funcs=episode_reward, **settings)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_are_what_the_model_wrote(tmp_path: Path, letters: Any, checkpointing: bool) -> None:
    rollout = letters(temperature=0.7)
    trainer = rollout_trainer(tmp_path, rollout, temperature=0.7)
    trainer.model.train()
    if checkpointing:
        trainer.model.gradient_checkpointing_enable()
    rows = rollout(["0", "0", "1", "2"], trainer)
    assert trainer.model.is_gradient_checkpointing is checkpointing
    assert rows["prompt_ids"][0] == rows["prompt_ids"][1] != rows["prompt_ids"][2]
    assert rows["episode_turns"] == [3, 3, 3, 3]
    assert sum(rows["episode_reward"]) == pytest.approx(sum(text.count("e") / max(1, len(text)) for text in PAID))
    columns = (rows[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs"))
    for prompt, completion, mask, logprobs in zip(*columns, strict=True):
        assert len(completion) == len(mask) == len(logprobs)
        assert mask[0] == mask[-1] == 1
        chosen = torch.tensor(mask).bool()
        shown = quickstart_tokenizer().decode(torch.tensor(completion)[~chosen])
        assert shown.count("You wrote") == 2  # what the environment said after the first two of three answers
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert torch.allclose(expected[chosen], torch.tensor(logprobs)[chosen], atol=1e-4)
        assert not torch.tensor(logprobs)[~chosen].any()


def test_training(tmp_path: Path, letters: Any) -> None:
    rollout = letters()
    trainer = rollout_trainer(tmp_path, rollout, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert not torch.equal(before, weights(trainer))
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert [entry["episodes/voided"] for entry in logs] == [0.0, 0.0]
    assert all(entry["grad_norm"] > 0 and entry["reward"] > 0 for entry in logs)
    assert len(PAID) == 2 * 8 * 3
    # TRL computes the probabilities again; those of the rollout were the same, so no ratio is clipped.
    assert all(entry["clip_ratio/region_mean"] == 0 for entry in logs)


def test_the_example(tmp_path: Path) -> None:
    run_example("trl_rollout.py", build_quickstart(tmp_path / "model"), tmp_path / "trained")


def test_voided_episodes_do_not_count(tmp_path: Path, letters: Any) -> None:
    trainer = rollout_trainer(tmp_path, letters("odd"))
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert entry["episodes/voided"] == 0.5
    rewards, advantages = list(trainer._logs["rewards"]["episode_reward"]), list(trainer._logs["advantages"])
    assert [math.isnan(reward) for reward in rewards] == [False, False, True, True] * 2
    assert [advantage for reward, advantage in zip(rewards, advantages, strict=True) if math.isnan(reward)] == [0.0] * 4
    counted = [reward for reward in rewards if not math.isnan(reward)]
    assert entry["reward"] == pytest.approx(sum(counted) / len(counted))


def test_a_batch_of_voided_episodes_teaches_nothing(tmp_path: Path, letters: Any) -> None:
    trainer = rollout_trainer(tmp_path, letters("all"))
    rows = trainer.rollout_func(["0", "1"], trainer)
    assert rows["episode_reward"] == rows["episode_success"] == [None, None]
    assert rows["env_mask"] == [[0], [0]]
    before = weights(trainer)
    trainer.train()
    assert torch.equal(before, weights(trainer))


def test_generating_with_gradient_checkpointing_is_wrong(tmp_path: Path, letters: Any) -> None:
    """The trap that RolloutFunc avoids: there is no cache, and `generate` passes the last token alone."""
    trainer = rollout_trainer(tmp_path, letters())
    assert trainer.args.gradient_checkpointing  # TRL's default
    model, prompt = trainer.model.eval(), torch.arange(20, 60)[None]
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    right = model.generate(prompt, **arguments)
    assert torch.equal(right[:, -1], model(right[:, :-1]).logits[:, -1].argmax(-1))
    model.train().gradient_checkpointing_enable()  # as `train` does
    assert not torch.equal(model.generate(prompt, **arguments), right)


def test_another_engine(tmp_path: Path, letters: Any) -> None:
    versions, see = [], quickstart_tokenizer()("see").input_ids

    async def generate(prompt_ids: list[int], sampling: Any, *, session: str) -> Any:
        await asyncio.sleep(0.01)
        return [*see, sampling.stop_ids[0]], [-1.0] * (len(see) + 1)

    rollout = letters(
        generate=generate, max_tokens=8, on_episode=lambda episode: versions.append(episode.version_started)
    )
    trainer = rollout_trainer(tmp_path, rollout)
    trainer.state.global_step = 7
    rows = rollout(["0", "1"], trainer)
    assert rows["episode_reward"] == pytest.approx([2.0, 2.0])
    assert versions == [7, 7]


def test_an_error_of_the_model_ends_the_training(tmp_path: Path, letters: Any) -> None:
    rollout = letters()
    trainer = rollout_trainer(tmp_path, rollout)

    def fail(*arguments: Any) -> None:
        raise MemoryError("no memory left")

    hook = trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError, match="no memory left"):
        trainer.train()
    hook.remove()
    assert len(rollout(["0", "1"], trainer)["prompt_ids"]) == 2  # nothing is left of it


def test_mistakes(tmp_path: Path, letters: Any) -> None:
    with pytest.raises(ConfigError, match="takes no argument 'group_size'"):
        letters(group_size=4)
    with pytest.raises(ConfigError, match="max_tokens"):
        letters(max_tokens=0)
    trainer = rollout_trainer(tmp_path, letters(temperature=0.5))
    with pytest.raises(ConfigError, match=r"temperature of GRPOConfig is 1\.0, that of RolloutFunc is 0\.5"):
        trainer.train()
    rollout = letters()
    for prompt in ("go", "-1", [{"role": "user", "content": "1"}], None):
        with pytest.raises(ConfigError, match="is no seed"):
            rollout([prompt], trainer)


def test_answers_without_probabilities_are_refused(tmp_path: Path, letters: Any) -> None:
    async def generate(prompt_ids: list[int], sampling: Any, *, session: str) -> Any:
        return [5, 6], [-1.0]

    rollout = letters(generate=generate)
    with pytest.raises(EngineError, match="2 ids and 1 log-probabilities"):
        rollout(["0"], rollout_trainer(tmp_path, rollout))


# -- environment_factory ----------------------------------------------------------------------------------------------


def tool_model(instance: Any, tool: str, answers: list[dict[str, Any]], steps: int = 160) -> tuple[Any, Any]:
    """Return a model that knows by heart to call ``tool`` with one of ``answers``, and its tokenizer."""
    import trl

    model: Any = quickstart_model(0).train()
    tokenizer: Any = quickstart_tokenizer()
    tokenizer.padding_side = "left"
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    methods = dict(inspect.getmembers(type(instance), predicate=inspect.isfunction))
    tools = [getattr(instance, name) for name in methods if name[0] != "_" and name not in ("reset", "get_reward")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shown = [instance.reset(seed=seed) for seed in range(2)]
    for step in range(steps):
        asked = [{"role": "user", "content": shown[step % 2]}]
        call = {"type": "function", "function": {"name": tool, "arguments": answers[step % 3 % len(answers)]}}
        answered = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        texts = [
            tokenizer.apply_chat_template(asked, tools=tools, add_generation_prompt=True, tokenize=False),
            tokenizer.apply_chat_template(answered, tools=tools, tokenize=False),
        ]
        prompt, ids = (tokenizer(text, return_tensors="pt").input_ids for text in texts)
        labels = ids.clone()
        labels[:, : prompt.shape[1]] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    instance.get_reward()
    return model, tokenizer


def test_tools_in_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    totals = []
    for seed in range(2):
        here = Invoice(lines=1)
        here.reset(seed=seed)
        totals.append(here.total)
    factory = EnvironmentFactory("Invoice-v0", kwargs={"lines": 1}, sandbox="local", reset_timeout=300.0)
    model, tokenizer = tool_model(factory(), "submit", [{"total": total} for total in totals])
    trainer = trainer_of(
        tmp_path,
        {"seed": [0, 1]},
        model=model,
        processing_class=tokenizer,
        environment_factory=factory,
        num_generations=4,
        max_completion_length=128,
        max_tool_calling_iterations=2,
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    before = weights(trainer)
    trainer.train()
    assert asyncio.run(local_sandboxes()) > 0
    factory.close()
    assert asyncio.run(local_sandboxes()) == 0
    assert not torch.equal(before, weights(trainer))
    (entry,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    assert entry["tools/call_frequency"] > 0.5
    assert entry["tools/failure_frequency"] == 0
    rewards = list(trainer._logs["rewards"]["Invoice-v0"])
    assert len(rewards) == 8
    assert 1.0 in rewards  # a right total
    assert 0.0 in rewards  # a wrong one
    run_example("trl_environment.py", tmp_path / "model", tmp_path / "trained")
    assert asyncio.run(local_sandboxes()) == 0


def test_a_failure_in_a_tool_is_left_out(tmp_path: Path) -> None:
    factory = EnvironmentFactory("Letters-v0", kwargs={"fails": "odd", "turn": 1}, max_turns=4)
    model, tokenizer = tool_model(factory(), "step", [{"action": "see"}, {"action": "on"}])
    trainer = trainer_of(
        tmp_path,
        {"seed": [0, 1]},
        model=model,
        processing_class=tokenizer,
        environment_factory=factory,
        num_generations=4,
        max_completion_length=256,
        max_tool_calling_iterations=3,
    )
    trainer.train()
    rewards, advantages = list(trainer._logs["rewards"]["Letters-v0"]), list(trainer._logs["advantages"])
    voided = [math.isnan(reward) for reward in rewards]
    assert voided[:4] == [False] * 4
    assert any(voided)  # those that called the tool
    assert [advantage for nan, advantage in zip(voided, advantages, strict=True) if nan] == [0.0] * sum(voided)
    factory.close()
    assert Letters.open == 0
