"""Owners, heartbeats and records: reused process numbers, clock changes and races do not mislead them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentkit.errors import SandboxExpired
from agentkit.sandboxes import paths
from agentkit.sandboxes.reaper import heartbeat, records
from agentkit.sandboxes.reaper import labels as label
from agentkit.sandboxes.reaper.owner import Owner, boot_id, host_id

ID = "ak-0123456789abcdef"


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKIT_RUNTIME_DIR", str(tmp_path / "runtime"))


def myself() -> Owner:
    owner = Owner.of(os.getpid())
    assert owner is not None
    return owner


class TestOwner:
    def test_a_running_process_lives_and_an_ended_one_does_not(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        owner = Owner.of(child.pid)
        assert owner is not None
        assert owner.alive() is True
        child.kill()
        deadline = time.monotonic() + 30
        while owner.alive():
            assert time.monotonic() < deadline
        assert owner.alive() is False, "a zombie does not run"
        child.communicate()
        assert owner.alive() is False
        assert Owner.of(child.pid) is None

    def test_a_reused_number_is_another_process(self) -> None:
        assert replace(myself(), start=myself().start - 1).alive() is False

    def test_processes_elsewhere_are_unknown(self) -> None:
        assert replace(myself(), boot="0" * 8 + "-0000-0000-0000-" + "0" * 12).alive() is None
        assert replace(myself(), namespace=1).alive() is None

    def test_parse_reverses_str(self) -> None:
        assert Owner.parse(str(myself())) == myself()
        assert myself().boot == boot_id()
        assert len(host_id()) == 16

    @pytest.mark.parametrize("text", ["", "1:2:3", "::", "a:1:2:3", f"{boot_id()}:-1:2:3", f"{boot_id()}:1:2:3\n"])
    def test_other_text_is_rejected(self, text: str) -> None:
        assert Owner.parse(text) is None

    def test_names_with_parentheses_and_spaces(self, tmp_path: Path) -> None:
        program = tmp_path / "a) b (c"
        program.symlink_to(sys.executable)
        child = subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            assert Owner.of(child.pid) is not None
        finally:
            child.kill()
            child.communicate()


class TestHeartbeat:
    def test_the_heartbeat_is_held_while_its_owner_runs(self) -> None:
        mine = heartbeat.current()
        assert heartbeat.current() is mine
        assert heartbeat.state(mine.path) == "held"
        assert heartbeat.state(mine.path.with_name("another")) == "absent"

    def test_the_heartbeat_is_free_after_its_owner_died(self) -> None:
        script = "from agentkit.sandboxes.reaper import heartbeat; print(heartbeat.current().run, flush=True); input()"
        child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        path = paths.heartbeat_path(child.stdout.readline().decode().strip())
        assert heartbeat.state(path) == "held"
        child.kill()
        child.communicate()
        assert heartbeat.state(path) == "free"

    def test_stale_without_renewals(self) -> None:
        mine = heartbeat.current()
        time.sleep(0.05)
        assert heartbeat.state(mine.path, stale_after=0.01) == "stale"
        mine.renew()
        assert heartbeat.state(mine.path, stale_after=30) == "held"

    @pytest.mark.parametrize("jump", [-3600.0, 3600.0, 1e8])
    def test_the_wall_clock_does_not_matter(self, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
        mine = heartbeat.current()
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + jump)
        assert heartbeat.state(mine.path) == "held"
        records.register(mine, ID, "docker", 60)
        assert not records.any_due()

    def test_it_comes_back_if_the_directory_is_cleared(self) -> None:
        mine = heartbeat.current()
        mine.path.unlink()
        mine.renew()
        assert heartbeat.state(mine.path) == "held"

    def test_it_never_renews_a_file_that_is_not_its_own(self, tmp_path: Path) -> None:
        mine = heartbeat.current()
        number = mine._fd
        other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
        os.dup2(other, number)  # as after a daemon closed all its files and opened others
        before = (tmp_path / "other").stat().st_mtime
        mine.renew()
        assert (tmp_path / "other").stat().st_mtime == before
        assert heartbeat.state(mine.path) == "held"
        os.close(number)
        os.close(other)

    def test_a_forked_child_has_its_own(self) -> None:
        mine = heartbeat.current()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writer, heartbeat.current().run.encode())
            os._exit(0)
        os.close(writer)
        run = os.read(reader, 100).decode()
        os.close(reader)
        os.waitpid(pid, 0)
        assert run != mine.run
        assert heartbeat.state(mine.path) == "held"
        assert heartbeat.state(paths.heartbeat_path(run)) == "free"

    def test_labels_of_an_owner(self) -> None:
        labels = heartbeat.current().labels(ID)
        assert labels[label.MANAGED] == "1"
        assert labels[label.ID] == ID
        assert Owner.parse(labels[label.OWNER]) == myself()
        assert labels[label.RUN] == heartbeat.current().run


class TestRecords:
    def test_a_record_is_written_and_removed(self) -> None:
        records.register(heartbeat.current(), ID, "docker", None)
        record = records.read(ID)
        assert record is not None
        assert (record.id, record.backend, record.run, record.due) == (ID, "docker", heartbeat.current().run, False)
        assert records.all_of(heartbeat.current().run) == [record]
        assert records.all_of("another") == []
        records.forget(ID)
        records.forget(ID)
        assert records.read(ID) is None

    def test_a_time_that_has_ended_is_not_extended(self) -> None:
        records.register(heartbeat.current(), ID, "docker", 0.01)
        time.sleep(0.02)
        assert records.any_due()
        with pytest.raises(SandboxExpired):
            records.extend(ID, 60)
        assert records.expire(ID)
        assert records.expire(ID), "the next sweep continues the removal"

    def test_an_extended_one_is_not_expired(self) -> None:
        records.register(heartbeat.current(), ID, "docker", 60)
        records.extend(ID, None)
        assert not records.expire(ID)

    def test_a_deadline_of_another_boot_is_ignored(self) -> None:
        record = records.Record(ID, "docker", str(myself()), "run", "another boot", deadline=0.0)
        assert not record.due

    def test_extending_and_expiring_exclude_each_other(self) -> None:
        for _ in range(30):
            records.register(heartbeat.current(), ID, "docker", 0.005)
            outcomes: dict[str, bool] = {}
            barrier = threading.Barrier(2)

            def extend(outcomes: dict[str, bool] = outcomes, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                try:
                    records.extend(ID, 60)
                    outcomes["extended"] = True
                except SandboxExpired:
                    outcomes["extended"] = False

            thread = threading.Thread(target=extend)
            thread.start()
            barrier.wait()
            time.sleep(0.004)
            expired = records.expire(ID) or records.expire(ID)
            thread.join()
            # Expired before it was extended, or extended and alive, or neither yet: never both.
            assert not (expired and outcomes["extended"])

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 1}', "null"])
    def test_an_incomplete_record_reads_as_none(self, text: str) -> None:
        paths.record_path(ID).write_text(text)
        assert records.read(ID) is None
        assert records.all_of() == []

    @pytest.mark.parametrize("id", ["", "../x", "ak-", "ak-0123456789abcdeF", "ak-0123456789abcdef/.."])
    def test_a_name_never_becomes_a_path(self, id: str) -> None:
        with pytest.raises(ValueError, match="sandbox id"):
            records.read(id)
