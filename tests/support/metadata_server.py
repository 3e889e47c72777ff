"""A metadata server on this machine that answers as that of a cloud, in the forms of the vendors' pages.

The pages of aws, google and azure are named in bootfile/processes/notices.py, that of alibaba too.
"""

import http.server
import json
import threading

TIME = "2026-11-30T08:22:00Z"
TOKENS = {"aws": "X-aws-ec2-metadata-token", "alibaba": "X-aliyun-ecs-metadata-token"}
PATHS = {
    "aws": "/latest/meta-data/spot/instance-action",
    "google": "/computeMetadata/v1/instance/preempted",
    "azure": "/metadata/scheduledevents?api-version=2020-07-01",
    "alibaba": "/latest/meta-data/instance/spot/termination-time",
}
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"  # of azure


def event(kind: str = "Preempt", *machines: str) -> dict:
    """Return an event of azure."""
    return {
        "EventId": "C1BF8322-4CBF-4FC4-9C45-B40CF3106D0E",
        "EventStatus": "Scheduled",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [*machines] or ["nodes_1"],
        "NotBefore": "Mon, 30 Nov 2026 08:22:00 GMT",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


class MetadataServer:
    """A server that runs until the end of the `with` block. Another one is `None`, which answers with `raw`.

    `has_notice`: whether the machine ends. `events`: those of azure then. `has_tokens`: whether there are
    tokens; then a request without one is refused. `name`: of the machine; None: it is not told.
    `raw`: called for each request in place of the answers: returns the whole answer with its head, in parts.
    `requests`: the method, path and headers of each request.
    """

    def __init__(self, cloud: str | None = None, has_notice: bool = False):
        self.cloud, self.has_notice, self.has_tokens, self.name = cloud, has_notice, True, "nodes_1"
        self.events = [event()]
        self.raw = lambda: [b""]
        self.requests = []
        self.closed = threading.Event()
        handler = type("Bound", (_Handler,), {"metadata": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, headers) -> tuple[int, str]:
        """Return the status and the text of an answer."""
        token = TOKENS.get(self.cloud, "")
        if token and self.has_tokens:
            if (method, path) == ("PUT", "/latest/api/token"):
                seconds = headers.get(f"{token}-ttl-seconds", "")
                return (200, "a-token==") if seconds.isdecimal() and 0 < int(seconds) <= 21600 else (400, "")
            if headers.get(token) != "a-token==":
                return 401, "Unauthorized"
        marks = {"google": ("Metadata-Flavor", "Google"), "azure": ("Metadata", "true")}
        if self.cloud in marks and headers.get(marks[self.cloud][0]) != marks[self.cloud][1]:
            return 403, "Forbidden"
        if (self.cloud, path) == ("azure", NAME) and self.name:
            return 200, self.name
        if (method, path) != ("GET", PATHS[self.cloud]):
            return 404, "Not Found"
        if self.cloud == "google":
            return 200, "TRUE" if self.has_notice else "FALSE"
        if self.cloud == "azure":
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events * self.has_notice})
        if not self.has_notice:
            return 404, "Not Found"
        return 200, json.dumps({"action": "terminate", "time": TIME}) if self.cloud == "aws" else TIME


class _Handler(http.server.BaseHTTPRequestHandler):
    metadata: MetadataServer

    def do_GET(self) -> None:
        server = self.metadata
        server.requests.append((self.command, self.path, dict(self.headers)))
        if server.cloud is None:
            self.close_connection = True
            for part in server.raw():
                self.wfile.write(part)
            return
        status, text = server.answer(self.command, self.path, self.headers)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the other side has closed
            self.close_connection = True

    def log_message(self, *_) -> None:
        """Print nothing."""
