"""Training runs from Python: ``agentkit.train``."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from agentkit.config import RunConfig
from agentkit.config_io import load_config
from agentkit.dashboard.child import run_page
from agentkit.errors import ConfigError
from agentkit.extras import require_training
from agentkit.jsonl import read_jsonl
from agentkit.preflight import check
from agentkit.progress import View
from agentkit.results import RunResult
from agentkit.run_directory import RunDirectory, changes
from agentkit.signals import run_interruptible
from agentkit.types import Trajectory


def train(
    config: str | Path | Mapping[str, Any] | RunConfig,
    *,
    overrides: Sequence[str] = (),
    resume: bool | Literal["auto"] = False,
    on_step: Callable[[int, Mapping[str, float]], object] | None = None,
    on_episode: Callable[[Trajectory], object] | None = None,
    view: View | None = None,
    dashboard: bool = False,
) -> RunResult:
    """Train an agent, and return when the run has ended.

    It can be called from a script or a notebook: if this thread's event loop is running, the run gets a thread of its
    own. In the main thread, it handles Ctrl-C and SIGTERM until it returns: the first signal finishes the run with a
    checkpoint and returns, the second one cancels the run and raises ``KeyboardInterrupt``.

    Example:
        >>> result = agentkit.train(
        ...     "examples/frozen_lake.yaml",
        ...     overrides=["steps=8"],
        ...     on_step=lambda step, metrics: print(step, metrics["rollout/success"]),
        ... )
        >>> result.success_after

    Args:
        config: a YAML file, the run directory of an earlier run, a dict of the same structure, or a ``RunConfig``.
        overrides: settings that replace those of ``config``, as ``"section.key=value"``.
        resume: False starts a new run in the directory ``config.dir``, which must not hold a run with a checkpoint.
            True continues the run in that directory from its last checkpoint. ``"auto"`` continues it if it is
            unfinished and has the same settings; otherwise a new run is started in ``dir``, ``dir-2``, ….
        on_step: called after each training step with its number (from 1) and its metrics.
        on_episode: called for each episode that was trained on, when its batch is taken, and for each voided episode
            (``outcome == "voided"``: its environment failed), when it ends. Dropped and cancelled episodes, and those
            of imitation and evaluation, are not reported.
            A run that restores itself from a checkpoint repeats the steps since, and reports them again.
        view: receives stages, steps and messages for display; ``agentkit run`` passes one. None shows nothing.
        dashboard: serve the page of ``agentkit dashboard`` about this run until it ends, and print its address.

    Both callbacks are called from the run's event loop, which waits for them. If one raises, the run stops with a
    checkpoint and the exception is raised here.

    Returns:
        The run directory, how the run ended, its success rates, and the metrics of all steps.

    Raises:
        MissingExtra: the extra ``train`` is not installed.
        ConfigError: the settings are wrong, or cannot work on this machine.
        TypeError: a callback is not a function, or is asynchronous.
        RunDirectoryError: the directory is in use, or holds another run.
        CheckpointError: there is no checkpoint to resume, or it cannot be read.
        AgentkitError: the run failed; everything it started has been stopped.
        KeyboardInterrupt: the run was cancelled by a second signal.
    """
    require_training()
    _check_callbacks(on_step=on_step, on_episode=on_episode)
    settings = resolve_config(config, overrides)
    check(settings)
    if automatic := resume == "auto":
        settings, resume = resumable_or_new(settings)
    directory = RunDirectory.resume(settings.dir, settings) if resume else RunDirectory.create(settings)
    tell = print if view is None else view.message
    view = view or _NoView()
    try:
        view.start(settings)
        if automatic:
            view.message(f"{'resuming' if resume else 'starting'} the run in {settings.dir}")
        if directory.set_aside is not None:
            view.message(f"{directory.path} held a run without a checkpoint; its records are in {directory.set_aside}")
        with run_page(directory.path, tell) if dashboard else contextlib.nullcontext():
            return _run(settings, directory, resume, on_step, on_episode, view)
    except KeyboardInterrupt:
        if directory.has_checkpoint():
            after = f"`agentkit run --resume {directory.path}` continues from the last checkpoint"
        else:
            after = "there is no checkpoint yet; the same command starts again"
        raise KeyboardInterrupt(f"stopped; {after}") from None
    finally:
        view.stop()
        directory.release()


def _check_callbacks(**callbacks: object) -> None:
    for name, callback in callbacks.items():
        if callback is not None and (not callable(callback) or inspect.iscoroutinefunction(callback)):
            raise TypeError(f"{name}={callback!r} must be a function that is not asynchronous")


def resolve_config(config: str | Path | Mapping[str, Any] | RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Like ``load_config``, but ``config`` may also be a run directory; ``dir`` is then that directory."""
    if isinstance(config, str | Path) and (Path(config) / "config.yaml").is_file():
        config_file = RunDirectory.open(Path(config)).config_file
        return load_config(config_file, [f"dir={json.dumps(str(config))}", *overrides])
    return load_config(config, overrides)


def _run(
    settings: RunConfig,
    directory: RunDirectory,
    resume: bool,
    on_step: Callable[[int, Mapping[str, float]], object] | None,
    on_episode: Callable[[Trajectory], object] | None,
    view: View,
) -> RunResult:
    view.message("loading …")
    from transformers.utils.logging import disable_progress_bar

    from agentkit.trainers import controller

    disable_progress_bar()  # bars for each saved file would break the view
    return run_interruptible(
        lambda stop: controller.run(
            settings, directory, resume=resume, view=view, stop=stop, on_step=on_step, on_episode=on_episode
        ),
        view.message,
    )


class _NoView:
    def start(self, config: RunConfig) -> None: ...

    def stage(self, name: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def message(self, text: str) -> None: ...

    def stop(self) -> None: ...


def resumable_or_new(settings: RunConfig) -> tuple[RunConfig, bool]:
    """Choose the directory of a run that may have been started before.

    Args:
        settings: settings of the run; the search starts at their ``dir``.

    Returns:
        The settings with ``dir`` set to the first of ``dir``, ``dir-2``, ``dir-3``, … that holds an unfinished run
        with the same settings, or no run with a checkpoint; and whether to resume the run there.
    """
    first = settings.dir
    for number in itertools.count(1):
        path = first if number == 1 else first.with_name(f"{first.name}-{number}")
        settings = settings.model_copy(update={"dir": path})
        directory = RunDirectory(path)
        if not directory.has_checkpoint():
            return settings, False
        if _unfinished(directory) and _same_settings(directory, settings):
            return settings, True
    raise AssertionError("unreachable")


def _unfinished(directory: RunDirectory) -> bool:
    events = list(read_jsonl(directory.events_file))
    return not (events and events[-1]["event"] == "end" and events[-1]["finished"])


def _same_settings(directory: RunDirectory, settings: RunConfig) -> bool:
    try:
        return not changes(directory.config(), settings)
    except ConfigError:  # written by a version with other settings
        return False
