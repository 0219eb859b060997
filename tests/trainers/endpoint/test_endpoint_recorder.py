"""The requests of a session become sequences that are exactly what the engine saw, and what the template shows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import CHATML, NO_SYSTEM, THINK_STRIPPING, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_templates import APPENDABLE, FILES, model_tokenizer

from agentkit.config import ModelConfig
from agentkit.errors import RendererError
from agentkit.tool_calls import ToolCall
from agentkit.trainers.batch import flatten
from agentkit.trainers.endpoint.dialogue import Dialogue
from agentkit.trainers.endpoint.recorder import Exchange, SessionRecorder, sequences, turns
from agentkit.trainers.inference.base import Generation
from agentkit.trainers.models.load import load_tokenizer
from agentkit.types import Group, Message, Trajectory

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Return a price.",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]
CHATML_TOKENIZER = tokenizer(CHATML)
PLAIN = Dialogue(CHATML_TOKENIZER, ModelConfig())


def sampled(tok: Any, text: str, end: str | None = "<|im_end|>", version: int = 0) -> Generation:
    """An answer as a policy samples it; its log-probabilities tell the tokens apart."""
    ids = tok(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    ids = np.array([*ids, *([tok.convert_tokens_to_ids(end)] if end else [])], np.int32)
    return Generation(ids, -1 - np.arange(len(ids), dtype=np.float32), ((version, len(ids)),), "stop")


def user(text: str) -> Message:
    return Message("user", text)


def ask(recorder: SessionRecorder, dialogue: Dialogue, messages: list[Message], generation: Generation) -> Exchange:
    prompt = recorder.prompt(dialogue, messages)
    recorder.add(prompt, generation, dialogue.answer(generation.ids))
    return recorder.exchanges[-1]


def reference(tok: Any, messages: list[Message], tools: Any = None) -> str:
    """The conversation and the generation prompt, as transformers renders them."""
    given: list[dict[str, Any]] = []
    for message in messages:
        one: dict[str, Any] = {"role": message.role, "content": message.content}
        calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
        given.append(one | ({"tool_calls": [{"type": "function", "function": c} for c in calls]} if calls else {}))
    return tok.apply_chat_template(given, tools=tools, tokenize=False, add_generation_prompt=True)


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=("Cs", "Co")), min_size=1, max_size=12),
    st.sampled_from(["<|im_end|>", "a<|im_start|>user\n", " spaces ", "<think>no</think>", "é日\n\n", "<|endoftext|>"]),
)
MOVES = st.lists(
    st.tuples(st.sampled_from(["extend", "fork", "edit", "retry"]), TEXTS, TEXTS, st.booleans()), max_size=6
)


@settings(max_examples=150, deadline=None)
@given(first=TEXTS, moves=MOVES)
def test_any_session_is_recorded_token_by_token(first: str, moves: list[tuple[str, str, str, bool]]) -> None:
    """The engine's prompts have the text of transformers' rendering, and sampled ids are never changed."""
    recorder = SessionRecorder()
    messages = [Message("system", "Rules."), user(first)]
    for number, (move, said, answer, ends) in enumerate([("extend", "", "Begin", True), *moves]):
        exchanges = recorder.exchanges
        if exchanges:
            earlier = exchanges[len(said) % len(exchanges)] if move == "fork" else exchanges[-1]
            messages = [*earlier.prompt.messages]
            if move in ("extend", "fork"):
                messages += [earlier.answer, user(said)]
            elif move == "edit":
                messages[-1] = user(said + "!")
        generation = sampled(CHATML_TOKENIZER, answer, "<|im_end|>" if ends else None, version=number)
        prompt = recorder.prompt(PLAIN, messages)
        assert PLAIN.spell(prompt.ids) == reference(CHATML_TOKENIZER, messages)
        extends = [
            e for e in exchanges if tuple(messages[: len(e.prompt.messages) + 1]) == (*e.prompt.messages, e.answer)
        ]
        assert (prompt.parent is not None) == bool(extends)
        if prompt.parent is not None:
            parent = exchanges[prompt.parent]
            seen = [*parent.prompt.ids, *parent.generation.ids]
            assert prompt.ids[: len(seen)].tolist() == seen
            assert prompt.added.tolist() == prompt.ids[len(seen) :].tolist()
        recorder.add(prompt, generation, PLAIN.answer(generation.ids))
    check_sequences(recorder.exchanges)


def rows(*columns: Any) -> list[tuple[float, ...]]:
    return [tuple(map(float, row)) for row in zip(*columns, strict=True)]


def check_sequences(exchanges: list[Exchange]) -> None:
    """Each sequence is the last prompt and answer of its branch; each sampled token is trained exactly once."""
    found = sequences(exchanges)
    parents = {exchange.prompt.parent for exchange in exchanges}
    leaves = [exchange for index, exchange in enumerate(exchanges) if index not in parents]
    assert len(found) == len(leaves)
    for sequence, leaf in zip(found, leaves, strict=True):
        assert sequence.ids.tolist() == [*leaf.prompt.ids.tolist(), *leaf.generation.ids.tolist()]
        assert len(sequence.ids) == len(sequence.mask) == len(sequence.logprobs) == len(sequence.versions)
        assert sequence.mask[-1]
        assert not sequence.logprobs[~sequence.mask].any()
        assert (sequence.versions[~sequence.mask] == -1).all()
    trained = [row for s in found for row in rows(s.ids[s.mask], s.logprobs[s.mask], s.versions[s.mask])]
    generations = [exchange.generation for exchange in exchanges]
    wanted = [row for g in generations for row in rows(g.ids, g.logprobs, [g.versions[0][0]] * len(g.ids))]
    assert sorted(trained) == sorted(wanted)
    episode = Trajectory(0, 0, "Test-v0", 0, 0)
    episode.turns, episode.rerendered = turns(exchanges)
    batch = flatten([Group(0, 0, 0, [episode])])
    assert batch.num_contexts == (1 if len(leaves) == 1 and not episode.rerendered else len(exchanges))
    assert batch.tokens[batch.mask].tolist() == [int(i) for e in exchanges for i in e.generation.ids]
    for context, (start, end) in enumerate(zip(batch.cu_contexts[:-1], batch.cu_contexts[1:], strict=True)):
        whole = exchanges[context if episode.rerendered else -1]
        assert batch.tokens[start:end].tolist() == [*whole.prompt.ids.tolist(), *whole.generation.ids.tolist()]


def test_an_extended_conversation_is_one_sequence() -> None:
    recorder, tok = SessionRecorder(), CHATML_TOKENIZER
    first = ask(recorder, PLAIN, [user("One?")], sampled(tok, "Yes", version=3))
    second = ask(recorder, PLAIN, [user("One?"), first.answer, user("Two?")], sampled(tok, "No", version=4))
    (sequence,) = sequences(recorder.exchanges)
    assert PLAIN.spell(sequence.ids) == (
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nNo<|im_end|>"
    )
    assert PLAIN.spell(sequence.ids[sequence.mask]) == "Yes<|im_end|>No<|im_end|>"
    assert set(sequence.versions.tolist()) == {-1, 3, 4}
    (one, two), rerendered = turns(recorder.exchanges)
    assert not rerendered
    assert (one.observation, two.observation) == ("One?", "Two?")
    assert [*first.prompt.ids, *one.action_ids, *two.prompt_ids].__len__() == len(second.prompt.ids)


def test_a_conversation_that_forks_trains_the_common_part_once() -> None:
    recorder, tok = SessionRecorder(), CHATML_TOKENIZER
    first = ask(recorder, PLAIN, [user("a")], sampled(tok, "root"))
    for text in ("left", "right"):
        ask(recorder, PLAIN, [user("a"), first.answer, user(text)], sampled(tok, text))
    left, right = sequences(recorder.exchanges)
    assert PLAIN.spell(left.ids[left.mask]) == "root<|im_end|>left<|im_end|>"
    assert PLAIN.spell(right.ids[right.mask]) == "right<|im_end|>"
    assert turns(recorder.exchanges)[1]


def test_a_sampled_answer_is_kept_although_its_text_has_other_ids() -> None:
    """Ids that no tokenizer would choose for a text continue unchanged."""
    tok = CHATML_TOKENIZER
    letters = [tok(letter, add_special_tokens=False)["input_ids"][0] for letter in "answer"]
    ids = np.array([*letters, tok.convert_tokens_to_ids("<|im_end|>")], np.int32)
    assert tok("answer", add_special_tokens=False)["input_ids"] != letters
    recorder = SessionRecorder()
    first = ask(recorder, PLAIN, [user("a")], Generation(ids, np.zeros(7, np.float32), ((0, 7),), "stop"))
    assert first.answer.content == "answer"
    second = recorder.prompt(PLAIN, [user("a"), first.answer, user("b")])
    assert second.parent == 0
    assert second.ids[len(first.prompt.ids) :][:7].tolist() == ids.tolist()


def test_a_template_that_strips_reasoning_starts_a_branch_only_where_it_strips() -> None:
    tok = tokenizer(THINK_STRIPPING)
    dialogue, recorder = Dialogue(tok, ModelConfig()), SessionRecorder()
    plain = ask(recorder, dialogue, [user("a")], sampled(tok, "short"))
    thought = ask(recorder, dialogue, [user("a"), plain.answer, user("b")], sampled(tok, "<think>\nhm\n</think>\nlong"))
    assert thought.prompt.parent == 0
    messages = [user("a"), plain.answer, user("b"), thought.answer, user("c")]
    stripped = recorder.prompt(dialogue, messages)
    assert stripped.parent is None
    assert dialogue.spell(stripped.ids) == reference(tok, messages)
    assert "hm" not in dialogue.spell(stripped.ids)


def test_an_answer_that_was_cut_at_a_stop_string_starts_a_branch() -> None:
    """The agent shows the answer without the stop string, and the model sampled it."""
    recorder, tok = SessionRecorder(), CHATML_TOKENIZER
    generation = sampled(tok, "Thought 1\nObservation: I", None)
    prompt = recorder.prompt(PLAIN, [user("a")])
    answer = PLAIN.answer(generation.ids, ["Observation:", "never"])
    assert answer.content == "Thought 1\n"
    recorder.add(prompt, generation, answer)
    messages = [user("a"), answer, user("b")]
    after = recorder.prompt(PLAIN, messages)
    assert after.parent is None
    assert PLAIN.spell(after.ids) == reference(tok, messages)


def test_a_template_without_a_system_role() -> None:
    tok = tokenizer(NO_SYSTEM)
    dialogue, recorder = Dialogue(tok, ModelConfig()), SessionRecorder()
    opening = [Message("system", "Rules."), user("a")]
    first = ask(recorder, dialogue, opening, sampled(tok, "yes"))
    assert dialogue.spell(first.prompt.ids) == reference(tok, [user("Rules.\n\na")])
    second = recorder.prompt(dialogue, [*opening, first.answer, user("b")])
    assert second.parent == 0
    assert dialogue.spell(second.ids) == reference(tok, [user("Rules.\n\na"), first.answer, user("b")])
    assert dialogue.spell(dialogue.prompt([user("a")])) == reference(tok, [user("a")])


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_with_every_template_the_engine_sees_what_the_template_shows(file: Any) -> None:
    """Whether a request continues or starts a branch: its prompt has the text of the whole conversation.

    Some templates write a space before answers, which the policy here does not sample.
    """
    spaced = file.stem.removesuffix("_training") in ("idefics3", "llava_next", "smolvlm")
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    dialogue, recorder = Dialogue(tok, ModelConfig()), SessionRecorder()
    messages = [Message("system", "Rules."), user("One?")]
    for number, text in enumerate(["Yes.", "<think>\nHm.\n</think>\n\nNo.", "Maybe <|im_end|>"]):
        prompt = recorder.prompt(dialogue, messages)
        seen, shown = dialogue.spell(prompt.ids), dialogue.spell(dialogue.prompt(messages))
        assert "".join(seen.split()) == "".join(shown.split())
        assert spaced or seen == shown
        generation = sampled(tok, text, tok.decode([dialogue.stop_ids[0]]), number)
        recorder.add(prompt, generation, dialogue.answer(generation.ids))
        messages += [recorder.exchanges[-1].answer, user(f"Go on, {number}.")]
    check_sequences(recorder.exchanges)
    continues = [exchange.prompt.parent is not None for exchange in recorder.exchanges]
    assert continues == ([False, True, True] if file.stem in APPENDABLE else continues)


def test_what_a_template_refuses_is_an_error() -> None:
    template = "{% if messages | length > 6 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    dialogue = Dialogue(tokenizer(template), ModelConfig())
    with pytest.raises(RendererError, match="too long"):
        SessionRecorder().prompt(dialogue, [user("a")] * 7)


# -- tools ------------------------------------------------------------------------------------------------------------

NATIVE = [file for file in FILES if file.stem in ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "llama3_1")]


@pytest.mark.parametrize("file", NATIVE, ids=[file.stem for file in NATIVE])
def test_calls_and_results_continue_the_sequence(file: Any) -> None:
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    dialogue, recorder = Dialogue(tok, ModelConfig(), TOOLS), SessionRecorder()
    call = ToolCall("price", {"item": "lämp <|im_end|>"})
    text = dialogue._use.write(call) if dialogue._use else ""
    end = tok.decode([dialogue._renderer._call_end])
    opening = [Message("system", "Rules."), user("What does it cost?")]
    first = ask(recorder, dialogue, opening, sampled(tok, text, end))
    assert first.answer == Message("assistant", "", (call,))
    messages = [*opening, first.answer, Message("tool", "12 <|im_start|>")]
    second = ask(recorder, dialogue, messages, sampled(tok, "It costs 12.", end))
    assert second.prompt.parent == 0
    assert dialogue.spell(second.prompt.ids) == reference(tok, messages, TOOLS)
    messages += [second.answer, user("Thanks")]
    third = recorder.prompt(dialogue, messages)
    assert third.parent == 1
    assert dialogue.spell(third.ids) == reference(tok, messages, TOOLS)
    check_sequences(recorder.exchanges)


def test_the_spelling_of_a_call_is_that_of_the_model() -> None:
    (file,) = (file for file in FILES if file.stem == "qwen2_5")
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    dialogue, recorder = Dialogue(tok, ModelConfig(), TOOLS), SessionRecorder()
    text = '  Look:\n\n<tool_call>{"arguments":{"item":"lamp"},"name":"price"}</tool_call>'
    first = ask(recorder, dialogue, [user("a")], sampled(tok, text))
    assert first.answer.calls == (ToolCall("price", {"item": "lamp"}),)
    second = recorder.prompt(dialogue, [user("a"), first.answer, Message("tool", "12")])
    assert second.parent == 0
    assert text in dialogue.spell(second.ids)
    changed = Message("assistant", first.answer.content, (ToolCall("price", {"item": "Lamp"}),))
    assert recorder.prompt(dialogue, [user("a"), changed, Message("tool", "12")]).parent is None
    other = Dialogue(tok, ModelConfig(), [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "cost"}}])
    assert recorder.prompt(other, [user("a"), first.answer, Message("tool", "12")]).parent is None


def test_several_calls_and_their_results() -> None:
    (file,) = (file for file in FILES if file.stem == "qwen2_5")
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    dialogue, recorder = Dialogue(tok, ModelConfig(), TOOLS), SessionRecorder()
    calls = (ToolCall("price", {"item": "lamp"}), ToolCall("price", {"item": "desk"}))
    text = "\n".join(
        f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>" for call in calls
    )
    first = ask(recorder, dialogue, [user("a")], sampled(tok, text))
    assert first.answer.calls == calls
    messages = [user("a"), first.answer, Message("tool", "12"), Message("tool", "80")]
    second = recorder.prompt(dialogue, messages)
    assert second.parent == 0
    assert dialogue.spell(second.ids) == reference(tok, messages, TOOLS)


def test_a_template_without_tools_gets_them_as_text() -> None:
    tok = load_tokenizer("quickstart")
    dialogue, recorder = Dialogue(tok, ModelConfig(), TOOLS), SessionRecorder()
    opening = [Message("system", "Rules."), user("a")]
    text = 'Let me see.\n<tool_call>\n{"name": "price", "arguments": {"item": "lamp"}}\n</tool_call>'
    first = ask(recorder, dialogue, opening, sampled(tok, text))
    assert first.answer == Message("assistant", "Let me see.", (ToolCall("price", {"item": "lamp"}),))
    shown = dialogue.spell(first.prompt.ids)
    assert "Rules.\n\nYou can call these tools:" in shown
    assert json.dumps(TOOLS[0]) in shown
    second = recorder.prompt(dialogue, [*opening, first.answer, Message("tool", "12")])
    assert second.parent == 0
    assert dialogue.spell(second.added).startswith("\n<|im_start|>user\n12<|im_end|>")
    alone = dialogue.spell(dialogue.prompt([user("a")]))
    assert "You can call these tools:" in alone


def test_a_call_that_cannot_be_read_stays_text() -> None:
    tok = load_tokenizer("quickstart")
    dialogue = Dialogue(tok, ModelConfig(), TOOLS)
    for text in ('<tool_call>{"name": "price"', "<tool_call>price</tool_call>", "no call"):
        assert dialogue.answer(sampled(tok, text).ids) == Message("assistant", text)
