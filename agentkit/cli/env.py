"""`agentkit env`: list, info, check, play, serve, export, new.

Invariant: listing imports no environment; the other commands describe an environment from its class.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentkit import prefixes, registry, scaffold
from agentkit.cli.heartbeat import watched
from agentkit.errors import ConfigError
from agentkit.extras import require_openenv

app = typer.Typer(help="List, inspect, check, play, serve, export and create environments.", no_args_is_help=True)

Id = Annotated[
    str,
    typer.Argument(metavar="ID", help="Registered name, such as FrozenLake-v1, or openenv:URL of an OpenEnv server."),
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments of the environment.")]
Sandbox = Annotated[
    str | None,
    typer.Option(
        metavar="BACKEND",
        help="Run it in a sandbox: `docker`, `local`, `remote`, or `remote:URL,URL` for these servers.",
        show_default=False,
    ),
]


def arguments_of(pairs: list[str] | None) -> dict[str, Any]:
    """Read ``key=value`` pairs, values as YAML. Raises ``ConfigError`` for anything else."""
    arguments = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{pair!r} is not of the form key=value, such as size=8")
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError as problem:
            raise ConfigError(f"the value of {pair!r} cannot be read: {problem}") from None
    return arguments


@app.command("list")
def list_environments(
    load: Annotated[bool, typer.Option("--load", help="Also import each environment, to check that it loads.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show all registered environments and the prefixes of other libraries, their origin, and their errors."""
    rows = []
    for entry in registry.list_envs():
        if load:
            try:
                entry.load()
            except registry.RegistryError as problem:
                entry.error = entry.error or str(problem)
        origin = f"plugin {entry.distribution}" if entry.source == "plugin" else entry.source
        rows.append({"id": entry.id, "source": origin, "entry_point": entry.target, "error": entry.diagnose()})
    for name, prefix in prefixes.PREFIXES.items():
        target = {"entry_point": prefix.entry_point, "error": prefix.problem()}
        place = "URL" if prefix.served else "NAME"
        rows.append({"id": f"{name}:{place}", "source": f"library {name}", **target})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("environment", "from", "entry point", "state")
    for row in rows:
        state = f"[red]{escape(row['error'])}[/red]" if row["error"] else "[green]ok[/green]"
        table.add_row(escape(row["id"]), escape(row["source"]), escape(row["entry_point"]), state)
    Console().print(table)


@app.command()
def info(id: Id) -> None:
    """Show description, arguments and declarations of an environment."""
    entry = registry.entry(id)
    cls: Any = entry.load().entry_point
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"{id}  ({entry.target}, {entry.distribution or 'registered in this process'})\n")
    console.print(f"{inspect.getdoc(cls) or ''}\n")
    console.print("Instructions shown to the model:")
    console.print("\n".join(f"  {line}" for line in cls.instructions_for(**entry.spec.kwargs).splitlines()) + "\n")
    tools = ", ".join(tool["function"]["name"] for tool in cls.tools_for(**entry.spec.kwargs))
    facts = {
        "turns": cls.max_turns_for(**entry.spec.kwargs),
        "actions per turn": cls.actions_per_turn,
        "tools": tools or "none",
        "runs": "async" if inspect.iscoroutinefunction(cls.step) else cls.concurrency,
        "deterministic": "yes" if cls.deterministic else "no",
        "expert": "yes" if cls.has_expert() else "no",
        "render modes": ", ".join(cls.metadata.get("render_modes") or []) or "none",
        "arguments": ", ".join(
            str(p).split(":")[0] if p.default is p.empty else f"{p.name}={entry.spec.kwargs.get(p.name, p.default)!r}"
            for p in inspect.signature(cls).parameters.values()
        ),
    }
    options = cls.options_for(**entry.spec.kwargs)
    if options:
        facts["options"] = ", ".join(f"{name}={value!r}" for name, value in options.items())
    for name, value in facts.items():
        console.print(f"{name:<18}{value}")


@app.command()
def check(
    id: Id,
    arguments: Arguments = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each check.")] = 120.0,
    sandbox: Sandbox = None,
) -> None:
    """Check an environment: gymnasium's checker, determinism, randomness, types, expert, closing.

    With --sandbox, also check that it plays the same episodes in a sandbox.
    """
    from agentkit.envs.check import check as examine

    with watched(f"checking {id}"):
        results = examine(id, timeout=timeout, sandbox=sandbox, **arguments_of(arguments))
    for result in results:
        mark = typer.style("ok  ", fg=typer.colors.GREEN) if result.passed else typer.style("FAIL", fg=typer.colors.RED)
        typer.echo(f"{mark}  {result.name}{f': {result.detail}' if result.detail else ''}")
        if result.transcript:
            typer.echo(textwrap.indent(result.transcript, "      "))
    failed = sum(not result.passed for result in results)
    typer.echo(f"{len(results) - failed} of {len(results)} checks passed")
    if failed:
        raise typer.Exit(1)


@app.command()
def play(
    id: Id,
    arguments: Arguments = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode; each further one adds 1.")] = 0,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 1,
    sandbox: Sandbox = None,
    expert: Annotated[bool, typer.Option("--expert", help="Let the environment's expert play.")] = False,
    random: Annotated[bool, typer.Option("--random", help="Let a random agent play.")] = False,
    delay: Annotated[float, typer.Option(min=0.0, help="Seconds between actions of an automatic player.")] = 0.0,
    web: Annotated[bool, typer.Option("--web", help="Play in a browser, if the environment has web pages.")] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for --web, on this machine; 0 chooses a free one.")
    ] = 0,
) -> None:
    """Play an environment, in the terminal or in a browser."""
    from agentkit.cli import env_play, env_web

    if web:
        if expert or random:
            raise ConfigError("--web is for human players; --expert and --random play in the terminal")
        if sandbox is not None:
            raise ConfigError("--web shows pages of an environment in this process; leave out --web or --sandbox")
        env_web.serve(id, arguments_of(arguments), seed=seed, port=port, ready=_tell_address)
        return
    if expert and random:
        raise ConfigError("--expert and --random contradict; choose one, or none to play by hand")
    player = "expert" if expert else "random" if random else "human"
    env_play.play(
        id, arguments_of(arguments), sandbox=sandbox, player=player, seed=seed, episodes=episodes, delay=delay
    )


@app.command()
def serve(
    id: Id,
    arguments: Arguments = None,
    sandbox: Sandbox = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other than loopback needs a token and TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 8000,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions at one time, each with its environment.")] = 64,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of an episode; default: turns times actions per turn.")
    ] = None,
    idle_timeout: Annotated[float, typer.Option(help="Seconds without a message that end a session.")] = 3600.0,
    step_timeout: Annotated[float, typer.Option(help="Seconds that a step may take.")] = 30.0,
    reset_timeout: Annotated[float, typer.Option(help="Seconds that making or resetting may take.")] = 60.0,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the tokens of clients; default: $AGENTKIT_OPENENV_TOKEN, or none.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="Key of the TLS certificate.")] = None,
) -> None:
    """Serve an environment over OpenEnv's protocol, to its clients and to trainers that speak it. Ctrl-C ends it."""
    require_openenv("agentkit env serve")
    from agentkit.integrations.openenv_server import serve as serve_environment
    from agentkit.integrations.openenv_tokens import find_tokens

    serve_environment(
        id,
        arguments_of(arguments),
        sandbox=sandbox,
        host=host,
        port=port,
        max_sessions=max_sessions,
        max_steps=max_steps,
        idle_timeout=idle_timeout,
        step_timeout=step_timeout,
        reset_timeout=reset_timeout,
        tokens=find_tokens(token_file),
        certificate=certificate,
        key=key,
        announce=lambda url: typer.echo(f"serving {id} at {url} (Ctrl-C ends)"),
    )


@app.command()
def export(
    id: Annotated[str, typer.Argument(metavar="ID", help="CodeContest-v0.")],
    folder: Annotated[Path, typer.Argument(help="Folder that gets a directory for each task.")],
    arguments: Arguments = None,
    count: Annotated[int, typer.Option(min=1, help="Number of tasks, one for each seed.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first task.")] = 0,
    base: Annotated[str, typer.Option(help="Image with Python and bash that the tasks start from.")] = "agentkit/base",
) -> None:
    """Write tasks as task directories of Harbor, which other trainers read."""
    from agentkit.integrations.harbor_export import export as export_tasks

    written = export_tasks(id, folder, count, seed=seed, base=base, kwargs=arguments_of(arguments))
    typer.echo(f"wrote {len(written)} tasks to {folder}")


def _tell_address(address: str) -> None:
    typer.echo(f"play at {address} (Ctrl-C ends)")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the package, such as my-env.")],
    into: Annotated[Path, typer.Option(help="Parent folder of the package.")] = Path(),
) -> None:
    """Create a complete plugin package: environment, entry point, tests, README, training configuration."""
    written = scaffold.write_package(name, into)
    typer.echo(f"wrote {written.directory}")
    typer.echo(f"next:  pip install -e {written.directory} && agentkit env check {written.env_id}")
