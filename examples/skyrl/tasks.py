"""Write a dataset for SkyRL, with one row per task: python tasks.py FILE FIRST_SEED NUMBER."""

import sys

import pandas as pd


def row(seed: int, env_class: str = "frozen_lake") -> dict:
    return {
        "prompt": [{"role": "user", "content": f"{env_class} {seed}"}],  # required; the environment has its own
        "env_class": env_class,
        "extra_info": {"seed": seed},
    }


if __name__ == "__main__":
    file, first, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pd.DataFrame([row(seed) for seed in range(first, first + number)]).to_parquet(file)
