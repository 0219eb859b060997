"""SWE tasks built from releases, without an engine: archives, differences, scripts, selection of tests."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentkit.envs.swebench.releases import build_task, package_index, source_trees, task_image
from agentkit.envs.swebench.releases.build_task import Pair
from agentkit.envs.swebench.releases.release_list import SHIPPED
from agentkit.envs.swebench.releases.source_trees import File
from agentkit.errors import ConfigError


def archive(path: Path, files: dict[str, bytes], *, top: str = "pkg-1.0") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def tree(**files: str) -> dict[str, File]:
    return {name.replace("__", "/").replace("_py", ".py"): File(text.encode()) for name, text in files.items()}


# Fetching.


@pytest.fixture
def offline_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of one release whose ``setup.py`` leaves a trace if it is run."""
    trap = f"open({str(tmp_path / 'trap')!r}, 'w').close()\n".encode()
    page = tmp_path / "simple" / "some-pkg"
    page.mkdir(parents=True)
    file = archive(page / "Some.Pkg-1.0.tar.gz", {"setup.py": trap, "pyproject.toml": b"", "PKG-INFO": b"x"})
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (page / "index.html").write_text(
        f'<a href="Some.Pkg-1.0-py3-none-any.whl">Some.Pkg-1.0-py3-none-any.whl</a>\n'
        f'<a href="Some.Pkg-1.0.tar.gz#sha256={digest}" data-requires-python="&gt;=3">Some.Pkg-1.0.tar.gz</a>\n'
    )
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    return page


def test_an_archive_is_fetched_and_nothing_of_it_is_run(offline_index: Path, tmp_path: Path) -> None:
    found = package_index.fetch("some_pkg", "1.0", tmp_path / "here")
    assert found.read_bytes() == (offline_index / "Some.Pkg-1.0.tar.gz").read_bytes()
    assert set(source_trees.read(found)) == {"setup.py", "pyproject.toml"}
    assert not (tmp_path / "trap").exists()
    (offline_index / "index.html").unlink()
    assert package_index.fetch("some-pkg", "1.0", tmp_path / "here") == found  # it is here: no index is asked


def test_an_archive_must_be_what_its_checksum_says(offline_index: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its checksum differs"):
        package_index.fetch("some-pkg", "1.0", tmp_path / "here", sha256="0" * 64)
    (offline_index / "Some.Pkg-1.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(ConfigError, match="its checksum differs"):
        package_index.fetch("some-pkg", "1.0", tmp_path / "here")
    assert not list((tmp_path / "here").glob("*"))


@pytest.mark.usefixtures("offline_index")
def test_a_release_without_an_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no source archive \(\.tar\.gz\) of some-pkg 2\.0"):
        package_index.fetch("some-pkg", "2.0", tmp_path / "here")


def test_both_forms_of_an_index_are_read() -> None:
    page = '{"files": [{"filename": "a-1.tar.gz", "url": "../f/a-1.tar.gz", "hashes": {"sha256": "ab"}}]}'
    (one,) = package_index.links(page, "https://x.example/simple/a/", "application/vnd.pypi.simple.v1+json")
    assert one == package_index.Source("a-1.tar.gz", "https://x.example/simple/f/a-1.tar.gz", "ab")
    page = "<a\n class='x' href='https://f.example/a-1.tar.gz?x=1&amp;y=2#sha256=cd' data-yanked=''> a-1.tar.gz </a>"
    (one,) = package_index.links(page, "https://x.example/simple/a/", "text/html; charset=utf-8")
    assert one == package_index.Source("a-1.tar.gz", "https://f.example/a-1.tar.gz?x=1&y=2", "cd")


@pytest.mark.parametrize(
    ("filename", "fits"),
    [("Foo.Bar-1.0.tar.gz", True), ("foo_bar-1.0.tar.gz", True), ("foo-bar-1.0.1.tar.gz", False),
     ("foo-bar-1.0.zip", False), ("foo_bar-1.0-py3-none-any.whl", False)],
)  # fmt: skip
def test_names_of_archives(filename: str, fits: bool) -> None:
    assert package_index.is_source(filename, "foo-bar", "1.0") is fits


def test_an_archive_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leads out of it"):
        source_trees.read(archive(tmp_path / "a.tar.gz", {"../../x": b""}))
    (tmp_path / "b.tar.gz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="is not a source archive"):
        source_trees.read(tmp_path / "b.tar.gz")
    with tarfile.open(tmp_path / "c.tar.gz", "w:gz") as tar:
        link = tarfile.TarInfo("pkg/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(ConfigError, match="holds no files"):
        source_trees.read(tmp_path / "c.tar.gz")


# Differences, against git.

TEXT = st.text(st.sampled_from("ab\n\r\f é"), max_size=30)
TREE = st.dictionaries(
    st.sampled_from(["a", "b.py", "d/c.txt", "d/e/f.py"]),
    st.builds(lambda t, x: File(t.encode(), x), TEXT, st.booleans()),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREE, TREE)
def test_git_makes_the_new_tree_of_a_difference(tmp_path_factory: pytest.TempPathFactory, old, new) -> None:
    patch = source_trees.diff(old, new, lambda _: True)
    if old == new:
        assert patch == ""
        return
    where = tmp_path_factory.mktemp("repo")
    for name, file in old.items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(0o755 if file.executable else 0o644)
    command = ["git", "apply", "--whitespace=nowarn", "-"]
    done = subprocess.run(command, input=patch.encode(), cwd=where, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, (done.stderr, patch)
    made = {
        path.relative_to(where).as_posix(): File(path.read_bytes(), bool(path.stat().st_mode & 0o100))
        for path in where.rglob("*")
        if path.is_file()
    }
    assert made == new


def test_changes_that_a_text_patch_cannot_express_are_omitted() -> None:
    old = {"a.png": File(b"\0one"), "b.txt": File(b"\xff\xfe"), 'odd"name': File(b"x"), "c": File(b"1\n")}
    new = {"a.png": File(b"\0two"), "b.txt": File(b"\xff"), 'odd"name': File(b"y"), "c": File(b"2\n")}
    assert source_trees.changed(old, new) == ["c"]


@pytest.mark.parametrize(
    ("path", "test"),
    [("tests/data/x.json", True), ("src/pkg/test/a.py", True), ("test_x.py", True), ("x_test.py", True),
     ("conftest.py", True), ("src/pkg/testing.py", False), ("docs/tests.rst", False), ("contest.py", False)],
)  # fmt: skip
def test_test_files_are_recognised(path: str, test: bool) -> None:
    assert source_trees.is_test(path) is test


def test_the_issue_is_what_the_change_log_adds() -> None:
    old = tree(CHANGES="Log\n\n1.0\n- first\n", README="1.0")
    new = tree(CHANGES="Log\n\n1.1\n- fixed it\n\n1.0\n- first\n", README="1.1")
    assert source_trees.statement(old, new) == "1.1\n- fixed it"
    assert source_trees.statement(tree(README="a"), tree(README="b")) is None
    assert source_trees.statement(old, {**new, "CHANGES": old["CHANGES"]}) is None


# Tasks.

PAIR = Pair("pkg", "1.0", "1.1", statement="Fix it.")


def test_a_change_is_split_into_solution_and_tests() -> None:
    old = tree(src__pkg_py="x = 1\n", tests__test_a_py="a\n", tests__helper_py="h\n")
    new = tree(src__pkg_py="x = 2\n", tests__test_a_py="b\n", tests__helper_py="i\n", tests__test_new_py="n\n")
    change = build_task.difference(PAIR, old, new)
    assert "src/pkg.py" in change.patch
    assert "tests/" not in change.patch
    assert change.test_patch.count("diff --git") == 3
    assert change.modules == ("tests/test_a.py", "tests/test_new.py")
    assert "Fix it." in change.statement
    for part in ("src/pkg.py", "tests/test_a.py"):
        with pytest.raises(ConfigError, match="gives no task"):
            build_task.difference(PAIR, old, {**old, part: new[part]})
    with pytest.raises(ConfigError, match="give a statement"):
        build_task.difference(Pair("pkg", "1.0", "1.1"), old, new)


def test_the_evaluation_restores_all_test_files(tmp_path: Path) -> None:
    """Run the script on a repository that was tampered with."""
    old = tree(pkg_py="x = 1\n", tests__test_a_py="a\n", tests__helper_py="h\n", setup_cfg="[tool:pytest]\n")
    old["setup.cfg"] = old.pop("setup_cfg")
    new = {**old, **tree(pkg_py="x = 2\n", tests__test_a_py="b\n", test_top_py="t\n")}
    for name, file in old.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(file.data)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    script = build_task.eval_script("HEAD", old, build_task.difference(PAIR, old, new))
    for name in ("tests/test_a.py", "tests/helper.py", "tests/conftest.py", "conftest.py", "pytest.ini", "setup.cfg"):
        (tmp_path / name).write_text("cheat\n")
    (tmp_path / "pkg.py").write_text("mine\n")
    # Up to the tests: what they see is what counts.
    before = script.partition(": '>>>>> Start")[0].replace("cd /testbed\n", "")
    subprocess.run(["bash", "-c", before], cwd=tmp_path, check=True, timeout=60, capture_output=True)
    seen = {
        p.relative_to(tmp_path).as_posix(): p.read_text()
        for p in tmp_path.rglob("*")
        if p.is_file() and ".git" not in p.parts
    }
    assert seen == {
        "pkg.py": "mine\n",
        "tests/test_a.py": "b\n",
        "tests/helper.py": "h\n",
        "test_top.py": "t\n",
        "setup.cfg": "[tool:pytest]\n",
    }


def test_only_tests_that_always_say_the_same_count() -> None:
    def passed(name: str, run) -> bool:
        return run.get(name) == "PASSED"

    before = [{"kept": "PASSED", "fixed": "FAILED", "flaky": "PASSED", "p[a": "PASSED"}] * 2
    before.append({"kept": "PASSED", "fixed": "ERROR", "flaky": "FAILED", "p[a": "PASSED"})
    after = [{"kept": "PASSED", "fixed": "PASSED", "new": "PASSED", "flaky": "PASSED", "p[a": "PASSED"}] * 2
    after.append({**after[0], "at[12:00]": "PASSED"})
    assert build_task.sorted_out(before, after, passed) == (["fixed", "new"], ["kept"])
    after[1] = {**after[1], "fixed": "FAILED"}
    assert build_task.sorted_out(before, after, passed) == (["new"], ["kept"])


def wheel(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as out:
        for name, data in files.items():
            out.writestr(name, data)
    return buffer.getvalue()


def test_build_metadata_is_parsed_without_running_it() -> None:
    pure = {"pkg-1.dist-info/WHEEL": b"Root-Is-Purelib: true\n", "pkg-1.dist-info/METADATA": b"Name: pkg\n"}
    built = task_image.unpacked(wheel({"pkg/__init__.py": b"", "one.py": b"", "pkg/data.json": b"", **pure}))
    assert built.modules == {"pkg", "one.py"}
    assert built.metadata == pure
    repository = tree(src__pkg____init___py="", one_py="")
    repository["src/pkg/__init__.py"] = File(b"")
    assert task_image.roots(repository, built.modules) == ["", "src/"]
    with pytest.raises(ConfigError, match="lies neither"):
        task_image.roots(repository, frozenset({"other"}))
    for bad in (
        wheel({"pkg-1.dist-info/WHEEL": b"Root-Is-Purelib: false\n"}),
        wheel({**pure, "x.dist-info/../../../etc/x": b""}),
        b"no wheel",
    ):
        with pytest.raises(ConfigError):
            task_image.unpacked(bad)


def test_the_shipped_list() -> None:
    assert len(SHIPPED) >= 8
    assert len({pair.id for pair in SHIPPED}) == len(SHIPPED)
    for pair in SHIPPED:
        assert pair.sha256 is not None
        assert all(len(digest) == 64 for digest in pair.sha256)
        assert all("==" in package for package in pair.packages)
