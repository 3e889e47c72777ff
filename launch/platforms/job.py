"""Find a job on ModelArts and read its state from the service."""

import re
from typing import Any

from bootfile.ground.errors import BadInput
from bootfile.ground.exit_codes import explain_exit_code
from common.console.arguments import Parser
from launch import records
from launch.explain import format_time
from launch.platforms.service import ModelArts

ENDED = ("Failed", "Completed", "Terminated")  # phases of v2, from the vendor's documents
OVER = (*ENDED, "Abnormal")  # no more output is expected, but an abnormal job may still run and write
_MILLISECONDS = 10**11  # larger timestamps are in milliseconds: as seconds they are after the year 5000


def make_parser(description: str, verb: str) -> Parser:
    """Return a parser of a verb about one job, with the argument JOB."""
    parser = Parser(description, f"python -m launch {verb}")
    parser.add_argument(
        "job",
        metavar="JOB",
        help="id of the job, or its record: a file, or a name in output_dir/jobs/ (or in $BOOTFILE_JOBS)",
    )
    return parser


class Job:
    """A job on ModelArts. record: the one that `submit` wrote. data: the service's answer to the last
    refresh()."""

    def __init__(self, record: dict[str, Any], service: ModelArts):
        self.id, self.record, self.service = record["id"], record, service
        self.data: dict[str, Any] = {}

    @classmethod
    def find(cls, text: str) -> "Job":
        """Return the job that `text` names: a record or an id. For an id without a record, the environment
        must name the region and the project. Raises BadInput."""
        record = records.find(text)
        if not record:
            if not re.fullmatch(records.ID, text):
                raise BadInput(f"{text}: no such file, and not the id of a job")
            record = {"id": text, "endpoint": "", "project_id": ""}
        return cls(record, ModelArts("", record["endpoint"], record["project_id"]))

    def refresh(self) -> "Job":
        """Read the job's state from the service. Raises ServiceError."""
        self.data = self.service.show(self.id)
        return self

    @property
    def _status(self) -> dict[str, Any]:
        return self.data.get("status", {})

    @property
    def phase(self) -> str:
        return self._status.get("phase") or "unknown"

    @property
    def tasks(self) -> list[str]:
        """Return the names of the nodes' containers, in the order of the nodes: worker-0, ..., worker-10."""
        return sorted({*self._status.get("tasks", [])}, key=_by_number)

    @property
    def headline(self) -> str:
        """Return one line: id, name, phase, time of the creation, number of nodes."""
        metadata, resource = self.data.get("metadata", {}), self.data.get("spec", {}).get("resource", {})
        name, created = metadata.get("name") or self.record.get("name"), to_utc(metadata.get("create_time"))
        return f"job {self.id} {name}: {self.phase}, created {created}, nodes={resource.get('node_count', 1)}"

    def list_ended(self) -> list[tuple[int, str]]:
        """Return (exit code, a line about it) for each container that has ended, in the order of the
        nodes."""
        ended = []
        for task in sorted(self._status.get("task_statuses", []), key=lambda task: _by_number(task["task"])):
            if (code := task.get("exit_code")) is not None:
                line = f"task {task['task']} exit_code={code}: {explain_exit_code(code)}"
                message = " ".join(task.get("message", "").split())
                ended.append((code, f"{line}; {message}" if message else line))
        return ended

    def list_restarts(self) -> list[str]:
        """Return one line for each earlier run: when and why it ended, and the service's reaction."""
        lines = []
        for run in self._status.get("running_records", []):
            if run.get("end_at") and run.get("end_recover"):
                task = f" ({run['end_related_task']})" if run.get("end_related_task") else ""
                reason = run.get("end_reason") or "no reason given"
                lines.append(f"restart {to_utc(run['end_at'])} {run['end_recover']}: {reason}{task}")
        return lines


def to_utc(stamp: int | None) -> str:
    """Return a time of the service, "-" without one. stamp: in seconds or milliseconds."""
    return format_time(stamp / (1000 if stamp > _MILLISECONDS else 1)) if stamp else "-"


def _by_number(task: str) -> tuple[int, str]:
    return len(task), task  # worker-9 is before worker-10
