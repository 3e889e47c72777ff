"""Show a job on ModelArts: its phase, the meaning of exit codes, restarts, last events.

    python -m launch status JOB

JOB: the id that `submit` printed, or its record. An id without a record needs MODELARTS_REGION (or
MODELARTS_ENDPOINT) and HUAWEICLOUD_SDK_PROJECT_ID. Exit codes: 0 shown, 2 bad input, or the service refused.
"""

from common.ground.exits import printable
from launch.platforms.job import Job, make_parser

_EVENTS = 5  # that are shown


def main(arguments: list[str]) -> int:
    """Print the state of a job and return the exit code. Raises BadInput."""
    parser = make_parser(__doc__, "status")
    args = parser.parse_args(arguments)
    job = Job.find(args.job).refresh()
    events = job.service.list_events(job.id, _EVENTS)[::-1]
    lines = [job.headline]
    for task in job.ended_tasks:
        message = f"; {task.message}" if task.message else ""
        lines.append(f"task {task.name} exit_code={task.code}: {task.meaning}{message}")
    lines += [f"restart {line}" for line in job.restarts]
    for event in events:
        text = " ".join(str(event.get("message") or "").split())
        lines.append(f"event {event.get('time') or '-'} {event.get('level') or '-'} {text}")
    lines += [f"output {output} {url}" for output, url in job.record.get("outputs", {}).items()]
    print(*map(printable, lines), sep="\n")
    return 0
