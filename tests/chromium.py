"""A real browser for tests, controlled through its debugging pipe; needs only the standard library and Chromium."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from requiring import require

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REMEDY = "apt-get install chromium"
TIMEOUT = 60.0


class Browser:
    """One page. ``evaluate`` runs JavaScript in it; ``wait`` runs it until it is true."""

    def __init__(self) -> None:
        assert PROGRAM is not None, REMEDY
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        switches += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={self._profile}"]
        script = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", PROGRAM, *switches, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._buffer, self._session = 0, b"", None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete'")

    def visit(self, address: str, place: str, then: str) -> None:
        """Open a deep link of the dashboard in a new page, and wait until ``then`` holds."""
        self.open("about:blank")
        self.open(f"{address}#/{place}")
        self.wait(then)

    def text(self, selector: str = "main") -> Any:
        """Return the text of the first element that matches."""
        return self.evaluate(f"document.querySelector({selector!r})?.innerText")

    def look(self, width: int, height: int, theme: str = "light") -> None:
        """Set the size of the window, and the theme (``light`` or ``dark``) that the system prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def evaluate(self, script: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        end = time.monotonic() + TIMEOUT
        while True:
            with contextlib.suppress(AssertionError):  # between two pages there is nothing to ask
                if self.evaluate(f"Boolean({script})"):
                    return
            assert time.monotonic() < end, f"{script} did not come true: {self.evaluate('document.body.innerText')}"
            time.sleep(0.05)

    def click(self, kind: str, text: str, then: str) -> None:
        """Click on the element with that text, and wait for the page that it leads to, and on which ``then`` holds."""
        found = f"[...document.querySelectorAll({kind!r})].find(e => e.innerText.toLowerCase() == {text!r})"
        self.evaluate(f"window.left = false; {found}.click()")
        self.wait(f"window.left === undefined && document.readyState == 'complete' && ({then})")

    def press(self, key: str) -> None:
        """Press and release a key, such as ``j`` or ``Escape``."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the window, as PNG or WebP according to the name."""
        kind = {"format": "webp", "quality": 80} if path.suffix == ".webp" else {"format": "png"}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **kind)["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT
        while True:
            while b"\0" not in self._buffer:
                assert select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0], f"{method} hangs"
                data = os.read(self._in, 1 << 16)
                assert data, "Chromium ended"
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]


@pytest.fixture(scope="session")
def one_browser() -> Iterator[Browser]:
    """The browser of all tests."""
    require(PROGRAM is not None, REMEDY)
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(one_browser: Browser) -> Browser:
    """A browser with a wide window and the light theme."""
    one_browser.look(1440, 900)
    return one_browser
