"""What run directories contain, as values that JSON can represent.

Invariant: a query only reads. It neither writes to a run nor waits for it, and reads runs of older versions: settings
are shown as they were written, without validation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentkit import records
from agentkit.alerts import recorded_alerts
from agentkit.errors import RunDirectoryError
from agentkit.jsonl import finite, read_jsonl
from agentkit.model_files import ADAPTER
from agentkit.results import wilson_interval
from agentkit.run_directory import RunDirectory
from agentkit.types import Trajectory, Turn

_DEPTH = 6
"""Levels of folders that are searched for runs."""
_RECORDS = (".lock", "events.jsonl", "metrics.jsonl", "episodes.sqlite")
"""Files of which each run has at least one: other folders may have a ``config.yaml``, too."""
_LONGEST_REASON = 300
"""Characters of an error in the table; the episode has the complete text."""
_TABLE = (
    "id", "step", "ending", "ending_reason", "group_id", "member", "attempt", "env_id", "seed", "version_started",
    "outcome", "reason", "success", "reward", "turns", "tokens", "action_tokens", "duration_s", "generate_s", "env_s",
    "ended_at",
)  # fmt: skip
"""Columns of the table of episodes, with the names of ``agentkit.records``."""
_EXPRESSIONS = {
    "reason": f"substr(reason, 1, {_LONGEST_REASON})",
    **{name: f"round({name}, 4)" for name in ("reward", "duration_s", "generate_s", "env_s")},
    "ended_at": "round(ended_at, 3)",
}


_OWN = ("name", "seed", "trackers")


def find_runs(places: Sequence[Path]) -> dict[str, Path]:
    """Return the run directories at and below ``places`` by name: their path from the deepest folder of all places.

    Raises:
        RunDirectoryError: a place is not a folder.
    """
    for place in places:
        if not place.is_dir():
            raise RunDirectoryError(f"{place} is not a folder; give run directories, or folders that contain some")
    found = sorted({run for place in places for run in _runs_below(place.absolute(), _DEPTH)})
    if not found:
        return {}
    root = os.path.commonpath([*found, *(place.absolute() for place in places)])
    root = os.path.dirname(root) if len(found) == 1 and found[0] == Path(root) else root
    return {os.path.relpath(run, root): run for run in found}


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / "config.yaml").is_file() and any((folder / name).exists() for name in _RECORDS):
        yield folder
    elif depth:
        try:
            children = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        except OSError:  # it was removed, or may not be read
            return
        for child in children:
            if not child.name.startswith("."):
                yield from _runs_below(child, depth - 1)


def signature(path: Path) -> tuple[Any, ...]:
    """Return a value that changes when the records of a run change."""
    run = RunDirectory(path)
    log = path / f"{run.episodes_file.name}-wal"
    files = (run.config_file, run.events_file, run.metrics_file, run.episodes_file, log, path / "sandboxes.json")
    return *map(_stamp, files), run.in_use()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of a run with dotted keys, except ``dir``.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    file = RunDirectory.open(path).config_file
    try:
        content = yaml.load(file.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error
    settings = dict(_flat(content, "")) if isinstance(content, Mapping) else {}
    settings.pop("dir", None)
    return finite(settings)


def _flat(value: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def summary(path: Path) -> dict[str, Any]:
    """Return state, progress, success rates and cost of a run.

    Returns:
        ``server``: the address, if it is the folder of a sandbox server and not of a run, otherwise empty; ``status``
        (see ``status_of``), ``error`` of a failed run, ``step`` of ``steps``, ``left_s`` (estimated seconds
        until the end, or None), ``started`` and ``updated`` (seconds since the epoch), ``seconds`` of work, ``before``
        and ``latest`` (evaluations, see ``evaluations``), ``family``, ``counts`` of episodes by ending, ``tokens``,
        ``action_tokens``, ``duration_s``, ``generate_s`` and ``env_s`` of all episodes together (None where an older
        version did not record it), ``alerts`` (the number of those that have not ended), and some settings.
    """
    run, settings = RunDirectory.open(path), read_settings(path)
    events, lines = read_lines(run.events_file), read_lines(run.metrics_file)
    trained = [line for line in lines if "eval/success" not in line]
    status, error = status_of(events, bool(lines), run.in_use())
    evaluated, totals = evaluations(path), _totals(path)
    times = [record["time"] for record in (*events, *lines) if record.get("time")]
    with contextlib.suppress(OSError):  # of a sandbox server
        times.append((path / "sandboxes.json").stat().st_mtime)
    step, steps = max((line["step"] for line in lines), default=0), settings.get("steps") or 0
    return {
        "server": str(settings.get("sandbox_server.url", "")),
        "env": str(settings.get("env.id", "")),
        "model": str(settings.get("model.path", "")),
        "algorithm": str(settings.get("algorithm.advantage", "")),
        "family": family(settings),
        "status": status,
        "error": error,
        "step": step,
        "steps": steps,
        "left_s": seconds_left(events, trained, steps) if status == "running" else None,
        "started": min(times, default=None),
        "updated": max(times, default=None),
        "seconds": seconds_of_work(events, lines),
        "before": evaluated[0] if evaluated and evaluated[0]["step"] == 0 else None,
        "latest": evaluated[-1] if evaluated else None,
        "alerts": sum(alert["ended"] is None for alert in recorded_alerts(events)),
        "return": trained[-1].get("rollout/return_mean") if trained else None,
        **totals,
    }


def family(settings: Mapping[str, Any]) -> str:
    """Return a text that is the same for runs that differ at most in their name, seed and trackers."""
    shared = sorted((name, value) for name, value in settings.items() if name not in _OWN)
    return hashlib.sha256(to_json(shared).encode()).hexdigest()


def status_of(events: Sequence[Mapping[str, Any]], trains: bool, in_use: bool) -> tuple[str, str]:
    """Return the status of a run, and the error if it failed.

    Args:
        events: its events.
        trains: whether it has recorded metrics.
        in_use: whether a process works on it.

    Returns:
        ``running``; ``finished``; ``stopped`` (asked to stop, with a checkpoint); ``failed``; ``interrupted`` (the
        process ended without saying so).
    """
    if in_use:
        return "running", ""
    last = next((event for event in reversed(events) if event["event"] in ("start", "end", "failed")), None)
    if last is None:  # an evaluation writes no events
        return ("interrupted" if trains else "finished"), ""
    if last["event"] == "failed":
        return "failed", f"{last.get('error', '')}: {last.get('text', '')}"
    if last["event"] == "end":
        return ("finished" if last.get("finished") else "stopped"), ""
    return "interrupted", ""


def seconds_left(events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], steps: int) -> float | None:
    """Return the estimated seconds until the last step, from the steps since the run was started or resumed."""
    began = max((event["time"] for event in events if event["event"] == "start"), default=0.0)
    recent = [line for line in lines if line["time"] >= began]
    if len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    return (last["time"] - first["time"]) / max(last["step"] - first["step"], 1) * (steps - last["step"])


def seconds_of_work(events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds in which the run worked: the sum over its sessions, without the time between them."""
    starts = [event["time"] for event in events if event["event"] == "start"]
    times = sorted(record["time"] for record in (*events, *lines))
    ends = [*starts[1:], float("inf")]
    return sum(
        max((time for time in times if start <= time < end), default=start) - start
        for start, end in zip(starts, ends, strict=False)
    )


def evaluations(path: Path) -> list[dict[str, Any]]:
    """Return the evaluations of a run in order: ``step``, ``success``, ``low``, ``high`` (95 % interval), ``episodes``.

    Episodes whose environment failed do not count.
    """
    query = (
        "select step, sum(success), count(*) from episodes where ending = ? and outcome != 'voided' "
        "group by step order by step"
    )
    rows = _select(path, query, records.EVALUATION)
    return [
        {"step": step, "success": won / count, "episodes": count}
        | dict(zip(("low", "high"), wilson_interval(won / count, count), strict=True))
        for step, won, count in rows
    ]


def _totals(path: Path) -> dict[str, Any]:
    file, sums = RunDirectory(path).episodes_file, ("tokens", "action_tokens", "env_s", "generate_s", "duration_s")
    if not file.is_file():
        return {"counts": {}, **dict.fromkeys(sums, 0)}
    with records.reading(file) as db:
        missing = records.missing_columns(db)
        asked = ", ".join("null" if name in missing else f"sum({name})" for name in sums)
        counts = dict(db.execute("select ending, count(*) from episodes group by ending").fetchall())
        totals = db.execute(f"select {asked} from episodes").fetchone()
    return {"counts": counts, **dict(zip(sums, totals, strict=True))}


def _select(path: Path, query: str, *values: Any) -> list[tuple[Any, ...]]:
    file = RunDirectory(path).episodes_file
    if not file.is_file():
        return []
    with records.reading(file) as db:
        return db.execute(query, values).fetchall()


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of metrics or events. Raises ``RunDirectoryError`` if it cannot be read."""
    try:
        return list(read_jsonl(file))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file} cannot be read: {error}") from error


def metrics(path: Path) -> dict[str, Any]:
    """Return all metrics of a run, by step.

    Returns:
        ``steps``; ``times`` (seconds since the epoch at the end of each step); ``values``: a list for each name, with
        None at steps that lack it; ``evaluations`` (see ``evaluations``).
    """
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_lines(RunDirectory.open(path).metrics_file):
        by_step.setdefault(line["step"], {}).update(line)
    ordered = [by_step[step] for step in sorted(by_step)]
    names = sorted({name for line in ordered for name in line} - {"step", "time"})
    return {
        "steps": [line["step"] for line in ordered],
        "times": [line["time"] for line in ordered],
        "values": {name: [line.get(name) for line in ordered] for name in names},
        "evaluations": evaluations(path),
    }


def alerts(path: Path) -> list[dict[str, Any]]:
    """Return the alerts of a run in the order in which they began (see ``agentkit.alerts.recorded_alerts``)."""
    return recorded_alerts(read_lines(RunDirectory.open(path).events_file))


def episode_table(path: Path, *, after: int = 0, at: float | None = None, count: int = 0) -> str:
    """Return the summaries of a run's episodes as JSON, column by column, in the order of recording.

    A caller that has the first ones passes what it knows, and receives only those after them; if they have changed
    since (a resumed run removes the episodes that it repeats), it receives all.

    Args:
        path: the run.
        after: id of the last episode that the caller has.
        at: ``last_at`` of the answer that contained it.
        count: number of episodes that the caller has.

    Returns:
        ``columns``: name and values; ``after``: 0 if these are all; ``last_at``: when the last one was recorded.
    """
    file = RunDirectory(path).episodes_file
    if not file.is_file():
        return json.dumps({"columns": {name: [] for name in _TABLE}, "after": 0, "last_at": None})
    with records.reading(file) as db:
        known = db.execute("select count(*) from episodes where id <= ?", (after,)).fetchone()[0]
        last = db.execute("select recorded_at from episodes where id = ?", (after,)).fetchone()
        if (last and last[0]) != at or known != count:
            after = 0
        missing = records.missing_columns(db)
        inner = ", ".join(
            f"null as {name}" if name in missing else f"{_EXPRESSIONS.get(name, name)} as {name}" for name in _TABLE
        )
        # SQLite writes the lists itself, many times faster than a loop here.
        outer = ", ".join(f"json_group_array({name})" for name in _TABLE)
        query = f"select {outer} from (select {inner} from episodes where id > ? order by id)"
        lists = db.execute(query, (after,)).fetchone()
        last = db.execute("select recorded_at from episodes order by id desc limit 1").fetchone()
    columns = ", ".join(f'"{name}": {values}' for name, values in zip(_TABLE, lists, strict=True))
    return f'{{"columns": {{{columns}}}, "after": {after}, "last_at": {json.dumps(last and last[0])}}}'


def episode(path: Path, number: int, text_of: Callable[[list[int]], str] | None) -> dict[str, Any]:
    """Return a complete episode.

    Args:
        path: the run.
        number: id of the episode.
        text_of: decodes token ids; None if the tokenizer is unknown.

    Returns:
        The columns of the table, ``system``, ``rerendered``, ``metrics``, ``sandboxes``, ``turns`` (with the fields of
        ``agentkit.types.Turn``), ``final_ids``, ``vocabulary`` (the text of each token id, or None) and ``group`` (ids
        of all attempts of its group, by member).

    Raises:
        RunDirectoryError: the run has no such episode.
    """
    row, trajectory = records.read_episode(RunDirectory(path).episodes_file, number)
    columns = {name: getattr(row, name) for name in _TABLE if hasattr(row, name)}
    columns |= {"group": _group(path, number)}
    columns |= {"action_tokens": trajectory.num_action_tokens, "reason": trajectory.reason}
    columns |= {
        f"{part}_s": sum(getattr(turn, f"{part}_s") for turn in trajectory.turns) for part in ("generate", "env")
    }
    return finite(
        columns
        | {
            "system": trajectory.system,
            "rerendered": trajectory.rerendered,
            "metrics": trajectory.metrics,
            "sandboxes": trajectory.sandboxes,
            "turns": [_turn(turn) for turn in trajectory.turns],
            "final_ids": trajectory.final_ids.tolist(),
            "vocabulary": None if text_of is None else {id: text_of([id]) for id in sorted(_ids(trajectory))},
        }
    )


def _group(path: Path, number: int) -> list[int]:
    query = (
        "select other.id from episodes as one join episodes as other on other.group_id = one.group_id and "
        "(other.ending = ?) = (one.ending = ?) and (one.ending != ? or other.step = one.step) where one.id = ? "
        "order by other.member, other.id"
    )
    return [id for (id,) in _select(path, query, *[records.EVALUATION] * 3, number)]


def _turn(turn: Turn) -> dict[str, Any]:
    value = {name: getattr(turn, name) for name in Turn.__dataclass_fields__}
    return value | {name: value[name].tolist() for name in ("prompt_ids", "action_ids", "action_logprobs")}


def _ids(trajectory: Trajectory) -> set[int]:
    arrays = [ids for turn in trajectory.turns for ids in (turn.prompt_ids, turn.action_ids)]
    return {id for ids in (*arrays, trajectory.final_ids) for id in ids.tolist()}


def token_texts(directory: RunDirectory) -> Callable[[list[int]], str] | None:
    """Return a function that decodes token ids with the run's saved tokenizer.

    None if there is no tokenizer yet, or the package ``tokenizers`` (extra ``train``) is not installed.
    """
    exports = ("model", "checkpoints/*/model", f"checkpoints/*/learner/{ADAPTER}")
    patterns = [f"{folder}/tokenizer.json" for folder in ("tokenizer", *exports)]
    files = [file for pattern in patterns for file in directory.path.glob(pattern)]
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    if not files:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(files[0]))
    except Exception:  # its only type of error: the checkpoint is being written or removed
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def to_json(value: Any) -> str:
    """Return JSON in ASCII characters, so that lone surrogates arrive as they were recorded."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
