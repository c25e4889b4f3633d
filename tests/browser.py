"""A headless Chromium, driven over its DevTools pipe: no package is needed, only the program.

Messages are JSON objects that end with a zero byte, written to the browser's descriptor 3 and read from its 4.
"""

from __future__ import annotations

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
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The browser's path: TILEWISE_CHROMIUM, or the first of NAMES on PATH; None where there is none."""
    named = os.environ.get("TILEWISE_CHROMIUM")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page. Use as a context manager.

    messages: console errors and warnings, and exceptions that no script caught, in their order.
    requests: addresses that the page asked for.
    """

    def __init__(self, program: str, width: int = 1320, height: int = 1000) -> None:
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._received = b""
        self._events: list[dict[str, Any]] = []
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--hide-scrollbars",
            f"--window-size={width},{height}", f"--user-data-dir={self._profile.name}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Out of the way first: descriptors 3 and 4 may be ends of these very pipes.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]

        def move_ends() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            command, pass_fds=(3, 4), preexec_fn=move_ends, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        self._out, self._in = ours_out, ours_in
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One DevTools command to the page; RuntimeError if the browser refuses it."""
        return self._call(method, session=self._session, **parameters)

    def open(self, path: Path) -> float:
        """Open a file and wait for its load event; returns the seconds until then, by the page's own clock."""
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self._wait("Page.loadEventFired")
        entry = "performance.getEntriesByType('navigation')[0]"
        return float(self.run(f"{entry}.loadEventEnd || {entry}.domComplete")) / 1000

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; RuntimeError if it throws."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and release a key: its DOM name and its virtual key code."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def click(self, selector: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """Click with the mouse into an element, at a fraction of its width and height."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        x, y = box[0] + box[2] * at[0], box[1] + box[3] * at[1]
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def resize(self, width: int, height: int) -> None:
        """The size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Ask for the "light" or the "dark" scheme, as the system would."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page, beyond the window if `whole`."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        mine = self._number
        command = {"id": mine, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        text = json.dumps(command).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        while True:
            answer = self._read()
            if answer.get("id") == mine:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _wait(self, event: str) -> None:
        while not any(seen.get("method") == event for seen in self._events):
            self._read()

    def _read(self, seconds: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._received += chunk
        text, _, self._received = self._received.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        if "method" in found:
            self._events.append(found)
            self._note(found["method"], found["params"])
        return found

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.messages.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.messages.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
