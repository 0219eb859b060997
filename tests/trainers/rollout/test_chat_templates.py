"""The chat templates that TRL collects work with at least one kind of history.

They are read from the package, which is not imported and needs none of its dependencies for that.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_tokenizers import tokenizer
from requiring import require

from agentkit.config import ModelConfig
from agentkit.errors import RendererError
from agentkit.trainers.rollout.renderer import ChatRenderer, make_renderer
from agentkit.types import Turn

FOLDER = "AGENTKIT_CHAT_TEMPLATES"
TOKEN = re.compile(r"<\|[^|<>'\"{}\s]+\|>|<｜[^｜<>\s]+｜>|</s>|<\|?(?!/?think)[a-z_A-Z]+\|?>|\[(?:gMASK|/?INST)\]")
"""What looks like a token in the text of a template."""


def folder() -> Path | None:
    """The folder of templates: of the environment variable, or of an installed TRL."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    found = importlib.util.find_spec("trl")
    return Path(found.origin).parent / "chat_templates" if found and found.origin else None


FILES = sorted(found.glob("*.jinja")) if (found := folder()) else []
APPENDABLE = {"cohere", "gemma", "llama3", "phi3", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"}
REWRITING = {
    "deepseek_r1_distill", "deepseekv3", "glm4moe", "gptoss", "nemotron_3_nano", "qwen3", "qwen3_5_nothink", "qwen3_6",
    "smolvlm",
}  # fmt: skip


def model_tokenizer(template: str) -> Any:
    return tokenizer(template, special=sorted(set(TOKEN.findall(template))), bos_token="<s>", eos_token="</s>")


def answered(renderer: ChatRenderer, observation: str, text: str, *, cut: bool = False) -> Turn:
    ids = renderer.encode_answer(text)[: -1 if cut else None]
    nothing = np.empty(0, np.int32)
    return Turn(nothing, ids, np.zeros(len(ids), np.float32), ((0, len(ids)),), observation=observation, response=text)


def reference(tok: Any, turns: list[Turn], observation: str) -> list[int]:
    """Ids of the conversation as transformers renders it, in the first form in which all texts are there."""
    opened = "<think>\n" if render(tok, [("user", observation)], in_parts=False).endswith("<think>\n") else ""
    shown = [("system", "Rules 7.")]
    for turn in turns:
        shown += [("user", turn.observation), ("assistant", opened + turn.response)]
    shown.append(("user", observation))
    merged = [("user", f"{shown[0][1]}\n\n{shown[1][1]}"), *shown[2:]]
    for messages, in_parts in ((shown, False), (shown, True), (merged, False)):
        text = render(tok, messages, in_parts=in_parts)
        if all(part in text for part in ("Rules 7.", observation)):
            return tok(text, add_special_tokens=False)["input_ids"]
    raise AssertionError("no form shows the conversation")


def render(tok: Any, messages: list[tuple[str, str]], *, in_parts: bool) -> str:
    contents = [[{"type": "text", "text": text}] if in_parts else text for _, text in messages]
    given = [{"role": role, "content": content} for (role, _), content in zip(messages, contents, strict=True)]
    try:
        return tok.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    except Exception:  # no system role
        return ""


def test_the_templates_are_there() -> None:
    require(bool(FILES), f"pip install --no-deps trl==1.16.0, or name a folder of templates with {FOLDER}")
    assert {file.stem for file in FILES} >= APPENDABLE | REWRITING or os.environ.get(FOLDER)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_collected_template_works(file: Path) -> None:
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    special = set(tok.all_special_ids)
    renderer = make_renderer(ModelConfig(), tok, 10)
    if file.stem in APPENDABLE | REWRITING:
        assert renderer.rerenders == (file.stem in REWRITING)
    whole = ChatRenderer(tok, rerenders=True)
    assert renderer.end_of_turn in special
    assert renderer.end_of_turn in renderer.stop_ids

    def prompts(renderer: ChatRenderer, *texts: str, cut: bool = False) -> list[list[int]]:
        """The conversation before each answer, with ``texts`` for the observations."""
        turns, seen, ids = [], [], []
        for number, text in enumerate(texts):
            new = renderer.prompt("Rules 7.", turns, text).tolist()
            ids = new if renderer.rerenders else ids + new
            seen.append(ids)
            turns.append(answered(renderer, text, f"answer {number}.", cut=cut))
            ids = ids + turns[-1].action_ids.tolist()
        return seen

    # The system message, all observations and all answers are there, in order, and the prompts agree with the template.
    for one in {renderer, whole}:
        texts = [tok.decode(ids) for ids in prompts(one, "first 1", "second 2", "third 3")]
        order = ["Rules 7.", "first 1", "answer 0.", "second 2", "answer 1.", "third 3"]
        places = [texts[-1].find(part) for part in order]
        assert -1 not in places
        assert places == sorted(places)
        assert all(texts[-1].count(part) == 1 for part in order)
    assert prompts(whole, "first 1")[0] == prompts(renderer, "first 1")[0]
    if not renderer.rerenders:
        assert [tok.decode(ids) for ids in prompts(renderer, "a", "b", "c")] == [
            tok.decode(ids) for ids in prompts(whole, "a", "b", "c")
        ]

    # The ids are those of transformers, also with reasoning in the answers.
    for responses in (
        ("go.", "stay."),
        ("<think>\nreason 8\n</think>\n\ngo.", "<think>\nreason 9"),
        ("r</think>go.", ""),
    ):
        turns = [answered(whole, f"seen {number}", response) for number, response in enumerate(responses)]
        assert whole.prompt("Rules 7.", turns, "last 5").tolist() == reference(tok, turns, "last 5")

    # Hostile observations and answers that were cut off leave the structure as it is.
    tokens = "".join(token for token in tok.all_special_tokens)
    structures = [
        [[id_ for id_ in ids if id_ in special] for ids in prompts(one, *texts, cut=cut)]
        for one in (whole, renderer)
        for texts, cut in (
            (("a", "b", "c"), False),
            ((f"a{tokens}", f"{tokens}</think>b", f"<think>{tokens}"), False),
            (("a", "b", "c"), True),
        )
    ]
    assert structures[0] == structures[1] == structures[2]
    assert structures[3] == structures[4] == structures[5]

    # Reasoning is shown whole or not at all, and never without its answer.
    thought = answered(whole, "first 1", "<think>\nreason 8\n</think>\n\nanswer 9.")
    text = tok.decode(whole.prompt("Rules 7.", [thought], "second 2"))
    assert text.count("answer 9.") == 1
    assert text.count("reason 8") in (0, 1)
    unclosed = answered(whole, "first 1", "<think>\nreason 8", cut=True)
    assert tok.decode(whole.prompt("Rules 7.", [unclosed], "second 2")).count("second 2") == 1


@pytest.mark.parametrize("file", [file for file in FILES if file.stem in REWRITING], ids=lambda file: file.stem)
def test_a_template_that_rewrites_history_is_refused_for_appending(file: Path) -> None:
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    with pytest.raises(RendererError, match=r"model\.history=rerender"):
        make_renderer(ModelConfig(history="append"), tok, 10)


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem in ("qwen3", "qwen3_6")], ids=lambda file: file.stem
)
@pytest.mark.parametrize("thinking", [True, False])
def test_an_argument_of_the_template_turns_reasoning_off(file: Path, thinking: bool) -> None:
    tok = model_tokenizer(file.read_text(encoding="utf-8"))
    renderer = make_renderer(ModelConfig(template_arguments={"enable_thinking": thinking}), tok, 1)
    text = tok.decode(renderer.prompt("Rules 7.", (), "first 1"))
    assert text.endswith("<think>\n\n</think>\n\n") != thinking
