"""An HTTP proxy that injects faults between a job and a real object store.

    with FaultProxy(server.port, "cut", seed=3) as proxy:
        environment = server.environment | proxy.environment

The seed and the order of the requests decide which requests fail, and at which byte.
"""

import base64
import hashlib
import http.client
import random
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# answers of S3; moto accepts all credentials
REFUSALS = {
    "busy": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "forbidden": (403, "AccessDenied", "Access Denied"),
    "no such method": (405, "MethodNotAllowed", "The method is not allowed against this resource."),
    "locked": (409, "ObjectLockedByBucketPolicy", "The object is kept until its retention ends."),
    "not implemented": (501, "NotImplemented", "A header that you provided is not implemented."),
}
KINDS = ("busy", "reset", "stall", "cut", "flip", "slow", "expired", "forbidden", "gone")
_LASTING = ("expired", "forbidden", "gone")  # these faults do not end
_STALL = 30.0  # seconds: longer than the time-outs of the clients in tests


class FaultProxy:
    """A proxy that runs until close(), or until the end of the `with` block.

    kind: one of KINDS; None for no faults. share: of the requests that fail; "busy" lasts for up to a second
    each time. after: number of first requests that do not fail. delay: seconds added to every request.
    held: requests whose path contains this text wait until `released` is set, except for the first `passed`.
    port: to listen on, 0 for any.
    """

    def __init__(
        self, target: int, kind: str | None = None, seed: int = 0, share: float = 0.2, after: int = 0,
        delay: float = 0.0, held: str | None = None, passed: int = 0, port: int = 0,
    ):  # fmt: skip
        self.target, self.kind, self.share, self.after, self.delay = target, kind, share, after, delay
        self.held, self.passed, self.holding, self.released = held, passed, 0, threading.Event()
        self.requests, self.struck = 0, []  # the latter: "PUT /bucket/key" of each
        self._draw, self._burst, self._lock = random.Random(seed), 0.0, threading.Lock()
        self.closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # clients hang up after a fault
        self.port = self._server.server_address[1]
        self.environment = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.port}"}
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def plan(self, line: str) -> tuple[str | None, float]:
        """Return (fault of the next request or None, its place in the body: 0..1)."""
        with self._lock:
            self.requests += 1
            place = self._draw.random()
            if self.kind is None or self.requests <= self.after:
                return None, place
            hit = self._draw.random() < self.share or (self.struck and self.kind in _LASTING)
            length = self._draw.uniform(0.1, 1.0)
            if self.kind == "busy" and hit:
                self._burst = max(self._burst, time.monotonic() + length)
            hit = hit or time.monotonic() < self._burst
            if hit:
                self.struck.append(line)
            return (self.kind if hit else None), place

    def hold(self, path: str) -> None:
        if self.held is None or self.held not in path:
            return
        with self._lock:
            self.passed -= 1
            if self.passed >= 0:
                return
            self.holding += 1
        self.released.wait()

    def close(self) -> None:
        self.closed.set()
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def _do(self):
        kind, place = self.proxy.plan(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            return self._reset()  # the client was killed: a store keeps no object whose bytes did not arrive
        if self.proxy.delay:
            time.sleep(self.proxy.delay)
        self.proxy.hold(self.path)
        if kind in REFUSALS:
            return self._refuse(*REFUSALS[kind])
        if kind == "gone":
            threading.Thread(target=self.proxy.close).start()  # no connection is accepted from now on
        if kind == "gone" or (kind == "reset" and place < 0.3):
            return self._reset()  # before the server sees it
        if kind == "slow":
            self.proxy.closed.wait(0.2 + place)
        if kind == "flip" and body and self.command == "PUT":
            body = _flipped(body, place)
            received = base64.b64encode(hashlib.md5(body).digest()).decode()
            if self.headers.get("Content-MD5", received) != received:
                return self._refuse(400, "BadDigest", "The Content-MD5 did not match.")  # moto ignores it
        status, headers, content = self._forward(body)
        if kind == "reset":
            return self._reset()  # the server has done it, and the answer is lost
        if kind == "flip" and self.command == "GET" and "xml" not in headers.get("Content-Type", ""):
            content = _flipped(content, place)
        self._answer(status, headers, content, kind, place)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do

    def _forward(self, body: bytes):
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.target, timeout=60)
        try:
            skip = ("connection", "expect", "content-length", "transfer-encoding")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in skip}
            connection.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers, content: bytes, kind: str | None, place: float) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind not in ("cut", "stall", "slow") or not content:
            self.wfile.write(content)
            return
        middle = int(place * len(content))
        self.wfile.write(content[:middle])
        self.wfile.flush()
        if kind == "cut":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif kind == "stall":
            self.proxy.closed.wait(_STALL)
            self.close_connection = True
        else:
            for start in range(middle, len(content), max(1, len(content) // 8)):
                self.proxy.closed.wait(0.05)
                self.wfile.write(content[start : start + max(1, len(content) // 8)])

    def _refuse(self, status: int, code: str, message: str) -> None:
        text = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message>'
        )
        content = f"{text}<RequestId>0</RequestId></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Date", self.date_time_string())
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def _flipped(content: bytes, place: float) -> bytes:
    if not content:
        return content
    changed = bytearray(content)
    bit = int(place * len(content) * 8)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
