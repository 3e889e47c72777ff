"""Show a job on ModelArts: its phase, the meaning of exit codes, restarts, last events.

    python -m launch status JOB

JOB: the id that `submit` printed, or its record. An id without a record needs MODELARTS_REGION (or
MODELARTS_ENDPOINT) and HUAWEICLOUD_SDK_PROJECT_ID. Exit codes: 0 shown, 2 bad input, or the service refused.
"""

from bootfile.ground.errors import printable
from launch.platforms.job import Job, make_parser

_EVENTS = 5  # that are shown


def main(arguments: list[str]) -> int:
    """Print the state of a job and return the exit code. Raises BadInput."""
    job = Job.find(make_parser(__doc__, "status").parse_args(arguments).job).refresh()
    lines = [job.headline, *(line for _, line in job.list_ended()), *job.list_restarts()]
    for event in job.service.list_events(job.id, _EVENTS)[::-1]:
        text = " ".join(str(event.get("message") or "").split())
        lines.append(f"event {event.get('time') or '-'} {event.get('level') or '-'} {text}")
    lines += [f"output {output} {url}" for output, url in job.record.get("outputs", {}).items()]
    print(*map(printable, lines), sep="\n")
    return 0
