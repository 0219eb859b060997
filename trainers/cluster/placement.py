"""What each process of the roles needs, and whether a cluster has it (pure).

Invariant: the resources of a process come from the configuration alone, except that ``model.device: auto`` asks for
GPUs where the cluster has some. A shortage is described by the missing resource and the settings that ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentkit.config import RunConfig

Resources = Mapping[str, float]
"""Amounts by Ray's names: ``CPU``, ``GPU``, and custom ones."""


class Slot(NamedTuple):
    """The reserved place of one process: bundle number ``bundle`` of a Ray placement group."""

    group: Any
    bundle: int
    resources: Resources


class RolePlan(NamedTuple):
    """The processes of a role: one entry of ``bundles`` each, with the resources that it needs on one node."""

    role: str
    bundles: tuple[Resources, ...]
    settings: str
    """The settings that determine ``bundles``."""
    beside: str | None = None
    """A role whose processes, one by one, have the places of this role's."""


def plan(config: RunConfig, *, gpus: bool) -> tuple[RolePlan, ...]:
    """Return the processes that the roles of ``config`` need; ``gpus``: whether the cluster has any."""
    device, learner, engine = config.model.device, config.learner, config.engine
    on_gpu = device.startswith("cuda") or (device == "auto" and gpus)

    colocated = config.cluster is not None and config.cluster.colocate

    def bundle(threads: int | None, num_gpus: float, resources: Resources) -> Resources:
        return {"CPU": float(threads or 1), **({"GPU": float(num_gpus)} if on_gpu else {}), **resources}

    rank = bundle(learner.threads, 0.5 if colocated else 1, learner.resources)
    replica = bundle(engine.threads, 0.5 if colocated else engine.tensor_parallel, engine.resources)
    return (
        RolePlan("learner", (rank,) * learner.ranks, "learner.ranks"),
        RolePlan("engine", (replica,) * engine.replicas, "engine.replicas", "learner" if colocated else None),
    )


def reservations(plans: Sequence[RolePlan]) -> dict[str, list[dict[str, float]]]:
    """Return what is reserved, by the role that owns the places: of each place, the sum for all processes there."""
    places = {role.role: [dict(bundle) for bundle in role.bundles] for role in plans if role.beside is None}
    for role in plans:
        if role.beside is not None:
            for place, bundle in zip(places[role.beside], role.bundles, strict=True):
                for name, amount in bundle.items():
                    place[name] = place.get(name, 0.0) + amount
    return places


def total(plans: Sequence[RolePlan]) -> dict[str, float]:
    """Return the sum of all resources."""
    sums: dict[str, float] = {}
    for role in plans:
        for bundle in role.bundles:
            for name, amount in bundle.items():
                sums[name] = sums.get(name, 0.0) + amount
    return sums


def shortage(plans: Sequence[RolePlan], nodes: Sequence[Resources]) -> str | None:
    """Return what the cluster lacks for ``plans``, as a sentence with the remedy, or None.

    Args:
        plans: processes of all roles.
        nodes: total resources of each node.
    """
    for name, needed in total(plans).items():
        present = sum(node.get(name, 0.0) for node in nodes)
        if needed > present:
            parts = [
                f"{role.role} {len(role.bundles)} × {role.bundles[0][name]:g}"
                for role in plans
                if role.bundles and role.bundles[0].get(name)
            ]
            return (
                f"the run needs {needed:g} {name} ({', '.join(parts)}), and the cluster has {present:g} on "
                f"{len(nodes)} node(s): add nodes, or lower {_settings(plans, name)}"
            )
    for role, places in reservations(plans).items():
        for bundle in places:
            if not any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes):
                needs = ", ".join(f"{amount:g} {name}" for name, amount in bundle.items())
                return (
                    f"one process of the {role} needs {needs} on one node, and no node of the cluster has that: "
                    f"add such a node, or lower {role}.threads or {role}.resources"
                )
    return None


def _settings(plans: Sequence[RolePlan], name: str) -> str:
    using = [role for role in plans if any(bundle.get(name) for bundle in role.bundles)]
    keys = [f"{role.role}.{'threads' if name == 'CPU' else 'resources'}" for role in using]
    keys += [role.settings for role in using if len(role.bundles) > 1]
    return " or ".join(keys)
