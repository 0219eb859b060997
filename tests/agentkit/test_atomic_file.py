from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentkit.atomic_file import write_atomically


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("durable", [False, True])
def test_content_is_replaced_and_no_temporary_file_remains(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"a longer old content", durable=durable)
    write_atomically(path, "näu", durable=durable)
    assert path.read_text("utf-8") == "näu"
    assert os.listdir(tmp_path) == ["file"]


def test_mode_is_reduced_by_the_umask_by_default(tmp_path: Path) -> None:
    former = os.umask(0o077)
    try:
        write_atomically(tmp_path / "default", b"")
        write_atomically(tmp_path / "program", b"", mode=0o755)
        write_atomically(tmp_path / "shared", b"", mode=0o644, ignore_umask=True)
    finally:
        os.umask(former)
    assert [mode_of(tmp_path / name) for name in ("default", "program", "shared")] == [0o600, 0o700, 0o644]


def test_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("untouched")
    (tmp_path / "link").symlink_to("target")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_text() == "untouched"
    assert not (tmp_path / "link").is_symlink()


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_atomically(path, object())  # pyright: ignore[reportArgumentType]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_names_of_the_greatest_length_can_be_written(tmp_path: Path, name: str) -> None:
    write_atomically(tmp_path / name, b"1")
    assert (tmp_path / name).read_bytes() == b"1"
