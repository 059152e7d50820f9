"""A headless Chromium to test pages in, driven over a pipe by the DevTools protocol, without further packages."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page in a Chromium of its own."""

    def __init__(self, width: int = 1280, height: int = 800) -> None:
        assert CHROMIUM
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        low_in, self._out = os.pipe()
        self._in, low_out = os.pipe()
        theirs = [fcntl.fcntl(low, fcntl.F_DUPFD, 10) for low in (low_in, low_out)]  # not 3 or 4
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}"]
        script = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'  # the descriptors that Chromium expects
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command, "about:blank"],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in (low_in, low_out, *theirs):
            os.close(descriptor)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = next(t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        self._ask("Runtime.enable")
        self._ask("Page.enable")
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.prefer("light")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(self, page: Path) -> None:
        """Open a file, and wait until it is loaded."""
        self._ask("Page.navigate", url=page.as_uri())
        self.js("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")
        self.frame()

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page, awaited if it is a promise."""
        result = self._ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def frame(self) -> None:
        """Wait until changes are drawn."""
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event, and wait until its effect is drawn."""
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1, buttons=int(kind == "mousePressed"))

    def press(self, key: str) -> None:
        """Press a key in the focused element."""
        text = {"text": key} if len(key) == 1 else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.frame()

    def prefer(self, scheme: str) -> None:
        """Prefer a colour scheme, dark or light."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"]["exception"].get("description", "?"))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "Chromium has ended"
            self._received += chunk
        text, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer
