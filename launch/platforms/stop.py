"""Stop a job on ModelArts. The files below its output's prefix stay.

    python -m launch stop JOB [--yes]

JOB: the id that `submit` printed, or its record. The command shows the job and asks before it stops it. The
service's documents do not say whether the nodes get a SIGTERM first: rely on the last checkpoint only.
Exit codes: 0 stopped, or it had ended before; 1 the answer was no; 2 bad input, or the service refused.
"""

from bootfile.ground.errors import printable
from launch import confirm
from launch.platforms.job import ENDED, Job, make_parser


def main(arguments: list[str]) -> int:
    """Ask, stop the job, and return the exit code. Raises BadInput."""
    parser = make_parser(__doc__, "stop")
    parser.add_argument("--yes", action="store_true", help="stop without asking")
    args = parser.parse_args(arguments)
    job = Job.find(args.job).refresh()
    print(printable(job.headline))
    if job.phase in ENDED:
        print("nothing to stop: it has ended")
    elif job.phase == "Terminating":
        print("nothing to do: it is being stopped")
    elif confirm.ask("stop this job", args.yes):
        job.service.stop(job.id)
        print(f"job {job.id}: {job.refresh().phase}")
    else:
        print("not stopped")
        return 1
    return 0
