"""The command line, run in a separate process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from requiring import require

from agentkit.config import RunConfig
from agentkit.config_io import load_config, parse_config
from agentkit.run_directory import RunDirectory
from agentkit.training import resumable_or_new

TINY = """\
env: {id: FrozenLake-v1, max_turns: 2}
steps: 1
rollout: {groups: 2, group_size: 2, max_tokens: 4}
imitation: {episodes: 8, batch_episodes: 8}
evaluation: {episodes: 4}
"""


def agentkit(*arguments: str | Path, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentkit", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "COLUMNS": "120", **env},
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"dir: {tmp_path / 'run'}\n")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that has trained one step, and its output."""
    path = tmp_path_factory.mktemp("finished")
    (path / "tiny.yaml").write_text(TINY)
    result = agentkit("run", path / "tiny.yaml", f"dir={path / 'run'}")
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr  # of libraries
    return path / "run", result.stdout


def test_importing_agentkit_is_cheap() -> None:
    script = (
        "import time; began = time.perf_counter(); import agentkit; print(time.perf_counter() - began);"
        "import sys; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    seconds = min(float(subprocess.check_output([sys.executable, "-c", script], timeout=60)) for _ in range(3))
    assert seconds < 0.3


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["env", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys; sys.argv = ['agentkit', *sys.argv[1:]]\n"
        "from agentkit.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "loaded = {'torch', 'transformers', 'gymnasium', 'wandb'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_dry_run_prints_the_resolved_configuration(config: Path, tmp_path: Path) -> None:
    result = agentkit("run", config, "learner.lr=3e-5", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert parse_config(result.stdout) == load_config(config, ["learner.lr=3e-5"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["lerner.lr=1"], "error: override 'lerner.lr=1': lerner: no such key; did you mean learner?\n"),
        (["env.id=FrozenLak-v1"], "did you mean FrozenLake-v1?"),
        (["env.kwargs.sise=4"], "did you mean 'size'?"),
        (["rollout.groups=many"], "rollout.groups: input should be a valid integer"),
        (["learner.minibatches=3"], "rollout.groups=2 is not divisible by learner.minibatches=3"),
        (["env.kwargs.size=1"], "env.kwargs: FrozenLake-v1 cannot be made with {'size': 1}: size=1 must be at least 2"),
        (["env.kwargs.size=four"], "env.kwargs: FrozenLake-v1 cannot be made with {'size': 'four'}: TypeError"),
        (["evaluation.kwargs.split=tset"], "evaluation.kwargs: FrozenLake-v1 cannot be made with {'split': 'tset'}"),
        (["model.path=./nowhere"], "model.path='./nowhere' does not exist"),
    ],
)
def test_wrong_settings_end_with_one_clear_line(config: Path, overrides: list[str], expected: str) -> None:
    result = agentkit("run", config, *overrides)
    assert result.returncode == 2
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert not (config.parent / "run").exists()


def test_every_problem_has_its_own_line(config: Path) -> None:
    result = agentkit("run", config, "env.kwargs.size=1", "model.path=/nowhere", "--dry-run")
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert [line.split()[:2] for line in lines] == [["error:", "env.kwargs:"], ["error:", "model.path='/nowhere'"]]
    assert result.stdout == ""


def test_a_dry_run_reports_what_it_cannot_check(config: Path) -> None:
    result = agentkit("run", config, "model.path=someone/some-model", "--dry-run")
    assert result.returncode == 0
    assert "note: model.path='someone/some-model' is not a directory" in result.stderr


def test_debug_shows_a_traceback(config: Path) -> None:
    result = agentkit("run", config, "lerner.lr=1", "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_missing_arguments_and_files(tmp_path: Path) -> None:
    assert "give a configuration file" in agentkit("run").stderr
    result = agentkit("run", tmp_path / "none.yaml")
    assert (result.returncode, "no such configuration file" in result.stderr) == (2, True)
    result = agentkit("run", "--resume", tmp_path / "none")
    assert (result.returncode, "is not a run directory" in result.stderr) == (1, True)
    result = agentkit("eval", "quickstart")
    assert (result.returncode, "add --env" in result.stderr) == (2, True)


def test_a_missing_extra_is_reported_before_anything_starts(config: Path, tmp_path: Path) -> None:
    script = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'wandb' else find(name, *rest)\n"
        "from agentkit.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "run", str(config), "trackers=[wandb]"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "pip install 'agentkit-rl[wandb]'" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_ends_with_its_results_and_the_next_commands(finished: tuple[Path, str]) -> None:
    directory, output = finished
    for line in ("success before", "success after", "run directory", f"agentkit show {directory}", "step 1/1"):
        assert line in output
    assert "Writing model shards" not in output


def test_a_run_directory_is_not_used_twice(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    result = agentkit("run", directory.parent / "tiny.yaml", f"dir={directory}")
    assert result.returncode == 1
    assert f"already contains a run; continue it with `agentkit run --resume {directory}`" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_finished_run_is_left_alone_and_another_one_starts_beside_it(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    config = directory.parent / "tiny.yaml"
    before = (directory / "events.jsonl").read_bytes()
    result = agentkit("run", config, f"dir={directory}", "--again", "model.lora={}")
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    assert f"starting the run in {directory}-2\n" in result.stdout
    assert f"agentkit show {directory}-2" in result.stdout
    assert (directory / "events.jsonl").read_bytes() == before
    refused = agentkit("run", config, "--again", "--resume", directory)
    assert refused.returncode == 2
    assert "contradict" in refused.stderr


def test_the_directory_of_a_repeated_run(tmp_path: Path) -> None:
    def made(settings: RunConfig, *events: str, checkpoint: bool = True) -> None:
        directory = RunDirectory.create(settings)
        directory.events_file.write_text("".join(f"{event}\n" for event in events))
        if checkpoint:
            (directory.checkpoints / "step-000000").mkdir()
        directory.release()

    def config(name: str, *overrides: str) -> RunConfig:
        return parse_config("env: {id: FrozenLake-v1}", [f"dir={tmp_path / name}", *overrides])

    started, ended = '{"event": "start"}', '{"event": "end", "finished": true}'
    assert resumable_or_new(config("a")) == (config("a"), False)
    made(config("a"), started, ended)
    assert resumable_or_new(config("a")) == (config("a-2"), False)
    made(config("a-2"), started, '{"event": "failed"}')
    assert resumable_or_new(config("a")) == (config("a-2"), True)
    assert resumable_or_new(config("a", "steps=7")) == (config("a-3", "steps=7"), False)  # another run is not continued
    made(config("b"), started, '{"event": "end", "finished": false}')
    assert resumable_or_new(config("b")) == (config("b"), True)
    made(config("c"), started, checkpoint=False)
    assert resumable_or_new(config("c")) == (config("c"), False)
    made(config("d"), started, ended, started)  # it trained on, and was killed
    assert resumable_or_new(config("d")) == (config("d"), True)
    (tmp_path / "d" / "config.yaml").write_text("env: {id: FrozenLake-v1}\nformer_setting: 1\n")
    assert resumable_or_new(config("d")) == (config("d-2"), False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_before_its_first_checkpoint_does_not_block_its_directory(config: Path, tmp_path: Path) -> None:
    events = tmp_path / "run" / "events.jsonl"
    command = [sys.executable, "-m", "agentkit", "run", str(config), "imitation.episodes=100000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not (events.exists() and events.read_text()):
                assert process.poll() is None, "the run ended before it recorded anything"
                assert time.monotonic() < deadline
                time.sleep(0.1)
            busy = agentkit("run", config)
        finally:
            process.kill()
    assert busy.returncode == 1
    assert "in use by another run" in busy.stderr
    result = agentkit("run", config)
    assert result.returncode == 0, result.stderr
    directory = tmp_path / "run"
    assert f"{directory} held a run without a checkpoint; its records are in {directory / 'failed-1'}" in result.stdout
    assert load_config(directory / "failed-1" / "config.yaml").imitation.episodes == 100_000  # type: ignore[union-attr]
    assert agentkit("show", directory, "--last", "1").returncode == 0


def test_show_lists_and_prints(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    result = agentkit("show", directory, "--last", "2")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 3
    number = result.stdout.splitlines()[-1].split()[0]
    result = agentkit("show", directory, "--episode", number)
    assert result.returncode == 0, result.stderr
    for part in ("FrozenLake-v1", "turn 1", "log-prob", "reward", "by version", "system message:", "  You walk on a"):
        assert part in result.stdout
    assert agentkit("show", directory, "--episode", "999").returncode == 1
    assert agentkit("show", directory, "--ending", "dropped").stdout == "no matching episodes\n"
    evaluated = agentkit("show", directory, "--ending", "eval", "--step", "1", "--sort", "reward", "--last", "3")
    assert [line.split()[10] for line in evaluated.stdout.splitlines()] == ["ended", "eval", "eval", "eval"]
    rewards = [float(line.split()[8]) for line in evaluated.stdout.splitlines()[1:]]
    assert rewards == sorted(rewards)
    result = agentkit("show", directory, "--sort", "size")
    assert result.returncode == 2
    assert "'recorded'" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_attention_credit_trains_and_its_rhythm_is_drawn(config: Path, tmp_path: Path) -> None:
    settings = ("steps=2", "algorithm.credit=coupled", "rollout.max_tokens=24")
    result = agentkit("run", config, *settings, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "credit: reads the attention of layers 1, 2 (from 0); 2 local and 2 global heads" in result.stdout
    directory = tmp_path / "run"
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "credit/gamma" in row]
    assert len(steps) == 2
    assert all(1 < row["credit/gamma"] < 1.7 and 0 < row["credit/anchor_share"] < 0.4 for row in steps)
    assert all(0 < row["credit/seconds"] < row["time/train"] for row in steps)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    [heads] = [event for event in events if "local" in event]
    assert heads["layers"] == [1, 2]
    assert len(heads["local"]) == len(heads["global"]) == 2

    result = agentkit("show", directory, "--episode", "1", "--rhythm")
    assert result.returncode == 0, result.stderr
    assert "heads of the run" in result.stdout
    assert "layers 1, 2" in result.stdout
    marks = [line.split()[-3] for line in result.stdout.splitlines() if line.rstrip().endswith("'")]
    assert any("A" in letters for letters in marks)
    result = agentkit("show", directory, "--rhythm")
    assert result.returncode == 2
    assert "add --episode N" in result.stderr


def test_eval_measures_a_run(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    result = agentkit("eval", directory, "--episodes", "3")
    assert result.returncode == 0, result.stderr
    assert "success" in result.stdout
    assert "episodes  3 in" in result.stdout


def test_eval_records_episodes_for_show(finished: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "measured"
    result = agentkit("eval", finished[0], "--episodes", "3", "--out", out)
    assert result.returncode == 0, result.stderr
    assert f"agentkit show {out}" in result.stdout
    listed = agentkit("show", out, "--ending", "eval").stdout.splitlines()
    assert sorted(line.split()[4] for line in listed[1:]) == ["1000000", "1000001", "1000002"]
    one = agentkit("show", out, "--episode", "1").stdout
    for part in ("system message:", "turn 1", "log-prob  text"):
        assert part in one
    again = agentkit("eval", finished[0], "--episodes", "3", "--out", out)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)


HOSTILE = """
from agentkit.envs.frozen_lake import FrozenLake

class HostileLake(FrozenLake):
    concurrency = "inline"

    def reset(self, **options):
        observation, info = super().reset(**options)
        if options["seed"] % 2:
            raise RuntimeError("broken [/bold] \\x1b]0;owned\\x07 ice")
        return "[Next >] [bold]\\x1b[31m" + observation, info
"""


def test_hostile_texts_and_failures_of_an_evaluation_are_shown_as_text(tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "hostile-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "hostile.py").write_text(HOSTILE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentkit.envs]\nHostileLake-v0 = hostile:HostileLake\n")
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    out = tmp_path / "out"
    settings = ("env.max_turns=1", "rollout.max_tokens=4", "rollout.retries=0")
    result = agentkit(
        "eval", "quickstart", "--env", "HostileLake-v0", "--episodes", "4", "--out", out, *settings, PYTHONPATH=path
    )
    assert result.returncode == 0, result.stderr
    assert "failures  2 episodes" in result.stdout
    failed = agentkit("show", out, "--error", "BROKEN").stdout
    assert agentkit("show", out, "--outcome", "voided").stdout == failed
    assert len(failed.splitlines()) == 3
    assert r"broken [/bold] \x1b]0;owned\x07 ice" in failed
    played = agentkit("show", out, "--outcome", "truncated").stdout.splitlines()[1:]
    shown = agentkit("show", out, "--episode", played[0].split()[0]).stdout
    assert r"  [Next >] [bold]\x1b[31m" in shown
    assert "\x1b" not in failed + shown


class Oracle(BaseHTTPRequestHandler):
    """Answers every chat with the same move."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "<answer>Right</answer>"}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


LIGHT = """
import sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "tokenizers", "safetensors"]))  # importing them fails
from agentkit.cli import main
main()
"""


def test_eval_asks_an_endpoint_and_needs_no_training_packages(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Oracle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        records = ("--out", str(tmp_path / "out"))
        options = ("--env", "FrozenLake-v1", "--endpoint", url, "--episodes", "2", "env.max_turns=1", *records)
        command = [sys.executable, "-c", LIGHT, "eval", "some-model", *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    assert result.returncode == 0, result.stderr
    assert "turns     1.00" in result.stdout
    assert "episodes  2 in" in result.stdout
    shown = agentkit("show", tmp_path / "out", "--episode", "2").stdout
    for part in ("system message:\n  You walk on a frozen lake", "<answer>Right</answer>"):
        assert part in shown


@pytest.mark.slow
def test_a_finished_run_trains_on_when_it_gets_more_steps(finished: tuple[Path, str]) -> None:
    directory, _ = finished
    result = agentkit("run", "--resume", directory, "steps=2")
    assert result.returncode == 0, result.stderr
    assert "resumed after step 1" in result.stdout
    assert "step 2/2" in result.stdout
    assert load_config(directory / "config.yaml").steps == 2


def test_doctor_reports_every_part(tmp_path: Path) -> None:
    result = agentkit("doctor")
    for name in ("Python", "torch", "GPU", "Docker", "Ray", "vLLM", "DeepSpeed", "memory", "disk"):
        assert name in result.stdout
    assert result.returncode in (0, 1)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A long run after its first step, with its roles in a cluster."""
    require("ray", "pip install 'agentkit-rl[ray]'")
    path = tmp_path / "long.yaml"
    path.write_text(TINY + "cluster: {}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "agentkit", "run", str(path), f"dir={tmp_path / 'run'}", "steps=100000"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("step 1/") for line in process.stdout), "the run ended before its first step"
        yield process
    finally:
        process.kill()
        process.communicate()


def roles(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    assert len(found) >= 2, "the roles should be processes"
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_once_saves_and_the_run_goes_on_later(running: subprocess.Popen[str], tmp_path: Path) -> None:
    started = roles(running)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 0
    assert "finishing with a checkpoint" in output
    assert not psutil.wait_procs(started, timeout=5)[1]
    steps = int(output.partition("stopped after ")[2].split()[0])
    result = agentkit("run", "--resume", tmp_path / "run", f"steps={steps + 1}", timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"resumed after step {steps}" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_is_resumed_by_the_same_command(config: Path, tmp_path: Path, stop: signal.Signals) -> None:
    arguments = ["run", str(config), "--again", "steps=40"]
    with subprocess.Popen([sys.executable, "-m", "agentkit", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 2/") for line in process.stdout), "the run ended before its second step"
        process.send_signal(stop)
        process.communicate(timeout=120)
    result = agentkit(*arguments, timeout=300)
    assert result.returncode == 0, result.stderr
    assert f"resuming the run in {tmp_path / 'run'}\n" in result.stdout
    assert "resumed after step" in result.stdout
    assert "step 40/40" in result.stdout
    assert not (tmp_path / "run-2").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_twice_stops_now_and_leaves_nothing(running: subprocess.Popen[str]) -> None:
    started = roles(running)
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode in (0, 130)  # 0: its step ended between the two
    assert not psutil.wait_procs(started, timeout=5)[1]
