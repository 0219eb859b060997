"""`agentkit serve` serves a model until Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from agentkit import serving
from agentkit.errors import ConfigError, MissingExtra
from agentkit.serving import TOKEN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, as in the folder of a finished run."""
    from agentkit.config import ModelConfig
    from agentkit.trainers.models.load import write_model

    return write_model(ModelConfig(), 5, tmp_path_factory.mktemp("models") / "small")


def test_the_command_serves_until_ctrl_c(model: Path) -> None:
    command = [sys.executable, "-u", "-m", "agentkit", "serve", str(model), "engine.max_context=256", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            said = process.stdout.readline()
            assert re.fullmatch(r"serving small at http://127\.0\.0\.1:\d+/v1 \(Ctrl-C ends\)\n", said)
            found = re.fullmatch(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)\n", process.stdout.readline())
            assert found is not None
            with openai.OpenAI(base_url=found[1], api_key=found[2], max_retries=0) as client:
                answer = client.chat.completions.create(
                    model="small", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0
                )
                assert answer.usage is not None
                assert 0 < answer.usage.completion_tokens <= 5
                with pytest.raises(openai.BadRequestError, match="maximum context length of 256"):
                    client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x " * 300}])
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_wrong_settings_are_errors_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_contest"):
        serving.serve("quickstart", ["engine.max_contest=5"])
    with pytest.raises(ConfigError, match=r"model\.path"):
        serving.serve(tmp_path)
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ConfigError, match=f"{TOKEN} must have at least 20"):
        serving.serve("quickstart")
    monkeypatch.setattr("agentkit.extras._TRAINING", ("no_such_module",))
    with pytest.raises(MissingExtra, match=r"pip install 'agentkit-rl\[serve\]'"):
        serving.serve("quickstart")
