"""Start or join a Ray cluster, and reserve resources in it.

Invariant: a cluster that was started here ends with this process, in any way, and leaves neither processes nor files;
another cluster is left as it was found. All roles' resources are reserved together, or none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "120",
    # Actors run at the priority of the run, not at nice 15.
    "RAY_worker_niceness": "0",
    # A silent node is lost after 9 s instead of 62 s.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# Ray reads these variables when it is imported.

import ray  # noqa: E402
from ray._private.authentication.authentication_token_setup import (  # noqa: E402
    maybe_enable_token_auth_if_token_available,
)
from ray.util.placement_group import (  # noqa: E402
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from agentkit.config import RunConfig  # noqa: E402
from agentkit.errors import ConfigError, RoleError  # noqa: E402
from agentkit.trainers.cluster.placement import RolePlan, Slot, plan, reservations, shortage, total  # noqa: E402

logging.getLogger("ray").setLevel(logging.ERROR)
# By itself, Ray uses an existing token only for new clusters and for the address "auto".
maybe_enable_token_auth_if_token_available(warn_if_disabled=False)

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Attempts to start a local cluster: Ray gives up after 30 s, which a busy machine may exceed."""
RESERVE_S = 60.0
"""Seconds for resources that the cluster has, but that others may use."""

# Survives a SIGKILL of its parent. At the end of its input it kills all processes that have the cluster's directory
# among their arguments or open files, and removes the directory. Ray's agents would live on for more than a minute.
_GUARD = """
trap "" INT TERM HUP
read -r _
for attempt in 1 2 3; do
    for entry in /proc/[0-9]*; do
        pid=${entry#/proc/}
        [ "$pid" = "$$" ] || [ "$pid" = "$PPID" ] && continue
        case "$(tr '\\0' ' ' < "$entry/cmdline" 2> /dev/null; ls -l "$entry/fd" 2> /dev/null)" in
            *"$0"*) kill -s KILL "$pid" ;;
        esac
    done
    rm -rf -- "$0" && break
    sleep 1
done
"""


@contextlib.asynccontextmanager
async def reserve(config: RunConfig) -> AsyncIterator[dict[str, tuple[Slot, ...]]]:
    """Connect to the cluster of ``config`` and reserve the places of all roles; yield them by role.

    A connection that this process has already is used and kept.

    Raises:
        ConfigError: the cluster cannot be reached, or cannot have the resources; the message names what is missing.
    """
    assert config.cluster is not None
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():
            # The cores of one machine are shared, so they limit no plan.
            cpus = math.ceil(total(plan(config, gpus=False))["CPU"])
            address = config.cluster.address
            connecting = local_cluster(cpus) if address == "local" else joined_cluster(address)
            handler = signal.getsignal(signal.SIGTERM)
            await asyncio.to_thread(stack.enter_context, connecting)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)  # Ray's own one aborts
        gpus = any(node.get("GPU") for node in _nodes())
        async with reserve_plans(plan(config, gpus=gpus)) as slots:
            yield slots


@contextlib.asynccontextmanager
async def reserve_plans(plans: Sequence[RolePlan]) -> AsyncIterator[dict[str, tuple[Slot, ...]]]:
    """Reserve the places of these processes in the connected cluster, in one placement group per role.

    Processes of roles that are beside another role have places in its group.

    Raises:
        ConfigError: the cluster lacks resources, which is found at once, or others use them for ``RESERVE_S``.
    """
    if missing := shortage(plans, _nodes()):
        raise ConfigError(f"cluster: {missing}")
    groups: dict[str, PlacementGroup] = {}
    try:
        for role, places in reservations(plans).items():
            groups[role] = placement_group(places, strategy="PACK")
        await _wait(list(groups.values()), plans)
        yield {
            role.role: tuple(
                Slot(groups[role.beside or role.role], index, bundle) for index, bundle in enumerate(role.bundles)
            )
            for role in plans
        }
    finally:
        for group in groups.values():
            remove_placement_group(group)


def have_places(slots: Sequence[Slot]) -> bool:
    """Return whether the nodes of these places live. Ray gives the places of a lost node to others that have room."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return all(placement_group_table(slot.group)["bundles_to_node_id"].get(slot.bundle) in alive for slot in slots)


def _nodes() -> list[dict[str, float]]:
    """Return the total resources of each node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


async def _wait(groups: list[PlacementGroup], plans: Sequence[RolePlan]) -> None:
    deadline = time.monotonic() + RESERVE_S
    for group in groups:
        if not await asyncio.to_thread(group.wait, max(0.1, deadline - time.monotonic())):
            free = ray.available_resources()
            needs = ", ".join(
                f"{amount:g} {name} (free: {free.get(name, 0.0):g})" for name, amount in total(plans).items()
            )
            raise ConfigError(
                f"cluster: the run needs {needs}, and the cluster could not reserve it within {RESERVE_S:g} s: others "
                "use it, or no node has enough for one process; wait for them, add nodes, or ask for less"
            )


@contextlib.contextmanager
def local_cluster(cpus: int) -> Iterator[None]:
    """Start a cluster on this machine, with ``cpus`` logical CPUs, and end it with the context or with this
    process."""
    # Not the directory of temporary files of the user: the paths of sockets in it are limited to 107 bytes.
    directory = tempfile.mkdtemp(prefix="agentkit-", dir="/tmp")
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _init(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=directory)
                break
            except Exception as error:
                ray.shutdown()
                if attempt == ATTEMPTS:
                    raise RoleError(f"Ray could not be started on this machine: {error}") from error
                logger.warning("Ray did not start (%s); trying again", error)
        yield
    finally:
        ray.shutdown()
        guard.stdin.close()
        guard.wait()


@contextlib.contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """Connect to the cluster at ``address``, of which this machine is a node."""
    try:
        _init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address}: this machine is no node of a Ray cluster there ({error}); start it "
            "with `ray start`, also on this machine, with the same version of Ray and the same authentication token"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _init(**options: Any) -> None:
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
