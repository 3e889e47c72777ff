"""Read the notice with which a cloud, or a file, announces that this machine is taken. Experimental.

Each cloud is a row of CLOUDS: how to ask its metadata server, and how to read the answer. A request needs no
credential; it goes to one address by http, through no proxy, and follows no redirect. From copies of the
vendors' pages, and botocore 1.44.8 and google-auth 2.63.0, on 2026-11-30; run with servers of the tests only:

aws      "Spot Instance interruption notices": 404 without a notice, 120 s; ask every 5 s. If no token is
         given, botocore asks without one (IMDSv1), and so does this module.
google   "Create and use preemptible VMs": TRUE or FALSE, 30 s.
azure    "Scheduled Events for Linux VMs": Preempt 30 s, Terminate 5 to 15 min; ask every second. The first
         answer may take 2 minutes. A machine also gets the events of others of its scale set.
alibaba  "Perceive interruption events": 404, in older pages an empty text, without a notice; 5 min.

Not read, as the machine stays or its system sends SIGTERM: AWS's rebalance recommendation, Google's
maintenance-event, and Azure's Freeze, Reboot and Redeploy. This module imports no torch.
"""

import contextlib
import dataclasses
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bootfile.ground.errors import BadInput

_SECONDS = 2.0  # for an answer of a server of the same machine
_MOST = 65536  # bytes of an answer
_MOST_SHOWN = 100  # characters of an answer in a line


class Notice(NamedTuple):
    """The end of machines. what: how and when. machines: their names; (): the machine that has asked."""

    what: str
    machines: tuple[str, ...] = ()


def _read_aws(text: str) -> list[Notice]:
    """Read {"action": "terminate", "time": "2026-11-30T08:22:00Z"}."""
    notice = json.loads(text)
    return [Notice(_describe(notice["action"], notice.get("time")))]


def _read_google(text: str) -> list[Notice]:
    return {"TRUE": [Notice("within 30 s")], "FALSE": []}[text.strip()]


def _read_azure(text: str) -> list[Notice]:
    """Read {"Events": [{"EventType": "Preempt", "NotBefore": "...", "Resources": ["vm_1"], ...}, ...]}."""
    events = [event for event in json.loads(text)["Events"] if event["EventType"] in ("Preempt", "Terminate")]
    whats = [_describe(event["EventType"], event.get("NotBefore")) for event in events]
    machines = [tuple(event.get("Resources") or ()) for event in events]
    return list(map(Notice, whats, machines))


def _read_alibaba(text: str) -> list[Notice]:
    moment = text.strip()
    if not moment:
        return []
    time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ")  # raises ValueError
    return [Notice(f"release at {moment}")]


def _describe(action: object, moment: object) -> str:
    return f"{action} at {moment}" if moment else f"{action}"


@dataclasses.dataclass(frozen=True)
class Cloud:
    """How to ask a cloud for notices, and how to read them.

    path: answers 200 with a text for read(), which returns the notices and raises any error for another
    text; if may_lack, 404 is the answer without a notice. every: seconds between two requests.
    address: the default. variable: the environment variable of the vendor's SDKs for another one.
    headers: of each request. token_header: that of a token, which PUT /latest/api/token returns.
    name_path: answers with the name of this machine. first: seconds for the first answer; 0: as for others.
    """

    path: str
    read: Callable[[str], list[Notice]]
    every: float
    address: str = "169.254.169.254"
    variable: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    token_header: str = ""
    may_lack: bool = False
    name_path: str = ""
    first: float = 0


CLOUDS = {
    "aws": Cloud(
        "/latest/meta-data/spot/instance-action",
        _read_aws,
        every=5,
        variable="AWS_EC2_METADATA_SERVICE_ENDPOINT",
        token_header="X-aws-ec2-metadata-token",
        may_lack=True,
    ),
    "google": Cloud(
        "/computeMetadata/v1/instance/preempted",
        _read_google,
        every=1,
        variable="GCE_METADATA_HOST",
        headers=(("Metadata-Flavor", "Google"),),
    ),
    "azure": Cloud(
        "/metadata/scheduledevents?api-version=2020-07-01",
        _read_azure,
        every=1,
        headers=(("Metadata", "true"),),
        name_path="/metadata/instance/compute/name?api-version=2021-02-01&format=text",
        first=130,
    ),
    "alibaba": Cloud(
        "/latest/meta-data/instance/spot/termination-time",
        _read_alibaba,
        every=5,
        address="100.100.100.200",
        token_header="X-aliyun-ecs-metadata-token",
        may_lack=True,
    ),
}


class Metadata:
    """The metadata server of a cloud. address: HOST:PORT, also with http://; None: that of the vendor's
    environment variable, or its usual one. Raises BadInput.

    name: of the cloud. every: seconds between two calls of find().
    """

    def __init__(self, name: str, address: str | None = None):
        self.name = name
        self._cloud = CLOUDS[name]
        self.every = self._cloud.every
        self._has_answered = False
        given = address or os.environ.get(self._cloud.variable) or self._cloud.address
        self._host, self._port = _parse_address(given)

    def find(self) -> str:
        """Return how and when this machine ends; "" without a notice. Raises an error if that is not known:
        any one, as a server may answer anything."""
        cloud = self._cloud
        headers = dict(cloud.headers)
        if cloud.token_header:
            with contextlib.suppress(OSError):
                lifetime = {f"{cloud.token_header}-ttl-seconds": "60"}
                status, text = self._ask("/latest/api/token", lifetime, "PUT")
                if status == 200:  # old machines offer none
                    headers[cloud.token_header] = text
        status, text = self._ask(cloud.path, headers, seconds=0 if self._has_answered else cloud.first)
        self._has_answered = True
        if status == 404 and cloud.may_lack:
            return ""
        if status != 200:
            raise BadInput(f"HTTP status {status}")
        try:
            notices = cloud.read(text)
        except Exception:  # whatever the text is
            raise BadInput(f"unexpected answer {text[:_MOST_SHOWN]!r}") from None
        whats = (notice.what for notice in notices if self._is_here(notice, headers))
        return next(whats, "")[:_MOST_SHOWN]

    def _is_here(self, notice: Notice, headers: Mapping[str, str]) -> bool:
        """Return whether a notice is about this machine: also if its name is not known."""
        if notice.machines and self._cloud.name_path:
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, name = self._ask(self._cloud.name_path, headers)
                names = [machine.lower() for machine in notice.machines]
                return status != 200 or name.strip().lower() in names
        return True

    def _ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET", seconds: float = 0
    ) -> tuple[int, str]:
        """Return the status and the text of an answer. Raises OSError and http.client.HTTPException."""
        # this client of Python's library uses neither proxies nor redirects
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        with contextlib.closing(connection):
            connection.connect()
            connection.sock.settimeout(None)
            limit = seconds or _SECONDS  # where there is a server, its answer may be late
            deadline = time.monotonic() + limit
            # the limit of a socket is one of each read, and a server may send an answer byte by byte
            end = threading.Timer(limit, connection.sock.shutdown, [socket.SHUT_RDWR])
            end.daemon = True
            end.start()
            try:
                connection.request(method, path, headers=dict(headers))
                response = connection.getresponse()
                text = response.read(_MOST).decode(errors="replace")
            finally:
                end.cancel()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no whole answer within {limit:g} s")
            if response.length:  # the server has closed the connection before
                raise http.client.IncompleteRead(text.encode(), response.length)
            return response.status, text


class File:
    """A file that exists when the machine ends. Its methods are those of Metadata."""

    every = 1.0

    def __init__(self, path: str):
        self.name = path
        self._path = os.path.abspath(path)  # the loop may change the working directory

    def find(self) -> str:
        return "the file exists" if os.path.exists(self._path) else ""


def find_source(given: str, address: str | None = None) -> Metadata | File:
    """Return what to ask for notices. given: "aws", "aws=http://HOST:PORT", or a path with a /, because
    another word is the wrong name of a cloud. Raises BadInput."""
    name, equals, place = given.partition("=")
    if name in CLOUDS and not (equals and not place):
        return Metadata(name, address or place or None)
    if "/" in given and "://" not in given and name not in CLOUDS and not address:
        return File(given)
    raise BadInput(
        f"--preemption, Preemption(): expected {', '.join(CLOUDS)}, CLOUD=http://HOST:PORT, or the path of a "
        f"file with a /, got {given!r}"
    )


def check(given: str, is_elastic: bool) -> None:
    """Raise BadInput if a job cannot use this --preemption."""
    find_source(given)
    if is_elastic:
        raise BadInput(
            f"--preemption {given} --elastic true: not offered together: a process that leaves is replaced "
            "on the same machine"
        )


def _parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST, HOST:PORT or http://HOST:PORT. Raises BadInput."""
    with contextlib.suppress(ValueError):  # raised by url.port
        url = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        rest = url.path.strip("/") or url.query or url.fragment or "@" in url.netloc
        if url.scheme == "http" and url.hostname and not rest:
            return url.hostname, url.port or 80
    raise BadInput(f"the address of a metadata server: expected http://HOST:PORT, got {text!r}")
