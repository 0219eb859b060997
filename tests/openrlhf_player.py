"""Drive the agent executor with OpenRLHF's own code: SCRIPT DIRECTORY.

Runs with the interpreter that has OpenRLHF, vLLM and DeepSpeed. The loader of the agent file, the engine's
``generate_responses``, the sample generator, the advantages and the loss are OpenRLHF's, the sampling parameters and
outputs vLLM's. Only the engine's model is not computed by vLLM: it chooses answers at random, and scores them with
transformers. flash-attn has no build for CPUs: its functions, which nothing here calls, are replaced by ones that
raise. Prints JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import random
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER, TESTS = Path(sys.argv[1]), Path(__file__).parent
os.environ |= {"FRAGILE_LAKE": str(FOLDER), "PYTHONPATH": str(TESTS), "CUDA_VISIBLE_DEVICES": ""}


def refuse(*arguments: Any) -> Any:
    raise NotImplementedError("flash-attn is not installed")


for module, names in (
    ("flash_attn", ()),
    ("flash_attn.bert_padding", ("index_first_axis", "pad_input", "rearrange", "unpad_input")),
    ("flash_attn.utils", ()),
    ("flash_attn.utils.distributed", ("all_gather",)),
):
    sys.modules[module] = types.ModuleType(module)
    sys.modules[module].__spec__ = ModuleSpec(module, None)
    vars(sys.modules[module]).update(dict.fromkeys(names, refuse))

from agentkit.trainers.cluster.ray_cluster import local_cluster  # noqa: I001, E402  before ray
import ray  # noqa: E402
import torch  # noqa: E402
from openrlhf.models.loss import PolicyLoss  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController  # noqa: E402
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator  # noqa: E402
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, _load_agent_executor  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.logprobs import Logprob  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402

from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer  # noqa: E402

ACTIONS = ("Down", "Right", "Down", "Right", "Left", "Up")
SEEDS = (0, 3, 2, 5)
"""Tasks of the batch: one without failures, one where one episode fails, one without failures, one where all fail."""
SAMPLES = 3
LOSSES = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "reinforce")


@ray.remote
class Engine(RolloutRayActor.__ray_metadata__.modified_class):
    """OpenRLHF's engine, without vLLM's computation."""

    async def __init__(self, agent: str) -> None:
        torch.set_num_threads(1)
        self.executor = _load_agent_executor(agent)
        self._tokenizer, self._model, self._random = quickstart_tokenizer(), quickstart_model(0), random.Random(0)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        text = self._tokenizer.decode(prompt_token_ids)
        valid = text.count("<answer>") < 3 or self._random.random() < 0.7
        answer = f"<answer>{self._random.choice(ACTIONS)}</answer>" if valid else "I do not know."
        stop = next(iter(sampling_params.all_stop_token_ids))
        ids = [*self._tokenizer.encode(answer, add_special_tokens=False), stop][: sampling_params.max_tokens]
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*prompt_token_ids, *ids]])).logits[0]
        found = logits[len(prompt_token_ids) - 1 : -1].log_softmax(-1)
        assert sampling_params.logprobs == 0
        logprobs = [{token: Logprob(found[k, token].item())} for k, token in enumerate(ids)]
        output = CompletionOutput(0, answer, ids, None, logprobs, "stop" if ids[-1] == stop else "length")
        return RequestOutput("0", None, prompt_token_ids, None, [output], True)

    def get_num_unfinished_requests(self) -> int:
        return 0

    def use(self, agent: str) -> None:
        self.executor = _load_agent_executor(agent)


def arguments(estimator: str) -> Any:
    """Return the part of OpenRLHF's settings that is used here."""
    advantage = SimpleNamespace(
        estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False, is_correction_level="token"
    )
    return SimpleNamespace(
        algo=SimpleNamespace(
            advantage=advantage,
            dynamic_filtering_enable=False,
            kl=SimpleNamespace(use_loss=False, estimator="k1", init_coef=0.0),
        ),
        rollout=SimpleNamespace(
            batch_size=len(SEEDS), n_samples_per_prompt=SAMPLES, vllm_generate_batch_size=None, micro_batch_size=3
        ),
        vllm=SimpleNamespace(enable_sleep=False),
        train=SimpleNamespace(dynamic_batch_enable=False),
        reward=SimpleNamespace(
            clip_range=None, overlong_buffer_len=None, overlong_penalty_factor=0.0, stop_properly_penalty_coef=None
        ),
    )


def generate() -> tuple[list[Any], str, list[Any]]:
    """Return a batch of OpenRLHF's sample generator, an error, and responses of the documented agent."""
    rows = [([None], [f"task {seed}"], [seed], [None]) for seed in SEEDS]
    strategy = SimpleNamespace(args=arguments("rloo"))
    with local_cluster(2):
        make: Any = Engine
        engine = make.remote(str(TESTS / "openrlhf_agent.py"))
        generator = SamplesGenerator(strategy, rows, None, quickstart_tokenizer(), [engine])
        samples, *_ = generator.generate_samples(max_len=768, max_new_tokens=None)
        rest = SamplingParams(logprobs=1), 768, quickstart_tokenizer(), 2
        try:
            ray.get(engine.generate_responses.remote("", "none", *rest))
            error = ""
        except Exception as problem:
            error = str(problem)
        ray.get(engine.use.remote(str(TESTS.parent / "examples" / "openrlhf/agent.py")))
        return samples, error, ray.get(engine.generate_responses.remote("", "4", *rest))


def train(samples: list[Any], estimator: str) -> dict[str, Any]:
    """Return OpenRLHF's advantages, and the gradient of its loss by log-probability."""
    args = arguments(estimator)
    maker = RemoteExperienceMaker(
        None, None, None, None, FixedKLController(0.0), SimpleNamespace(args=args), quickstart_tokenizer()
    )
    batches = maker.split_rollout_samples(samples)
    for batch in batches:
        batch.action_log_probs = batch.rollout_log_probs.clone()
        batch.kl = torch.zeros_like(batch.action_log_probs)
    found: dict[str, Any] = {"advantages": [], "gradients": {True: [], False: []}}
    for batch in maker.compute_advantages_and_returns(batches):
        found["advantages"] += (batch.advantages * batch.action_mask).tolist()
        for token_level in (True, False):
            logprobs = batch.action_log_probs.clone().requires_grad_()
            loss = PolicyLoss(token_level_loss=token_level)
            value, *_ = loss(logprobs, batch.action_log_probs, batch.advantages, batch.action_mask)
            if value.isfinite():  # a micro-batch without any token has no loss
                value.backward()
            gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
            found["gradients"][token_level] += gradient.tolist()
    return found


def main() -> None:
    torch.set_num_threads(1)
    samples, error, documented = generate()
    rows = [
        {
            "seed": sample.labels[0],
            "ids": sample.sequences[0].tolist(),
            "mask": [False, *sample.action_mask[0].bool().tolist()],
            "logprobs": [0.0, *sample.rollout_log_probs[0].tolist()],
            "reward": sample.rewards.item(),
            "score": sample.scores.item(),
            "truncated": sample.truncated.item(),
            "info": {name: value.item() for name, value in sample.info.items()},
        }
        for sample in samples
    ]
    losses = {name: train(samples, name) for name in LOSSES}
    print(json.dumps({"rows": rows, "error": error, "documented": documented, "losses": losses}))


if __name__ == "__main__":
    main()
