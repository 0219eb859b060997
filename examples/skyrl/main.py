"""Train on FrozenLake with SkyRL: python main.py data.train_data=… generator.max_turns=10 …"""

import sys

import ray
import skyrl_gym
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from agentkit.integrations.skyrl_generator import RetryingGenerator


def register() -> None:
    skyrl_gym.register(
        id="frozen_lake",  # the column env_class of the dataset
        entry_point="agentkit.integrations.skyrl_gym:AgentkitEnv",
        kwargs={"env": "FrozenLake-v1", "max_turns": 10, "kwargs": {"split": "train"}},
    )


class Experiment(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return RetryingGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=resolve_policy_model_name(cfg),
        )


@ray.remote(num_cpus=1)
def train(cfg: SkyRLTrainConfig) -> None:
    register()  # in this process, which plays the episodes
    Experiment(cfg).run()


if __name__ == "__main__":
    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(train.remote(cfg))
