"""One run, from configuration to trained model: imitation, then rollout in parallel with training.

Invariant: between two training steps there is one consistent instant: the learner has stepped, its weights are served,
and the gate has their version. Only then checkpoints are written and stops take effect. The served version is the
number of finished training steps.

A learner that is lost is started again, and the run goes back to its last checkpoint, as ``--resume`` does: everything
that was recorded since is removed, and a new rollout loop starts from the state in the checkpoint.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from agentkit import alerts, progress
from agentkit.config import RunConfig
from agentkit.errors import CheckpointError, PluginError, RoleError
from agentkit.jsonl import read_jsonl
from agentkit.progress import View
from agentkit.records import EVALUATION, TokenCredit
from agentkit.results import EvalResult, RunResult
from agentkit.run_directory import RunDirectory
from agentkit.sandboxes.backoff import RestartLimit
from agentkit.store import Recorder
from agentkit.trackers import open_trackers
from agentkit.trainers import checkpoint, imitation
from agentkit.trainers.algorithms.signal import missing_signal
from agentkit.trainers.batch import Batch, flatten, per_episode
from agentkit.trainers.inference.base import EngineStats
from agentkit.trainers.roles import Roles, start_roles
from agentkit.trainers.rollout.evaluation import evaluate, evaluation_metrics
from agentkit.trainers.rollout.loop import RolloutLoop
from agentkit.types import FloatArray, Trajectory

T = TypeVar("T")

RESTARTS = 3
"""Restarts of the learner within ``WINDOW_S``, successful or not."""
WINDOW_S = 600.0


async def run(
    config: RunConfig,
    directory: RunDirectory,
    *,
    resume: bool,
    view: View,
    stop: asyncio.Event,
    on_step: Callable[[int, Mapping[str, float]], object] | None = None,
    on_episode: Callable[[Trajectory], object] | None = None,
) -> RunResult:
    """Train in ``directory``, from the start or, with ``resume``, from the last checkpoint.

    Args:
        config: settings of the run.
        directory: its locked run directory.
        resume: continue from the last checkpoint.
        view: shows the progress; the caller starts and stops it.
        stop: ends the run at the next consistent instant, with a checkpoint.
        on_step: called with the number and the metrics of each finished training step.
        on_episode: called with each episode that is trained on or voided.

    Raises:
        CheckpointError: there is no checkpoint to resume from.
        Exception: an error of a role or an environment, or of a callback. The run has been stopped; after an error of
            a callback there is a checkpoint.
    """
    found = checkpoint.list_checkpoints(directory.checkpoints)
    checkpoint.tidy(directory.checkpoints, config.checkpoint.keep)
    if resume and not found:
        raise CheckpointError(
            f"{directory.path} has no checkpoint to resume from; start again with `agentkit run "
            f"{directory.config_file} dir={directory.path}`"
        )
    view.stage("starting")
    with Recorder(directory, open_trackers(config, directory), sample_every=config.sample_every) as recorder:
        recorder.event("start", resume=resume, step=found[-1].step if resume else 0)
        try:
            async with start_roles(config, partial(_report, recorder, view)) as roles:
                callbacks = _Callbacks(on_step, on_episode, stop)
                session = _Run(config, directory, recorder, view, stop, roles, callbacks)
                result = await session.go(found[-1] if resume else None)
        except BaseException as error:
            recorder.event("failed", error=type(error).__name__, text=str(error))
            raise
        recorder.event("end", steps=result.steps, finished=result.finished)
    rows = [_numbers(row) for row in read_jsonl(directory.metrics_file)]
    return replace(
        result,
        history=tuple(row for row in rows if "time/step" in row),
        evaluations=tuple(row for row in rows if "eval/success" in row),
    )


def _report(recorder: Recorder, view: View, kind: str, **fields: Any) -> None:
    """Record an event of the engines, and show a loss."""
    recorder.event(kind, **fields)
    if kind == "engine_lost":
        view.message(f"engine {fields['engine']} was lost: {_first_line(fields['text'])}")
    elif kind == "engine_waiting":
        view.message(f"engine {fields['engine']} waits for a node with room for it; {fields['engines_left']} are left")
    elif kind == "engine_abandoned":
        view.message(f"engine {fields['engine']} is not started again; {fields['engines_left']} are left")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """A line of the metrics file, where null stands for a value that is not finite."""
    return {name: math.nan if value is None else value for name, value in row.items() if name != "time"}


class _Callbacks:
    """The caller's functions. The first error of one stops the run, and is raised when that has a checkpoint."""

    def __init__(
        self,
        on_step: Callable[[int, Mapping[str, float]], object] | None,
        on_episode: Callable[[Trajectory], object] | None,
        stop: asyncio.Event,
    ) -> None:
        self._on_step, self._on_episode, self._stop = on_step, on_episode, stop
        self.error: Exception | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(self._on_step, step, metrics)

    def episode(self, trajectory: Trajectory) -> None:
        self._call(self._on_episode, trajectory)

    def _call(self, callback: Callable[..., object] | None, *arguments: object) -> None:
        if callback is None or self.error is not None:
            return
        try:
            callback(*arguments)
        except Exception as error:
            self.error = error
            self._stop.set()


class _Run:
    """The state of one ``run``: its parts, and the counters that a checkpoint keeps."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        recorder: Recorder,
        view: View,
        stop: asyncio.Event,
        roles: Roles,
        callbacks: _Callbacks,
    ) -> None:
        self.config, self.directory, self.recorder, self.view, self.stop = config, directory, recorder, view, stop
        self.roles, self.callbacks = roles, callbacks
        self.step = 0
        self.success_before: float | None = None
        self.success_after: float | None = None
        self.demonstrated_success: float | None = None
        self._missing_signal: str | None = None
        """Why the last step had no learning signal; None if it had one."""
        self._watch = alerts.Watch()
        self.loop = self._new_loop()
        self.snapshot = self.loop.state()
        """State of the rollout loop at the end of ``step``."""
        self.saved_step = -1
        self._heads: dict[str, Any] | None = None
        """Head sets of attention-rhythm credit, as last reported."""
        self.started = time.monotonic()
        self._restarts = RestartLimit(RESTARTS, WINDOW_S)

    def _new_loop(self) -> RolloutLoop:
        roles = self.roles
        return RolloutLoop(
            self.config,
            roles.engine,
            roles.renderer,
            roles.parser,
            on_episode=self._record_episode,
            on_event=self.recorder.event,
        )

    async def go(self, resumed: checkpoint.Checkpoint | None) -> RunResult:
        if resumed:
            await self._restore(resumed)
            self.view.message(f"resumed after step {resumed.step}")
        if self.config.model.history == "auto" and self.roles.renderer.rerenders:
            self.view.message(
                "model.history: the chat template rewrites earlier turns, so it renders every prompt again, and each "
                "turn is a training sequence"
            )
        while True:
            try:
                await self._continue()
                break
            except Exception as error:
                await self._recover(error)
        if self.callbacks.error is not None:
            raise self.callbacks.error
        return RunResult(
            directory=self.directory.path,
            steps=self.step,
            ending="interrupted" if self.stop.is_set() else "finished",
            success_before=self.success_before,
            success_after=self.success_after,
            demonstrated_success=self.demonstrated_success,
            duration_s=time.monotonic() - self.started,
        )

    async def _continue(self) -> None:
        """Do all that is left of the run: after the last checkpoint, or from the beginning."""
        if self.saved_step < 0:
            await self.roles.publish(0)
            if self.config.imitation:
                self.view.stage("imitation")
                self.demonstrated_success = await self._unless_lost(
                    imitation.imitate(self.config, self.roles, self.recorder, self.view, self.stop)
                )
        if self.stop.is_set():
            await self._save()  # the state of an interrupted imitation
            return
        if self.success_before is None:
            self.success_before = (await self._evaluate()).success
        await self._train()

    async def _recover(self, error: Exception) -> None:
        """Start a lost learner again, and go back to the last checkpoint, or to the beginning if there is none.

        Raises ``error`` if it has another cause, and ``RoleError`` if the learner was lost too often.
        """
        while True:
            loss, began = await self.roles.loss_of_learner(error), time.monotonic()
            if loss is None:
                raise error
            self.recorder.event("learner_lost", step=self.step, error=type(loss).__name__, text=str(loss))
            self.view.message(f"the learner was lost: {_first_line(str(loss))}")
            if not self._restarts.allow(began):
                raise RoleError(
                    f"the learner was started again {RESTARTS} times within {WINDOW_S:g} s and was lost again: {loss}"
                ) from error
            found = checkpoint.list_checkpoints(self.directory.checkpoints)
            try:
                with progress.work("starting the learner"):
                    await self.roles.start_learner()
                await self._restore(found[-1] if found else None)
            except Exception as again:
                error = again
                continue
            seconds = time.monotonic() - began
            self.recorder.event("learner_restored", step=self.step, seconds=seconds)
            self.view.message(f"the learner was restored; the run goes on after step {self.step}")
            return

    async def _train(self) -> None:
        """Train until the last step or a requested stop; then write a checkpoint, and after the last step the model."""
        self.view.stage("training")
        if self.saved_step < 0:  # A kill in the first steps must not lose the imitation.
            await self._save()
        await self.loop.start()
        try:
            while self.step < self.config.steps and not self.stop.is_set() and await self._one_step():
                every = self.config.evaluation.every
                if every and self.step % every == 0 and self.step < self.config.steps:
                    await self._evaluate()
                every = self.config.checkpoint.every
                if every and self.step % every == 0:
                    await self._save()
        finally:
            await self.loop.close()
        if not self.stop.is_set():
            changed = self.config.steps > 0
            self.success_after = (await self._evaluate()).success if changed else self.success_before
        await self._save()
        if not self.stop.is_set():
            await self._export()

    async def _one_step(self) -> bool:
        """Consume one batch and publish its weights. Return False, without using a batch, if a stop was requested."""
        began, before = time.monotonic(), await self.roles.engine.stats()
        label = f"step {self.step + 1}"
        with progress.work(f"{label}: episodes", detail=self.loop.under_way):
            try:
                groups = await self._unless_stopped(self.loop.next_batch())
            except PluginError:  # The learner is as after the last step, which must not be lost.
                await self._save()
                raise
        if groups is None:
            return False
        got = time.monotonic()
        with progress.work(f"{label}: training", detail=self.loop.under_way):
            batch = flatten(groups, final_states=self.config.critic is not None)
            metrics = await self.roles.train(batch, self.step)
            credit = await self.roles.learner.token_credit()
            weights = await self.roles.stage(self.step + 1)
            trained = time.monotonic()
            await self.loop.publish(weights)
        ended = time.monotonic()
        # Episodes that end from here on are recorded under the next step and are not in the snapshot.
        self.step += 1
        self.snapshot = self.loop.state()
        metrics |= self.loop.metrics()
        metrics |= _engine_metrics(before, await self.roles.engine.stats(), ended - began)
        metrics |= {
            "time/wait": got - began,
            "time/train": trained - got,
            "time/publish": ended - trained,
            "time/step": ended - began,
            "learner/idle_share": (got - began) / (ended - began),
        }
        self._record_credit(batch, credit)
        self.recorder.metrics(self.step, metrics)
        self.view.step(self.step, metrics)
        self.callbacks.step(self.step, metrics)
        self._report_alerts(metrics)
        if self.config.algorithm.credit != "none":
            await self._report_heads()
        reason = missing_signal([group.members for group in groups], self.config.algorithm)
        if reason is not None:
            self.recorder.event("no_signal", step=self.step, reason=reason)
            again = reason == self._missing_signal
            self.view.message(f"step {self.step} had no signal {'either' if again else f'to learn from: {reason}'}")
        self._missing_signal = reason
        return True

    def _report_alerts(self, metrics: Mapping[str, float]) -> None:
        """Record and show the alerts that begin and end with a step."""
        began, ended = self._watch.update({"step": self.step, **metrics})
        for alert in began:
            self.recorder.event(alerts.BEGAN, **asdict(alert))
            self.view.message(f"alert in step {self.step}: {alert.sentence()}")
        for alert in ended:
            self.recorder.event(alerts.ENDED, name=alert.name, subject=alert.subject, step=self.step, began=alert.step)
            self.view.message(f"step {self.step}: the alert of step {alert.step} has ended ({alert.text})")

    def _record_credit(self, batch: Batch, credit: Mapping[str, FloatArray]) -> None:
        """Record what the learner gave each token of a batch."""
        episodes = zip(batch.group_ids.tolist(), batch.members.tolist(), per_episode(batch, credit), strict=True)
        self.recorder.credit([TokenCredit(self.step, group, member, columns) for group, member, columns in episodes])

    async def _report_heads(self) -> None:
        """Record the layers and heads whose attention gives credit, when they change."""
        heads = await self.roles.learner.credit_heads()
        if heads == self._heads or heads is None:
            return
        self.recorder.event("credit_heads", step=self.step, **heads)
        if self._heads is None:
            layers = ", ".join(map(str, heads["layers"]))
            sizes = f"{len(heads['local'])} local and {len(heads['global'])} global heads"
            self.view.message(f"credit: reads the attention of layers {layers} (from 0); {sizes}")
        self._heads = heads

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``; if a stop is requested first, cancel ``work`` and return None."""
        stopping = asyncio.ensure_future(self.stop.wait())
        try:
            return await self._unless_lost(work, stopping)
        finally:
            stopping.cancel()

    async def _unless_lost(self, work: Coroutine[Any, Any, T], *others: asyncio.Future[Any]) -> T | Any:
        """Return the result of ``work``. Cancel it if one of ``others`` is done first, and return None, or if the
        learner is lost, and raise the cause."""
        working, lost = asyncio.ensure_future(work), self.roles.learner_lost
        try:
            await asyncio.wait((working, lost, *others), return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and lost.done():
                raise lost.result()
            return await working if working.done() else None
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _evaluate(self) -> EvalResult:
        self.view.stage("evaluation")
        settings, roles, step = self.config.evaluation, self.roles, self.step
        self.recorder.begin_evaluation(step)
        env = self.config.env.model_copy(update={"kwargs": {**self.config.env.kwargs, **settings.kwargs}})
        evaluation = evaluate(
            self.config.model_copy(update={"env": env}),
            roles.engine,
            roles.renderer,
            roles.parser,
            range(settings.first_seed, settings.first_seed + settings.episodes),
            temperature=settings.temperature,
            on_episode=lambda trajectory, reason: self.recorder.episode(step, trajectory, EVALUATION, reason),
        )
        result = await self._unless_lost(evaluation)
        self.recorder.metrics(step, evaluation_metrics(result))
        self.view.message(f"step {step}: success {result.success:.1%} on {result.episodes} evaluation episodes")
        self.view.stage("training")
        return result

    async def _save(self) -> None:
        if self.saved_step == self.step:
            return
        state = {
            "step": self.step,
            "success_before": self.success_before,
            "demonstrated_success": self.demonstrated_success,
        }
        with progress.work("checkpoint"):
            partial = checkpoint.begin(self.directory.checkpoints, self.step)
            await self.roles.learner.save(partial / "learner")
            if self.config.model.lora is None:
                await self.roles.learner.export(partial / "model")
            await asyncio.to_thread(self.recorder.flush)
            keep = self.config.checkpoint.keep
            await asyncio.to_thread(
                checkpoint.commit, partial, self.step, rollout=self.snapshot, state=state, keep=keep
            )
        self.saved_step = self.step

    async def _export(self) -> None:
        """Add the whole model to the last checkpoint of a finished run, if it holds only the adapter."""
        last = checkpoint.list_checkpoints(self.directory.checkpoints)[-1]
        if last.whole_model.is_dir():
            return
        with progress.work("exporting the model"):
            partial = checkpoint.begin(self.directory.checkpoints, self.step)
            await self.roles.learner.export(partial / "model")
            await asyncio.to_thread(checkpoint.add_model, partial, last, keep=self.config.checkpoint.keep)

    async def _restore(self, found: checkpoint.Checkpoint | None) -> None:
        """Go back to a checkpoint, or, with None, to the beginning of the run, with a learner that has just started."""
        self.loop, self._missing_signal = self._new_loop(), None
        if found is None:
            self.step, self.saved_step = 0, -1
            self.success_before = self.demonstrated_success = None
            self.recorder.rollback(-1)
            self._watch = alerts.Watch()
            self.snapshot = self.loop.state()
            return
        await self.roles.learner.load(found.learner)
        self.step = self.saved_step = found.step
        self.success_before = found.state["success_before"]
        self.demonstrated_success = found.state["demonstrated_success"]
        self.recorder.rollback(found.step)
        rows = [row for row in read_jsonl(self.directory.metrics_file) if "time/step" in row]
        self._watch = alerts.Watch(rows, read_jsonl(self.directory.events_file))
        await self.roles.publish(found.step)
        self.snapshot = found.rollout_state()
        self.loop.restore(self.snapshot)

    def _record_episode(self, trajectory: Trajectory, ending: str, reason: str) -> None:
        self.recorder.episode(self.step + 1, trajectory, ending, reason)
        if ending in ("trained", "voided"):
            self.callbacks.episode(trajectory)


def _engine_metrics(before: EngineStats, after: EngineStats, seconds: float) -> dict[str, float]:
    return {
        "engine/busy_share": (after.busy_s - before.busy_s) / seconds,
        "engine/tokens_per_s": (after.generated_tokens - before.generated_tokens) / seconds,
        "engine/reused_share": _reused_share(before, after),
        **_replica_metrics(before.engines, after.engines, seconds),
    }


def _reused_share(before: EngineStats, after: EngineStats) -> float:
    """Return the share of the prompt tokens that a prefix cache had."""
    prompt = after.prefilled_tokens - before.prefilled_tokens
    reused = after.reused_tokens - before.reused_tokens
    return reused / (prompt + reused) if prompt + reused else 0.0


def _replica_metrics(before: Sequence[EngineStats], after: Sequence[EngineStats], seconds: float) -> dict[str, float]:
    """Return the metrics of each engine behind a router."""
    metrics: dict[str, float] = {}
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        metrics |= {
            f"engine/{index}/tokens_per_s": (new.generated_tokens - old.generated_tokens) / seconds,
            f"engine/{index}/busy_share": (new.busy_s - old.busy_s) / seconds,
            f"engine/{index}/reused_share": _reused_share(old, new),
            f"engine/{index}/in_flight": new.running + new.waiting,
            f"engine/{index}/version": new.version,
            f"engine/{index}/restarts": new.restarts,
        }
        if tokens := new.generated_tokens - old.generated_tokens:
            metrics[f"engine/{index}/token_s"] = (new.request_s - old.request_s) / tokens
    return metrics
