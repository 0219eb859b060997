"""The command line.

Invariant: starting it loads neither torch nor an environment. An ``AgentkitError`` is printed as one message and ends
the process with status 2 (a setting) or 1 (any other error). A traceback is shown only for unexpected errors, or with
``--debug``.
"""

from __future__ import annotations

import errno
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from agentkit.cli import algorithm, dashboard, data, doctor, env, evaluate, model, plan, run, sandbox, serve, show
from agentkit.errors import AgentkitError, ConfigError

app = typer.Typer(
    help="Write an environment once, train an LLM agent on it anywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("plan")(plan.plan)
app.command("eval")(evaluate.evaluate)
app.command("serve")(serve.serve)
app.command("show")(show.show)
app.command("dashboard")(dashboard.dashboard)
app.add_typer(env.app, name="env")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(algorithm.app, name="algorithm")
app.add_typer(model.app, name="model")
app.add_typer(data.app, name="data")
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentkit {version('agentkit-rl')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks. Can be anywhere on the command line.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line (entry point of the console script)."""
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        app(arguments)
    except AgentkitError as error:
        if debug:
            raise
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader, such as `head`, has ended. Closing standard output again would raise again.
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if debug or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        where = f" ({error.filename})" if error.filename else ""
        resume = "make room, then continue from the last checkpoint with --resume"
        typer.secho(f"error: cannot write: {error.strerror}{where}; {resume}", err=True, fg=typer.colors.RED)
        sys.exit(1)
