"""The documentation page of the scale benchmark (pure), from results that are saved as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.sandbox.figures import p

OPERATIONS = ("create", "acquire", "exec", "exec of a shell", "write 4 kB")


def latencies(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a table of the durations of operations, in milliseconds."""
    lines = ["| operation | number | p50 | p95 | p99 |", "|---|---|---|---|---|"]
    for name in OPERATIONS:
        if times := seconds.get(name):
            shown = " | ".join(f"{1e3 * p(list(times), percent):,.0f} ms" for percent in (50, 95, 99))
            lines.append(f"| {name} | {len(times):,} | {shown} |")
    return "\n".join(lines)


def processes(use: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table of what processes used."""
    lines = ["| process | memory | descriptors | processor |", "|---|---|---|---|"]
    for name, one in use.items():
        memory = f"{int(one['memory']) >> 20} MiB"
        lines.append(f"| {name} | {memory} | {one['descriptors']:.0f} | {100 * one['processor']:.0f} % |")
    return "\n".join(lines)


def servers(measured: Mapping[str, Any]) -> str:
    """Return what was measured on real servers (``Measured``)."""
    recovered = measured["recovered"]
    return SERVERS.format(
        **{**measured, "closed": f"{measured['closed']:.1f}"},
        latencies=latencies(measured["seconds"]),
        processes=processes(measured["use"]),
        rate=measured["sandboxes"] / measured["filled"],
        balance=" and ".join(f"{number:,}" for number in measured["per_host"].values()),
        first=min(recovered),
        half=p(recovered, 50),
        last=max(recovered),
    )


def simulation(report: Mapping[str, Any]) -> str:
    """Return what a simulation reported (``Report``)."""
    faults = "\n".join(f"| {kind} | {number:,} |" for kind, number in sorted(report["faults"].items()))
    return SIMULATION.format(**{**report, "faults": faults, "imbalance": 100 * report["imbalance"]})


def page(results: Mapping[str, Any]) -> str:
    """Return the documentation page. ``results``: ``servers`` and ``simulation``, as far as they were measured."""
    parts = {"servers": servers, "simulation": simulation}
    shown = {name: show(results[name]) if name in results else "Not measured yet.\n" for name, show in parts.items()}
    return PAGE.format(**shown)


SERVERS = """\
{sandboxes} Docker sandboxes in use at one time, on two servers of one machine with {processors} processors, which other
programs used too (a load of {machine_load:.0f}): the times are upper bounds. The sandboxes were created in
{filled:.0f} s ({rate:.1f} per second) and then used for {loaded:.0f} s. Meanwhile {replaced} of them were replaced.

{latencies}

`acquire` is the time in which a user gets another sandbox under load; `exec` starts one program.

- {lost} sandboxes were lost before the kill, {wrong} commands found a wrong state, and {left} sandboxes were left.
- The servers had {balance} sandboxes, with those that are kept ready.
- One server was killed (SIGKILL) with {killed_with} sandboxes in use, and every user ran a command at once. The first
  had its result after {first:.1f} s, half of them after {half:.1f} s and the last after {last:.1f} s. The creation of
  the replacements determines the time. {also_lost} sandboxes of the other server were lost meanwhile.
- At the end, the pool removed its sandboxes in {closed} s.

{processes}

Sandboxes are pinged every {ping_interval:g} s, with a timeout of {ping_timeout:g} s. In a run with the default, every
2 s with a timeout of 0.9 s, and a load of 27, half of the commands took more than 4 s. While the containers of the
killed server ended, 65 sandboxes of the other server were taken for hung, and the last user continued after 189 s. No
sandbox was lost before the kill and none was left in that run either.
"""

SIMULATION = """\
{hosts:,} hosts and {sandboxes:,} users, each with a sandbox that replays after a loss. At most {in_use:,} sandboxes
were in use at one time, and {most:,} existed.

- {episodes:,} episodes of {actions} commands and a check. None was lost or had another result than without faults.
- {recoveries:,} recoveries; the slowest action took {slowest:.1f} s with its recoveries.
- No sandbox was left, and no host exceeded its limit.
- The load of a host differed from the mean by at most {imbalance:.1f} % of its limit.
- {virtual:.0f} virtual seconds took {seconds:.0f} s of processor time in one process. Sandboxes were pinged every
  {ping_interval:g} s.

| failure | number |
|---|---|
{faults}

A small form, with five hosts, runs in CI over many seeds.
"""

PAGE = """# Scale

`python -m benchmarks.scale` writes this page. `--only servers` and `--only simulation` replace one part of it.

## Two real servers

A pool of real sandboxes on two real servers. The phases are separate: all users acquire a sandbox; they run commands
and write files while one after another replaces its sandbox; one server is killed; the pool is closed.

{servers}
## Simulation

Many hosts in virtual time: the pool, the supervisor, the client and the servers are the real ones, the network and the
engines are simulated. Hosts crash, fall silent, drain, restart and come under memory pressure; sandboxes die, freeze
and hang. A simulation fails if an episode is lost or has another result than without faults, if a sandbox is left on a
host, if a host exceeds its limit, or if the loads of hosts differ by more than 35 % of their limit; up to 1,000
sandboxes, also if callers are served out of order.

{simulation}
## Decisions of a pool

Processor time of one process, in microseconds per sandbox, before and after changes of state keep their order instead
of sorting all slots (the machine was overloaded):

| operation | 1,000 sandboxes, before | after |
|---|---|---|
| acquire a warm sandbox | 666 | 313 |
| 20 s of health checks | 3,654 | 2,208 |

The search for slow sandboxes compared each with all others; it now sorts the latencies once in each round of pings.
"""
