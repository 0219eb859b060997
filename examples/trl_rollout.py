"""Train on FrozenLake with TRL's GRPOTrainer; agentkit plays the episodes: MODEL [STEPS] [OUTPUT] [SANDBOX].

MODEL is a directory with a model that knows the answer format, such as one of
`agentkit run examples/frozen_lake.yaml steps=0 dir=runs/start`. With `docker` as SANDBOX, episodes run in
containers.
"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agentkit.integrations.trl import RolloutFunc, episode_reward


def main(path: str, steps: str = "40", output: str = "runs/trl", sandbox: str = "none") -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    rollout = RolloutFunc(
        "FrozenLake-v1", tokenizer, max_tokens=8, max_turns=12, kwargs={"split": "train"}, sandbox=sandbox
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        processing_class=tokenizer,
        reward_funcs=episode_reward,
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": [str(seed) for seed in range(100_000)]}),
        args=GRPOConfig(
            output_dir=output,
            max_steps=int(steps),
            per_device_train_batch_size=32,
            num_generations=8,
            learning_rate=5e-4,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
    )
    trainer.train()
    trainer.save_model(output)
    rollout.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
