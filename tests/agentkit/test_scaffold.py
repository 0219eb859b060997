"""`agentkit env new` writes a package that works: here as source, and (slowly) installed into a fresh environment."""

import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkit import scaffold
from agentkit.cli.env import app
from agentkit.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Env", "is not a package name"),
        ("my_env", "is not a package name"),
        ("-env", "is not a package name"),
        ("my--env", "is not a package name"),
        ("../env", "is not a package name"),
        ("", "is not a package name"),
        ("1env", "is not a package name"),
        ("class", "Python's own"),
        ("json", "Python's own"),
        ("numpy", "installed module"),
        ("countdown", "Countdown-v0, which exists"),
    ],
)
def test_malformed_or_used_names_are_refused(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        scaffold.write_package(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path):
    written = scaffold.write_package("maze-of-words", tmp_path)
    assert (written.module, written.class_name, written.env_id) == ("maze_of_words", "MazeOfWords", "MazeOfWords-v0")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="exists already"):
        scaffold.write_package("maze-of-words", tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(b"@name@" in text or b"@module@" in text or b"@env_id@" in text for text in before.values())


def test_the_command_prints_the_next_commands(tmp_path):
    result = CliRunner().invoke(app, ["new", "my-env", "--into", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "agentkit env check MyEnv-v0" in result.output


def test_the_written_package_is_clean_and_satisfies_the_contract(tmp_path):
    package = scaffold.write_package("guess-it", tmp_path)
    script = (
        "import agentkit; from agentkit.envs.check import check\n"
        f"agentkit.register('GuessIt-v0', '{package.module}.env:{package.class_name}')\n"
        "failed = [result for result in check('GuessIt-v0') if not result.passed]\n"
        "assert not failed, failed\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=package.directory, check=True, timeout=100)
    lint = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "E4,E7,E9,F,W,B,UP",
        str(package.directory),
    ]
    subprocess.run(lint, check=True, timeout=60)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The package, built into a wheel and installed into a separate virtual environment.

    Its dependencies are found through a path file, so nothing is downloaded.
    """
    place = tmp_path_factory.mktemp("plugin")
    package = scaffold.write_package("stranger-env", place)
    venv = place / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = venv / "lib" / version / "site-packages"
    # `site.addsitedir` reads the path files of our own environment too: an editable agentkit is found as well.
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(ours) if Path(path).is_dir()]
    (target / "dependencies.pth").write_text("\n".join(lines) + "\n")
    wheels = place / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    run([*pip, "wheel", "--quiet", *offline, "--wheel-dir", str(wheels), str(package.directory)])
    (wheel,) = wheels.glob("stranger_env-*.whl")
    run([*pip, "--python", str(venv / "bin" / "python"), "install", "--quiet", *offline[:1], "--no-index", str(wheel)])
    return package, venv / "bin" / "python"


def run(command, **options):
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=environment, check=False, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout


def command_line(python, *arguments, cwd):
    return run([str(python), "-c", "import agentkit.cli; agentkit.cli.main()", *arguments], cwd=cwd)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_package_installs_and_its_own_test_passes(installed, tmp_path):
    package, python = installed
    listing = run(
        [str(python), "-c", "import agentkit; print([(e.id, e.source, e.diagnose()) for e in agentkit.list_envs()])"],
        cwd=tmp_path,
    )
    assert "('StrangerEnv-v0', 'plugin', None)" in listing
    tests = package.directory / "tests"
    out = run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], cwd=tmp_path)
    assert "3 passed" in out
    assert "MyEnv" not in listing


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_installed_package_can_be_trained_on(installed, tmp_path):
    package, python = installed
    small = [
        "steps=1",
        "dir=trained",
        "imitation.episodes=16",
        "imitation.check_episodes=4",
        "rollout.groups=2",
        "rollout.group_size=2",
        "evaluation.episodes=4",
    ]
    out = command_line(python, "run", str(package.directory / "train.yaml"), *small, cwd=tmp_path)
    assert (tmp_path / "trained" / "metrics.jsonl").is_file(), out
