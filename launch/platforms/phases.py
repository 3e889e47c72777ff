"""What the service says of a job, as verbs show it."""

import datetime
from typing import Any, NamedTuple

from launch import exit_codes

PHASES = {  # of v2, as the vendor's documents list them
    "Creating": "being created",
    "Pending": "waiting for resources",
    "Running": "running",
    "Failed": "failed",
    "Completed": "done",
    "Terminating": "being stopped",
    "Terminated": "stopped",
    "Abnormal": "in an abnormal state: the service has lost sight of it",
}
ENDED = ("Failed", "Completed", "Terminated")
OVER = (*ENDED, "Abnormal")  # nothing more is to be expected; but it may still run, and write
FAILED = ("Failed", "Terminated", "Abnormal")
_MILLISECONDS = 10**11  # timestamps above are in milliseconds: as seconds they lie after the year 5000


class Task(NamedTuple):
    """One node's container. code: None while it runs."""

    name: str
    code: int | None
    meaning: str
    message: str


def phase(job: dict[str, Any]) -> str:
    return job.get("status", {}).get("phase") or "unknown"


def tasks(job: dict[str, Any]) -> list[str]:
    """Names of the nodes' containers, in the order of the nodes: worker-0, worker-1, ..., worker-10."""
    names = {str(name) for name in job.get("status", {}).get("tasks") or []}
    return sorted(names, key=lambda name: (name.rpartition("-")[0], _number(name)))


def ended_tasks(job: dict[str, Any]) -> list[Task]:
    """Those that have an exit code."""
    found = []
    for each in job.get("status", {}).get("task_statuses") or []:
        code = each.get("exit_code")
        if code is not None:
            message = " ".join(str(each.get("message") or "").split())
            found.append(Task(str(each.get("task")), int(code), exit_codes.explain(int(code)), message))
    return sorted(found, key=lambda task: (task.name.rpartition("-")[0], _number(task.name)))


def nodes(job: dict[str, Any]) -> int:
    resource = job.get("spec", {}).get("resource") or {}
    return int(resource.get("node_count") or 1)


def since(job: dict[str, Any]) -> datetime.datetime | None:
    """When the job came to its phase, as far as the service says it: a start, or an end; before, its
    creation."""
    status, created = job.get("status", {}), job.get("metadata", {}).get("create_time")
    start = status.get("start_time")
    if phase(job) in OVER and start:
        return _time(start) + datetime.timedelta(milliseconds=int(status.get("duration") or 0))
    if phase(job) in ("Running", "Terminating") and start:
        return _time(start)
    return _time(created) if created else None


def restarts(job: dict[str, Any]) -> list[str]:
    """One line for every earlier run of the job that ended, and what the service did about it."""
    found = []
    for record in job.get("status", {}).get("running_records") or []:
        if record.get("end_at") and record.get("end_recover"):
            task = record.get("end_related_task")
            found.append(
                f"{_time(record['end_at']):%Y-%m-%d %H:%M:%S} UTC {record['end_recover']}: "
                f"{record.get('end_reason') or 'no reason given'}{f' ({task})' if task else ''}"
            )
    return found


def _time(stamp: Any) -> datetime.datetime:
    seconds = int(stamp) / (1000 if int(stamp) > _MILLISECONDS else 1)
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


def _number(name: str) -> int:
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else 0
