"""``agentkit.rollout``: the same records as a run, attribution of failures, wrong generators, limits, clean-up."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import gone
from requiring import require
from rollout_envs import AsyncPuppet, Puppet
from rollout_harness import GO, renderer

import agentkit
from agentkit import registry
from agentkit.envs.frozen_lake import FrozenLake
from agentkit.errors import (
    AgentkitError,
    ConfigError,
    EngineError,
    EnvCrashed,
    EnvFailureBudgetExceeded,
    LearnerError,
    MissingExtra,
    RegistryError,
    RendererError,
)
from agentkit.records import iterate_trajectories
from agentkit.rollout import Generation, Rollouts, Sampling, sequences
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.models.load import load_policy, load_tokenizer
from agentkit.types import Trajectory


class Policy:
    """A generator with a script: the answer to a prompt's text and the request's seed."""

    def __init__(self, script: Callable[[str, int], str] | str = GO, latency: float = 0.0) -> None:
        self.script = script if callable(script) else lambda text, seed: str(script)
        self.latency = latency
        self.requests: list[tuple[str, list[int], list[int], Sampling]] = []
        self.running = self.most = self.cancelled = 0

    async def __call__(self, prompt_ids: list[int], sampling: Sampling, *, session: str) -> tuple[Any, ...]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.latency)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        text = self.script(renderer().decode(prompt_ids), sampling.seed or 0)
        ids = renderer().encode_answer(text)[: sampling.max_tokens].tolist()
        self.requests.append((session.split(".", 1)[1], list(prompt_ids), ids, sampling))
        prompt_ids.clear()  # the list is the policy's own
        return ids, [-0.25 * (k + 1) for k in range(len(ids))]


def rollouts(generate: Any, env: dict[str, Any] | None = None, id: str = "Puppet-v0", **settings: Any) -> Rollouts:
    registry.register("Puppet-v0", Puppet)
    registry.register("AsyncPuppet-v0", AsyncPuppet)
    return Rollouts(id, load_tokenizer("quickstart"), generate, kwargs=env or {}, **settings)


# -- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", ["append", "rerender"])
async def test_episodes_equal_those_that_a_run_records(history: Any, tmp_path: Path) -> None:
    config = agentkit.load_config(
        {
            "dir": tmp_path / "run",
            "seed": 5,
            "steps": 1,
            "deterministic": True,
            "env": {"id": "FrozenLake-v1", "kwargs": {"size": 3}, "max_turns": 3, "first_seed": 11},
            "model": {"history": history},
            "engine": {"max_context": 512, "max_batch": 4},
            "rollout": {"groups": 2, "group_size": 2, "max_tokens": 6, "temperature": 0.7},
            "evaluation": {"episodes": 1},
        }
    )
    await asyncio.to_thread(agentkit.train, config)
    recorded = [episode for _, episode in iterate_trajectories(tmp_path / "run" / "episodes.sqlite", ending="trained")]
    engine = HFEngine(config.model, config.engine, seed=5, deterministic=True)
    await engine.start()
    try:
        played = Rollouts(
            "FrozenLake-v1",
            load_tokenizer("quickstart"),
            engine.generate,
            group_size=2,
            max_tokens=6,
            max_context=512,
            temperature=0.7,
            history=history,
            seed=5,
            kwargs={"size": 3},
            max_turns=3,
        )
        async with played:
            episodes = [member for group in await played.batch([11, 12]) for member in group.members]
    finally:
        await engine.close()
    model = load_policy(config.model, 5)
    assert len(episodes) == len(recorded) == 4
    for ours, theirs in zip(episodes, recorded, strict=True):
        assert (ours.seed, ours.member, ours.outcome, ours.reward) == (
            theirs.seed, theirs.member, theirs.outcome, theirs.reward,
        )  # fmt: skip
        assert ours.final_ids.tolist() == theirs.final_ids.tolist()
        assert ours.rerendered == (history == "rerender")
        for a, b in zip(ours.turns, theirs.turns, strict=True):
            for name in ("prompt_ids", "action_ids", "action_logprobs"):
                assert getattr(a, name).tolist() == getattr(b, name).tolist()
            assert (a.versions, a.finish_reason, a.reward, a.observation, a.response, a.actions, a.valid) == (
                b.versions, b.finish_reason, b.reward, b.observation, b.response, b.actions, b.valid,
            )  # fmt: skip
        for part in sequences(ours):  # scored again by transformers
            with torch.no_grad():
                logits = model(input_ids=torch.from_numpy(part.ids.astype(np.int64))[None]).logits[0, :-1].float()
            again = torch.log_softmax(logits / 0.7, -1).numpy()[np.arange(len(part.ids) - 1), part.ids[1:]]
            np.testing.assert_allclose(again[part.mask[1:]], part.logprobs[part.mask], atol=1e-4)


@pytest.mark.parametrize("history", ["append", "rerender"])
async def test_sequences_hold_what_the_policy_saw_and_said(history: Any) -> None:
    policy = Policy(lambda text, seed: (GO, "what?", "<answer>Bad</answer>")[seed % 3])
    async with rollouts(policy, {"length": 2}, history=history, group_size=6, max_turns=4) as played:
        group = await played.group(3)
    for member in group.members:
        asked = [request for request in policy.requests if request[0] == f"0.0.{member.member}.0"]
        parts = sequences(member)
        assert len(parts) == (1 if history == "append" else len(asked))
        for part, (_, prompt, answer, _) in zip(parts, asked if history == "rerender" else asked[-1:], strict=True):
            assert part.ids.tolist() == prompt + answer
            assert part.ids[part.mask].tolist()[-len(answer) :] == answer
            assert part.logprobs[-len(answer) :].tolist() == [-0.25 * (k + 1) for k in range(len(answer))]
            assert not part.logprobs[~part.mask].any()
        said = [token for _, _, answer, _ in asked for token in answer]
        assert [token for part in parts for token in part.ids[part.mask]] == said
        earned = [turn.reward for turn in member.turns if turn.reward]
        assert [float(reward) for part in parts for reward in part.rewards if reward] == pytest.approx(earned)


async def test_environments_with_tools_get_calls() -> None:
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
    policy = Policy(call)
    async with rollouts(policy, {"lines": 1}, id="Invoice-v0", max_turns=2, max_tokens=64, max_context=2048) as played:
        episode = await played.episode(5)
    assert [turn.actions for turn in episode.turns] == [('{"name": "price", "arguments": {"item": "lamp"}}',)] * 2
    assert "Return the price of one piece" in renderer().decode(policy.requests[0][1])


async def test_a_group_shares_its_first_state_and_nothing_random() -> None:
    policy = Policy()
    async with rollouts(policy, id="FrozenLake-v1", group_size=3, max_turns=2, max_context=2048) as played:
        groups = await played.batch([7, 8, 7])
        single = await played.episode(7)
    assert [group.seed for group in groups] == [7, 8, 7]
    assert [group.group_id for group in groups] == [0, 1, 2]
    for group in groups:
        env = FrozenLake()
        first, _ = env.reset(seed=group.seed)
        assert {member.turns[0].observation for member in group.members} == {first}
        assert [member.member for member in group.members] == [0, 1, 2]
    assert single.turns[0].observation == groups[0].members[0].turns[0].observation
    seeds = [sampling.seed for *_, sampling in policy.requests]
    assert len(set(seeds)) == len(seeds) == 2 * (9 + 1)
    assert all(sampling.stop_ids == renderer().stop_ids for *_, sampling in policy.requests)


async def test_versions_are_those_of_the_answers() -> None:
    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        ids = renderer().encode_answer(GO).tolist()
        if session.split(".", 1)[1].startswith("0.0"):
            return ids, [-1.0] * len(ids)
        if session.split(".", 1)[1].startswith("0.1"):
            return torch.tensor(ids), torch.full((len(ids),), -1.0), 9
        return Generation(np.array(ids), np.full(len(ids), -1.0), ((3, 1), (4, len(ids) - 1)), "stop")

    async with rollouts(generate, {"length": 1}) as played:
        played.version = 2
        episodes = [await played.episode(0) for _ in range(3)]
    count = len(renderer().encode_answer(GO))
    assert [episode.version_started for episode in episodes] == [2, 2, 2]
    assert [episode.turns[0].versions for episode in episodes] == [
        ((2, count),),
        ((9, count),),
        ((3, 1), (4, count - 1)),
    ]


async def test_an_aborted_answer_is_generated_again() -> None:
    calls = 0

    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), "abort")
        ids = renderer().encode_answer(GO)
        return ids, np.zeros(len(ids))

    async with rollouts(generate, {"length": 1}) as played:
        episode = await played.episode(0)
    assert (calls, len(episode.turns), episode.metrics["aborted_turns"]) == (2, 1, 1.0)


async def test_limits_are_those_of_a_run() -> None:
    long = Policy("so " * 60)
    async with rollouts(long, {"length": 9}, max_turns=2, max_tokens=5, format_penalty=-0.25) as played:
        episode = await played.episode(0)
    assert (episode.outcome, episode.reason) == ("truncated", "max_turns")
    assert [len(turn.action_ids) for turn in episode.turns] == [5, 5]
    assert [turn.finish_reason for turn in episode.turns] == ["length", "length"]
    assert [turn.reward for turn in episode.turns] == [-0.25, -0.25]
    async with rollouts(Policy(), {"length": 50}, max_turns=50, max_context=256) as played:
        episode = await played.episode(0)
        assert (episode.outcome, episode.reason) == ("truncated", "context")
        assert episode.num_tokens <= 256
    async with rollouts(Policy(), max_context=40) as played:
        with pytest.raises(ConfigError, match=r"engine\.max_context=40"):
            await played.episode(0)


# -- failures of environments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["crash", "nan", "die", "hang"])
async def test_a_failed_environment_is_replaced(how: str, tmp_path: Path) -> None:
    env = {"how": how, "at": 2, "once": str(tmp_path / "failed")}
    ended: list[Trajectory] = []
    where = "process" if how in ("die", "hang") else "inline"
    settings = {"concurrency": where, "step_timeout": 0.5, "recovery": "retry"}
    async with rollouts(Policy(), env, group_size=2, on_episode=ended.append, **settings) as played:
        group = await played.group(4)
    assert not group.voided
    assert sorted(member.attempt for member in group.members) == [0, 1]
    (voided,) = [episode for episode in ended if episode.outcome == "voided"]
    assert (voided.attempt, voided.success, len(voided.turns)) == (0, False, 2)
    assert "Env" in voided.reason
    with pytest.raises(LearnerError, match="voided"):
        sequences(voided)
    assert [id(episode) for episode in ended if episode is not voided] == [id(member) for member in group.members]


async def test_what_has_no_result_is_voided() -> None:
    env = {"how": "crash", "share": 0.4}
    bad = {seed for seed in range(30) if np.random.default_rng(seed).random() < 0.4}
    ended: list[Trajectory] = []
    settings = {"retries": 1, "max_failure_share": 1.0, "on_episode": ended.append, "recovery": "retry"}
    async with rollouts(Policy(), env, group_size=2, **settings) as played:
        groups = await played.batch(range(30))
        assert {group.seed for group in groups if group.voided} == bad
        for group in groups:
            kinds = {member.outcome for member in group.members}
            assert kinds == ({"voided"} if group.voided else {"terminated"})
        of_groups = len(ended)
        seed = min(bad)
        episode = await played.episode(seed)
        assert (episode.outcome, episode.attempt, episode.seed) == ("voided", 1, seed)
    assert [(e.outcome, e.attempt) for e in ended[of_groups:]] == [("voided", 0), ("voided", 1)]


async def test_redundant_members_replace_lost_ones(tmp_path: Path) -> None:
    env = {"how": "crash", "once": str(tmp_path / "failed")}
    async with rollouts(Policy(), env, group_size=2, extra_members=1, retries=0, recovery="retry") as played:
        groups = await played.batch(range(3))
    assert [len(group.members) for group in groups] == [2, 2, 2]
    assert not any(group.voided for group in groups)


async def test_redundant_members_are_cancelled() -> None:
    policy = Policy(latency=0.01)
    slow = iter(["slow"])

    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        if session.split(".", 1)[1].startswith("0.0.1"):
            next(slow)  # asked once
            await asyncio.sleep(3600)
        return await policy(prompt_ids, sampling, session=session)

    async with rollouts(generate, group_size=2, extra_members=1) as played:
        group = await asyncio.wait_for(played.group(0), 20)
    assert [member.member for member in group.members] == [0, 2]


async def test_the_second_unexplained_crash_is_the_policys_failure() -> None:
    async with rollouts(Policy(), {"how": "unexplained", "at": 2}, retries=0) as played:
        episode = await played.episode(0)
    assert (episode.outcome, episode.success, episode.attempt, episode.reward) == ("terminated", False, 1, 0.0)
    assert episode.reason == "UnexplainedCrash: its sandbox died"


async def test_too_many_failures_raise() -> None:
    async with rollouts(Policy(), {"how": "crash"}, group_size=2) as played:
        with pytest.raises(EnvFailureBudgetExceeded, match="no such room"):
            await played.batch(range(30))


# -- generators -------------------------------------------------------------------------------------------------------

IDS = renderer().encode_answer(GO).tolist()
LOGPROBS = [-0.5] * len(IDS)
END = renderer().end_of_turn
WRONG: list[tuple[Any, str]] = [
    (None, r"None, not \(ids, logprobs\)"),
    (IDS, r"not \(ids, logprobs\)"),
    ("ok", r"'ok', not"),
    ((IDS, LOGPROBS, 0, 0), r"not \(ids, logprobs\)"),
    (([], []), "0 ids, not 1 to sampling.max_tokens=32"),
    (([1] * 33, [-0.5] * 33), "33 ids"),
    ((IDS, LOGPROBS[1:]), "log-probabilities: return one for each id"),
    ((IDS, None), "log-probabilities None, not a list of numbers"),
    ((IDS, [float("nan")] * len(IDS)), "log-probability nan"),
    ((IDS, [float("-inf")] * len(IDS)), "log-probability -inf"),
    ((IDS, [0.5] * len(IDS)), "log-probability 0.5"),
    (([1.0, 2.0], [-0.5, -0.5]), "not a list of integers"),
    (([True, False], [-0.5, -0.5]), "not a list of integers"),
    (([[1, 2]], [[-0.5, -0.5]]), "not a list of integers"),
    (([[1], [2, 3]], [-0.5, -0.5]), "no list of integers"),
    (("ab", [-0.5, -0.5]), "not a list of integers"),
    (([-1], [-0.5]), "ids from -1"),
    (([2**31], [-0.5]), "ids from 2147483648"),
    (([10**30], [-0.5]), "not a list of integers"),
    (([END, END], [-0.5, -0.5]), f"stop id {END} before the end"),
    ((IDS, LOGPROBS, -1), r"versions \[\(-1"),
    ((IDS, LOGPROBS, "new"), "versions"),
    ((IDS, LOGPROBS, None), "versions"),
    (Generation(np.array(IDS), np.array(LOGPROBS), ((0, 1),), "stop"), f"for {len(IDS)} tokens in all"),
    (Generation(np.array(IDS), np.array(LOGPROBS), ((0, len(IDS)),), "done"), "finish_reason='done'"),  # pyright: ignore[reportArgumentType]
    (torch.ones(2, 4, requires_grad=True), "tensor"),
    ((IDS, torch.zeros(len(IDS), requires_grad=True)), r"use \.tolist\(\)"),
]


@pytest.mark.parametrize(("result", "message"), WRONG, ids=[str(number) for number in range(len(WRONG))])
async def test_a_wrong_answer_is_one_clear_error(result: Any, message: str) -> None:
    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        return result

    ended: list[Trajectory] = []
    async with rollouts(generate, group_size=2, on_episode=ended.append) as played:
        with pytest.raises(EngineError, match=f"^generate returned .*{message}"):
            await played.group(0)
    assert ended == []  # not a failure of the environment


async def test_a_function_that_is_not_asynchronous_is_named() -> None:
    async with rollouts(lambda prompt_ids, sampling, *, session: (IDS, LOGPROBS)) as played:
        with pytest.raises(EngineError, match="async def"):
            await played.episode(0)


@pytest.mark.parametrize(
    "error", [ValueError("boom"), EngineError("boom"), EnvCrashed("boom"), asyncio.CancelledError()]
)
async def test_an_error_of_the_generator_is_not_the_environments(error: BaseException) -> None:
    policy, fails = Policy(), True

    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        if fails and session.split(".", 1)[1].startswith("0.0.1"):
            raise error
        return await policy(prompt_ids, sampling, session=session)

    expected = type(error) if isinstance(error, ValueError) else EngineError
    ended: list[Trajectory] = []
    async with rollouts(generate, group_size=3, on_episode=ended.append) as played:
        with pytest.raises(expected, match=r"boom|cancelled by its engine"):
            await asyncio.wait_for(played.group(0), 20)
        assert ended == []
        fails = False
        assert len((await played.group(0)).members) == 3
    assert policy.running == 0


async def test_an_error_of_the_callback_is_raised() -> None:
    def callback(episode: Trajectory) -> None:
        raise KeyError(episode.outcome)

    async with rollouts(Policy(), {"how": "crash"}, on_episode=callback) as played:
        with pytest.raises(KeyError, match="voided"):
            await played.episode(0)
    async with rollouts(Policy(), on_episode=callback) as played:
        with pytest.raises(KeyError, match="terminated"):
            await played.episode(0)


# -- batches, cancellation --------------------------------------------------------------------------------------------


async def test_an_endless_sequence_of_seeds_is_played_as_it_is_consumed() -> None:
    drawn = 0

    def seeds() -> Any:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    policy = Policy(latency=0.001)
    async with rollouts(policy, group_size=2, max_groups=3) as played:
        found = []
        async for group in played.groups(seeds()):
            found.append(group.seed)
            await asyncio.sleep(0.01)
            if len(found) == 10:
                break
        assert drawn <= 10 + 3
        assert len(set(found)) == 10
        assert set(found) <= set(range(1, drawn + 1))
        assert policy.most <= 2 * 3
        batch = await played.batch(range(50, 60))
        assert [group.seed for group in batch] == list(range(50, 60))
        assert policy.most <= 2 * 3
    assert policy.running == 0


async def test_single_groups_wait_for_a_place() -> None:
    policy = Policy(latency=0.005)
    async with rollouts(policy, max_groups=2) as played:
        episodes = await asyncio.gather(*(played.episode(seed) for seed in range(8)))
    assert [episode.seed for episode in episodes] == list(range(8))
    assert policy.most == 2


async def test_cancellation_closes_environments_in_processes() -> None:
    pids: list[int] = []
    reached = asyncio.Event()

    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        text = renderer().decode(prompt_ids)
        pids.append(int(re.findall(r"pid (\d+)", text)[-1]))
        if len(pids) == 3:
            reached.set()
        await asyncio.sleep(3600)

    played = rollouts(generate, group_size=3, concurrency="process")
    async with played:
        task = asyncio.ensure_future(played.group(0))
        await asyncio.wait_for(reached.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not played._player.alive
    assert len(set(pids)) == 3
    assert all(gone(pid) for pid in pids)


async def test_closing_ends_what_is_being_played() -> None:
    AsyncPuppet.closed = 0
    policy, reached = Policy(latency=3600), asyncio.Event()

    async def generate(prompt_ids: list[int], sampling: Sampling, *, session: str) -> Any:
        if policy.running == 3:
            reached.set()
        return await policy(prompt_ids, sampling, session=session)

    played = rollouts(generate, id="AsyncPuppet-v0", group_size=4, max_groups=1)
    waiting = [asyncio.ensure_future(played.group(seed)) for seed in range(2)]
    await asyncio.wait_for(reached.wait(), 60)
    await asyncio.wait_for(played.close(), 10)
    for task in waiting:
        with pytest.raises(RuntimeError, match="closed"):
            await task
    assert (policy.running, policy.cancelled, AsyncPuppet.closed) == (0, 4, 4)
    with pytest.raises(RuntimeError, match="closed"):
        await played.episode(0)
    await played.close()


async def test_environments_run_in_sandboxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentkit.errors import EngineUnavailable
    from agentkit.sandboxes.backends.local.backend import LocalBackend

    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))
    backend = LocalBackend()
    try:
        await backend.start()
    except EngineUnavailable as error:
        require(False, f"install bubblewrap ({error})")
    async with rollouts(Policy(), group_size=2) as played:
        here = await played.group(3)
    async with rollouts(Policy(), group_size=2, sandbox="local", reset_timeout=300.0) as played:
        there = await played.group(3)
    assert [member.reward for member in here.members] == [member.reward for member in there.members]
    pid = re.compile(r"pid \d+")
    assert pid.findall(here.members[0].turns[0].observation) != pid.findall(there.members[0].turns[0].observation)
    assert await backend.list({}) == []
    await backend.close()


# -- arguments, imports -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"group_sise": 4}, ConfigError, "did you mean 'group_size'"),
        ({"first_seed": 4}, ConfigError, "no argument 'first_seed'"),
        ({"group_size": 0}, ConfigError, "group_size"),
        ({"max_groups": 0}, ConfigError, "max_groups=0"),
        ({"max_tokens": 2000}, ConfigError, "leaves no room"),
        ({"standbys": 1}, ConfigError, "needs a sandbox"),
        ({"temperature": 0.0}, ConfigError, "temperature"),
        ({"history": "all"}, ConfigError, "history"),
        ({"id": "Pupet-v0"}, RegistryError, "Puppet-v0"),
        ({"env": {"lenght": 3}}, RegistryError, "did you mean 'length'"),
        ({"generate": 3}, ConfigError, "generate=3 must be a coroutine function"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, Any], error: type[AgentkitError], message: str) -> None:
    with pytest.raises(error, match=message):
        rollouts(**{"generate": Policy(), **settings})


async def test_wrong_seeds_and_tokenizers_are_named() -> None:
    async with rollouts(Policy()) as played:
        for seed in (-1, 1.5, "1", None):
            with pytest.raises(ConfigError, match="seed="):
                await played.episode(seed)  # pyright: ignore[reportArgumentType]
        assert (await played.episode(np.int64(3))).seed == 3  # pyright: ignore[reportArgumentType]
    with pytest.raises(RendererError, match="object has no fast tokenizer"):
        Rollouts("Puppet-v0", object(), Policy())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("quickstart")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="pip install tokenizers"):
        Rollouts("FrozenLake-v1", tokenizer, Policy())


WITHOUT_TORCH = '''
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise RuntimeError(f"{name} is imported")

sys.meta_path.insert(0, Blocked())

import asyncio
import agentkit
import agentkit.rollout
import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

class Own:
    """A tokenizer of bytes, without transformers."""
    chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
    )
    def __init__(self):
        letters = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self.backend_tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.backend_tokenizer.decoder = decoders.ByteLevel()
        self.backend_tokenizer.add_special_tokens([AddedToken(text) for text in ("<|im_start|>", "<|im_end|>")])
        self.eos_token_id = self.backend_tokenizer.token_to_id("<|im_end|>")
    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize
        values = {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        return jinja2.Template(self.chat_template, keep_trailing_newline=True).render(values)

tokenizer = Own()
seen = []

async def generate(prompt_ids, sampling, *, session):
    seen.append(tokenizer.backend_tokenizer.decode(prompt_ids, skip_special_tokens=False))
    ids = tokenizer.backend_tokenizer.encode("<answer>Right</answer><|im_end|>").ids
    return ids, [-1.0] * len(ids)

async def play():
    settings = {"group_size": 2, "max_turns": 2, "max_context": 4000}
    async with agentkit.Rollouts("FrozenLake-v1", tokenizer, generate, **settings) as rollouts:
        return await rollouts.group(seed=0)

group = asyncio.run(play())
assert [turn.actions for member in group.members for turn in member.turns][0] == ("Right",)
(part,) = agentkit.rollout.sequences(group.members[0])
assert tokenizer.backend_tokenizer.decode(part.ids.tolist(), skip_special_tokens=False).startswith(seen[0])
assert seen[0].endswith("<|im_end|>\\n<|im_start|>assistant\\n")
assert not {"torch", "transformers", "ray", "docker", "vllm"} & set(sys.modules)
'''


def test_no_torch_and_no_transformers_are_imported() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 0, result.stderr
