"""Find a job on ModelArts and read its state from the service."""

import datetime
from typing import Any, NamedTuple

from common.console.arguments import Parser
from common.ground.exits import BadInput
from launch import records
from launch.explain import explain_exit_code
from launch.platforms import service as modelarts

ENDED = ("Failed", "Completed", "Terminated")  # phases of v2, from the vendor's documents
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
        "job",
        metavar="JOB",
        help="id of the job, or its record: a file, or a name in output_dir/jobs/ (or in $BOOTFILE_JOBS)",
    )
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
        record = records.find(text)
        if record is None:
            if not records.is_id(text):
                raise BadInput(f"{text}: no such file, and not the id of a job")
            record = {"id": text, "endpoint": "", "project_id": ""}
        endpoint = modelarts.find_endpoint(url=record["endpoint"])
        return cls(record, modelarts.connect(endpoint, modelarts.find_project(record["project_id"])))

    def refresh(self) -> "Job":
        """Read the job's state from the service. Raises ServiceError."""
        self.data = self.service.show(self.id)
        return self

    @property
    def name(self) -> str:
        return str(self._metadata.get("name") or self.record.get("name"))

    @property
    def phase(self) -> str:
        return self._status.get("phase") or "unknown"

    @property
    def nodes(self) -> int:
        resource = self.data.get("spec", {}).get("resource") or {}
        return int(resource.get("node_count") or 1)

    @property
    def created(self) -> str:
        """Return when the job was created, "-" if it is not known."""
        created = self._metadata.get("create_time")
        return _utc(created) if created else "-"

    @property
    def tasks(self) -> list[str]:
        """Return the names of the nodes' containers, in the order of the nodes: worker-0, ..., worker-10."""
        return sorted({str(name) for name in self._status.get("tasks") or []}, key=_by_number)

    @property
    def ended_tasks(self) -> list[Task]:
        """Return the containers that have an exit code, in the order of the nodes."""
        tasks = []
        for status in self._status.get("task_statuses") or []:
            if (code := status.get("exit_code")) is not None:
                message = " ".join(str(status.get("message") or "").split())
                tasks.append(Task(str(status.get("task")), int(code), explain_exit_code(int(code)), message))
        return sorted(tasks, key=lambda task: _by_number(task.name))

    @property
    def restarts(self) -> list[str]:
        """Return one line for each earlier run: when and why it ended, and the service's reaction."""
        lines = []
        for run in self._status.get("running_records") or []:
            if run.get("end_at") and run.get("end_recover"):
                task = f" ({run['end_related_task']})" if run.get("end_related_task") else ""
                reason = run.get("end_reason") or "no reason given"
                lines.append(f"{_utc(run['end_at'])} {run['end_recover']}: {reason}{task}")
        return lines

    @property
    def headline(self) -> str:
        """Return one line: id, name, phase, time of the creation, number of nodes."""
        return f"job {self.id} {self.name}: {self.phase}, created {self.created}, nodes={self.nodes}"

    @property
    def _metadata(self) -> dict[str, Any]:
        return self.data.get("metadata", {})

    @property
    def _status(self) -> dict[str, Any]:
        return self.data.get("status", {})


def _utc(stamp: Any) -> str:
    seconds = int(stamp) / (1000 if int(stamp) > _MILLISECONDS else 1)
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _by_number(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("-")
    return head, int(tail) if tail.isdecimal() else 0
