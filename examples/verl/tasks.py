"""Write a dataset for verl, with one row per task: python tasks.py FILE FIRST_SEED NUMBER."""

import sys

import pandas as pd


def row(seed: int, loop: str = "frozen_lake") -> dict:
    return {
        "prompt": [{"role": "user", "content": f"{loop} {seed}"}],  # required; the environment has its own prompt
        "agent_name": loop,
        "data_source": loop,
        "extra_info": {"seed": seed, "index": seed},
    }


if __name__ == "__main__":
    file, first, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pd.DataFrame([row(seed) for seed in range(first, first + number)]).to_parquet(file)
