"""One episode as one page without other files.

Invariant: the page runs the same modules with the same answers as the static copy. Its security policy allows only
its own script, by its hash, and loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

from agentkit import records
from agentkit.dashboard.answers import Answers
from agentkit.dashboard.drawings import drawing_of
from agentkit.dashboard.export import joined, modules_of
from agentkit.dashboard.server import static_files
from agentkit.errors import ConfigError
from agentkit.run_directory import RunDirectory

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header id="top"></header>
<main id="view" tabindex="-1"></main>
<noscript>This page needs JavaScript.</noscript>
<script>{script}</script>
</body>
</html>
"""


def write_episode_page(path: Path, number: int, file: Path) -> None:
    """Write one episode of a run, with its tokens and its group, as one self-contained page.

    Args:
        path: the run.
        number: id of the episode.
        file: the page; an older one is replaced.

    Raises:
        ConfigError: the file cannot be written.
        RunDirectoryError: the run has no such episode.
    """
    page = episode_page(path, number)
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another") from error


def episode_page(path: Path, number: int) -> str:
    """Return the page of an episode. It contains the other members of its group, too.

    Raises:
        RunDirectoryError: the run has no such episode.
    """
    run = RunDirectory.open(path).path.absolute()
    records.read_episode(RunDirectory(run).episodes_file, number)
    answers = Answers([run])
    ((name, _),) = answers.runs.items()
    known = {"data/runs.js": json.loads(answers.answer("runs", {}))}
    pages: dict[str, str] = {}
    group = json.loads(answers.answer("episode", {"run": name, "id": str(number)}))["group"]
    for id in group:
        for question in ("episode", "credit", "drawings"):
            known[f"data/0/{question}-{id}.js"] = json.loads(answers.answer(question, {"run": name, "id": str(id)}))
        for state, page in enumerate(drawing_of(run, id).pages):
            pages[f"data/0/page-{id}-{state}.html"] = page
    copy = {"folders": {name: "data/0"}, "answers": known, "pages": pages, "only": {"run": name, "id": number}}
    files = static_files()
    script = "\n".join(
        (
            # "<" could end the script, or begin a comment in it.
            f"globalThis.agentkitCopy = {json.dumps(copy).replace('<', chr(92) + 'u003c')};",
            files["vendor/uplot/uPlot.iife.min.js"].decode(),
            joined(modules_of(files)),
        )
    )
    style = files["vendor/uplot/uPlot.min.css"].decode() + files["style.css"].decode()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(policy=policy, title=f"agentkit: episode {number}", style=style, script=script)
