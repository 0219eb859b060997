"""Train with agentkit and with TRL on the same tasks, model and machine, in turns, and compare the times of a step.

    python -m benchmarks.peers                  # about half an hour; writes docs/results/peers.md
    python -m benchmarks.peers --only single    # one part of the page: replaces it
    python -m benchmarks.peers --short          # two steps of each arm in one setting; writes nothing

Needs the extra `train`, TRL and matplotlib. All arms take turns in one process, each with one thread of torch for
generating and one for training.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Threads that wait actively would slow down the others.
os.environ |= {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false"}

from benchmarks.peers.page import CURVES, page, plot, problems, table
from benchmarks.peers.settings import ARMS, ASYNC, FLOOR, SETTINGS, SINGLE, SYNC, THREADS, Setting

RESULTS, PAGE_PATH = Path("benchmarks/results/peers.json"), Path("docs/results/peers.md")
MODELS = Path("benchmarks/results/peers")
CURVE = "curves"
CURVE_STEPS = 60
PARTS = (*SETTINGS, CURVE)


def measure(setting: Setting, rounds: int, steps: int) -> dict[str, Any]:
    """Let all arms of a setting train in turns: ``rounds`` times ``steps`` steps, the first of which is not counted."""
    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from benchmarks.peers import floor, models, ours, theirs

    torch.set_num_threads(THREADS)
    disable_progress_bar()
    set_verbosity_error()
    directory = MODELS / setting.model
    if not directory.exists():
        built = models.endless_model() if setting is SINGLE else models.calling_model()
        tokenizer = models.quickstart_tokenizer() if setting is SINGLE else models.calling_tokenizer()
        models.write(built, tokenizer, directory)
    arms = [arm for arm in ARMS if setting is SINGLE or arm != FLOOR]
    parts = {SYNC: ours, ASYNC: ours, FLOOR: floor}
    began, load, measured = time.monotonic(), os.getloadavg()[0], []
    for number in range(rounds):
        results: dict[str, Any] = {}
        for arm in arms if number % 2 == 0 else arms[::-1]:
            results[arm] = [asdict(step) for step in parts.get(arm, theirs).measure(setting, arm, MODELS, steps)]
            print(f"{setting.name}, round {number + 1}, {arm}: {results[arm][-1]}", flush=True)
        measured.append(results)
    minutes = (time.monotonic() - began) / 60
    machine = (
        f"Measured in {minutes:.0f} minutes on {os.cpu_count()} CPUs with a load of {load:.1f} at the beginning and "
        f"{os.getloadavg()[0]:.1f} at the end (a load above 2 is other work), Linux {platform.release()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}."
    )
    return {"machine": machine, "rounds": measured}


def curves() -> dict[str, list[float]]:
    """Train on FrozenLake with the example for TRL, without and with sandboxes; return the success of each step."""
    start, environment = MODELS / "start", {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    agentkit = [sys.executable, "-m", "agentkit", "run", "examples/frozen_lake.yaml", "steps=0", f"dir={start}"]
    if not start.exists():
        subprocess.run(agentkit, check=True)
    found = {}
    for sandbox in CURVES:
        example = ["examples/trl_rollout.py", str(start / "model"), str(CURVE_STEPS), str(MODELS / "trl"), sandbox]
        done = subprocess.run(
            [sys.executable, *example], check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        found[sandbox] = successes(done.stdout)
    return found


def successes(log: str) -> list[float]:
    """Return the success of each step from a log of the example."""
    entries = [line[line.index("{") :] for line in log.splitlines() if "'episodes/success'" in line]
    parsed = [ast.literal_eval(entry[: entry.rindex("}") + 1]) for entry in entries]
    return [float(entry["episodes/success"]) for entry in parsed]


def save(part: str, found: dict[str, Any]) -> None:
    """Replace a part of the results, and write the page."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = found
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE_PATH.write_text(page(known))
    if part == CURVE:
        plot(found, PAGE_PATH.parent / "peers_trl_frozen_lake.svg")
    print(f"written to {PAGE_PATH}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round; the first one is not counted")
    asked = parser.parse_args()
    wrong: list[str] = []
    for part in [asked.only] if asked.only else ["single"] if asked.short else PARTS:
        if part == CURVE:
            save(part, curves())
            continue
        found = measure(SETTINGS[part], 1, 2) if asked.short else measure(SETTINGS[part], asked.rounds, asked.steps)
        print(f"{found['machine']}\n\n{table(found['rounds'])}", flush=True)
        wrong += problems(SETTINGS[part], found["rounds"])
        if not asked.short:
            save(part, found)
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
