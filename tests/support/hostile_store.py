"""A server that gives broken or hostile answers to the requests of an object store's client."""

import contextlib
import socketserver
import threading
from collections.abc import Callable, Iterable
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

MODIFIED = "2026-01-02T03:04:05.000Z"
ETAG = '"0123456789abcdef0123456789abcdef-2"'  # not an MD5


class HostileStore:
    """A server that runs until the end of the `with` block.

    answer: called with the method, the key in the bucket ("" for the bucket) and the query of a request.
        Returns the whole answer with its head, in one piece or in parts.
    """

    def __init__(self, answer: Callable[[str, str, dict[str, str]], bytes | Iterable[bytes]]):
        self.answer, self.requests, self.closed = answer, 0, threading.Event()
        self._server = socketserver.ThreadingTCPServer(
            ("127.0.0.1", 0), type("Bound", (_Handler,), {"store": self})
        )
        self._server.daemon_threads = True
        self.environment = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self._server.server_address[1]}"}
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def slowly(self, content: bytes) -> Iterable[bytes]:
        """Yield a byte every 0.1 s, until the server is closed."""
        for byte in content:
            if self.closed.wait(0.1):
                return
            yield bytes([byte])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.StreamRequestHandler):
    store: HostileStore

    def handle(self):
        method, target, _ = self.rfile.readline().decode().split(" ")
        length = 0
        while line := self.rfile.readline().strip():
            name, _, value = line.decode().partition(":")
            if name.lower() == "content-length":
                length = int(value)
        self.rfile.read(length)
        self.store.requests += 1
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        answer = self.store.answer(method, parts.path.lstrip("/").partition("/")[2], query)
        with contextlib.suppress(OSError):  # the client has hung up
            for part in [answer] if isinstance(answer, bytes) else answer:
                self.wfile.write(part)


def reply(content: bytes = b"", status: int = 200, **headers: str | None) -> bytes:
    """Return an answer. headers: further ones, with _ for -; None removes a header."""
    fields = {
        "Content_Length": str(len(content)), "ETag": ETAG, "Last_Modified": "Fri, 02 Jan 2026 03:04:05 GMT",
        "Connection": "close",
    } | headers  # fmt: skip
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"HTTP/1.1 {status} OK", *lines, "", ""]).encode() + content


def missing() -> bytes:
    return reply(b"<Error><Code>NoSuchKey</Code></Error>", 404, Content_Type="application/xml")


def listing(*keys: str, truncated: bool = False, size: int = 5, **fields: str | None) -> bytes:
    """Return an answer to list_objects. fields: further ones of each object; None removes a field."""
    entries = ""
    for key in keys:
        values = {"Key": escape(key), "Size": str(size), "ETag": ETAG, "LastModified": MODIFIED} | fields
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in values.items() if value is not None)
        entries += f"<Contents>{inner}</Contents>"
    text = (
        f"<ListBucketResult><IsTruncated>{str(truncated).lower()}</IsTruncated>{entries}</ListBucketResult>"
    )
    return reply(text.encode(), Content_Type="application/xml")
