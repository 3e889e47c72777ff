"""A stand-in for the training-job service of ModelArts: a real HTTP server, in a thread of the test.

It checks the key of every request, and every body of a new job (tests/support/modelarts_body.py).
A test controls the phases of the jobs. It was written from the documents and the SDK, without a
live account.
"""

import http.server
import json
import socket
import struct
import threading
import urllib.parse

from tests.support.modelarts_body import Wrong, check_job

PROJECT, ACCESS_KEY, SECRET_KEY = "0123456789abcdef", "TESTING-ACCESS-KEY", "testing-secret-key"
PHASES = ("Creating", "Pending", "Running", "Failed", "Completed", "Terminating", "Terminated", "Abnormal")


class Refused(Exception):
    """An answer other than 2xx, with status, code and message."""


class ModelArtsService(http.server.ThreadingHTTPServer):
    """The jobs and the operations on them. The server runs until the end of the `with` block."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.jobs, self.faults, self.requests = threading.Lock(), {}, [], []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Print nothing: a test resets connections, and reads what commands print."""

    def keys(self, **extra: str) -> dict[str, str]:
        """Return the environment of a user."""
        names = ("HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK", "HUAWEICLOUD_SDK_PROJECT_ID")
        return dict(zip(names, (ACCESS_KEY, SECRET_KEY, PROJECT), strict=True)) | extra

    def test(self, **what) -> dict:
        """Change the state of the server.

        clear: no faults. fault: {"status": a number, or "reset", "reset_after", "text", "no_id"; times,
        path} of the next requests. job: an id, with a new phase.

        Returns the bodies that created jobs, by id, and all requests.
        """
        with self.lock:
            if "clear" in what:
                self.faults = []
            if "fault" in what:
                self.faults.append({"times": 1, "path": "", **what["fault"]})
            if "job" in what:
                assert what["phase"] in PHASES, what
                self.jobs[what["job"]]["phase"] = what["phase"]
            bodies = {job_id: job["body"] for job_id, job in self.jobs.items()}
            return {"bodies": bodies, "requests": self.requests}

    def answer(self, method: str, path: str, content: bytes) -> tuple[int, object]:
        with self.lock:
            self.requests.append([method, path])
            begin = f"/v2/{PROJECT}/training-jobs"
            if not path.startswith(begin):
                raise Refused(404, "ModelArts.0104", f"no project of yours has {path}")
            if (method, path) == ("POST", begin):
                return self._create(json.loads(content))
            job_id, _, rest = path[len(begin) + 1 :].partition("/")
            if job_id not in self.jobs:
                raise Refused(404, "ModelArts.2764", f"training job {job_id} does not exist")
            if (method, rest) == ("GET", ""):
                return 200, self._shown(job_id)
            raise Refused(404, "ModelArts.0104", f"{method} {path} is unknown")

    def _create(self, body) -> tuple[int, object]:
        try:
            check_job(body)
        except Wrong as error:
            raise Refused(400, "ModelArts.2750", str(error)) from error
        job_id = f"{len(self.jobs):08x}-0000-4000-8000-000000000000"
        self.jobs[job_id] = {"body": body, "phase": "Creating"}
        return 201, self._shown(job_id)

    def _shown(self, job_id: str) -> dict:
        job = self.jobs[job_id]
        metadata = job["body"]["metadata"] | {"id": job_id}
        spec = {"resource": job["body"]["spec"]["resource"]}
        return {"kind": "job", "metadata": metadata, "status": {"phase": job["phase"]}, "spec": spec}

    def fault(self, path: str) -> dict | None:
        with self.lock:
            fault = next((each for each in self.faults if each["times"] and each["path"] in path), None)
            if fault:
                fault["times"] -= 1
            return fault


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self._serve()

    do_GET = do_POST

    def _serve(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urllib.parse.urlsplit(self.path)
        fault = self.server.fault(url.path)
        kind = fault and fault["status"]
        if kind == "reset_after":  # the job is created, and the answer is lost
            self.server.answer(self.command, url.path, content)
        if kind in ("reset", "reset_after"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        if kind == "text":
            self._answer(200, "<html>a proxy</html>", "text/html")
            return
        try:
            if f" Access={ACCESS_KEY}, " not in self.headers.get("Authorization", ""):
                raise Refused(401, "ModelArts.0103", "verify aksk signature fail")
            if isinstance(kind, int):
                raise Refused(kind, f"ModelArts.{kind}", fault.get("message", f"a fault of {kind}"))
            status, data = self.server.answer(self.command, url.path, content)
            if kind == "no_id":  # the job is created, and the answer does not name it
                del data["metadata"]["id"]
            self._answer(status, data)
        except Refused as error:
            status, code, message = error.args
            self._answer(status, {"error_code": code, "error_msg": message})

    def _answer(self, status: int, data, kind: str = "application/json"):
        content = data.encode() if isinstance(data, str) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Request-Id", f"request-{len(self.server.requests)}")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass
