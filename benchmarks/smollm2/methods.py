"""The methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """Settings beside those of the example."""

    title: str
    settings: list[str]


_ASYPPO = ["algorithm.advantage=gae", "critic.count=2", "critic.layers=2", "critic.hidden_size=64"]
METHODS = {
    "grpo": Method("GRPO, LoRA (the example)", []),
    "full": Method("GRPO, all weights", ["model.lora=null", "learner.lr=1e-5"]),
    "asyppo": Method("AsyPPO, LoRA", [*_ASYPPO, "critic.lr=2e-3", "critic.updates=2", "critic.warmup_steps=4"]),
    "coupled_credit": Method("GRPO with coupled credit, LoRA", ["algorithm.credit=coupled"]),
}
