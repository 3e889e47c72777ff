"""A Chromium that tests steer: its DevTools protocol over two pipes (--remote-debugging-pipe)."""

import itertools
import json
import os
import shutil
import subprocess
from typing import Any


def find_chromium() -> str | None:
    """Return the path of a Chromium of this machine."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in a headless Chromium that reaches 127.0.0.1 only. Close it.

    profile: an empty folder.
    """

    def __init__(self, profile: str):
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()

        def place() -> None:  # runs in the child: the protocol reads from 3 and writes to 4
            first, second = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(first, 3)
            os.dup2(second, 4)

        program = find_chromium()
        assert program
        words = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
        ]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            words, preexec_fn=place, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb", 0)
        self._ids = itertools.count(1)
        self._rest = b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = self._in.read(65536)
            assert block, "Chromium has ended"
            self._rest += block
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _call(self, method: str, session: str | None = None, **arguments: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": arguments}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of the page to a method of the protocol."""
        return self._call(method, self._session, **arguments)

    def open(self, url: str, width: int) -> None:
        """Open a page in a window of this width in pixels, and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False
        )
        self.call("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait()
        self._out.close()
        self._in.close()
