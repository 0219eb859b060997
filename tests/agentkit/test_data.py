"""Data sets: downloads from a real server that breaks off, hostile archives, and the commands."""

import functools
import hashlib
import http.server
import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from others import as_another
from typer.testing import CliRunner

from agentkit import data
from agentkit.archives import unpack
from agentkit.cli.data import app
from agentkit.data import DataSet, Remote
from agentkit.download import download
from agentkit.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 4_000


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves ``state["content"]``; breaks the connection after ``state["limit"]`` bytes of an answer."""

    def __init__(self, state, *arguments):
        self.state = state
        super().__init__(*arguments)

    def do_GET(self):
        state, content, start = self.state, self.state["content"], 0
        asked = self.headers.get("Range")
        state["requests"].append(asked)
        tag = hashlib.md5(content).hexdigest()
        if asked and state["ranges"] and self.headers.get("If-Range") == f'"{tag}"':
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
        self.send_response(206 if start else state["status"])
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Content-Type", state["type"])
        self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        end = len(content) if state["limit"] is None else min(len(content), start + state["limit"])
        self.wfile.write(content[start:end])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    state = {
        "content": CONTENT,
        "limit": None,
        "ranges": True,
        "requests": [],
        "status": 200,
        "type": "application/octet-stream",
    }
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, state))
    thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
    thread.start()
    state["url"] = f"http://127.0.0.1:{http_server.server_port}/games.zip"
    yield state
    http_server.shutdown()
    http_server.server_close()
    thread.join()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path / "data"))
    return tmp_path


def numbers(folder):
    return {"lines": len((folder / "games" / "a.txt").read_text().splitlines())}


def declare(monkeypatch, **changes):
    fields = {
        "name": "toys",
        "title": "Toys",
        "licence": "MIT",
        "homepage": "https://example.org",
        "size": "1 MB",
        "forms": (("games/a.txt",),),
        "counts": {"lines": 2},
        "counter": f"{__name__}:numbers",
    }
    known = DataSet(**{**fields, **changes})
    monkeypatch.setitem(data.DATASETS, known.name, known)


def packed(**files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def test_an_interrupted_download_is_continued(server, tmp_path):
    server["limit"] = 300_000
    seen = []
    download(server["url"], tmp_path / "file", pause=0.0, progress=lambda done, total: seen.append((done, total)))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert server["requests"] == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert sorted(done for done, _ in seen) == [done for done, _ in seen]
    assert os.listdir(tmp_path) == ["file"]


def test_another_process_continues_a_partial_download(server, tmp_path):
    server["limit"] = 0  # nothing more arrives: the download fails and keeps its partial file
    download_part = tmp_path / "file.part"
    download_part.write_bytes(CONTENT[:1000])
    (tmp_path / "file.tag").write_text(f'"{hashlib.md5(CONTENT).hexdigest()}"')
    with pytest.raises(DataError, match="1000 bytes are kept"):
        download(server["url"], tmp_path / "file", pause=0.0)
    server["limit"] = None
    download(server["url"], tmp_path / "file", pause=0.0)
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("change", ["content", "ranges"])
def test_it_starts_again_if_the_file_changed_or_the_server_cannot_go_on(server, tmp_path, change):
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    (tmp_path / "file.tag").write_text(f'"{hashlib.md5(CONTENT).hexdigest()}"')
    server[change] = {"content": b"other" * 10_000, "ranges": False}[change]
    download(server["url"], tmp_path / "file", pause=0.0)
    assert (tmp_path / "file").read_bytes() == server["content"]


def test_a_complete_partial_file_is_not_downloaded_again(server, tmp_path):
    (tmp_path / "file.part").write_bytes(CONTENT)
    (tmp_path / "file.tag").write_text(f'"{hashlib.md5(CONTENT).hexdigest()}"')
    download(server["url"], tmp_path / "file", pause=0.0)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_refusals_say_why(server, tmp_path):
    with pytest.raises(DataError, match="instead of 5"):
        download(server["url"], tmp_path / "file", size=5, pause=0.0)
    server["type"] = "text/html; charset=utf-8"
    with pytest.raises(DataError, match=r"web page .* --from"):
        download(server["url"], tmp_path / "file", pause=0.0)
    server["status"] = 404
    with pytest.raises(DataError, match="404"):
        download(server["url"], tmp_path / "file", pause=0.0)
    server["status"] = 503
    with pytest.raises(DataError, match="503"):
        download(server["url"], tmp_path / "file", pause=0.0)


def test_a_set_is_fetched_verified_and_read_only(server, place, monkeypatch):
    server["content"] = packed(**{"games/a.txt": "one\ntwo\n"})
    digest = hashlib.sha256(server["content"]).hexdigest()
    declare(monkeypatch, files=(Remote(server["url"], ".", len(server["content"]), digest, unpack=True),))
    assert data.find("toys") is None
    with pytest.raises(DataError, match=r"agentkit data fetch toys` \(downloads 1 MB\)"):
        data.locate("toys")
    folder = data.fetch("toys")
    assert folder == place / "data" / "toys" == data.locate("toys")
    assert (folder / "games" / "a.txt").read_text() == "one\ntwo\n"
    assert stat.S_IMODE((folder / "games" / "a.txt").stat().st_mode) == 0o444
    assert data.verify("toys") == []
    assert data.fetch("toys") == folder
    assert len(server["requests"]) == 1
    (folder / "games" / "a.txt").chmod(0o644)
    (folder / "games" / "a.txt").write_text("one\n")
    assert data.verify("toys") == [
        "games/a.txt has changed since it was fetched",
        f"toys in {folder} has 1 lines instead of 2",
    ]


def test_a_wrong_checksum_or_count_leaves_nothing_behind(server, place, monkeypatch):
    server["content"] = packed(**{"games/a.txt": "one\n"})
    declare(monkeypatch, files=(Remote(server["url"], ".", None, "0" * 64, unpack=True),))
    with pytest.raises(DataError, match="checksum differs"):
        data.fetch("toys")
    declare(monkeypatch, files=(Remote(server["url"], ".", unpack=True),))
    with pytest.raises(DataError, match="1 lines instead of 2"):
        data.fetch("toys")
    declare(monkeypatch, files=(Remote(server["url"], "x.txt"),))
    with pytest.raises(DataError, match=r"games/a\.txt is missing"):
        data.fetch("toys")
    assert data.find("toys") is None
    assert [path for path in (place / "data").iterdir() if not path.name.startswith(".toys.lock")] == [
        place / "data" / ".downloads"
    ]


def test_a_local_archive_or_folder_is_accepted(place, monkeypatch):
    declare(monkeypatch)
    (place / "own.zip").write_bytes(packed(**{"top/games/a.txt": "one\ntwo\n"}))
    folder = data.fetch("toys", place / "own.zip")
    assert numbers(folder) == {"lines": 2}
    declare(monkeypatch, name="others")
    assert numbers(data.fetch("others", folder)) == {"lines": 2}
    declare(monkeypatch, name="third")
    with pytest.raises(DataError, match="does not exist"):
        data.fetch("third", place / "nothing")
    (place / "notes.json").write_text("{}")
    with pytest.raises(DataError, match=r"neither a folder nor an archive .* games/a\.txt"):
        data.fetch("third", place / "notes.json")


def count_lines(folder):
    return {"lines": sum(len(path.read_text().splitlines()) for path in folder.glob("*.csv"))}


def test_the_only_file_of_a_data_set_is_accepted(place, monkeypatch):
    forms = (("test.csv",), ("lite_test.csv",))
    declare(monkeypatch, forms=forms, counter=f"{__name__}:count_lines")
    (place / "test-00000-of-00001.csv").write_text("one\n")
    with pytest.raises(DataError, match="1 lines instead of 2"):
        data.fetch("toys", place / "test-00000-of-00001.csv")
    (place / "test-00000-of-00001.csv").write_text("one\ntwo\n")
    assert [path.name for path in data.fetch("toys", place / "test-00000-of-00001.csv").glob("*.csv")] == ["test.csv"]
    assert data.verify("toys") == []
    declare(monkeypatch, name="others", forms=forms, counter=f"{__name__}:count_lines")
    (place / "lite_test.csv").write_text("one\ntwo\n")
    assert [path.name for path in data.fetch("others", place / "lite_test.csv").glob("*.csv")] == ["lite_test.csv"]
    declare(monkeypatch, name="third", forms=forms, counter=f"{__name__}:count_lines")
    (place / "test.json").write_text("{}")
    with pytest.raises(DataError, match="neither a folder nor an archive"):
        data.fetch("third", place / "test.json")


def write_toys(folder):
    (folder / "games").mkdir()
    (folder / "games" / "a.txt").write_text("1\n2\n")


def test_agentkits_own_data_sets_are_generated_on_use(place, monkeypatch):
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(data.locate("toys"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [place / "data" / "toys"] * 4


def test_only_one_process_fetches_a_set(place, monkeypatch):
    declare(monkeypatch)
    with data._lock("toys"), pytest.raises(DataError, match="another process is fetching"):
        data.fetch("toys", place)


@pytest.fixture
def commons(monkeypatch):
    """A folder that every user can read, with a folder for temporary files; ``tmp_path`` is private to its creator."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("AGENTKIT_DATA", f"{folder}/data")
        monkeypatch.setattr(tempfile, "tempdir", f"{folder}/tmp")
        os.mkdir(f"{folder}/tmp")
        os.chmod(f"{folder}/tmp", 0o1777)
        yield Path(folder)


def source_of_toys(folder, text="1\n2\n"):
    (folder / "games").mkdir(parents=True)
    (folder / "games" / "a.txt").write_text(text)
    return folder


def spare_of_toys():
    """The folder of the data set toys in this user's spare folder, created by the caller."""
    spare = data._spare_root()
    spare.mkdir(mode=0o700)
    return source_of_toys(spare / "toys")


def test_the_spare_folder_is_used_if_the_usual_one_is_not_writable(commons, monkeypatch):
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    made = as_another(data.locate, "toys")
    assert made == commons / "tmp" / f"agentkit-data-{made.stat().st_uid}" / "toys"
    assert as_another(data.find, "toys") == made
    assert as_another(data.derived_root).parent == made.parent


def test_a_writable_folder_precedes_the_spare_one(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    spare_of_toys()
    assert data.find("toys") is None
    assert data.locate("toys") == place / "data" / "toys"


@pytest.mark.parametrize(
    "change",
    [
        lambda spare: spare.chmod(0o770),
        lambda spare: spare.chmod(0o707),
        lambda spare: (spare.rename(spare.with_name("elsewhere")), spare.symlink_to(spare.with_name("elsewhere"))),
    ],
    ids=["of a group", "writable by all", "a link"],
)
def test_data_sets_that_other_users_could_have_written_are_not_read(place, monkeypatch, change):
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(data, "_writable", lambda folder: False)  # as root, all can be
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    folder = spare_of_toys()
    assert data.find("toys") == folder
    change(folder.parent)
    assert data.find("toys") is None
    with pytest.raises(DataError, match="not a folder that only you can write"):
        data.locate("toys")


def test_data_sets_in_a_spare_folder_of_another_user_are_not_read(commons, monkeypatch):
    declare(monkeypatch, files=(Remote("https://example.org", "x"),))
    folder = as_another(spare_of_toys)
    assert as_another(data.find, "toys") == folder
    os.chown(folder.parent, 0, 0)
    folder.parent.chmod(0o755)
    assert as_another(data.find, "toys") is None


def test_a_set_is_taken_from_one_that_is_here_already(commons, monkeypatch):
    declare(monkeypatch)
    declare(monkeypatch, name="others")
    sealed = data.fetch("toys", source_of_toys(commons / "source"))
    data.fetch("others", sealed)
    assert data.verify("others") == []
    monkeypatch.setenv("AGENTKIT_DATA", f"{commons}/tmp/own")
    assert as_another(data.fetch, "toys", sealed) == commons / "tmp" / "own" / "toys"
    assert as_another(data.verify, "toys") == []


def test_a_folder_that_can_only_be_read_serves_as_well(commons, monkeypatch):
    declare(monkeypatch)
    source = source_of_toys(commons / "source")
    source.chmod(0o555)
    (source / "games").chmod(0o555)
    monkeypatch.setenv("AGENTKIT_DATA", f"{commons}/tmp/own")
    assert as_another(data.fetch, "toys", source) == commons / "tmp" / "own" / "toys"
    assert [path.name for path in (commons / "tmp" / "own").iterdir() if path.name != "toys"] == [".toys.lock"]


def test_a_root_that_can_only_be_read_has_its_sets_fetched(commons, monkeypatch):
    declare(monkeypatch)
    folder = data.fetch("toys", source_of_toys(commons / "source"))
    assert as_another(data.fetch, "toys") == folder == as_another(data.locate, "toys")
    assert as_another(data.verify, "toys") == []


def test_a_root_that_cannot_be_looked_into_has_no_set(commons, monkeypatch):
    declare(monkeypatch, files=(Remote("https://example.org", "x"),))
    (commons / "data").mkdir(mode=0o700)
    with pytest.raises(DataError, match="agentkit data fetch toys"):
        as_another(data.locate, "toys")
    with pytest.raises(DataError, match="is not writable"):
        as_another(data.fetch, "toys")
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    assert as_another(data.locate, "toys").parent.parent == commons / "tmp"


def test_a_root_that_is_a_file_is_reported(place, monkeypatch):
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    (place / "data").write_text("a file")
    for root in (place / "data", place / "data" / "below"):
        monkeypatch.setenv("AGENTKIT_DATA", str(root))
        assert data.find("toys") is None
        for work in (lambda: data.locate("toys"), lambda: data.fetch("toys", place), data.derived_root):
            with pytest.raises(DataError, match=f"'{root}'; data sets are stored in {root}; set AGENTKIT_DATA"):
                work()


def test_without_a_home_directory_the_error_names_the_variable_to_set(monkeypatch):
    for name in ("AGENTKIT_DATA", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"~/\.cache/agentkit/data: no such home directory; set AGENTKIT_DATA"):
        as_another(data.locate, "webshop-small", uid=54_321)
    monkeypatch.setenv("AGENTKIT_DATA", "~nobody-of-that-name/data")
    with pytest.raises(DataError, match="~nobody-of-that-name/data: no such home directory"):
        data.root()


def test_a_full_disk_is_reported_and_leaves_no_files(place, monkeypatch):
    declare(monkeypatch)
    source = source_of_toys(place / "source")
    (source / "large").write_bytes(bytes(1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(DataError, match=r"File too large: .*large"):
            data.fetch("toys", source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(place / "data") == [".toys.lock"]


def test_a_dangling_link_is_named(place, monkeypatch):
    declare(monkeypatch)
    source = source_of_toys(place / "source")
    (source / "dangling").symlink_to(place / "nothing")
    with pytest.raises(DataError, match=r"No such file or directory: .*source/dangling"):
        data.fetch("toys", source)


def damaged(folder):
    raise ERRORS[(folder / "games" / "a.txt").read_text()]


ERRORS = {
    type(error).__name__: error
    for error in (
        EOFError("Compressed file ended"),
        zlib.error("Error -3"),
        ValueError("Expecting value"),
        KeyError("name"),
        TypeError("list indices"),
        PermissionError("denied"),
    )
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_of_readers_of_damaged_data_sets_are_reported(place, monkeypatch, kind):
    declare(monkeypatch, counter=f"{__name__}:damaged")
    source = source_of_toys(place / "source", kind)
    with pytest.raises(DataError, match=f"toys in {source} cannot be read: {kind}: "):
        data.fetch("toys", source)
    folder = source_of_toys(place / "data" / "toys", kind)
    (folder / data.RECORD).write_text("[1")
    result = run("verify", "toys")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        ".agentkit.json, the record of what was fetched, is damaged",
        f"toys in {folder} cannot be read: {kind}: {ERRORS[kind]}",
    ]


def linger(folder):
    (folder / "half").write_text("of it")
    print("writing", flush=True)
    time.sleep(600)


def test_files_of_a_killed_process_are_removed(place, monkeypatch):
    script = (
        "import pytest, test_data; test_data.declare(pytest.MonkeyPatch(), generate='test_data:linger'); "
        "test_data.data.locate('toys')"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(signal.SIGKILL)
    assert len(os.listdir(place / "data")) == 2
    declare(monkeypatch, generate=f"{__name__}:write_toys")
    data.locate("toys")
    assert sorted(os.listdir(place / "data")) == [".toys.lock", "toys"]


def test_the_only_subfolder_with_the_data_set_is_used(place, monkeypatch):
    declare(monkeypatch)
    notes = {"__MACOSX/top/games/._a.txt": "note", "read me": "note", "top/.agentkit.json": "{}"}
    (place / "own.zip").write_bytes(packed(**{"top/games/a.txt": "one\ntwo\n", **notes}))
    folder = data.fetch("toys", place / "own.zip")
    assert sorted(os.listdir(folder)) == [".agentkit.json", "games"]
    assert list(json.loads((folder / data.RECORD).read_text())) == ["games/a.txt"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    declare(monkeypatch, name="others")
    (place / "two.zip").write_bytes(packed(**{"one/games/a.txt": "1\n2\n", "two/games/a.txt": "1\n2\n"}))
    with pytest.raises(DataError, match=r"two\.zip is not the data set others: games/a\.txt"):
        data.fetch("others", place / "two.zip")


def tarred(*members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = 3 if info.isfile() else 0
            archive.addfile(info, io.BytesIO(b"abc") if info.isfile() else None)
    return buffer.getvalue()


def special(kind, target=""):
    info = tarfile.TarInfo("thing")
    info.type, info.linkname = kind, target
    return info


def linked_zip():
    buffer = io.BytesIO()
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


HOSTILE = {
    "climbs": tarred("../outside"),
    "absolute": tarred("/outside"),
    "climbs from inside": tarred("a/../../outside"),
    "link": tarred(special(tarfile.SYMTYPE, "/etc")),
    "hard link": tarred(special(tarfile.LNKTYPE, "/etc/passwd")),
    "device": tarred(special(tarfile.CHRTYPE)),
    "pipe": tarred(special(tarfile.FIFOTYPE)),
    "twice": tarred("twice", "twice"),
    "climbs in a zip": packed(**{"../outside": "abc"}),
    "backslashes": packed(**{"..\\outside": "abc"}),
    "link in a zip": linked_zip(),
    "too large": tarred("large1", "large2", "large3", "large4"),
    "cut off": tarred("cut")[:-20],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_archives_write_nothing_outside_the_target(content, tmp_path):
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(DataError):
        unpack(tmp_path / "archive", tmp_path / "in" / "target", limit=10)
    assert {path.name for path in tmp_path.iterdir()} == {"archive", "in"}
    assert {path.name for path in (tmp_path / "in").iterdir()} == {"target"}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_archives_unpack(mode, tmp_path):
    with tarfile.open(tmp_path / "archive", mode) as archive:
        folder, file = tarfile.TarInfo("a"), tarfile.TarInfo("a/b")
        folder.type, file.size, file.mode = tarfile.DIRTYPE, 3, 0o6777
        archive.addfile(folder)
        archive.addfile(file, io.BytesIO(b"abc"))
    unpack(tmp_path / "archive", tmp_path / "target")
    assert (tmp_path / "target" / "a" / "b").read_bytes() == b"abc"
    assert not (tmp_path / "target" / "a" / "b").stat().st_mode & 0o6111


def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_commands(place, monkeypatch):
    declare(monkeypatch)
    assert "toys" in run("list").stdout
    with pytest.raises(DataError, match="agentkit data fetch toys"):
        run("path", "toys")
    (place / "source" / "games").mkdir(parents=True)
    (place / "source" / "games" / "a.txt").write_text("1\n2\n")
    folder = str(place / "data" / "toys")
    assert run("fetch", "toys", "--from", str(place / "source")).stdout.strip() == folder
    assert run("path", "toys").stdout.strip() == folder
    assert run("verify", "toys").stdout == "toys is complete: 2 lines\n"
    assert f'"folder": "{folder}"' in run("list", "--json").stdout
    (place / "data" / "toys" / "games" / "a.txt").unlink()
    (place / "data" / "toys" / "games" / "a.txt").write_text("1\n2\n3\n")
    result = run("verify", "toys")
    assert result.exit_code == 1
    assert "3 lines instead of 2" in result.stdout
    with pytest.raises(ConfigError, match=r"known: .*toys"):
        run("path", "toy")


def test_the_table_is_in_order():
    for name, known in data.DATASETS.items():
        assert name == known.name
        assert (known.generate is None) == bool(known.files)
        assert all(remote.url.startswith("https://") for remote in known.files)
        assert all(remote.sha256 is None or len(remote.sha256) == 64 for remote in known.files)
        assert known.forms
        assert ":" in known.counter
