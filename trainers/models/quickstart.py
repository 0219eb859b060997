"""The quickstart policy: a Qwen3-architecture model and a tokenizer small enough to learn a game on two CPU cores.

Invariant: the build is deterministic. The tokenizer depends on the project's own corpus alone, the initial weights on
the seed alone; neither touches a global random number generator or the network.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentkit.trainers.models.corpus import corpus

VOCABULARY_SIZE = 896
CONTEXT = 2048
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<answer>", "</answer>", "<think>", "</think>")
"""Plain-text tags with one id each; decoding keeps them."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""ChatML without a default system message."""

_WORDS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s"
"""Words, single digits, runs of signs (each with the space before it) and single white-space characters."""


def quickstart_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 896 ids; decoding is the exact inverse for any text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def quickstart_config(vocabulary_size: int = VOCABULARY_SIZE) -> Qwen3Config:
    """The architecture: 3 layers of width 96, 4 query and 2 key/value heads, tied embeddings (0.42 M parameters).

    Small enough to be trained on a laptop in minutes, deep enough to plan a few moves ahead; head size 32 is the
    minimum of vLLM's CPU attention.
    """
    ids = Tokenizer.from_str(_trained()).token_to_id
    return Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        initializer_range=0.02,
        tie_word_embeddings=True,
        eos_token_id=ids(TURN_END),
        pad_token_id=ids(PAD),
    )


def critic_config(vocabulary_size: int, layers: int, hidden_size: int) -> Qwen3Config:
    """A small architecture for critics, of any vocabulary; heads are 32 wide, as in the quickstart model."""
    heads = max(1, hidden_size // 32)
    return Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=8 * hidden_size // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        tie_word_embeddings=True,
        pad_token_id=None,
    )


def quickstart_model(seed: int) -> Qwen3ForCausalLM:
    """The quickstart policy with fresh weights."""
    return fresh_model(quickstart_config(), seed)


def fresh_model(config: Qwen3Config, seed: int) -> Qwen3ForCausalLM:
    """The model with fresh float32 weights that follow from ``seed``; torch's global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    return model.eval()


def build_quickstart(directory: Path, seed: int = 0) -> Path:
    """Write model and tokenizer into ``directory`` as transformers loads them; returns ``directory``."""
    directory = Path(directory)
    quickstart_model(seed).save_pretrained(directory)
    quickstart_tokenizer().save_pretrained(directory)
    return directory


@cache
def _trained() -> str:
    """The tokenizer as JSON; trained once a process (about 0.1 s)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (PAD, TURN_START, TURN_END)]
    tags = [AddedToken(text, special=False, normalized=False) for text in TAGS]
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE - len(tags),
            special_tokens=special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(tags)
    return tokenizer.to_str()
