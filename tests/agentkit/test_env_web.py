"""`agentkit env play --web`: over HTTP, and in a real browser."""

import re
import subprocess
import sys

import httpx
import pytest
from chromium import PROGRAM, REMEDY, Browser
from requiring import require
from typer.testing import CliRunner

import agentkit
from agentkit.cli.env import app
from agentkit.errors import ConfigError


@pytest.fixture
def address(tmp_path, monkeypatch):
    """The address of a running shop."""
    require("bm25s", "pip install 'agentkit-rl[webshop]'")
    monkeypatch.setenv("AGENTKIT_DATA", str(tmp_path))
    command = [sys.executable, "-u", "-m", "agentkit", "env", "play", "WebShop-v0", "--web", "--seed", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.kill()


def expert_of_seed_3():
    env = agentkit.make("WebShop-v0")
    env.reset(seed=3)
    return list(env.expert())


def test_a_task_over_http(address):
    with httpx.Client(follow_redirects=True, timeout=30) as client:
        assert "Instruction:" in client.get(address).text
        plan = expert_of_seed_3()
        page = client.post(address, data={"search_query": plan[0][7:-1]}).text
        assert "Page 1 (Total results: " in page
        assert client.get(address, params={"action": plan[1]}).text.count('type="radio"') > 1
        for action in plan[2:]:
            page = client.post(address, data={"action": action}).text
        assert "<p>1.0</p>" in page
        assert "Next task" in page
        assert client.get(address).text == page  # reloading buys nothing again
        assert 'id="search_input"' in client.post(address, data={"next": "1"}).text
        assert client.post(address, data={"action": "click[nothing]"}).status_code == 200


def test_foreign_and_oversized_requests_are_refused(address):
    assert httpx.get(address, headers={"Host": "example.org"}).status_code == 403
    assert httpx.post(address, headers={"Sec-Fetch-Site": "cross-site"}, data={"next": "1"}).status_code == 403
    assert httpx.get(address + "secret").status_code == 404
    assert httpx.post(address, content=b"x" * 100_000).status_code == 413


def test_environments_without_web_pages_are_refused():
    runner = CliRunner()
    for arguments, message in ((["FrozenLake-v1"], "no web pages"), (["WebShop-v0", "--expert"], "for human players")):
        result = runner.invoke(app, ["play", *arguments, "--web"])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


@pytest.mark.slow
def test_a_person_shops_in_a_browser(address, tmp_path):
    require(PROGRAM is not None, REMEDY)
    search, item, *options, buy = (action[action.index("[") + 1 : -1] for action in expert_of_seed_3())
    assert len(options) == 2
    browser = Browser()
    try:
        browser.open(address)
        assert browser.evaluate("document.activeElement.id") == "search_input"
        browser.evaluate(f"document.getElementById('search_input').value = {search!r}")
        browser.click("button", "search", then="document.querySelectorAll('a.product-link').length == 10")
        browser.screenshot(tmp_path / "results.png")
        browser.click("a.product-link", item, then="document.querySelectorAll('input[type=radio]').length > 1")
        for count, option in enumerate(options, 1):
            browser.click("label", option, then=f"document.querySelectorAll('input:checked').length == {count}")
        browser.screenshot(tmp_path / "item.png")
        browser.click("button", buy, then="document.getElementById('score')")
        assert browser.evaluate("document.getElementById('score').innerText").split()[-1] == "1.0"
        assert "MTurk" not in browser.evaluate("document.body.innerText")
        browser.screenshot(tmp_path / "done.png")
        browser.click("button", "next task", then="document.getElementById('search_input')")
    finally:
        browser.close()
    assert all((tmp_path / f"{name}.png").stat().st_size > 5_000 for name in ("results", "item", "done"))
