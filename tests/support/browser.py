"""A headless Chromium, driven through its DevTools protocol over a pair of pipes."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import time


def find() -> str | None:
    """Return the path of the browser; None if no browser is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a browser whose profile is in `folder`.

    events: (method, parameters) of what it reported since the last open(). Host names do not resolve.
    """

    def __init__(self, folder):
        read, child_writes = os.pipe()
        child_reads, write = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            f"--user-data-dir={folder}", "--host-resolver-rules=MAP * ~NOTFOUND", "about:blank",
        ]  # fmt: skip
        program = find()
        # the protocol uses the descriptors 3 and 4
        shell = f'exec 3<&{child_reads} 4>&{child_writes}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", program, *flags],
            pass_fds=(child_reads, child_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(child_reads)
        os.close(child_writes)
        self._read, self._write, self._rest, self._number = read, write, b"", 0
        self._session, self.events = None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append((answer["method"], answer["params"]))

    def _receive(self, seconds: float = 60) -> dict:
        deadline = time.monotonic() + seconds
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0], "no answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a page, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            answer = self._receive()
            self.events.append((answer["method"], answer["params"]))
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        if self.process.poll() is None:
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self._read)
        os.close(self._write)
