"""`agentkit sandbox`: create, list, run commands in, remove and serve sandboxes, and build their images.

Invariant: without an explicit id, owner or ``--all``, only sandboxes without a living owner are removed. ``exec``
passes on the output and the exit status of the command. Output to a terminal has its control characters escaped.
"""

import typer

from agentkit.cli.sandbox import build, create, execute, listing, operation, removal, serve, top

app = typer.Typer(help="Create, list, use, remove and serve sandboxes, and build their images.", no_args_is_help=True)
app.command("create")(create.create)
app.command("rm")(removal.remove)
app.command("stats")(listing.stats)
app.command("ls")(listing.list_sandboxes)
app.command("logs")(execute.logs)
app.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
    execute.execute
)
app.command("gc")(removal.gc)
app.command("build")(build.build)
app.command("serve")(serve.serve)
app.command("drain")(operation.drain)
app.command("status")(operation.status)
app.command("pull")(operation.pull)
app.command("top")(top.top)
