"""Tokenizers with chat templates for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentkit.trainers.models.load import load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PREFILLED = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else 'user') + '\n' + m.content | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
THINK_STRIPPING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NUMBERED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (loop.index | string) + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


def tokenizer(template: str | None, special: Sequence[str] = SPECIAL, plain: Sequence[str] = (), **tokens: str) -> Any:
    """Return the quickstart tokenizer with further tokens and another template.

    Args:
        template: the template.
        special: tokens that are declared as special.
        plain: tokens that are not.
        tokens: such as ``eos_token``.
    """
    quickstart: Any = load_tokenizer("quickstart")
    backend = Tokenizer.from_str(quickstart.backend_tokenizer.to_str())
    tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"} | tokens
    new = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
    new.add_special_tokens({"additional_special_tokens": list(special)})
    new.add_tokens(list(plain))
    new.chat_template = template
    return new
