"""`agentkit model`: check.

Invariant: only the tokenizer is loaded, not the weights.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentkit.cli.heartbeat import watched
from agentkit.errors import RendererError

app = typer.Typer(help="Check a model.", no_args_is_help=True)


@app.callback()
def _model() -> None:
    """Keep `check` a command of its own while it is the only one."""


@app.command()
def check(
    path: Annotated[
        str, typer.Argument(help="As `model.path`: a model or run directory, `quickstart`, or a hub name.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Settings of `model`, such as chat_template=chat.jinja template_arguments.enable_thinking=false.",
        ),
    ] = None,
) -> None:
    """Show which kinds of history (`model.history`) fit the chat template, and why."""
    from agentkit.config_io import load_config
    from agentkit.extras import require_training

    require_training()
    from agentkit.trainers.models.load import load_tokenizer
    from agentkit.trainers.rollout.renderer import ChatRenderer
    from agentkit.trainers.rollout.tool_probing import TOOL as PROBE

    run = {"env": {"id": "FrozenLake-v1"}, "model": {"path": path}}
    model = load_config(run, [f"model.{setting}" for setting in settings or []]).model
    with watched(f"reading the chat template of {path}"):
        tokenizer = load_tokenizer(model.path, model.chat_template)
    table = Table("model.history", "", "remark")
    fitting: dict[str, ChatRenderer] = {}
    for name in ("append", "rerender"):
        try:
            fitting[name] = ChatRenderer(tokenizer, rerenders=name == "rerender", arguments=model.template_arguments)
        except RendererError as error:
            table.add_row(name, "[red]no[/red]", escape(str(error)))
        else:
            remark = {
                "append": "the chat template leaves earlier turns alone; one training sequence per episode",
                "rerender": "one training sequence per turn; `window` shows the latest turns only",
            }[name]
            table.add_row(name, "[green]yes[/green]", remark)
    Console().print(table)
    if not fitting:
        raise typer.Exit(1)
    history, renderer = next(iter(fitting.items()))
    merged = renderer.template.system_is_merged
    typer.echo(f"model.history=auto uses {history}")
    typer.echo(f"an answer ends with {tokenizer.convert_ids_to_tokens(renderer.end_of_turn)!r}")
    typer.echo(f"the rules are {'at the start of the first user message' if merged else 'a system message'}")
    tools = ChatRenderer(
        tokenizer,
        rerenders=True,
        arguments=model.template_arguments,
        tools=[PROBE],
        tool_format=model.tool_format,
    ).tools
    assert tools is not None
    shown = "as the chat template does" if tools.native else "and the tools are described in the system message"
    typer.echo(f"tool calls are written in the format {tools.format.name}, {shown}")
