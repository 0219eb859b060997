"""``agentkit eval``: evaluate a run, a model or an endpoint on tasks that are not used for training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentkit.text import printable

if TYPE_CHECKING:
    from agentkit.results import EvalResult


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="Run directory, Hugging Face model, `quickstart`, `smollm2`, or the model's name at the endpoint.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to override, as `section.key=value`.", show_default=False)
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment; the default is the run's.", show_default=False)] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 128,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Use the model at this OpenAI-compatible server, such as http://localhost:8000/v1.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Record every episode in this new folder, for `agentkit show DIR`.", show_default=False
        ),
    ] = None,
) -> None:
    """Play evaluation tasks and report the success rate: `agentkit eval runs/frozen_lake --episodes 256`."""
    import agentkit
    from agentkit.cli.heartbeat import watched
    from agentkit.evaluation import evaluation_config
    from agentkit.signals import STOPPED

    config = evaluation_config(target, env, overrides or [])
    first = config.evaluation.first_seed
    typer.echo(printable(f"{config.env.id}, {target}, {episodes} episodes from seed {first} …"))
    began = time.monotonic()
    try:
        with watched(f"evaluating {target}"):
            result = agentkit.evaluate(
                target, env=env, episodes=episodes, endpoint=endpoint, overrides=overrides or [], out=out
            )
    except KeyboardInterrupt:
        raise typer.Exit(STOPPED) from None
    for line in report(result, time.monotonic() - began):
        typer.echo(line)
    if out is not None:
        typer.echo(printable(f"records   {out}  (agentkit show {out})"))


def report(result: EvalResult, seconds: float) -> list[str]:
    """Return the printed lines of an evaluation, with the 95 % interval of the success rate."""
    low, high = result.success_interval()
    lines = [
        f"success   {result.success:.1%}  (95 % interval {low:.1%} to {high:.1%})",
        f"return    {result.return_mean:.3f}",
        f"turns     {result.turns_mean:.2f}",
        f"episodes  {result.episodes} in {seconds:.1f} s",
    ]
    if result.failures:
        lines.append(f"failures  {result.failures} episodes without a result: the environment failed")
    if result.voided:
        causes = ", ".join(f"{count} x {cause}" for cause, count in sorted(result.voided.items()))
        lines.append(f"voided    {sum(result.voided.values())} attempts: {causes}")
    if result.policy_crashes:
        lines.append(f"crashed   {result.policy_crashes} episodes failed: the policy's code crashed its sandbox twice")
    return lines
