"""How a job on ModelArts is: its phase and since when, what exit codes mean, restarts, last events.

    python -m launch status JOB [--json]

JOB: the id that `submit` printed, or its record. A bare id without a record is looked for by MODELARTS_REGION
(or MODELARTS_ENDPOINT) and HUAWEICLOUD_SDK_PROJECT_ID. Exit codes: 0 shown, 2 it cannot be.
"""

import json

from common.arguments import Parser, positive_int
from common.exits import BadInput, printable
from launch.platforms import phases as job_phases
from launch.platforms import records as job_records


def main(arguments: list[str]) -> int:
    """Print it and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch status"
    parser.add_argument("job", metavar="JOB", help=job_records.HELP)
    parser.add_argument("--events", type=positive_int, default=5, help="how many of the last (default: 5)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(arguments)
    if args.events > 100:
        raise BadInput(f"--events {args.events}: the service gives 100 at a time")
    record = job_records.find(args.job)
    service = job_records.service(record)
    job = service.show(record["id"])
    events = list(reversed(service.events(record["id"], args.events)))
    if args.json:
        print(json.dumps(_summary(record, job, events), ensure_ascii=False))
        return 0
    since = job_phases.since(job)
    phase = job_phases.phase(job)
    name = job.get("metadata", {}).get("name") or record.get("name")
    moment = f" since {since:%Y-%m-%d %H:%M:%S} UTC" if since else ""
    meaning = job_phases.PHASES.get(phase, "a phase that the service's documents do not list")
    _say(f"job {record['id']} {name}: {phase}{moment} ({meaning}), nodes={job_phases.nodes(job)}")
    for task in job_phases.ended_tasks(job):
        said = f"; {task.message}" if task.message else ""
        _say(f"task {task.name} exit_code={task.code}: {task.meaning}{said}")
    for line in job_phases.restarts(job):
        _say(f"restart {line}")
    for event in events:
        text = " ".join(str(event.get("message") or "").split())
        _say(f"event {event.get('time') or '-'} {event.get('level') or '-'} {text}")
    for output, url in record.get("outputs", {}).items():
        _say(f"output {output} {url}")
    return 0


def _say(text: str) -> None:
    """Print a line with text of the service."""
    print(printable(text))


def _summary(record: dict, job: dict, events: list[dict]) -> dict:
    since = job_phases.since(job)
    return {
        "id": record["id"],
        "name": job.get("metadata", {}).get("name") or record.get("name"),
        "phase": job_phases.phase(job),
        "ended": job_phases.phase(job) in job_phases.ENDED,
        "since": since.isoformat(timespec="seconds") if since else None,
        "nodes": job_phases.nodes(job),
        "tasks": [task._asdict() for task in job_phases.ended_tasks(job)],
        "restarts": job_phases.restarts(job),
        "events": events,
        "outputs": record.get("outputs", {}),
    }
