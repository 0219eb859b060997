"""A command that redefines what a shell has cannot forge the end of the next command."""

from __future__ import annotations

import shutil

import pytest
from local_harness import runtime_directory
from requiring import require

from agentkit.sandboxes import Sandbox
from agentkit.sandboxes import shell as shells

__all__ = ["runtime_directory"]

pytestmark = pytest.mark.usefixtures("runtime_directory")

FORGE = r"{ /usr/bin/printf '\036%s:0\036' $2 forged; }"
HOSTILE = {
    "function printf": f"printf() {FORGE}",
    "other functions": f"command() {FORGE}; unalias() {FORGE}; PS1() {FORGE}",
    "aliases": "alias printf='echo forged' eval='echo forged' command='echo forged' unset=: trap=: PS1=:",
    "variables": "PS1='> '; PS2=forged; PROMPT_COMMAND='echo forged'; PS4=forged; PS0=forged; IFS=0123456789",
    "options": "set -u; set -f; set -C",
}
ONLY_BASH = {
    "functions for all": "; ".join(
        f"{name}() {FORGE}" for name in ("printf", "eval", "command", "unset", "trap", "builtin", "set", "[")
    ),
    "function with a slash": f"/usr/bin/printf() {FORGE}; printf() {FORGE}",
    "trap": "trap 'echo forged $BASH_COMMAND' DEBUG",
    "extended trap": "shopt -s extdebug; trap 'echo forged; false' DEBUG",
    "errors": "trap 'printf forged' ERR; shopt -s expand_aliases",
    "posix mode": f"set -o posix; printf() {FORGE}",
}
BREAKING = ["set -n", "exec >/dev/null", "exec 2>&1", "exit 3", "readonly _agentkit", "kill -9 $$", "exec sleep 100"]


@pytest.fixture(params=["bash", "dash"])
async def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    require(shutil.which("bwrap") is not None and shutil.which(request.param) is not None, "install bubblewrap, dash")
    if request.param == "dash":
        monkeypatch.setattr(shells, "_BEST_SHELL", "exec dash -i")
    async with Sandbox.create(backend="local") as box, box.shell() as made:
        yield request.param, made


async def test_no_result_is_forged(shell) -> None:
    kind, session = shell
    for name, hostile in {**HOSTILE, **(ONLY_BASH if kind == "bash" else {})}.items():
        await session.run(hostile, timeout=5)
        result = await session.run("(exit 7)", timeout=5)
        assert (result.exit_code, result.timed_out) == (7, False), (name, result)
        result = await session.run("echo out; echo err >&2; (exit 3)", timeout=5)
        assert result.exit_code == 3, (name, result)
        assert "out" in result.stdout, (name, result)
        assert "err" in result.stderr, (name, result)
        assert "\x1e" not in result.stdout, (name, result)
        await session.run("exit", timeout=5)  # the next one begins with a new shell


async def test_a_shell_that_is_broken_is_replaced(shell) -> None:
    _, session = shell
    for breaking in BREAKING:
        first = await session.run(breaking, timeout=1)
        second = await session.run("true", timeout=2)
        assert second.timed_out or second.session_restarted or second.exit_code == 0, (breaking, first, second)
        await session.run("exit", timeout=2)
        result = await session.run("echo out; (exit 3)", timeout=5)
        assert (result.stdout, result.exit_code) == ("out\n", 3), (breaking, result)
