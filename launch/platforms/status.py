"""Show a job on ModelArts: its phase and since when, the meaning of exit codes, restarts, last events.

    python -m launch status JOB [--json]

JOB: the id that `submit` printed, or its record. An id without a record needs MODELARTS_REGION (or
MODELARTS_ENDPOINT) and HUAWEICLOUD_SDK_PROJECT_ID. Exit codes: 0 shown, 2 bad input, or the service refused.
"""

import json

from common.console.arguments import positive_int
from common.ground.exits import BadInput, printable
from launch.platforms.job import ENDED, Job, make_parser


def main(arguments: list[str]) -> int:
    """Print the state of a job and return the exit code. Raises BadInput."""
    parser = make_parser(__doc__, "status")
    parser.add_argument("--events", type=positive_int, default=5, help="number of last events (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(arguments)
    if args.events > 100:
        raise BadInput(f"--events {args.events}: expected at most 100")
    job = Job.find(args.job).refresh()
    events = job.service.list_events(job.id, args.events)[::-1]
    outputs = job.record.get("outputs", {})
    if args.json:
        state = {
            "id": job.id, "name": job.name, "phase": job.phase, "ended": job.phase in ENDED,
            "since": job.since.isoformat(timespec="seconds") if job.since else None, "nodes": job.nodes,
            "tasks": [task._asdict() for task in job.ended_tasks], "restarts": job.restarts, "events": events,
            "outputs": outputs,
        }  # fmt: skip
        print(json.dumps(state, ensure_ascii=False))
        return 0
    lines = [job.headline]
    for task in job.ended_tasks:
        message = f"; {task.message}" if task.message else ""
        lines.append(f"task {task.name} exit_code={task.code}: {task.meaning}{message}")
    lines += [f"restart {line}" for line in job.restarts]
    for event in events:
        text = " ".join(str(event.get("message") or "").split())
        lines.append(f"event {event.get('time') or '-'} {event.get('level') or '-'} {text}")
    lines += [f"output {output} {url}" for output, url in outputs.items()]
    print(*map(printable, lines), sep="\n")
    return 0
