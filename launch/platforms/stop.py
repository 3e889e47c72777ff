"""Stop a job on ModelArts. What it has written below its output's prefix stays there.

    python -m launch stop JOB [--yes]

JOB: the id that `submit` printed, or its record. It is shown first, and you are asked. Whether the nodes get
a SIGTERM before they are taken away, the service's documents do not say: what counts is the last checkpoint.
Exit codes: 0 stopped, or it had ended before; 1 not agreed to; 2 it cannot be.
"""

from common.arguments import Parser
from launch.platforms import consent
from launch.platforms import phases as job_phases
from launch.platforms import records as job_records


def main(arguments: list[str]) -> int:
    """Ask, stop, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch stop"
    parser.add_argument("job", metavar="JOB", help=job_records.HELP)
    parser.add_argument("--yes", action="store_true", help="stop without asking")
    args = parser.parse_args(arguments)
    record = job_records.find(args.job)
    service = job_records.service(record)
    job = service.show(record["id"])
    phase, since = job_phases.phase(job), job_phases.since(job)
    name = job.get("metadata", {}).get("name") or record.get("name")
    moment = f" since {since:%Y-%m-%d %H:%M:%S} UTC" if since else ""
    print(f"job {record['id']} {name}: {phase}{moment}, nodes={job_phases.nodes(job)}")
    if phase in job_phases.ENDED:
        print("nothing to stop: it has ended")
        return 0
    if phase == "Terminating":
        print("nothing to do: it is being stopped")
        return 0
    if not args.yes and not consent.agreed("stop this job?"):
        print("it goes on")
        return 1
    service.stop(record["id"])
    print(f"job {record['id']}: {job_phases.phase(service.show(record['id']))}")
    return 0
