"""The least that a step needs: transformers' ``generate``, and one forward and backward pass over the same tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.settings import SINGLE, Setting, Step
from benchmarks.peers.theirs import countdown_prompt


def measure(setting: Setting, arm: str, models: Path, steps: int) -> list[Step]:
    """Generate and differentiate ``steps`` batches; return all but the first one."""
    if setting is not SINGLE:
        raise ValueError("the floor is measured for single turns only")
    model: Any = AutoModelForCausalLM.from_pretrained(models / setting.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(models / setting.model, padding_side="left")
    taken = []
    for step in range(steps):
        prompts = [countdown_prompt(step * setting.groups + k // setting.group_size) for k in range(setting.episodes)]
        inputs: Any = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        began, cpu = time.perf_counter(), time.process_time()
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=setting.max_tokens)
        generated = time.perf_counter()
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, setting.max_tokens), value=1)
        output = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=setting.max_tokens + 1)
        logprobs = output.logits[:, :-1].log_softmax(-1)
        (-logprobs.gather(2, ids[:, -setting.max_tokens :, None]).mean()).backward()
        ended = time.perf_counter()
        model.zero_grad()
        tokens = setting.episodes * setting.max_tokens
        assert ids.shape[1] == inputs["input_ids"].shape[1] + setting.max_tokens, "an answer ended early"
        cpu = time.process_time() - cpu
        wait, train = generated - began, ended - generated
        taken.append(Step(ended - began, cpu, wait, train, wait, 0.0, tokens, setting.episodes))
    return taken[1:]
