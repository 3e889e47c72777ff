"""Find a job on ModelArts and read its state from the service."""

import datetime
import os
import sys
from typing import Any, NamedTuple

from common.arguments import Parser
from common.exits import BadInput
from launch import records
from launch.explain import explain_exit_code
from launch.platforms import service as modelarts

PHASES = {  # of v2, from the vendor's documents
    "Creating": "being created",
    "Pending": "waiting for resources",
    "Running": "running",
    "Failed": "failed",
    "Completed": "done",
    "Terminating": "being stopped",
    "Terminated": "stopped",
    "Abnormal": "in an abnormal state: the service has lost contact with it",
}
ENDED = ("Failed", "Completed", "Terminated")
OVER = (*ENDED, "Abnormal")  # no more output is expected, but an abnormal job may still run and write
FAILED = ("Failed", "Terminated", "Abnormal")
_MILLISECONDS = 10**11  # larger timestamps are in milliseconds: as seconds they are after the year 5000


class Task(NamedTuple):
    """A node's container that has ended."""

    name: str
    code: int
    meaning: str
    message: str


def make_parser(description: str, verb: str) -> Parser:
    """Return a parser of a verb about one job, with the argument JOB."""
    parser = Parser(description)
    parser.prog = f"python -m launch {verb}"
    parser.add_argument(
        "job", metavar="JOB",
        help="the job's id, or its record: a file, or a name in output_dir/jobs/ (or in $BOOTFILE_JOBS)",
    )  # fmt: skip
    return parser


class Job:
    """A job on ModelArts. record: the one that `submit` wrote. data: the service's answer to the last
    refresh()."""

    def __init__(self, record: dict[str, Any], service: modelarts.ModelArts):
        self.id, self.record, self.service = record["id"], record, service
        self.data: dict[str, Any] = {}

    @classmethod
    def find(cls, text: str) -> "Job":
        """Return the job that `text` names: a record or an id. For an id without a record, the environment
        must name the region and the project. Raises BadInput."""
        record = records.find(text) or _record_from_environment(text)
        return cls(record, connect(record))

    def refresh(self) -> "Job":
        """Read the job's state from the service. Raises ServiceError."""
        self.data = self.service.show(self.id)
        return self

    @property
    def name(self) -> str:
        return str(self.data.get("metadata", {}).get("name") or self.record.get("name"))

    @property
    def phase(self) -> str:
        return self._status.get("phase") or "unknown"

    @property
    def nodes(self) -> int:
        resource = self.data.get("spec", {}).get("resource") or {}
        return int(resource.get("node_count") or 1)

    @property
    def since(self) -> datetime.datetime | None:
        """Return when the job entered its phase: the job's start or end if known, else its creation."""
        start, created = self._status.get("start_time"), self.data.get("metadata", {}).get("create_time")
        if self.phase in OVER and start:
            return _time(start) + datetime.timedelta(milliseconds=int(self._status.get("duration") or 0))
        if self.phase in ("Running", "Terminating") and start:
            return _time(start)
        return _time(created) if created else None

    @property
    def tasks(self) -> list[str]:
        """Return the names of the nodes' containers, in the order of the nodes: worker-0, ..., worker-10."""
        return sorted({str(name) for name in self._status.get("tasks") or []}, key=_by_number)

    @property
    def ended_tasks(self) -> list[Task]:
        """Return the containers that have an exit code, in the order of the nodes."""
        found = []
        for each in self._status.get("task_statuses") or []:
            if (code := each.get("exit_code")) is not None:
                message = " ".join(str(each.get("message") or "").split())
                found.append(Task(str(each.get("task")), int(code), explain_exit_code(int(code)), message))
        return sorted(found, key=lambda task: _by_number(task.name))

    @property
    def restarts(self) -> list[str]:
        """Return one line for each earlier run: when and why it ended, and the service's reaction."""
        found = []
        for run in self._status.get("running_records") or []:
            if run.get("end_at") and run.get("end_recover"):
                task = f" ({run['end_related_task']})" if run.get("end_related_task") else ""
                reason = run.get("end_reason") or "no reason given"
                found.append(f"{_utc(_time(run['end_at']))} {run['end_recover']}: {reason}{task}")
        return found

    def headline(self, meaning: str = "") -> str:
        """Return one line: id, name, phase and since when, number of nodes."""
        moment = f" since {_utc(self.since)}" if self.since else ""
        return f"job {self.id} {self.name}: {self.phase}{moment}{meaning}, nodes={self.nodes}"

    @property
    def _status(self) -> dict[str, Any]:
        return self.data.get("status", {})


def connect(record: dict[str, Any]) -> modelarts.ModelArts:
    """Connect to the service of a job. Warn if its host does not belong to the vendor. Raises BadInput."""
    place = modelarts.find_endpoint(url=record["endpoint"])
    if not modelarts.is_expected(place):
        print(
            f"warning: the record of job {record['id']} names {place}, which is not a host of "
            f"{modelarts.DOMAIN}: it receives requests signed with your keys, and the session token",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return modelarts.connect(place, record["project_id"])


def _record_from_environment(text: str) -> dict[str, Any]:
    if not records.is_id(text):
        raise BadInput(f"{text}: no such file, and not the id of a job")
    for what, names in (
        ("region", ("MODELARTS_REGION", "MODELARTS_ENDPOINT")),
        ("project", ("HUAWEICLOUD_SDK_PROJECT_ID",)),
    ):
        if not any(os.environ.get(name) for name in names):
            raise BadInput(
                f"job {text} has no record in {records.FOLDER}, and no {what} is set: set {names[0]}"
            )
    return {"id": text, "endpoint": modelarts.find_endpoint(), "project_id": modelarts.find_project()}


def _utc(time: datetime.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _time(stamp: Any) -> datetime.datetime:
    seconds = int(stamp) / (1000 if int(stamp) > _MILLISECONDS else 1)
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


def _by_number(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("-")
    return head, int(tail) if tail.isdecimal() else 0
