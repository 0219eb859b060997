"""Train on Invoice, whose tools run in a sandbox, with the loop of TRL's GRPOTrainer: MODEL [STEPS] [OUTPUT].

MODEL is a model that calls tools, such as Qwen/Qwen3-0.6B.
"""

import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agentkit.integrations.trl import EnvironmentFactory


def main(path: str, steps: str = "100", output: str = "runs/trl") -> None:
    factory = EnvironmentFactory("Invoice-v0", kwargs={"lines": 1, "split": "train"}, sandbox="local")
    trainer = GRPOTrainer(
        model=path,
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        train_dataset=Dataset.from_dict({"seed": range(10_000)}),
        environment_factory=factory,
        args=GRPOConfig(
            output_dir=output,
            max_steps=int(steps),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=512,
            max_tool_calling_iterations=6,
            chat_template_kwargs={"enable_thinking": False},
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            report_to=[],
            save_strategy="no",
        ),
    )
    trainer.train()
    trainer.save_model(output)
    factory.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
