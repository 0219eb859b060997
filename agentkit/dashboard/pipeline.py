"""What the learner, the engines, the environments and the gate of a run did, and what they waited for.

Invariant: a query only reads, and what a run of an older version did not record is None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentkit import records
from agentkit.dashboard.queries import read_lines, read_settings
from agentkit.jsonl import finite
from agentkit.run_directory import RunDirectory

RECENT = 20
"""Steps of the summary: the last ones."""
_LITTLE = 0.2
"""Share of its time up to which the learner is said to set the pace."""
_EVENTS = 200
_GROUPS = 50
_REASONS = 100
_LONGEST_REASON = 300

Record = Mapping[str, Any]
Times = NDArray[np.float64]


def pipeline(path: Path) -> dict[str, Any]:
    """Return what the parts of a run did, and what they waited for.

    Returns:
        ``steps``: columns of ``step_times`` and ``activity``; ``recent`` (see ``shares``) and its ``verdict``; ``gate``
        (see ``gate_state``); ``staleness``: the share of the groups by age; ``endings`` (see ``episode_endings``);
        ``groups`` (see ``equal_groups``); ``engines``, ``roles``, ``nodes`` and ``events`` (see ``described``).

    Raises:
        RunDirectoryError: the run cannot be read.
    """
    run, settings = RunDirectory.open(path), read_settings(path)
    events = [event for event in read_lines(run.events_file) if _is_number(event.get("time"))]
    lines = [line for line in read_lines(run.metrics_file) if _is_number(line.get("time/step"))]
    lines.sort(key=lambda line: line["step"])
    steps = step_times(lines)
    episodes, completed = _intervals(run.episodes_file)
    steps |= activity(steps, episodes, completed)
    session = _session(events)
    engines, roles = engine_states(lines, session), role_states(session)
    recent = shares(steps, lines, [event["time"] for event in events if event["event"] == "start"])
    return finite(
        {
            "steps": steps,
            "recent": recent,
            "verdict": verdict(recent),
            "gate": gate_state(settings, lines),
            "staleness": staleness(lines),
            "endings": episode_endings(run.episodes_file),
            "groups": equal_groups(run.episodes_file),
            "engines": engines,
            "roles": roles,
            "nodes": nodes(roles, lines),
            "events": described(events)[-_EVENTS:],
        }
    )


# --- time


def step_times(lines: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the times of the learner in each step, in seconds since the epoch.

    Returns:
        Columns ``step``; ``began``: it waits for a batch; ``got``: it trains; ``trained``: it publishes the weights;
        ``ended``.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("step", "began", "got", "trained", "ended")}
    for line in lines:
        began = line["time"] - line["time/step"]
        got = began + (line.get("time/wait") or 0.0)
        times = (line["step"], began, got, got + (line.get("time/train") or 0.0), line["time"])
        for column, value in zip(columns.values(), times, strict=True):
            column.append(value)
    return columns


def activity(steps: Mapping[str, Sequence[Any]], episodes: Times, completed: Times) -> dict[str, list[Any]]:
    """Return what happened on average at each moment of a step, while the learner waited and trained.

    An episode counts for its whole duration with the shares of its time, because the times of its turns are not
    recorded.

    Args:
        steps: see ``step_times``.
        episodes: ``[n, 4]``: when each episode ended, its duration, and seconds of generation and of the environment.
        completed: ``[n, 2]``: step of each group that was trained on, and when its last episode ended.

    Returns:
        Columns ``generating``, ``environment`` and ``waiting``: the number of episodes that do so (waiting: for
        neither of them, but for their turn in this process); ``ready``: the number of complete groups that wait for
        the learner; ``ready_s``: the seconds for which those of this step's batch did. None where it is unknown.
    """
    names = ("generating", "environment", "waiting", "ready", "ready_s")
    count = len(steps["step"])
    if not count or not len(episodes):
        return {name: [None] * count for name in names}
    began, got, ended = (np.array(steps[name], np.float64) for name in ("began", "got", "ended"))
    ends, durations = episodes[:, 0], episodes[:, 1]
    starts = ends - durations
    generating, environment = np.minimum(episodes[:, 2:4].T, durations)
    waiting = np.maximum(durations - generating - environment, 0.0)
    columns = {
        name: mean_number(starts, ends, seconds / durations, began, ended)
        for name, seconds in zip(names, (generating, environment, waiting), strict=False)
    }
    place = {step: index for index, step in enumerate(steps["step"])}
    known = np.array([[place[step], end] for step, end in completed if step in place]).reshape(-1, 2)
    index = known[:, 0].astype(int)
    taken = np.maximum(got[index], known[:, 1])
    columns["ready"] = mean_number(known[:, 1], taken, np.ones(len(known)), began, ended)
    sums = np.bincount(index, taken - known[:, 1], minlength=count)
    numbers = np.bincount(index, minlength=count)
    columns["ready_s"] = np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)
    seen = (ended > starts.min()) & (began < max(ends.max(), taken.max(initial=-np.inf)))  # an older part has no times
    return {
        name: [float(one) if here else None for one, here in zip(columns[name], seen, strict=True)] for name in names
    }


def mean_number(starts: Times, ends: Times, weights: Times, begins: Times, until: Times) -> Times:
    """Return the mean, over each of some spans of time, of the sum of the weights of the intervals that contain a
    moment.

    Args:
        starts, ends, weights: of each interval, ``[n]``.
        begins, until: of each span, ``[m]``.

    Returns:
        ``[m]``; 0 for spans without length.
    """
    origin = begins.min()  # near 0, sums lose no digits

    def ramp(points: Times, at: Times) -> Times:
        order = np.argsort(points)
        points, some = points[order] - origin, weights[order]
        sums = np.concatenate([[0.0], np.cumsum(some)]), np.concatenate([[0.0], np.cumsum(some * points)])
        before = np.searchsorted(points, at - origin)
        return (at - origin) * sums[0][before] - sums[1][before]

    total = [ramp(starts, at) - ramp(ends, at) for at in (begins, until)]
    seconds = until - begins
    return np.where(seconds > 0, np.maximum(total[1] - total[0], 0.0) / np.where(seconds > 0, seconds, 1.0), 0.0)


def shares(steps: Mapping[str, Sequence[Any]], lines: Sequence[Record], starts: Sequence[float]) -> dict[str, Any]:
    """Return what the parts did in the last ``RECENT`` steps.

    Args:
        steps: see ``step_times`` and ``activity``.
        lines: the metrics of the same steps.
        starts: when the run was started and resumed.

    Returns:
        ``steps``: their number; ``learner``: seconds of ``waiting`` for episodes, ``training``, ``publishing`` and
        ``other`` (evaluations and checkpoints between the steps); ``episodes``: mean number that are ``generating``,
        in the ``environment`` and ``waiting``, or None; ``engines``: mean share of the time in which they computed, or
        None; ``ready``: mean number of complete groups, or None.
    """
    first = max(0, len(lines) - RECENT)
    last = {name: list(column[first:]) for name, column in steps.items()}
    gaps = [
        begins - ended
        for ended, begins in zip(last["ended"], last["began"][1:], strict=False)
        if begins > ended and not any(ended < start <= begins for start in starts)
    ]
    learner = {
        name: sum(end - begin for begin, end in zip(last[before], last[after], strict=True))
        for name, before, after in (
            ("waiting", "began", "got"),
            ("training", "got", "trained"),
            ("publishing", "trained", "ended"),
        )
    }
    seconds = [end - begin for begin, end in zip(last["began"], last["ended"], strict=True)]
    parts = {name: _mean(last[name], seconds) for name in ("generating", "environment", "waiting")}
    return {
        "steps": len(seconds),
        "learner": learner | {"other": sum(gaps)},
        "episodes": None if None in parts.values() else parts,
        "engines": _mean([line.get("engine/busy_share") for line in lines[first:]], seconds),
        "ready": _mean(last["ready"], seconds),
    }


def verdict(recent: Record) -> str:
    """Return in one sentence who waits for whom, according to ``shares``; empty before the first step."""
    learner = recent["learner"]
    seconds = sum(learner[name] for name in ("waiting", "training", "publishing"))
    if not seconds:
        return ""
    waits = learner["waiting"] / seconds
    text = f"Within steps, the learner waits for episodes in {100 * waits:.0f} % of its time"
    if waits < _LITTLE:
        ready = recent["ready"]
        return f"{text}, so it sets the pace" + (
            f"; {ready:.1f} complete groups wait for it on average." if ready else "."
        )
    if recent["episodes"] is None or not sum(recent["episodes"].values()):
        return f"{text}."
    name, number = max(recent["episodes"].items(), key=lambda one: one[1])
    share = 100 * number / sum(recent["episodes"].values())
    part = {
        "generating": "generation",
        "environment": "their environments",
        "waiting": "neither generation nor environment",
    }[name]
    return f"{text}; episodes spend {share:.0f} % of theirs in {part}."


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _intervals(file: Path) -> tuple[Times, Times]:
    """Return the arguments ``episodes`` and ``completed`` of ``activity``."""
    nothing = np.zeros((0, 4)), np.zeros((0, 2))
    if not file.is_file():
        return nothing
    with records.reading(file) as db:
        if "ended_at" in records.missing_columns(db):
            return nothing
        episodes = db.execute(
            "select ended_at, duration_s, coalesce(generate_s, 0), coalesce(env_s, 0) from episodes "
            "where ended_at is not null and duration_s > 0"
        ).fetchall()
        completed = db.execute(
            "select step, max(ended_at) from episodes where ending = 'trained' and ended_at is not null "
            "group by step, group_id"
        ).fetchall()
    return np.array(episodes, np.float64).reshape(-1, 4), np.array(completed, np.float64).reshape(-1, 2)


# --- gate


def gate_state(settings: Record, lines: Sequence[Record]) -> dict[str, Any]:
    """Return the limits of the gate, and what was in it at the end of the last step.

    Returns:
        ``policy``, ``async_ratio``, ``batch`` (groups), ``extra``; ``capacity``: groups that may be under way while
        the learner trains, and ``max_staleness`` (see ``agentkit.trainers.rollout.gate``), or None; ``step``,
        ``running`` and ``ready``: groups, or None.
    """
    from agentkit.trainers.rollout.gate import Gate

    values: list[Any] = [settings.get(f"rollout.{name}") for name in ("groups", "async_ratio", "extra_groups")]
    policy, last = settings.get("gate.policy"), lines[-1] if lines else {}
    try:
        gate = Gate(values[0], values[1], extra=values[2] or 0)
        limits = {"capacity": gate.capacity, "max_staleness": gate.max_staleness}
    except (TypeError, ValueError, OverflowError):  # settings of another version, or damaged
        limits = {"capacity": None, "max_staleness": None}
    return {
        "policy": policy,
        **dict(zip(("batch", "async_ratio", "extra"), values, strict=True)),
        **limits,
        "step": last.get("step"),
        "running": last.get("gate/running"),
        "ready": last.get("gate/ready"),
    }


def staleness(lines: Sequence[Record]) -> list[float]:
    """Return the share of the groups that were trained on by their age in versions, over all steps."""
    known = [line for line in lines if "staleness/mean" in line]
    prefix = "staleness/hist_"
    ages = {int(name[len(prefix) :]) for line in known for name in line if name.startswith(prefix)}
    return [
        sum(line.get(f"{prefix}{age}") or 0.0 for line in known) / len(known)
        for age in range(max(ages, default=-1) + 1)
    ]


def episode_endings(file: Path) -> list[dict[str, Any]]:
    """Return how the episodes of the training ended, by ending and reason, the most frequent first.

    Returns:
        ``ending``, ``reason``, ``episodes``, ``tokens`` (mean of the answers, or None) and ``seconds`` of all together.
    """
    if not file.is_file():
        return []
    with records.reading(file) as db:
        tokens = "null" if "action_tokens" in records.missing_columns(db) else "avg(action_tokens)"
        rows = db.execute(
            f"select ending, substr(ending_reason, 1, {_LONGEST_REASON}) as why, count(*) as number, {tokens}, "
            "sum(duration_s) from episodes where ending != ? group by ending, why "
            f"order by ending = 'trained' desc, number desc limit {_REASONS}",
            (records.EVALUATION,),
        ).fetchall()
    return [dict(zip(("ending", "reason", "episodes", "tokens", "seconds"), row, strict=True)) for row in rows]


def equal_groups(file: Path) -> dict[str, Any]:
    """Return the groups whose returns are all equal: group-relative advantages have no signal from them.

    Returns:
        ``groups``: number of complete groups; ``equal``: of those with equal returns; ``solved`` and ``unsolved``: of
        those of them in which every and no episode succeeded; ``latest``: the last ones, with ``step``, ``group_id``,
        ``ending``, ``return``, ``solved`` and ``episodes``.
    """
    counts = dict.fromkeys(("groups", "equal", "solved", "unsolved"), 0)
    if not file.is_file():
        return {**counts, "latest": []}
    query = (
        "select max(step) as step, group_id, max(ending) as used, min(reward) as low, max(reward) as high, "
        "sum(success) as won, count(*) as number from episodes where ending = 'trained' or (ending = 'dropped' and "
        "ending_reason in ('zero_signal', 'filtered', 'stale')) group by group_id having number > 1"
    )
    with records.reading(file) as db:
        totals = db.execute(
            "select count(*), sum(low = high), sum(low = high and won = number), sum(low = high and won = 0) "
            f"from ({query})"
        ).fetchone()
        latest = db.execute(
            f"select step, group_id, used, high, won, number from ({query}) where low = high "
            f"order by step desc, group_id desc limit {_GROUPS}"
        ).fetchall()
    names = ("step", "group_id", "ending", "return", "solved", "episodes")
    return {
        **{name: total or 0 for name, total in zip(counts, totals, strict=True)},
        "latest": [dict(zip(names, row, strict=True)) for row in latest],
    }


# --- roles


def engine_states(lines: Sequence[Record], session: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the state of each engine at the end of the last step.

    Args:
        lines: the metrics of the steps.
        session: the events since the run was last started or resumed.

    Returns:
        ``engine``, ``tokens_per_s``, ``busy_share``, ``reused_share``, ``in_flight``, ``version`` and ``restarts``
        (None where it is unknown); ``behind``: published versions that it does not serve; ``state``: ``serving``;
        ``replaced`` (expelled, and its replacement is not ready); ``waiting`` for a node; ``abandoned``; ``since``
        and ``cause`` of a state that is not ``serving``.
    """
    if not lines:
        return []
    last = lines[-1]
    several = sorted({int(name.split("/")[1]) for name in last if re.fullmatch(r"engine/\d+/version", name)})
    rows = []
    for index in several or [0]:
        prefix = f"engine/{index}/" if several else "engine/"
        names = ("tokens_per_s", "busy_share", "reused_share", "in_flight", "version", "restarts")
        row = {"engine": index, **{name: last.get(f"{prefix}{name}") for name in names}}
        if not several:  # one engine alone is never replaced, and is updated before a step ends
            row |= {"version": last["step"], "restarts": 0}
        change = next((event for event in reversed(session) if event.get("engine") == index), None)
        state = _STATES.get(change["event"], "serving") if change else "serving"
        if change is not None and state != "serving":
            row |= {"since": change["time"], "cause": str(change.get("text", ""))[:_LONGEST_REASON]}
        version = row["version"]
        rows.append(row | {"state": state, "behind": None if version is None else last["step"] - version})
    return rows


def role_states(session: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the processes of the learner and the engines, as they were last placed.

    Returns:
        ``role``, ``index`` (rank of the learner, number of the engine), ``host``, ``pid``, ``since`` (when it was
        placed) and ``placed``: how often, since the run was last started or resumed.
    """
    rows: dict[tuple[str, Any], dict[str, Any]] = {}
    for event in session:
        if event["event"] == "role_placed":
            key = str(event.get("role")), event.get("index")
            placed = rows[key]["placed"] + 1 if key in rows else 1
            place = {"host": str(event.get("host")), "pid": event.get("pid")}
            rows[key] = {"role": key[0], "index": key[1], **place, "since": event["time"], "placed": placed}
    return list(rows.values())


def nodes(roles: Sequence[Record], lines: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the hosts of roles and sandboxes.

    Returns:
        ``host``; ``roles``: number of processes by role; ``sandboxes``: at the end of the last step, or None.
    """
    found: dict[str, dict[str, Any]] = {}
    for role in roles:
        node = found.setdefault(role["host"], {"host": role["host"], "roles": {}, "sandboxes": None})
        node["roles"][role["role"]] = node["roles"].get(role["role"], 0) + 1
    for name, value in (lines[-1] if lines else {}).items():
        if match := re.fullmatch(r"sandbox/host/(.+)/sandboxes", name):
            found.setdefault(match[1], {"host": match[1], "roles": {}})["sandboxes"] = value
    return list(found.values())


def described(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Return what happened to the run and its roles: ``time``, ``event`` and ``text`` of each event, in order."""
    return [
        {"time": event["time"], "event": event["event"], "text": _TEXTS[event["event"]](event)[:_LONGEST_REASON]}
        for event in events
        if event["event"] in _TEXTS
    ]


def _engine(event: Record, what: str) -> str:
    text = str(event.get("text", ""))
    return f"engine {event.get('engine')} {what}" + (f": {text}" if text else "")


_STATES = {"engine_lost": "replaced", "engine_waiting": "waiting", "engine_abandoned": "abandoned"}
_TEXTS: dict[str, Callable[[Record], str]] = {
    "start": lambda event: f"resumed after step {event.get('step')}" if event.get("resume") else "started",
    "end": lambda event: f"ended after step {event.get('steps')}",
    "failed": lambda event: f"failed: {event.get('error')}: {event.get('text')}",
    "rollback": lambda event: f"went back to step {event.get('to_step')}",
    "no_signal": lambda event: f"step {event.get('step')} had no signal: {event.get('reason')}",
    "learner_lost": lambda event: f"the learner was lost: {event.get('error')}: {event.get('text')}",
    "learner_restored": lambda event: f"the learner was restored after step {event.get('step')}",
    "engine_lost": lambda event: _engine(event, "was lost"),
    "engine_waiting": lambda event: _engine(event, "waits for a node"),
    "engine_joined": lambda event: _engine(event, f"serves again, version {event.get('version')}"),
    "engine_abandoned": lambda event: _engine(event, "is not started again"),
}


def _session(events: Sequence[Record]) -> Sequence[Record]:
    """Return the events since the run was last started or resumed."""
    first = max((place for place, event in enumerate(events) if event["event"] == "start"), default=0)
    return events[first:]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
