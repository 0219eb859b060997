"""The quickstart model is deterministic and small; its tokenizer is lossless and knows the games' symbols."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkit.config import ModelConfig
from agentkit.trainers.models import build_quickstart, load_policy, load_tokenizer
from agentkit.trainers.models.corpus import LEXICON

TOKENIZER = load_tokenizer("quickstart")


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(encode(text)) == text


@pytest.mark.parametrize(
    "text", ["<answer>", "</answer>", " ||", *"P_OG#X√S", *(" " + symbol for symbol in "P_OG#X√S")]
)
def test_symbols_are_single_tokens(text: str) -> None:
    assert len(encode(text)) == 1


def test_words_are_single_tokens() -> None:
    assert [word for word in LEXICON for text in (word, " " + word) if len(encode(text)) != 1] == []


def test_answers_and_grids_are_short() -> None:
    assert len(encode("<answer>Right || Down</answer>")) == 5
    assert len(encode("P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G")) == 16 + 3


def test_chat_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "go"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str)
    assert text == "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(encode(text), skip_special_tokens=True) == "system\nbe\nuser\ngo\nassistant\n"
    assert TOKENIZER.eos_token == "<|im_end|>"


@pytest.mark.slow
def test_same_tokenizer_in_another_process() -> None:
    code = "from agentkit.trainers.models import load_tokenizer as l;print(l('quickstart').backend_tokenizer.to_str())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == TOKENIZER.backend_tokenizer.to_str().strip()  # type: ignore[attr-defined]


def test_weights_follow_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = (load_policy(ModelConfig(device="cpu"), seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.num_parameters() < 1e6


def test_build_is_loadable(tmp_path) -> None:
    build_quickstart(tmp_path / "model", seed=5)
    loaded = load_policy(ModelConfig(path=str(tmp_path / "model"), device="cpu"), seed=0)
    built = load_policy(ModelConfig(device="cpu"), seed=5)
    for (name, a), (_, b) in zip(loaded.state_dict().items(), built.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert tokenizer.chat_template == TOKENIZER.chat_template
