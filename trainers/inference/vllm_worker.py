"""Extension of vLLM's worker processes: load published weights, and report log-probs of the full vocabulary.

vLLM imports this module in every worker, as its worker extension, before it loads the model. The import registers the
transport below under the name that the engine's configuration asks for, and starts the watch over the owner.

Invariant: an update either replaces every parameter of the model or is reported as failed. Weights that leave a
parameter untouched would otherwise serve a mixture of two policies.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentkit.trainers.inference.vllm_guard import guard
from agentkit.trainers.inference.vllm_launch import SEED
from agentkit.trainers.weights.base import Receiver
from agentkit.trainers.weights.sent import SentWeights
from agentkit.trainers.weights.shared_memory import SharedWeights

TRANSPORT = "agentkit"
"""Name of the transport in vLLM's registry."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Workers meet the learner in each update, not before."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """Published weights as plain data, which is all that vLLM passes to its workers."""

    sent: bool
    weights: dict[str, Any]


class Transfer(WeightTransferEngine):
    """A weight-transfer engine of vLLM's own kind, for weights as a learner of agentkit publishes them.

    Each worker of a tensor-parallel engine reads or receives all weights and keeps its shards. vLLM's own transports
    need accelerators on both sides, and vLLM on the learner's side.
    Layer-wise reloading is vLLM's: parameters return to their checkpoint form, are loaded, processed again as at the
    first load (packing, quantisation) and copied into the tensors that the kernels already hold.
    """

    init_info_cls = NoInit
    update_info_cls = Update

    def init_transfer_engine(self, init_info: NoInit) -> None:
        self._receiver = Receiver(str(self.device))

    def start_weight_update(self) -> None:
        # Tied parameters count once before the restoration and twice after it; those that processing made (packed
        # weights, scales) exist before it alone. A checkpoint must contain the parameters of both.
        served = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        self._untouched = served & {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: Update) -> None:
        """Load all tensors. The model's own loader renames, fuses and shards them."""
        weights = (SentWeights if update_info.sent else SharedWeights).of_plain(update_info.weights)
        for bucket in weights.buckets(self._receiver):
            loaded = self.model.load_weights(iter(bucket))
            # A model whose loader does not report what it loaded cannot be checked; all of vLLM's usual ones do.
            self._untouched = self._untouched - loaded if loaded is not None else set()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            repack_tied(self.model)
        if self._untouched:
            some = ", ".join(sorted(self._untouched)[:3])
            raise RuntimeError(f"the weights leave {len(self._untouched)} parameters untouched, such as {some}")

    def shutdown(self) -> None:
        self._receiver.close()


def repack_tied(model: torch.nn.Module) -> None:
    """Pack again what shares its parameter with an earlier module, such as an output layer tied to the embedding.

    On CPUs vLLM multiplies with packed copies. Reloading packs the module that a tensor was loaded into; a module tied
    to it sees the new parameter, but would continue to multiply with the packed copy of the old one.
    """
    seen: set[int] = set()
    for module in model.modules():
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        method = getattr(module, "quant_method", None)
        if method is not None and not seen.isdisjoint(own):
            method.process_weights_after_loading(module)
        seen.update(own)


WeightTransferEngineFactory.register_engine(TRANSPORT, Transfer)


class OwnSampler(torch.nn.Module):
    """vLLM's top-k and top-p sampler, with log-probs from before the truncation and, on CPUs, with seeds that work.

    vLLM reports either the distribution before the temperature or the one after truncation. What a learner can
    re-score is the one in between: full vocabulary, at the sampling temperature.

    vLLM's own seeds keep one generator a request and set it back when a sample is discarded, as it is after each part
    of a prompt but the last. Generators of CPUs cannot be set back: the worker ends. ``seeds`` sets the generators for
    each step instead, so nothing has to be set back.
    """

    def __init__(self, inner: Any, seeds: Callable[[], dict[int, int]] | None) -> None:
        super().__init__()
        self.inner = inner
        self.seeds = seeds
        inner.logprobs_mode = "raw_logprobs"  # the inner sampler need not compute log-probs of its own

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits`` float32 ``[requests, vocabulary]``, already divided by the temperature; may be overwritten."""
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        if self.seeds is not None:
            generators = {row: torch.Generator().manual_seed(seed) for row, seed in self.seeds().items()}
        sampled, _ = self.inner(logits, generators, k, p)
        return sampled, logprobs


def row_seeds(runner: Any) -> dict[int, int]:
    """Return the seed of the next token of each row whose request has a seed.

    It depends only on the request's seed and the number of tokens so far, not on how a prompt was split, on discarded
    samples, or on interruptions by other requests or an update.
    """
    batch = runner.input_batch
    seeds = {}
    for row, request in enumerate(batch.req_ids[: batch.num_reqs]):
        seed = (runner.requests[request].sampling_params.extra_args or {}).get(SEED)
        if seed is not None:
            seeds[row] = mixed(seed, int(batch.num_tokens_no_spec[row]))
    return seeds


def mixed(seed: int, position: int) -> int:
    """Return a 63-bit number, unrelated for adjacent seeds and positions (the finaliser of SplitMix64)."""
    mask = 2**64 - 1
    state = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return (state ^ (state >> 31)) >> 1


class WorkerExtension:
    """Methods added to vLLM's worker; the engine calls them by name."""

    model_runner: Any

    def agentkit_own_sampler(self) -> bool:
        """Wrap vLLM's sampler in ``OwnSampler``; return False if this vLLM's sampler does not allow it."""
        runner = self.model_runner
        sampler = getattr(runner, "sampler", None)
        inner = getattr(sampler, "topk_topp_sampler", None)
        if sampler is None or inner is None:
            return False
        on_cpu = runner.device.type == "cpu"
        sampler.topk_topp_sampler = OwnSampler(inner, functools.partial(row_seeds, runner) if on_cpu else None)
        return True


guard()
