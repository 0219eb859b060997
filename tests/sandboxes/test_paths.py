"""The runtime directory is private and checked, and names that are paths are refused."""

from __future__ import annotations

import os

import pytest

from agentkit.errors import ConfigError
from agentkit.sandboxes import paths


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


def test_the_runtime_directory_is_private(root):
    assert paths.runtime_root() == root
    assert root.stat().st_mode & 0o777 == 0o700
    directory = paths.make_sandbox_directory(id := paths.new_id())
    assert directory == root / "sandboxes" / id
    assert directory.stat().st_mode & 0o777 == 0o755
    assert paths.heartbeat_path("1234-abc").parent == root / "heartbeats"
    assert directory.is_dir()
    paths.remove_sandbox_directory(id)
    paths.remove_sandbox_directory(id)
    assert not directory.exists()


def test_location_of_the_runtime_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("AGENTKIT_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_root() == tmp_path / "agentkit"
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", "relative")
    with pytest.raises(ConfigError, match="absolute"):
        paths.runtime_root()


def test_a_runtime_directory_that_is_not_private_is_refused(root, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="0700"):
        paths.runtime_root()
    root.unlink()
    root.mkdir()
    root.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        paths.runtime_root()
    root.chmod(0o700)
    if os.getuid() == 0:
        os.chown(root, 65534, 65534)
        with pytest.raises(ConfigError, match="user 0"):
            paths.runtime_root()
    root.rmdir()
    root.write_text("a file")
    with pytest.raises(ConfigError):
        paths.runtime_root()


@pytest.mark.parametrize(
    "name", ["", "..", "ak-", "ak-0123456789abcdef/..", "ak-0123456789abcdeg", "AK-0123456789abcde"]
)
def test_only_ids_become_paths(root, name):
    assert not paths.is_id(name)
    with pytest.raises(ValueError, match="not a sandbox id"):
        paths.sandbox_directory(name)


def test_ids_differ():
    ids = {paths.new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(paths.is_id(id) for id in ids)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a" * 65, "a\n"])
def test_only_names_of_runs_become_heartbeats(root, name):
    with pytest.raises(ValueError, match="not the name of a run"):
        paths.heartbeat_path(name)
