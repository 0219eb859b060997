"""Alerts of a run: what is wrong, its likely cause, and what to do.

Invariant: ``find_alerts`` is a pure function of the metrics of recent training steps. A healthy run has no alert: every
rule asks for enough steps and episodes that chance does not explain, and for an effect that matters. ``Watch`` keeps a
bounded number of steps, and which alerts have begun.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from agentkit import errors

Row = Mapping[str, Any]
"""Metrics of one training step by name, with its number as ``step``: a line of ``metrics.jsonl``."""

BEGAN, ENDED = "alert", "alert_ended"
"""Kinds of the events of an alert."""

WINDOW = 50
"""Steps that are kept: enough for a median, and few enough that it follows a change of the settings."""
CALM_STEPS = 5
"""Steps without an alert after which it has ended, so that a value near its limit is one alert and not many."""

EARLIER_STEPS = 8
"""Steps before a phase is compared with its median: the first ones compile and fill caches."""
SLOW_PHASE = 6.0
"""A phase is slow above this many times its median ..."""
LEAST_DELAY_S = 5.0
LEAST_DELAY_SHARE = 0.25
"""... if the delay is at least this many seconds, and this share of the median step. A short phase varies by more than
its median: with ``async_ratio`` above 0, most batches are ready at once."""

SHARE_STEPS, SHARE_EPISODES = 5, 64
"""Steps and episodes of a share. Of 64 independent episodes, a share of 50 % has a standard error of 6 %."""
ABORTED = 0.05
WITHOUT_SIGNAL = 0.5
NOTHING_LEFT = 0.98
"""Share of groups without signal from which a run cannot learn. Below, a policy that succeeds in most episodes has such
groups because it solves their tasks: a run that learns gets there."""
PROGRESS_STEPS = 40
"""Steps in which a run with many groups without signal shows whether the others are enough for it: its return rises.
With tasks of different difficulty, more than half of the groups may have no signal for the whole of a run that learns,
and its return may fall for some 20 steps before it rises."""
TRUNCATED = 0.25

DRIFT_STEPS = 3
"""Steps over which divergence and sample size are averaged: one batch may have an unlikely token."""
MOST_KL = 3e-2
LEAST_ESS = 0.5

FAILURES = 10
FAILURE_SHARE = 0.02
DOMINATES = 0.5
"""One type dominates with more than this share of at least ``FAILURES`` failures, which are at least ``FAILURE_SHARE``
of the episodes: a rare failure of one type is no pattern."""

SLOW_PEER = 3.0
"""A machine is slow above this many times the median of its peers ..."""
PEER_STEPS = 3
"""... in this many steps in a row."""
LEAST_ENV_DELAY_S = 0.05
"""Delay of an environment's step that matters beside the generation of a turn."""


@dataclass(frozen=True)
class Alert:
    """One alert; ``name`` and ``subject`` identify it within a run."""

    name: str
    """``slow_phase``, ``aborts``, ``no_signal``, ``truncated``, ``off_policy``, ``one_failure`` or ``slow_host``."""
    subject: str
    """What it is about, such as ``time/train`` or a host."""
    step: int
    """Step in which it was found."""
    text: str
    """The observation, with its numbers."""
    cause: str
    remedy: str

    def sentence(self) -> str:
        """Return observation, cause and remedy as one line."""
        return f"{self.text}; {self.cause}. {self.remedy[0].upper()}{self.remedy[1:]}"


def find_alerts(rows: Sequence[Row]) -> list[Alert]:
    """Return the alerts of the last training step.

    Args:
        rows: that step and those before it, in order; the last ``WINDOW`` are enough.
    """
    return [alert for rule in _RULES for alert in rule(rows)] if rows else []


class Watch:
    """Finds out when alerts begin and end.

    Args:
        rows: steps that a resumed run has done, in order; the last ``WINDOW`` are enough. The durations of phases are
            not compared with theirs: a resumed run starts its engines again, maybe on another machine.
        events: all events of the run so far; the alerts in them that have not ended last.
    """

    def __init__(self, rows: Iterable[Row] = (), events: Iterable[Mapping[str, Any]] = ()) -> None:
        untimed = ({name: value for name, value in row.items() if not name.startswith("time/")} for row in rows)
        self._rows: deque[Row] = deque(untimed, maxlen=WINDOW)
        self._current: dict[tuple[str, str], Alert] = {}
        for one in recorded_alerts(events):
            if one["ended"] is None:
                alert = Alert(**{name: one[name] for name in Alert.__dataclass_fields__})
                self._current[alert.name, alert.subject] = alert
        self._seen = dict.fromkeys(self._current, 0)
        """Steps since each current alert was last found."""

    def update(self, row: Row) -> tuple[list[Alert], list[Alert]]:
        """Add the next training step; return the alerts that begin with it, and those that end, as they began."""
        self._rows.append(row)
        found = {(alert.name, alert.subject): alert for alert in find_alerts(tuple(self._rows))}
        began = [alert for key, alert in found.items() if key not in self._current]
        self._seen = {key: 0 if key in found else self._seen[key] + 1 for key in {**self._current, **found}}
        ended = [alert for key, alert in self._current.items() if self._seen[key] >= CALM_STEPS]
        for alert in ended:
            del self._current[alert.name, alert.subject]
        self._current |= {(alert.name, alert.subject): alert for alert in began}
        return began, ended


def recorded_alerts(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the alerts in the events of a run, in the order in which they began.

    A roll-back removes what happened after its step, as it does with the metrics.

    Returns:
        The fields of ``Alert``; ``time`` of the event; ``ended``, the step in which it ended, or None.
    """
    alerts: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == BEGAN:
            alerts.append({**{name: value for name, value in event.items() if name != "event"}, "ended": None})
        elif event["event"] == ENDED:
            for alert in alerts:
                if alert["ended"] is None and all(alert[key] == event[key] for key in ("name", "subject")):
                    alert["ended"] = event["step"]
        elif event["event"] == "rollback":
            alerts = [alert for alert in alerts if alert["step"] <= event["to_step"]]
            for alert in alerts:
                if alert["ended"] is not None and alert["ended"] > event["to_step"]:
                    alert["ended"] = None
    return alerts


# -- numbers ---------------------------------------------------------------------------------------------------------


def _value(row: Row, name: str) -> float | None:
    value = row.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [value for row in rows if (value := _value(row, name)) is not None]


def _sum(rows: Iterable[Row], name: str) -> float:
    return sum(_values(rows, name))


def _share_rows(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the last ``SHARE_STEPS`` steps, and more if they have too few episodes; none if all have too few."""
    episodes = 0.0
    for count, row in enumerate(reversed(rows), 1):
        episodes += _value(row, "rollout/episodes") or 0.0
        if count >= SHARE_STEPS and episodes >= SHARE_EPISODES:
            return rows[-count:]
    return ()


def _mean_of_episodes(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a metric, weighted by the episodes of each step; None if no step has it."""
    weighted = [
        (value, _value(row, "rollout/episodes") or 0.0) for row in rows if (value := _value(row, name)) is not None
    ]
    weight = sum(episodes for _, episodes in weighted)
    return sum(value * episodes for value, episodes in weighted) / weight if weight else None


def _with_prefix(rows: Iterable[Row], prefix: str) -> Counter[str]:
    """Return the sums of all counts below a prefix, by the rest of their names."""
    sums: Counter[str] = Counter()
    for row in rows:
        for name in row:
            if name.startswith(prefix):
                sums[name[len(prefix) :]] += round(_value(row, name) or 0.0)
    return sums


def _rises(rows: Sequence[Row]) -> bool:
    """Return whether the mean return of the later half of some steps is above that of the earlier half."""
    half = len(rows) // 2
    earlier, later = (_mean_of_episodes(part, "rollout/return_mean") for part in (rows[:half], rows[half:]))
    return earlier is not None and later is not None and later > earlier


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- rules: each takes the steps so far, and yields the alerts of the last one -----------------------------------------


_PHASES = {
    "time/wait": (
        "waiting for episodes",
        "the last episodes of the batch were late: slow environments, very long answers, or a machine busy otherwise",
        "look at the slowest episodes of the step; `rollout.extra_members` and a larger `rollout.async_ratio` hide "
        "single late ones, `env.step_timeout` bounds them",
    ),
    "time/train": (
        "training",
        "the machine of the learner was busy with other work or swapped, or the batch had far more tokens",
        "look for other processes on it (`nvidia-smi`, `top`) and compare `rollout/tokens_mean` with other steps",
    ),
    "time/publish": (
        "the weight update",
        "the way of the weights to the engines was slow: a busy machine, network or disk",
        "check the network between learner and engines, and `engine.weights`",
    ),
}


def _slow_phases(rows: Sequence[Row]) -> Iterator[Alert]:
    *earlier, last = rows
    steps = _values(earlier, "time/step")
    for name, (phase, cause, remedy) in _PHASES.items():
        seconds, before = _value(last, name), _values(earlier, name)
        if seconds is None or not steps or len(before) < EARLIER_STEPS:
            continue
        usual = median(before)
        least = max(LEAST_DELAY_S, LEAST_DELAY_SHARE * median(steps))
        if seconds > SLOW_PHASE * usual and seconds - usual >= least:
            if name == "time/wait" and (trouble := _trouble(last)):
                cause = f"in this step, {trouble}"
            times = f"{seconds / usual:.0f} times its" if usual else "more than the"
            text = f"{phase} took {seconds:.3g} s, {times} median of {usual:.3g} s"
            yield Alert("slow_phase", name, int(last["step"]), text, cause, remedy)


def _trouble(row: Row) -> str:
    """Return what may have delayed the episodes of a step; empty if nothing is known."""
    counts = {
        "environments failed": _value(row, "env/failures"),
        "environments moved to another sandbox": _value(row, "sandbox/recoveries"),
        "sandboxes could not be created": _value(row, "sandbox/create_failures"),
    }
    return ", ".join(f"{count:.0f} {what}" for what, count in counts.items() if count)


def _aborts(rows: Sequence[Row]) -> Iterator[Alert]:
    recent = _share_rows(rows)
    if not recent:
        return
    step, episodes = int(recent[-1]["step"]), _sum(recent, "rollout/episodes")
    voided, stale = _sum(recent, "gate/voided"), _sum(recent, "gate/dropped/stale")
    share = (voided + stale) / (voided + stale + episodes)
    if share > ABORTED:
        text = (
            f"{_percent(share)} of the episodes of the last {len(recent)} steps were lost: {voided:.0f} to failed "
            f"environments, {stale:.0f} because they were too old"
        )
        if voided >= stale:
            types = _with_prefix(recent, "gate/voided/").most_common(1)
            cause = (
                f"environments fail{f', mostly with {types[0][0]}' if types else ''}: what remains is a biased sample"
            )
            remedy = "read the errors with `agentkit show RUN --ending voided`, and test one with `agentkit env check`"
        else:
            cause = "the policy changes faster than episodes end"
            remedy = "lower `rollout.async_ratio`, set `gate.policy: wait`, or shorten the episodes"
        yield Alert("aborts", "episodes", step, text, cause, remedy)
    turns = sum((_value(row, "rollout/turns_mean") or 0.0) * (_value(row, "rollout/episodes") or 0.0) for row in recent)
    aborted = _sum(recent, "rollout/aborted_turns")
    if aborted > ABORTED * (turns + aborted):
        text = (
            f"{_percent(aborted / (turns + aborted))} of the answers of the last {len(recent)} steps were aborted "
            f"({aborted:.0f}) and generated again"
        )
        cause = "weight updates interrupt answers that are being generated"
        remedy = "set `rollout.in_flight: continue`, or shorten the answers with `rollout.max_tokens`"
        yield Alert("aborts", "answers", step, text, cause, remedy)


def _no_signal(rows: Sequence[Row]) -> Iterator[Alert]:
    recent = _share_rows(rows)
    flat, success = (_mean_of_episodes(recent, f"rollout/{name}") for name in ("zero_signal_share", "success"))
    if flat is None:
        return
    solved = success is not None and success >= 0.5
    progress = ""
    if flat < NOTHING_LEFT:
        recent = rows[-PROGRESS_STEPS:]
        flat, success = (_mean_of_episodes(recent, f"rollout/{name}") for name in ("zero_signal_share", "success"))
        if solved or len(recent) < PROGRESS_STEPS or flat is None or flat <= WITHOUT_SIGNAL or _rises(recent):
            return
        progress = ", while the mean return did not rise"
    text = f"{_percent(flat)} of the groups of the last {len(recent)} steps had no learning signal{progress}"
    text += "" if success is None else f", and {_percent(success)} of the episodes succeeded"
    if solved:
        cause = "the policy solves these tasks, so the members of nearly every group earn the same"
        remedy = "use harder tasks, or stop the run"
    else:
        cause = (
            "the tasks are too hard for this policy, or its answers hardly vary: most members of a group earn the same"
        )
        more = "" if _sum(recent, "rollout/refills") else ", or `rollout.dynamic_sampling`"
        remedy = f"use easier tasks, imitation, a larger `rollout.group_size`{more}"
    yield Alert("no_signal", "groups", int(recent[-1]["step"]), text, cause, remedy)


def _truncated(rows: Sequence[Row]) -> Iterator[Alert]:
    recent = _share_rows(rows)
    if not recent:
        return
    step, episodes = int(recent[-1]["step"]), _sum(recent, "rollout/episodes")
    over = _sum(recent, "rollout/context_truncated")
    if over > TRUNCATED * episodes:
        text = f"{_percent(over / episodes)} of the episodes of the last {len(recent)} steps overflowed the context"
        cause = "conversations are longer than `engine.max_context`, so episodes end before their result"
        remedy = (
            "raise `engine.max_context`, set `model.history: window`, or lower `env.max_turns` or `rollout.max_tokens`"
        )
        yield Alert("truncated", "episodes", step, text, cause, remedy)
    cut = _mean_of_episodes(recent, "rollout/cut_answers")
    if cut is not None and cut > TRUNCATED:
        text = f"{_percent(cut)} of the answers of the last {len(recent)} steps were cut off at `rollout.max_tokens`"
        cause = "answers are longer than the limit, or the model does not end them"
        remedy = (
            "raise `rollout.max_tokens`; if answers do not end at any length, check the format of the prompt "
            "(`agentkit model check`) or begin with imitation"
        )
        yield Alert("truncated", "answers", step, text, cause, remedy)


def _off_policy(rows: Sequence[Row]) -> Iterator[Alert]:
    last = rows[-1]
    for name, what, outside, limit in (
        ("policy/kl_behaviour", "KL divergence of the policy from that of the samples", float.__gt__, MOST_KL),
        ("policy/ess", "effective sample size", float.__lt__, LEAST_ESS),
    ):
        known = _values(rows[-DRIFT_STEPS:], name)
        if len(known) < DRIFT_STEPS or not outside(mean(known), limit):
            continue
        bound = f"{'above' if limit == MOST_KL else 'below'} {limit:g}"
        text = f"the {what} was {mean(known):.3g} in the mean of the last {DRIFT_STEPS} steps, {bound}"
        age = _value(last, "staleness/mean") or 0.0
        if age > 0:
            cause = f"samples are {age:.1f} updates old on average, and the policy has moved away from them"
            remedy = "lower `rollout.async_ratio` or `learner.lr`, or use a loss for older data (`decoupled_ppo`)"
        else:
            cause = "one batch moves the policy far, or engine and learner compute different log-probabilities"
            remedy = (
                "lower `learner.lr`, `learner.epochs` or `learner.minibatches`; if they are small, check the model's "
                "numerical precision, and set `engine.verify_weights: true`"
            )
        yield Alert("off_policy", name, int(last["step"]), text, cause, remedy)


_REMEDIES = {
    "EnvTimeout": "raise `env.step_timeout` or `env.reset_timeout`, or play fewer episodes at once on this machine",
    "EnvContractError": "correct the environment; `agentkit env check` names the rule that it breaks",
    "oom": "raise the memory in `env.sandbox_spec`, or put fewer environments into a sandbox (`env.sandbox_share`)",
    "slow": "look for the slow machine with `agentkit sandbox top`",
    "hung": "look for an overloaded machine with `agentkit sandbox top`",
    "engine_down": "look at the container engine or sandbox server; `agentkit show RUN --sandboxes` names the hosts",
}


def _one_failure(rows: Sequence[Row]) -> Iterator[Alert]:
    recent = _share_rows(rows)
    if not recent:
        return
    # A recovery in a sandbox may be counted under both names.
    recovered = _with_prefix(recent, "rollout/env_replays/") | _with_prefix(recent, "sandbox/recoveries/")
    types = _with_prefix(recent, "gate/voided/") + recovered
    failures, episodes = types.total(), _sum(recent, "rollout/episodes")
    if failures < FAILURES or failures < FAILURE_SHARE * episodes:
        return
    ((kind, count),) = types.most_common(1)
    if count <= DOMINATES * failures:
        return
    first, last = int(recent[0]["step"]), int(recent[-1]["step"])
    text = (
        f"{count:.0f} of {failures:.0f} failures of environments in steps {first} to {last} ({episodes:.0f} episodes, "
        f"{recovered.total():.0f} failures recovered) are of one type, {kind}"
    )
    remedy = _REMEDIES.get(
        kind,
        "read the errors of voided episodes (the dashboard's table with the use `voided`, or `agentkit show RUN "
        "--ending voided`) and of sandboxes (`--sandboxes`)",
    )
    yield Alert("one_failure", kind, int(recent[-1]["step"]), text, _meaning(kind), remedy)


def _meaning(kind: str) -> str:
    """Return what a type of failure means: a reason of ``LOSS_REASONS``, or the name of an error class."""
    if kind in errors.LOSS_REASONS:
        return f"the sandbox of the environment was lost: {errors.LOSS_REASONS[kind]}"
    known = getattr(errors, kind, None)
    first = (known.__doc__ or "").partition(". ")[0].partition("; ")[0].strip().rstrip(".") if known else ""
    return first[:1].lower() + first[1:] if first else "the same fault happens again and again"


_PEERS = (
    (
        re.compile(r"sandbox/host/(.+)/step_s"),
        "a step of an environment on {0}",
        LEAST_ENV_DELAY_S,
        "the machine or the network to it is slow or overloaded",
        "look at it with `agentkit sandbox top`; `agentkit sandbox drain` takes it out of use",
    ),
    (
        re.compile(r"(engine/\d+)/token_s"),
        "a token of an answer of {0}",
        0.0,
        "its machine or GPU is slower, throttled, or busy with other work",
        "look at that machine (`nvidia-smi`), and restart the run without it if the fault stays",
    ),
)


def _slow_hosts(rows: Sequence[Row]) -> Iterator[Alert]:
    if len(rows) < PEER_STEPS:
        return
    last = rows[-1]
    for pattern, what, least, cause, remedy in _PEERS:
        matches = [found for name in last if (found := pattern.fullmatch(name))]
        names = {found[0]: found[1] for found in matches}
        for name, host in names.items():
            compared = [_compared(row, name, names.keys()) for row in rows[-PEER_STEPS:]]
            if all(one is not None and one[0] > SLOW_PEER * one[1] and one[0] - one[1] > least for one in compared):
                seconds, peers = (mean(one[part] for one in compared if one) for part in (0, 1))
                times = f"{seconds / peers:.0f} times the" if peers else "more than the"
                subject = host.replace("/", " ")
                text = (
                    f"{what.format(subject)} took {1000 * seconds:.3g} ms in the last {PEER_STEPS} steps, {times} "
                    f"median of its peers, {1000 * peers:.3g} ms"
                )
                yield Alert("slow_host", subject, int(last["step"]), text, cause, remedy)


def _compared(row: Row, name: str, names: Iterable[str]) -> tuple[float, float] | None:
    """Return the value of one machine and the median of the others; None if one of both is missing."""
    own = _value(row, name)
    others = [value for other in names if other != name and (value := _value(row, other)) is not None]
    return None if own is None or not others else (own, median(others))


_RULES: tuple[Callable[[Sequence[Row]], Iterator[Alert]], ...] = (
    _slow_phases,
    _aborts,
    _no_signal,
    _truncated,
    _off_policy,
    _one_failure,
    _slow_hosts,
)
