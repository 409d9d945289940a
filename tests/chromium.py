"""A headless Chromium that tests drive over the DevTools protocol, through a pair of pipes: no port, no package.

with Browser() as browser:
    page = browser.open(path, width_px=390, dark=True)
    page.evaluate("document.title")
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the path of the installed browser; None without one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One browser process with its own, empty profile."""

    def __init__(self, timeout_s: float = 240.0) -> None:
        self.timeout_s = timeout_s
        self.events: list[dict[str, Any]] = []
        self._target = ""
        self._next_id = 0
        self._unread = b""
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)

    def __enter__(self) -> "Browser":
        command = [find_chromium() or NAMES[0], *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        theirs_in, self._write = _pipe()
        self._read, theirs_out = _pipe()

        def wire() -> None:
            """Connect the pipes: the browser reads commands from descriptor 3 and writes answers to descriptor 4."""
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(
            command, preexec_fn=wire, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def call(self, method: str, session: str | None = None, **params: object) -> dict[str, Any]:
        """Send one command and return its result; events that arrive meanwhile are kept. Raises RuntimeError."""
        self._next_id += 1
        message = {"id": self._next_id, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._next_id:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def wait_for(self, method: str, session: str) -> None:
        """Return when a page has sent an event, at once if it already has."""
        while not any(event["method"] == method and event.get("sessionId") == session for event in self.events):
            self.events.append(self._receive())

    def open(self, path: Path, width_px: int = 1280, height_px: int = 900, dark: bool = False) -> "Page":
        """Open a file in a window of this size and wait until it has loaded; the previous page is closed."""
        if self._target:
            self.call("Target.closeTarget", targetId=self._target)
        self.events.clear()
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", session, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        self.call("Page.navigate", session, url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return Page(self, session)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.timeout_s
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("Chromium has ended" if ready else f"Chromium was silent for {self.timeout_s:.0f} s")
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression. Raises RuntimeError where it throws."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(_words(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, clip: dict[str, float] | None = None) -> bytes:
        """Return a PNG of the whole page, or of the part {x, y, width, height}."""
        part = {"clip": clip | {"scale": 1}} if clip else {}
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True, **part)["data"])

    def move_pointer(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def complaints(self, site: Path | None = None) -> list[str]:
        """Return exceptions, console errors, and requests for other files than this one or those below the folder
        `site`."""
        self.evaluate("new Promise(done => setTimeout(done, 50))")
        found, requests = [], []
        for event in self._browser.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(_words(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append("console: " + " ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append("log: " + params["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                requests.append(params["request"]["url"])
        own = site.resolve().as_uri() + "/" if site else None
        return found + [f"request: {url}" for url in requests[1:] if not (own and url.startswith((own, "data:")))]


def _pipe() -> tuple[int, int]:
    """Return both ends of a pipe on descriptors from 10 on, away from those that the browser expects."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


def _words(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details["text"]
