"""The two small models, whose answers have a fixed number of tokens in every framework.

Invariant: the length follows from the weights alone, so that neither framework needs a setting for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from agentkit.tool_calls import ToolCall, action_of
from agentkit.trainers.models.quickstart import fresh_model, quickstart_config, quickstart_tokenizer
from agentkit.trainers.rollout.episode import system_message
from agentkit.trainers.rollout.renderer import ChatRenderer
from agentkit.trainers.rollout.tools import ToolParser
from benchmarks.peers.games import DIRECTIONS, INSTRUCTIONS, TOOL, TURNS

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
"""A short chat template of Qwen's tool calls, which lists no tools: the system message does."""
RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How TRL reads these calls."""
_ALWAYS, _NEVER, _CERTAINTY = 0.5, -20.0, 3.0


def endless_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Return a fresh model of the quickstart's size that never ends an answer.

    One dimension of its hidden states has the same value for all tokens, because no layer writes to it. The end of a
    turn has a negative weight there, and all other tokens have none.
    """
    config = quickstart_config()
    config.tie_word_embeddings = False
    model: Any = fresh_model(config, seed)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = _ALWAYS
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[config.eos_token_id, 0] = _NEVER
    return model


def calling_tokenizer() -> Any:
    """Return the quickstart's tokenizer with tool calls in Qwen's format."""
    tokenizer: Any = quickstart_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer


def opening() -> str:
    """Return the system message of the game, with its tool."""
    use = ChatRenderer(calling_tokenizer(), tools=(TOOL,)).tools
    assert use is not None
    return system_message(INSTRUCTIONS, ToolParser(use))


def calling_model(updates: int = 150, episodes: int = 8) -> Any:
    """Return a model that has learnt by heart to call the game's tool in every turn, in either direction."""
    renderer = ChatRenderer(calling_tokenizer(), tools=(TOOL,))
    assert renderer.tools is not None
    parser, random = ToolParser(renderer.tools), torch.Generator().manual_seed(0)
    model: Any = fresh_model(quickstart_config(), 0).train()
    calls = [parser.format([action_of(ToolCall("move", {"to": to}))]) for to in DIRECTIONS]
    answers = [renderer.encode_answer(call).tolist() for call in calls]
    prompts = [renderer.first(opening(), f"Position:{k}").tolist() for k in range(10)]
    results = [renderer.result(f"Position:{k}", closed=True).tolist() for k in range(10)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, updates)
    for _ in range(updates):
        rows = []
        for _ in range(episodes):
            shown = torch.randint(10, (TURNS,), generator=random).tolist()
            chosen = torch.randint(2, (TURNS,), generator=random).tolist()
            row, labels = [*prompts[shown[0]]], [-100] * len(prompts[0])
            for turn in range(TURNS):
                if turn:
                    row += results[shown[turn]]
                    labels += [-100] * len(results[0])
                row += answers[chosen[turn]]
                labels += answers[chosen[turn]]
            rows.append((row, labels))
        ids, labels = torch.tensor([row for row, _ in rows]), torch.tensor([labels for _, labels in rows])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        model.model.norm.weight *= _CERTAINTY  # rare slips would end an episode of TRL early
    return model.eval()


def answer_tokens() -> tuple[int, int, int]:
    """Return the numbers of tokens of the game's first prompt, of an answer, and of what follows a call."""
    renderer = ChatRenderer(calling_tokenizer(), tools=(TOOL,))
    assert renderer.tools is not None
    call = ToolParser(renderer.tools).format([action_of(ToolCall("move", {"to": DIRECTIONS[0]}))])
    first, result = renderer.first(opening(), "Position:3"), renderer.result("Position:3", closed=True)
    return len(first), len(renderer.encode_answer(call)), len(result)


def write(model: Any, tokenizer: Any, directory: Path) -> Path:
    """Write a model directory that transformers loads."""
    model.save_pretrained(directory)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(directory)
    return directory
