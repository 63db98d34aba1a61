"""A headless Chromium, driven through a pipe with the DevTools protocol: nothing but Chromium itself is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The program, or None where there is none."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab.

    Attributes
    ----------
    problems : list of str
        Errors and warnings of the console, exceptions that nothing caught, and what the page asked of a network.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self._call(f"{domain}.enable")

    def size(self, width: int, height: int) -> None:
        """The window's."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """``"light"`` or ``"dark"``."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, path: Path) -> float:
        """Open a file and wait until it has drawn itself; the seconds that it took."""
        start = time.perf_counter()
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.body && document.body.dataset.ready === 'yes'")
        return time.perf_counter() - start

    def run(self, script: str) -> Any:
        """The value of an expression."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} is not true after {seconds} s; {self.problems}"
            time.sleep(0.02)

    def cpu_seconds(self) -> float:
        """That the tab's process has computed so far."""
        found = self._call("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in found if one["name"] == "ProcessTime")

    def frame(self) -> None:
        """Until what was changed is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str) -> None:
        """A key of the keyboard: a letter, or its name."""
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        code = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39}
        own = {"windowsVirtualKeyCode": code[key]} if key in code else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **own, **({"text": text} if text else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, **own)
        self.frame()

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self._call("Input.insertText", text=text)
        self.frame()

    def click(self, selector: str, number: int = 0) -> None:
        """The middle of an element, with the mouse."""
        where = self.run(
            f"(() => {{ const one = document.querySelectorAll({json.dumps(selector)})[{number}];"
            "one.scrollIntoView({block: 'nearest'}); const box = one.getBoundingClientRect();"
            "return [box.left + Math.min(box.width / 2, 60), box.top + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call(
                "Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", buttons=1, clickCount=1
            )
        self.frame()

    def picture(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._see(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        whole, self._rest = self._rest.split(b"\0", 1)
        return json.loads(whole)

    def _see(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        if event.get("method") == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(str(found["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(found["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(found["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            url = found["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.problems.append(f"asked for {url}")


@contextmanager
def chromium_page(program: str) -> Iterator[Page]:
    """A new browser with a profile of its own, which ends with the block."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def connect() -> None:
        # The browser reads from 3 and writes to 4.
        ends = os.dup(to_browser[0]), os.dup(from_browser[1])
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-background-networking"]
        browser = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            page = Page(to_browser[1], from_browser[0])
            page.size(1440, 900)
            yield page
        finally:
            os.close(to_browser[1])
            os.close(from_browser[0])
            browser.terminate()
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
