"""Drive the agent loop with verl's own code: SCRIPT DIRECTORY.

Runs with the interpreter that has verl. The trainers' dataset, agent-loop managers and workers (V0 and V1), client,
load balancer, transfer queue, replay buffer and advantages are verl's. Only the inference server is not: it chooses
answers at random, and scores them with a real model. Prints JSON.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import os
import random
import runpy
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import ray
import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import NonTensorData
from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils import tensordict_utils
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from agentkit.trainers.cluster.ray_cluster import local_cluster
from agentkit.trainers.models.quickstart import quickstart_model, quickstart_tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"
ACTIONS = ("Down", "Right", "Down", "Right", "Left", "Up")
ROWS = ((0, "lake"), (3, "lake"), (5, "lake"), (7, "strict"), (4, "rerendered"))
"""Seeds and agent loops: no failure, one that is retried, one without end, one without retries, a sequence per turn."""


@ray.remote
class Server:
    """Stands for vLLM's server: the same method, the same result."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._tokenizer, self._model = quickstart_tokenizer(), quickstart_model(0)
        self._random = random.Random(seed)
        self.requests: list[Any] = []

    def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **rest: Any
    ) -> TokenOutput:
        self.requests.append({"sampling": sampling_params})
        if len(self.requests) == 2:  # as an update of the weights does
            return TokenOutput(token_ids=[], log_probs=[], stop_reason="aborted", extra_fields={"global_steps": 3})
        text = self._tokenizer.decode(prompt_ids)
        valid = text.count("<answer>") < 3 or self._random.random() < 0.7
        answer = f"<answer>{self._random.choice(ACTIONS)}</answer>" if valid else "I do not know."
        ids = self._tokenizer.encode(answer, add_special_tokens=False) + sampling_params["stop_token_ids"][:1]
        ids = ids[: sampling_params["max_tokens"]]
        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        return TokenOutput(
            token_ids=ids, log_probs=logprobs.tolist(), num_preempted=0, extra_fields={"global_steps": 4}
        )

    def asked(self) -> list[Any]:
        return self.requests


def configuration(folder: Path) -> Any:
    """Return verl's configuration of a PPO run, with the agent loops of the documentation."""
    settings = {
        "max_turns": 4,
        "max_tokens": 24,
        "max_context": 768,
        "max_failure_share": 0.9,
        "kwargs": {"failed": str(folder), "always": 5, "size": 2},
    }
    loops = [
        {"name": "lake", "settings": {**settings, "retries": 1}},
        {"name": "strict", "settings": {**settings, "retries": 0, "recovery": "void"}},
        {"name": "rerendered", "settings": {**settings, "history": "rerender"}},
    ]
    for loop in loops:
        loop |= {"_target_": "verl_loops.AgentkitLoop", "env": "FragileLake-v0"}
    documented = OmegaConf.load(EXAMPLES / "verl/loops.yaml")
    OmegaConf.save([*documented, *loops], folder / "loops.yaml")
    quickstart_model(0).save_pretrained(folder / "model")
    quickstart_tokenizer().save_pretrained(folder / "model")
    with initialize_config_dir(str(Path(str(verl.__file__)).parent / "trainer" / "config"), version_base=None):
        return compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={folder}/model",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/loops.yaml",
                "actor_rollout_ref.rollout.agent.default_agent_loop=lake",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.n=2",
                "data.max_prompt_length=512",
                "data.max_response_length=1024",
                "algorithm.adv_estimator=grpo",
                "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            ],
        )


def dataset(config: Any, folder: Path, rows: Any) -> dict[str, Any]:
    """Return a batch of verl's dataset, from a parquet file as in the documentation."""
    row = runpy.run_path(str(EXAMPLES / "verl/tasks.py"))["row"]
    pd.DataFrame([row(seed, loop) for seed, loop in rows]).to_parquet(folder / "tasks.parquet")
    read = RLHFDataset(str(folder / "tasks.parquet"), quickstart_tokenizer(), config.data)
    return collate_fn([read[k] for k in range(len(read))])


def play_v0(config: Any, client: Any, folder: Path) -> Any:
    """Play rows without failures, also in the documented loop, and one with: AgentLoopManager, AgentLoopWorker."""
    manager = AgentLoopManager.create(config, client)
    batch = DataProto.from_single_dict(dataset(config, folder, ((0, "frozen_lake"), (2, "lake")))).repeat(2)
    done = manager.generate_sequences(batch)
    mask = done.batch["attention_mask"]
    found = []
    for k in range(len(done)):
        prompt = done.batch["prompts"][k][mask[k][:512].bool()]
        length = int(mask[k][512:].sum())
        row = {name: done.batch[name][k][:length].tolist() for name in ("responses", "response_mask")}
        found.append(
            {
                **row,
                "prompts": prompt.tolist(),
                "rollout_log_probs": done.batch["rollout_log_probs"][k][:length].tolist(),
                "rm_scores": done.batch["rm_scores"][k][:length].tolist(),
                "seed": done.non_tensor_batch["extra_info"][k]["seed"],
                "loop": done.non_tensor_batch["agent_name"][k],
                "extra_fields": {"turn_scores": done.non_tensor_batch["turn_scores"][k]},
                "success": float(done.non_tensor_batch["success"][k]),
            }
        )
    failing = DataProto.from_single_dict(dataset(config, folder, ((5, "lake"),)))
    try:
        manager.generate_sequences(failing)
        error = ""
    except Exception as problem:
        error = str(problem)
    for worker in manager.agent_loop_workers:
        ray.kill(worker)
    return {"rows": found, "error": error, "timing": {k: float(v) for k, v in done.meta_info["timing"].items()}}


def play_v1(config: Any, client: Any, folder: Path) -> Any:
    """Play all rows as the trainer V1 does: AgentLoopManagerTQ, TransferQueue, ReplayBuffer, advantages."""
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    manager = AgentLoopManagerTQ.create(config, client)
    columns = dataset(config, folder, ROWS)
    columns["uid"] = np.array([uuid.uuid4().hex for _ in ROWS], dtype=object)
    names = dict(zip(columns["uid"], ROWS, strict=True))
    batch = tensordict_utils.get_tensordict(columns)
    batch["global_steps"] = NonTensorData(4)
    tq.kv_batch_put(
        keys=list(columns["uid"]),
        partition_id="train",
        tags=[{"is_prompt": True, "status": "pending", "global_steps": 4} for _ in ROWS],
    )
    manager.generate_sequences(batch)
    buffer = ReplayBuffer("sync", config.trainer, 1, "drop", OmegaConf.create({}), poll_interval=0.2)
    sampled, _ = buffer.sample(4, "train", len(ROWS))
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields", "extra_info"]
    data = tq.kv_batch_get(keys=sampled.keys, partition_id="train", select_fields=fields)
    found = []
    for k, key in enumerate(sampled.keys):
        row = data[k]
        found.append({name: row[name].tolist() for name in fields[:5]})
        extra = row["extra_fields"]
        found[-1] |= {
            "extra_fields": {k: v for k, v in getattr(extra, "data", extra).items() if k != "raw_prompt"},
            "seed": names[key.split("_")[0]][0],
            "loop": names[key.split("_")[0]][1],
            "key": key.split("_", 1)[1],
            "tag": sampled.tags[k],
        }
    padded = DataProto(batch=data.select("response_mask", "rm_scores").to_padded_tensor())
    padded.batch["token_level_scores"] = padded.batch["token_level_rewards"] = padded.batch["rm_scores"]
    padded.non_tensor_batch["uid"] = np.array([key.split("_")[0] for key in sampled.keys], dtype=object)
    scored = compute_advantage_for_multi_trajectories(
        padded, sampled.keys, config.algorithm.adv_estimator, norm_adv_by_std_in_grpo=False, config=config.algorithm
    )
    for k, row in enumerate(found):
        row["advantages"] = scored.batch["advantages"][k][: len(row["responses"])].tolist()
    return {"rows": found}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    with local_cluster(4):
        config = configuration(folder)
        servers: dict[str, Any] = {f"server_{k}": Server.remote(k) for k in range(2)}
        client = LLMServerClient(config, ray.remote(GlobalRequestLoadBalancer).remote(servers))
        result = {"v0": play_v0(config, client, folder), "v1": play_v1(config, client, folder)}
        result["requests"] = [request for server in servers.values() for request in ray.get(server.asked.remote())]
    print(json.dumps(result, default=str))


if __name__ == "__main__":
    asyncio.set_event_loop(asyncio.new_event_loop())
    main()
