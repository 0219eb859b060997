"""The sandboxes of a run or of a sandbox server: their hosts, states and failures, and the episodes that they served.

Invariant: a query only reads, and what a run of an older version did not record is None. Sandboxes of a run that
neither served a recorded episode nor failed are counted, but not listed. A server records its present sandboxes and
what happens to them (``agentkit.sandboxes.server.records``); it knows neither episodes nor the spares and standbys of
its clients.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentkit import records
from agentkit.dashboard.queries import read_lines
from agentkit.errors import LOSS_REASONS, RunDirectoryError
from agentkit.jsonl import finite
from agentkit.run_directory import RunDirectory

_BOXES = 500
_EPISODES = 30
"""Episodes that are listed for each sandbox: the last ones."""
_HISTORY = 1000
_LONGEST = 300

Record = Mapping[str, Any]

_STATES = ("busy", "idle", "creating", "degraded", "spares", "standbys", "breakers_open")
_INCIDENTS = {
    "oom": ("memory", "the memory limit killed a process in it"),
    "timeout": ("timeout", "a command took longer than its time limit, and was killed"),
    "taint": ("taint", LOSS_REASONS["tainted"]),
    "died": ("kill", "its main process ended"),
}
"""Kind and meaning of what a server records of its sandboxes."""
_KINDS = {
    "oom": "memory",
    "tainted": "taint",
    "hung": "timeout",
    "slow": "timeout",
    "exited": "kill",
    "agent_dead": "kill",
    "removed": "kill",
    "frozen": "kill",
    "engine_down": "host",
}
"""Kind of each cause of a loss, see ``agentkit.errors.LOSS_REASONS``."""


def sandboxes(path: Path) -> dict[str, Any]:
    """Return the sandboxes of a run, or of a sandbox server.

    Returns:
        ``server``: whether it is a server; ``state`` (see ``last_state``), or the ``time`` and the number of present
        sandboxes by ``states``; ``totals`` (see ``totals``); ``hosts``, ``boxes`` and ``history`` (see the
        functions of these names); ``number`` of all sandboxes of which ``boxes`` are the last.

    Raises:
        RunDirectoryError: the run cannot be read.
    """
    run = RunDirectory.open(path)
    events = [event for event in read_lines(run.events_file) if isinstance(event.get("time"), (int, float))]
    lines = sorted(
        (line for line in read_lines(run.metrics_file) if "sandbox/created" in line), key=lambda line: line["step"]
    )
    served = _served(run.episodes_file)
    listed = failed = boxes(events, served)
    state = last_state(lines)
    if (now := present(run.path)) is not None:
        lines, listed = [*lines, now["metrics"]], with_present(failed, now["sandboxes"])
        states = Counter(str(one["state"]) for one in now["sandboxes"])
        state = {"time": now["time"], "states": states}
    return finite(
        {
            "server": now is not None,
            "state": state,
            "totals": totals(lines),
            "hosts": hosts(events, lines, failed),
            "boxes": listed[:_BOXES],
            "number": len(listed),
            "history": history(events)[-_HISTORY:],
        }
    )


def last_state(lines: Sequence[Record]) -> dict[str, Any] | None:
    """Return the numbers of sandboxes by state at the end of the last step; None before the first one.

    Args:
        lines: the metrics of the steps in order, with names as in docs/sandboxes/monitoring.md.

    Returns:
        ``step``; ``busy``, ``idle``, ``creating``, ``degraded``, ``spares``, ``standbys`` and ``breakers_open``.
    """
    if not lines:
        return None
    return {"step": lines[-1]["step"], **{name: lines[-1].get(f"sandbox/{name}") for name in _STATES}}


def totals(lines: Sequence[Record]) -> dict[str, Any]:
    """Return what happened in all steps together.

    Returns:
        ``created``, ``create_failures``, ``removed``, ``recoveries``, ``lost_s``, ``hedges`` and ``hedges_won``;
        ``oom``, ``timeout``, ``taint`` and ``died``, which only servers record;
        ``removed_by`` reason, ``recoveries_after`` cause and ``recovered_by`` means, each a number by name; and
        ``longest_s``, the longest recovery, or None.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for name, value in line.items():
            if name.startswith("sandbox/") and isinstance(value, (int, float)):
                total[name] += value

    def by(prefix: str) -> dict[str, float]:
        return {name[len(prefix) :]: number for name, number in sorted(total.items()) if name.startswith(prefix)}

    names = ("created", "create_failures", "removed", "recoveries", "lost_s", "hedges", "hedges_won", *_INCIDENTS)
    return {
        **{name: total[f"sandbox/{name}"] for name in names},
        "removed_by": by("sandbox/removed/"),
        "recoveries_after": by("sandbox/recoveries/"),
        "recovered_by": by("sandbox/recovered_by/"),
        "longest_s": max((line.get("sandbox/recovery_s_max") or 0.0 for line in lines), default=0.0) or None,
    }


def boxes(events: Sequence[Record], served: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each sandbox that served an episode or failed, the last one first.

    Args:
        events: the events of the run.
        served: for each sandbox ``host``, ``sandbox``, ``number`` and ids of ``episodes``, ``first`` and ``last``: when
            it began to serve the first, and ended to serve the last one.

    Returns:
        The fields of ``served``; ``state``: ``used``, or ``failed`` with ``cause``, its ``kind`` and ``meaning``,
        ``in_use`` (None if it is unknown) and the time ``failed_at``; ``recovered``: number of its environments that
        continued elsewhere, ``recovered_by``: the same by means; ``recovery_s``: the longest of these recoveries, or
        None.
    """
    found: dict[str, dict[str, Any]] = {}

    def box(host: Any, sandbox: Any) -> dict[str, Any]:
        new = {"host": str(host), "sandbox": str(sandbox), "number": 0, "episodes": [], "first": None, "last": None}
        more = {"state": "used", "cause": "", "kind": "", "in_use": None, "failed_at": None}
        return found.setdefault(str(sandbox), new | more | {"recovered": 0, "recovered_by": {}, "recovery_s": None})

    for one in served:
        box(one["host"], one["sandbox"]).update(one)
    for event in events:
        if event["event"] not in ("sandbox_lost", "sandbox_recovered"):
            continue
        one, cause = box(event.get("host"), event.get("sandbox")), str(event.get("cause"))
        if event["event"] == "sandbox_lost":
            failure = {"state": "failed", "cause": cause[:_LONGEST], "kind": kind_of(cause)}
            one.update(failure | {"in_use": event.get("in_use"), "failed_at": event["time"]})
        else:
            number, means = _count(event), str(event.get("by"))
            one["recovered"] += number
            one["recovered_by"][means] = one["recovered_by"].get(means, 0) + number
            one["recovery_s"] = max(one["recovery_s"] or 0.0, _seconds(event))
            if one["state"] == "used":  # an environment failed in it, and it may go on
                one.update({"cause": cause[:_LONGEST], "kind": kind_of(cause)})
    for one in found.values():
        one["meaning"] = LOSS_REASONS.get(one["cause"], "")
    return sorted(found.values(), key=lambda one: max(one["failed_at"] or 0.0, one["last"] or 0.0), reverse=True)


def present(path: Path) -> dict[str, Any] | None:
    """Return ``time``, ``sandboxes`` and ``metrics`` (since the last line) of a server's last look; None for a run.

    Raises:
        RunDirectoryError: the file is damaged.
    """
    file = path / "sandboxes.json"
    try:
        found = json.loads(file.read_bytes())
        rows, metrics = [dict(one) for one in found["sandboxes"]], dict(found["metrics"])
        return {"time": float(found["time"]), "sandboxes": rows, "metrics": metrics}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error


def with_present(failed: Sequence[Record], now: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the sandboxes of a server: the present ones, the newest first, then those that failed and are gone.

    Args:
        failed: sandboxes that failed or were restarted, see ``boxes``.
        now: the present ones, as the server recorded them.

    Returns:
        The fields of ``boxes``; ``state`` is that of the engine, such as ``running``, or ``failed``; also ``tenant``,
        ``created`` (a time), ``cpu`` (processors in use), ``memory``, ``memory_limit`` (bytes) and
        ``processes``; None: unknown.
    """
    known = {one["sandbox"]: one for one in failed}
    new = {"number": 0, "episodes": [], "first": None, "last": None, "cause": "", "kind": "", "meaning": ""}
    new |= {"in_use": None, "failed_at": None, "recovered": 0, "recovered_by": {}, "recovery_s": None, "state": ""}
    unknown = dict.fromkeys(("tenant", "created", "cpu", "memory", "memory_limit", "processes"))
    listed = []
    for one in sorted(now, key=lambda one: one.get("created") or 0.0, reverse=True):
        before = known.pop(one["sandbox"], new)
        lost = before["state"] == "failed" and not before["recovered"]
        listed.append(
            {**before, **unknown, **one, "state": "failed" if lost else one["state"], "first": one.get("created")}
        )
    return [*listed, *({**unknown, **one} for one in failed if one["sandbox"] in known)]


def hosts(events: Sequence[Record], lines: Sequence[Record], listed: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each host of sandboxes.

    Args:
        events: the events of the run.
        lines: the metrics of the steps in order.
        listed: sandboxes, see ``boxes``.

    Returns:
        ``host``; ``state``, ``reason`` and ``since`` of its last change, or ``up``; ``sandboxes`` and shares of ``cpu``
        and ``memory`` in use at the end of the last step, or None; ``served``: sandboxes that served an episode,
        ``failed``: sandboxes that failed, ``recovered``: environments in them that continued elsewhere, ``kinds``: the
        failures by kind.
    """
    found: dict[str, dict[str, Any]] = {}

    def host(name: str) -> dict[str, Any]:
        present = {
            "host": name,
            "state": "up",
            "reason": "",
            "since": None,
            "sandboxes": None,
            "cpu": None,
            "memory": None,
        }
        return found.setdefault(name, present | {"served": 0, "failed": 0, "recovered": 0, "kinds": {}})

    for name, value in (lines[-1] if lines else {}).items():
        place, _, what = name.removeprefix("sandbox/host/").rpartition("/")
        if name.startswith("sandbox/host/") and what in ("sandboxes", "cpu", "memory"):
            host(place)[what] = value
    for event in events:
        if event["event"] == "start":  # the next process begins to watch
            for one in found.values():
                one.update({"state": "up", "reason": "", "since": None})
        if event["event"] == "sandbox_host":
            change = {"state": str(event.get("state")), "reason": str(event.get("reason"))[:_LONGEST]}
            host(str(event.get("host"))).update(change | {"since": event["time"]})
    for box in listed:
        one = host(box["host"])
        one["served"] += box["number"] > 0
        one["failed"] += box["state"] == "failed"
        one["recovered"] += box["recovered"]
        if box["state"] == "failed":
            one["kinds"][box["kind"]] = one["kinds"].get(box["kind"], 0) + 1
    return sorted(found.values(), key=lambda one: one["host"])


def history(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Return what happened to sandboxes, their hosts and environments, in order.

    Returns:
        ``time``; ``what``: ``failed``, ``recovered``, ``host``, ``not created``, ``environment`` (recovered outside of
        a sandbox), ``omitted``, or, of servers, ``created``, ``removed``, ``oom``, ``timeout``, ``taint``, ``died``,
        ``paused``, ``resumed`` or ``adopted``; ``kind`` of the cause: ``memory``, ``timeout``, ``taint``, ``kill``,
        ``host`` or ``other``; ``host`` and ``sandbox``, or empty; ``text``; ``meaning`` of the cause, or empty;
        ``episodes`` and ``seconds`` of a recovery, or None.
    """
    return [row for event in events if (row := _row(event)) is not None]


def kind_of(cause: str) -> str:
    """Return the kind of a cause: of ``LOSS_REASONS``, the class of an error, or a text such as ``memory: …``."""
    if "Timeout" in cause or cause.startswith("canary"):
        return "timeout"
    return _KINDS.get(cause, "memory" if cause.startswith("memory") else "other")


def _row(event: Record) -> dict[str, Any] | None:
    cause = str(event.get("cause", ""))
    row = {"time": event["time"], "host": str(event.get("host", "")), "sandbox": str(event.get("sandbox", ""))}
    row |= {"kind": kind_of(cause), "meaning": LOSS_REASONS.get(cause, ""), "episodes": None, "seconds": None}
    recovery = {"episodes": _count(event), "seconds": _seconds(event)}
    match event["event"]:
        case "sandbox_lost":
            more = {"what": "failed", "text": cause + (" while idle" if event.get("in_use") is False else "")}
        case "sandbox_recovered":
            more = {"what": "recovered", "text": f"by {event.get('by')}, after {cause}", **recovery}
        case "env_recovered":
            text = f"by {event.get('by')}, after {cause}: {event.get('error', '')}"
            more = {"what": "environment", "text": text, **recovery}
        case "sandbox_host":
            change = f"{event.get('before')} → {event.get('state')}: {event.get('reason', '')}".removesuffix(": ")
            more = {"what": "host", "kind": "host", "text": change}
        case "sandbox_not_created":
            more = {"what": "not created", "kind": "host", "text": str(event.get("error"))}
        case "sandbox_created":
            more = {"what": "created", "text": f"for {event.get('tenant')}", "seconds": _seconds(event)}
        case "sandbox_removed":
            more = {"what": "removed", "text": cause}
        case "sandbox_incident":
            what = str(event.get("what"))
            kind, meaning = _INCIDENTS.get(what, ("other", ""))
            more = {"what": what[:_LONGEST], "text": cause, "kind": kind, "meaning": meaning}
        case "sandbox_events_omitted":
            numbers = [f"{number} {name}" for name, number in event.items() if name.startswith(("sandbox_", "env_"))]
            more = {"what": "omitted", "kind": "other", "text": f"too many to record: {', '.join(numbers)}"}
        case _:
            return None
    return row | more | {"text": more["text"][:_LONGEST]}


def _count(event: Record) -> int:
    value = event.get("episodes", 0)
    return value if isinstance(value, int) else 0


def _seconds(event: Record) -> float:
    value = event.get("seconds")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _served(file: Path) -> list[dict[str, Any]]:
    """Return the argument ``served`` of ``boxes``."""
    if not file.is_file():
        return []
    with records.reading(file) as db:
        if "sandboxes" in records.missing_columns(db):
            return []
        rows = db.execute(
            "select json_extract(value, '$[0]') as host, json_extract(value, '$[1]') as sandbox, count(*), "
            "min(ended_at - duration_s), max(ended_at), group_concat(episodes.id) "
            "from episodes, json_each(sandboxes) where sandboxes is not null group by host, sandbox"
        ).fetchall()
    return [
        {
            "host": str(host),
            "sandbox": str(sandbox),
            "number": number,
            "first": first,
            "last": last,
            "episodes": sorted(map(int, ids.split(",")))[-_EPISODES:],
        }
        for host, sandbox, number, first, last, ids in rows
    ]
