"""The episodes of a run, and the credit of their tokens, in one SQLite file.

Invariant: the columns of a row repeat fields of its trajectory, which is stored completely (``agentkit.codec``), or
sum them over its turns.
``step`` is the training step in which the episode ended; a roll-back to step s keeps the rows with step ≤ s.

The table can also be queried with SQL: ``sqlite3 episodes.sqlite "select step, avg(success) from episodes
where ending = 'trained' group by step"``.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentkit.codec import decode_columns, decode_trajectory, encode_columns, encode_trajectory
from agentkit.errors import RunDirectoryError
from agentkit.types import FloatArray, Trajectory

_SCHEMA_VERSION = 2
_SCHEMA = """
create table if not exists episodes (
    id integer primary key,
    step integer not null,
    ending text not null,
    ending_reason text not null,
    group_id integer not null,
    member integer not null,
    attempt integer not null,
    env_id text not null,
    seed integer not null,
    version_started integer not null,
    outcome text not null,
    reason text not null,
    success integer not null,
    reward real,
    turns integer not null,
    tokens integer not null,
    duration_s real,
    action_tokens integer,
    generate_s real,
    env_s real,
    ended_at real,
    sandboxes text,
    recorded_at real not null,
    trajectory blob not null
);
create index if not exists episodes_step on episodes (step);
create table if not exists credit (
    step integer not null,
    group_id integer not null,
    member integer not null,
    columns blob not null,
    primary key (step, group_id, member)
);
"""
_COLUMNS = (
    "id, step, ending, ending_reason, group_id, member, attempt, env_id, seed, version_started, outcome, reason, "
    "success, reward, turns, tokens, duration_s"
)
_ADDED = {"action_tokens": "integer", "generate_s": "real", "env_s": "real", "ended_at": "real", "sandboxes": "text"}
"""Columns that files of older versions lack, and their types."""
_BUSY_TIMEOUT_S = 30.0

EVALUATION, TRAINED = "eval", "trained"
"""Endings of evaluation episodes, and of episodes that were trained on. The rollout loop defines the others."""

Order = Literal["recorded", "reward", "turns", "tokens", "duration"]
"""Sort key of a list of episodes."""
_ORDER_COLUMNS: dict[Order, str] = {"recorded": "id", "duration": "duration_s"}


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """Summary of an episode; fields as in ``Trajectory``, with ``step`` and ``ending`` of the rollout loop."""

    id: int
    step: int
    ending: str
    ending_reason: str
    group_id: int
    member: int
    attempt: int
    env_id: str
    seed: int
    version_started: int
    outcome: str
    reason: str
    success: bool
    reward: float
    turns: int
    tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Filter:
    """Condition on episodes: all fields that are not None must match."""

    ending: str | None = None
    step: int | None = None
    env_id: str | None = None
    outcome: str | None = None
    """``terminated``, ``truncated`` or ``voided``."""
    error: str | None = None
    """Part of the environment's error message, ignoring case; an empty text matches every error."""
    min_reward: float | None = None
    max_reward: float | None = None

    def condition(self) -> tuple[str, list[str | int | float]]:
        """Return an SQL condition and the values of its parameters."""
        terms: dict[str, str | int | float | None] = {
            "ending = ?": self.ending,
            "step = ?": self.step,
            "env_id = ?": self.env_id,
            "outcome = ?": self.outcome,
            "outcome = 'voided' and instr(lower(reason), lower(?)) > 0": self.error,
            "reward >= ?": self.min_reward,
            "reward <= ?": self.max_reward,
        }
        given = {term: value for term, value in terms.items() if value is not None}
        return " and ".join(given) or "1", list(given.values())


@dataclass(frozen=True, slots=True)
class PendingEpisode:
    """An episode to be written."""

    step: int
    trajectory: Trajectory
    ending: str
    reason: str


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """What the learner gave each action token of an episode in ``step``."""

    step: int
    group_id: int
    member: int
    columns: Mapping[str, FloatArray]
    """Float32 ``[action tokens]`` by name: see ``agentkit.trainers.learner.training.Training.token_credit``."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create the file, in WAL mode: readers never wait for the run. Raises ``RunDirectoryError``."""
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        version = connection.execute("pragma user_version").fetchone()[0]
        if version not in range(_SCHEMA_VERSION + 1):
            raise RunDirectoryError(f"{path} was written by another version of agentkit (format {version})")
        if version:
            for column in missing_columns(connection):
                connection.execute(f"alter table episodes add column {column} {_ADDED[column]}")
        connection.executescript(_SCHEMA)
        connection.execute(f"pragma user_version = {_SCHEMA_VERSION}")
        return connection
    except sqlite3.Error as error:
        raise RunDirectoryError(f"{path} cannot be written to: {error}") from error


def missing_columns(connection: sqlite3.Connection) -> list[str]:
    """Return the names of columns that the file lacks, because an older version wrote it."""
    present = {row[1] for row in connection.execute("pragma table_info(episodes)")}
    return [column for column in _ADDED if column not in present]


def insert(connection: sqlite3.Connection, episodes: Iterable[PendingEpisode]) -> None:
    """Write episodes in one transaction."""
    connection.execute("begin")
    try:
        connection.executemany(
            "insert into episodes (step, ending, ending_reason, group_id, member, attempt, env_id, seed, "
            "version_started, outcome, reason, success, reward, turns, tokens, duration_s, action_tokens, generate_s, "
            "env_s, ended_at, sandboxes, recorded_at, trajectory) "
            "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (_values(episode) for episode in episodes),
        )
    except BaseException:
        connection.execute("rollback")
        raise
    connection.execute("commit")


def insert_credit(connection: sqlite3.Connection, credit: Iterable[TokenCredit]) -> None:
    """Write the credit of episodes in one transaction."""
    connection.execute("begin")
    try:
        connection.executemany(
            "insert or replace into credit values (?, ?, ?, ?)",
            ((one.step, one.group_id, one.member, encode_columns(one.columns)) for one in credit),
        )
    except BaseException:
        connection.execute("rollback")
        raise
    connection.execute("commit")


def _values(episode: PendingEpisode) -> tuple:
    trajectory = episode.trajectory
    return (
        episode.step,
        episode.ending,
        _storable(episode.reason),
        trajectory.group_id,
        trajectory.member,
        trajectory.attempt,
        trajectory.env_id,
        trajectory.seed,
        trajectory.version_started,
        trajectory.outcome,
        _storable(trajectory.reason),
        int(trajectory.success),
        trajectory.reward,
        len(trajectory.turns),
        trajectory.num_tokens,
        trajectory.duration_s,
        trajectory.num_action_tokens,
        sum(turn.generate_s for turn in trajectory.turns),
        sum(turn.env_s for turn in trajectory.turns),
        trajectory.ended_at or None,
        json.dumps(trajectory.sandboxes) if trajectory.sandboxes else None,
        time.time(),
        encode_trajectory(trajectory),
    )


def _storable(text: str) -> str:
    """Replace lone surrogates, which SQLite cannot store, by their escapes; the trajectory keeps them."""
    return text.encode("utf-8", "backslashreplace").decode()


def delete_after(connection: sqlite3.Connection, step: int) -> int:
    """Remove the episodes of later steps, with their credit, and return the number of episodes."""
    connection.execute("delete from credit where step > ?", (step,))
    return connection.execute("delete from episodes where step > ?", (step,)).rowcount


def delete_evaluation(connection: sqlite3.Connection, step: int) -> int:
    """Remove the evaluation episodes of one step, and return their number."""
    return connection.execute("delete from episodes where step = ? and ending = ?", (step, EVALUATION)).rowcount


def first_of_groups(connection: sqlite3.Connection, step: int, count: int) -> list[int]:
    """Return the ids of the first trained episodes of different groups of a step, at most ``count``."""
    query = (
        "select min(id) from episodes where step = ? and ending = 'trained' group by group_id order by min(id) limit ?"
    )
    return [id for (id,) in connection.execute(query, (step, count))]


def list_episodes(
    path: Path,
    wanted: Filter | None = None,
    *,
    order: Order = "recorded",
    reverse: bool = False,
    last: int | None = None,
) -> list[EpisodeRow]:
    """Return the episodes that match a filter.

    Args:
        path: the episodes file.
        wanted: the filter; None matches all.
        order: sort key.
        reverse: sort in descending order.
        last: return only this many rows from the end; None returns all.

    Raises:
        RunDirectoryError: the file does not exist or cannot be read.
    """
    condition, values = (wanted or Filter()).condition()
    column = _ORDER_COLUMNS.get(order, order)
    way = "asc" if reverse else "desc"  # the last rows are the first rows in opposite order
    query = f"select {_COLUMNS} from episodes where {condition} order by {column} {way}, id {way} limit ?"
    with reading(path) as connection:
        rows = connection.execute(query, (*values, -1 if last is None else last)).fetchall()
    return [_row(row) for row in reversed(rows)]


def read_episode(path: Path, episode_id: int) -> tuple[EpisodeRow, Trajectory]:
    """Return one complete episode. Raises ``RunDirectoryError`` if the file does not contain it."""
    with reading(path) as connection:
        query = f"select {_COLUMNS}, trajectory from episodes where id = ?"
        row = connection.execute(query, (episode_id,)).fetchone()
        if row is None:
            first, last = connection.execute("select min(id), max(id) from episodes").fetchone()
            there = "it contains none yet" if first is None else f"it contains {first} to {last}"
            raise RunDirectoryError(f"{path} has no episode {episode_id}; {there}")
    return _row(row[:-1]), decode_trajectory(row[-1])


def read_credit(path: Path, row: EpisodeRow) -> dict[str, FloatArray] | None:
    """Return what the learner gave each action token of an episode; None if that was not recorded.

    Raises:
        RunDirectoryError: the file cannot be read.
    """
    with reading(path) as connection:
        if not connection.execute("select 1 from sqlite_master where name = 'credit'").fetchone():
            return None  # an older version wrote the file
        query = "select columns from credit where step = ? and group_id = ? and member = ?"
        found = connection.execute(query, (row.step, row.group_id, row.member)).fetchone()
    return decode_columns(found[0]) if found and row.ending == TRAINED else None


def iterate_trajectories(path: Path, *, ending: str | None = None) -> Iterator[tuple[EpisodeRow, Trajectory]]:
    """Yield all complete episodes, in the order of recording."""
    for row in list_episodes(path, Filter(ending=ending)):
        yield read_episode(path, row.id)


def _row(values: tuple) -> EpisodeRow:
    row = dict(zip(EpisodeRow.__dataclass_fields__, values, strict=True))
    row["success"] = bool(row["success"])
    for key in ("reward", "duration_s"):
        # SQLite stores NaN as null.
        row[key] = float("nan") if row[key] is None else row[key]
    return EpisodeRow(**row)


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file for queries. Raises ``RunDirectoryError`` if it does not exist or cannot be read."""
    if not path.is_file():
        raise RunDirectoryError(f"{path} does not exist: the run has recorded no episode yet")
    try:
        # A writer has a log. Without one, SQLite would create it, and fail in a folder that may not be written.
        place = path.resolve()
        how = "mode=ro" if place.with_name(f"{place.name}-wal").exists() else "mode=ro&immutable=1"
        with closing(sqlite3.connect(f"{place.as_uri()}?{how}", uri=True, timeout=_BUSY_TIMEOUT_S)) as db:
            yield db
    except sqlite3.Error as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
