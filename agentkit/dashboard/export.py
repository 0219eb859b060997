"""Write a static copy of the page, which opens from a file or any web host.

Invariant: the copy contains the page's own modules and the server's own answers. Browsers load neither modules nor data
from a file, so the modules are joined into one script, and each answer is a script that registers it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentkit import records
from agentkit.dashboard.answers import Answers
from agentkit.dashboard.drawings import drawing_of
from agentkit.dashboard.server import DRAWN, static_files
from agentkit.errors import ConfigError, RunDirectoryError
from agentkit.run_directory import RunDirectory

EPISODES = 100
_ENTRY = "main.js"
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_POLICY = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'self'; "
    "style-src 'self'; img-src 'self' data:; frame-src 'self'; base-uri 'none'; form-action 'none'\">\n"
)


def export(places: Sequence[Path], folder: Path, *, episodes: int = EPISODES) -> int:
    """Write a copy of the page about the runs at and below ``places``.

    Args:
        places: run directories, or folders that contain some.
        folder: a new or empty folder.
        episodes: number of complete episodes of each run and use (trained, eval, …), the newest; the table contains
            all.

    Returns:
        The number of runs.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
        RunDirectoryError: there is no run.
    """
    answers = Answers(places)
    if not answers.runs:
        raise RunDirectoryError(f"there is no run in {', '.join(map(str, places))}; give run directories")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; choose a new folder")
        for name, content in _page(answers):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        for number, name in enumerate(answers.runs):
            if not answers.readable(name):  # the page shows the error
                continue
            place = f"data/{number}/"
            (folder / place).mkdir(parents=True)
            for file, question, more in _questions(answers.runs[name], episodes):
                answer = answers.answer(question, {"run": name, **more})
                script = f"agentkitCopy.answers[{json.dumps(place + file)}] = {answer};\n"
                (folder / place / file).write_text(script, encoding="utf-8")
                if question == "drawings":
                    for state, page in enumerate(drawing_of(answers.runs[name], int(more["id"])).pages):
                        content = f'<meta http-equiv="Content-Security-Policy" content="{DRAWN}">{page}'
                        (folder / place / f"page-{more['id']}-{state}.html").write_text(content, "utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another") from error
    return len(answers.runs)


def _questions(run: Path, episodes: int) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield file name, question and arguments of each answer about a run."""
    for question in ("metrics", "settings", "alerts", "pipeline", "sandboxes", "episodes"):
        yield f"{question}.js", question, {}
    file = RunDirectory(run).episodes_file
    if not file.is_file():
        return
    with records.reading(file) as db:
        endings = [ending for (ending,) in db.execute("select distinct ending from episodes")]
    for ending in endings:
        for row in records.list_episodes(file, records.Filter(ending=ending), last=episodes) if episodes else ():
            for question in ("episode", "credit", "drawings"):
                yield f"{question}-{row.id}.js", question, {"id": str(row.id)}


def _page(answers: Answers) -> Iterator[tuple[str, bytes]]:
    pages = static_files()
    modules = modules_of(pages)
    for name, content in pages.items():
        if name not in modules and name != "index.html":
            yield name, content
    page = pages["index.html"].decode()
    module = f'<script src="{_ENTRY}" type="module"></script>'
    scripts = '<script src="copy.js" defer></script>\n<script src="page.js" defer></script>'
    assert module in page
    yield "index.html", page.replace(module, scripts).replace("<title>", f"{_POLICY}<title>").encode()
    yield "page.js", joined(modules).encode()
    runs = json.loads(answers.answer("runs", {}))  # this searches for runs again
    folders = {name: f"data/{number}" for number, name in enumerate(answers.runs)}
    content = {"folders": folders, "answers": {"data/runs.js": runs}}
    yield "copy.js", f"globalThis.agentkitCopy = {json.dumps(content)};\n".encode()


def modules_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the page's own modules among its files."""
    return {name: content.decode() for name, content in files.items() if name.endswith(".js") and "/" not in name}


def joined(modules: dict[str, str]) -> str:
    """Return one script that does what the modules do, beginning with ``main.js``.

    Modules import names from each other without renaming them, so all of their names share one function. Names that two
    modules define would collide; a test forbids them.
    """
    order: list[str] = []

    def visit(name: str) -> None:
        for needed in _IMPORT.findall(modules[name]):
            visit(needed)
        if name not in order:
            order.append(name)

    visit(_ENTRY)
    bodies = (_EXPORT.sub("", _IMPORT.sub("", modules[name])) for name in order)
    return '"use strict";\n(() => {\n' + "\n".join(bodies) + "\n})();\n"
