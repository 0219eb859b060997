"""`agentkit model check` says which history fits a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentkit.cli import app
from agentkit.errors import ConfigError

REWRITING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1]) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' + ('' if thinking else '<think></think>') }}{% endif %}"
)


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["model", "check", *arguments], env={"COLUMNS": "200"})
    if isinstance(result.exception, ConfigError):
        raise result.exception
    return result.exit_code, " ".join(result.stdout.split())


def test_a_template_that_leaves_history_alone() -> None:
    code, text = check("quickstart")
    assert code == 0
    assert "append │ yes" in text
    assert "rerender │ yes" in text
    assert "model.history=auto uses append an answer ends with '<|im_end|>' the rules are a system message" in text
    assert "tool calls are written in the format hermes, and the tools are described in the system message" in text


def test_a_template_with_tools(tmp_path: Path) -> None:
    template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(template, encoding="utf-8")
    code, text = check("quickstart", f"chat_template={tmp_path / 'chat.jinja'}")
    assert code == 0
    assert "tool calls are written in the format hermes, as the chat template does" in text


def test_a_template_that_rewrites_history(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(REWRITING, encoding="utf-8")
    code, text = check("quickstart", f"chat_template={tmp_path / 'chat.jinja'}", "template_arguments.thinking=true")
    assert code == 0
    assert "append │ no │ the chat template strips the reasoning of earlier turns" in text
    assert "model.history=auto uses rerender" in text


def test_a_template_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no') }}", encoding="utf-8")
    code, text = check("quickstart", f"chat_template={tmp_path / 'chat.jinja'}")
    assert code == 1
    assert text.count("failed on a plain conversation: no") == 2
    with pytest.raises(ConfigError, match="cannot be read"):
        check("quickstart", "chat_template=missing.jinja")
