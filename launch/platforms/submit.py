"""Create a job on ModelArts, or write the job file for the tool of another platform.

    python -m launch submit jobs/train_ddp.py --config job.toml --dry_run
    python -m launch submit jobs/train_ddp.py --config job.toml
    python -m launch submit jobs/train_ddp.py --config job.toml --platform slurm --dry_run > job.sh

launch/job.example.toml explains every key of job.toml. --dry_run shows the complete request and the command
of every node; it needs no keys, no network and no SDK. Without it, the command shows the request, asks, and
sends it. It writes a record to output_dir/jobs/ (or the folder BOOTFILE_JOBS), which `fetch` accepts. The
keys are in HUAWEICLOUD_SDK_AK and HUAWEICLOUD_SDK_SK, and sending needs
`pip install huaweicloudsdkmodelarts`. The console of the service, its SDK and ma-cli show and stop a job.

Every run writes its outputs below its own prefix. --resume_from uses the prefix of an earlier run, which must
have ended: the service copies its files to the nodes, and the job resumes from them.

Exit codes: 0 created, or shown; 1 the answer was no; 2 bad input, or the service refused.
"""

import argparse
import datetime
import json
import os
import shlex

from bootfile.ground.errors import BadInput
from common.console.arguments import Parser
from common.ground.files import ROOT
from launch import explain, records
from launch.platforms import request, templates
from launch.platforms.config import PLATFORMS, JobConfig, check_volumes, load
from launch.platforms.service import ENDED, ModelArts, ServiceError
from launch.profiles import MODELARTS_JOB


def main(arguments: list[str]) -> int:
    """Show, send or write a job, and return the exit code. Raises BadInput."""
    args = _parse_args(arguments)
    config = load(args.config, args.job, args.platform)
    if not any(os.path.isfile(os.path.join(folder, config.job)) for folder in ("", ROOT)):
        raise BadInput(f"JOB {config.job}: no such file here or in {ROOT}: run `submit` in the code folder")
    run = request.make_run_name(config.name)
    if args.platform != "modelarts":  # other platforms have tools of their own, which read a file
        if not args.dry_run:
            _, command = templates.COMMANDS[args.platform]
            raise BadInput(f"{args.platform} has its own tool: --dry_run prints the file, then {command}")
        print(templates.render(args.platform, config, run, args.resume_from), end="")
        return 0
    outputs = request.make_outputs(config.outputs, run, args.resume_from)
    check_volumes(config, outputs.values())  # --resume_from may name a folder
    if args.resume_from and not args.resume_from.startswith("/") and not config.prefetch_to_local:
        raise BadInput("--resume_from needs prefetch_to_local = true: the job would find an empty folder")
    body = request.make_body(config, outputs)
    # always: with --dry_run it is the result, and else what the user is asked about
    print(json.dumps(body, indent=2, ensure_ascii=False))
    if not args.dry_run:
        return _send(args, config, run, outputs, body)
    print(f"\n({MODELARTS_JOB} stands for the name that the service makes from the job's id)")
    # what the service will start, so that a wrong path is seen before it costs a node
    for node, (command, variables) in enumerate(request.make_node_starts(config, outputs)):
        print(f"\nnode {node}: {command}")
        for name, value in variables.items():
            # <address of node 0>: the service knows it when the node runs
            print(f"  {name}={value if value.startswith('<') else shlex.quote(value)}")
    return 0


def _parse_args(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, "python -m launch submit")
    add = parser.add_argument
    add("job", metavar="JOB", help="path of the boot file in the code: jobs/train_ddp.py")
    add("--config", required=True, metavar="FILE", help="job.toml")
    add("--platform", choices=PLATFORMS, default="modelarts", help="default: modelarts")
    add("--dry_run", action="store_true", help="show everything and send nothing")
    add("--resume_from", metavar="URL", help="outputs of an earlier run, to continue")
    add("--yes", action="store_true", help="send without asking")
    return parser.parse_args(arguments)


def _send(args: argparse.Namespace, config: JobConfig, run: str, outputs: dict[str, str], body: dict) -> int:
    service = ModelArts(config.region, config.endpoint, config.project_id)
    if args.resume_from:  # two jobs would write to one place
        _check_ended(service, outputs["train_url"])
    print(f"service {service.endpoint} project {service.project}")
    if not explain.ask("create this job", args.yes):
        print("nothing was sent")
        return 1
    path = os.path.join(records.FOLDER, f"{run}.json")
    # the id is not known yet
    record = config.model_dump(include={"name", "job", "code", "log_url"}) | {
        "id": None,
        "run": run,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "endpoint": service.endpoint,
        "project_id": service.project,
        "nodes": config.resources.node_count,
        "outputs": outputs,
    }
    records.write(path, record)  # first: a job that costs money must have a record
    try:
        record["id"] = service.create(body)
    except ServiceError as error:
        if error.status is not None and error.status < 500:  # it was certainly refused
            os.unlink(path)
            raise
        # the record stays: the job may run
        unsure = f"whether it was created is not known: look for {config.name} in the console"
        raise BadInput(f"{error}; {unsure}") from error
    print(f"job {record['id']}", flush=True)
    records.write(path, record)
    print(f"record {path}")
    return 0


def _check_ended(service: ModelArts, url: str) -> None:
    """Raise BadInput if a recorded job that writes to this output is still active."""
    for record in records.read_all():
        # a record may be of another account, or of a job that was refused
        is_here = (record["endpoint"], record["project_id"]) == (service.endpoint, service.project)
        if not (is_here and record["id"] and url in record["outputs"].values()):
            continue
        try:
            phase = service.phase(record["id"])
        except ServiceError as error:
            if error.status == 404:  # deleted
                continue
            raise
        if phase not in ENDED:
            raise BadInput(f"--resume_from {url}: job {record['id']} is {phase} and writes there")
