"""`agentkit algorithm`: list, check.

Invariant: a plug-in that does not load affects only its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentkit import plugins
from agentkit.cli.heartbeat import watched
from agentkit.errors import ConfigError, RegistryError

if TYPE_CHECKING:
    from agentkit.config import AlgorithmConfig
    from agentkit.trainers.algorithms.contract import Result

app = typer.Typer(help="List algorithms and other plug-ins, and check your own.", no_args_is_help=True)

Checked = Literal["advantage", "loss"]


@app.command("list")
def list_algorithms(
    kind: Annotated[
        str | None,
        typer.Option(help="Only this kind: advantage, loss, reward, filter, parser or summary.", show_default=False),
    ] = None,
) -> None:
    """Show advantages, losses, rewards, filters, parsers and summaries: built in, or declared by installed packages."""
    known = {one.name: one for one in plugins.KINDS}
    if kind is not None and kind not in known:
        raise ConfigError(f"--kind {kind}: there is no such kind; choose {', '.join(known)}")
    table = Table("kind", "name", "from", "needs", "options")
    for one in plugins.KINDS if kind is None else [known[kind]]:
        for row in _rows(one):
            table.add_row(*map(escape, row))
    Console().print(table)


def _rows(kind: plugins.Kind) -> Iterator[tuple[str, str, str, str, str]]:
    for name in kind.built_in:
        yield kind.name, name, "built-in", _needs(kind.built_in[name]), ""
    for name, claim in kind.claims().items():
        try:
            plugin = kind.load(name)
        except RegistryError as error:
            yield kind.name, name, claim.distribution, f"error: {error}", ""
        else:
            options = ", ".join(f"{option}: {text}" for option, text in plugin.options.items())
            yield kind.name, name, claim.distribution, _needs(plugin.traits), options


def _needs(traits: Any) -> str:
    if isinstance(traits, plugins.AdvantageTraits):
        needs = {"a critic": traits.needs_critic, "groups of 2 or more": traits.group_baseline}
        return ", ".join(need for need, wanted in needs.items() if wanted)
    return ", ".join(sorted(traits.needs)) if isinstance(traits, plugins.LossTraits) else ""


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="Built-in name, plug-in, or package.module:function.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings of `algorithm`, such as gamma=0.9 options.power=2."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="`advantage` or `loss`, if the name alone does not tell.", show_default=False)
    ] = None,
) -> None:
    """Check that an advantage or a loss keeps the rules that training relies on."""
    from agentkit.extras import require_training

    require_training()
    kind = kind or _kind_of(name)
    if kind not in get_args(Checked):
        raise ConfigError(f"--kind {kind}: only advantages and losses can be checked")
    config = _settings(kind, name, settings or [])
    with watched(f"checking {name}"):
        results = list(_check(kind, config))
    table = Table(f"{kind} {escape(name)}", "", "problem")
    for result in results:
        state = "[red]BROKEN[/red]" if result.problem else "[green]ok[/green]"
        table.add_row(result.rule, state, escape(result.problem))
    Console().print(table)
    broken = sum(bool(result.problem) for result in results)
    typer.echo(f"{len(results) - broken} of {len(results)} rules are kept")
    if broken:
        raise typer.Exit(1)


def _kind_of(name: str) -> str:
    """Return whether ``name`` is an advantage or a loss."""
    if ":" in name:
        return "loss" if _loads(plugins.LOSS, name) and not _loads(plugins.ADVANTAGE, name) else "advantage"
    kinds = (plugins.ADVANTAGE, plugins.LOSS)
    found = [kind.name for kind in kinds if name in kind.built_in or name in kind.claims()]
    if len(found) > 1:
        raise ConfigError(f"there is an advantage {name} and a loss {name}; choose one with --kind")
    if not found:
        known = [one for kind in kinds for one in (*kind.built_in, *kind.claims())]
        hint = plugins.entry_points.nearest(name, known)
        raise ConfigError(f"there is no advantage or loss {name!r}; {hint} (`agentkit algorithm list` shows all)")
    return found[0]


def _loads(kind: plugins.Kind, name: str) -> bool:
    try:
        kind.load(name)
    except RegistryError:
        return False
    return True


def _settings(kind: str, name: str, settings: list[str]) -> AlgorithmConfig:
    """Return the algorithm section, validated as in a run that has what the part needs."""
    from agentkit.config_io import load_config
    from agentkit.preflight import plugin_problems

    run: dict[str, Any] = {"env": {"id": "FrozenLake-v1"}, "algorithm": {kind: name, "kl": "k3"}}
    if kind == "advantage" and plugins.ADVANTAGE.traits(name).needs_critic:
        run["critic"] = {}
    config = load_config(run, [f"algorithm.{setting}" for setting in settings])
    if problems := list(plugin_problems(config)):
        raise ConfigError("\nerror: ".join(problems))
    return config.algorithm


def _check(kind: str, config: AlgorithmConfig) -> Iterator[Result]:
    from agentkit.trainers.algorithms.contract import check_advantage
    from agentkit.trainers.algorithms.loss_contract import check_loss

    return check_advantage(config) if kind == "advantage" else check_loss(config)
