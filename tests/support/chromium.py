"""A headless Chromium, told what to do over a pair of pipes (the Chrome DevTools Protocol), without a package."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 120.0


class Page:
    """One page. Raises AssertionError where Chromium refuses a call, or is silent for TIMEOUT_S."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._ids, self._read, self._session = itertools.count(1), b"", None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, url: str) -> None:
        """Go there."""
        self._call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, width: int, height: int) -> bytes:
        """A PNG of the page."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._read:
                assert select.select([self._from], [], [], TIMEOUT_S)[0], f"Chromium is silent after {method}"
                data = os.read(self._from, 1 << 20)
                assert data, "Chromium has ended"
                self._read += data
            line, _, self._read = self._read.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])


@contextlib.contextmanager
def chromium_page() -> Iterator[Page]:
    """A page of a fresh browser, which ends with the block."""
    read_by_browser, to_browser = os.pipe()
    from_browser, written_by_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={profile} --remote-debugging-pipe"
        # The browser reads its calls from descriptor 3 and answers on 4.
        shell = f"exec chromium {flags} 3<&{read_by_browser} 4>&{written_by_browser}"
        browser = subprocess.Popen(
            ["bash", "-c", shell],
            pass_fds=(read_by_browser, written_by_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_by_browser)
        os.close(written_by_browser)
        try:
            yield Page(to_browser, from_browser)
        finally:
            browser.terminate()
            browser.wait(30)
            os.close(to_browser)
            os.close(from_browser)
