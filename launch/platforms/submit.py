"""Create a job on ModelArts, or write the job file for the tool of another platform.

    python -m launch submit jobs/train_ddp.py --config job.toml --dry_run
    python -m launch submit jobs/train_ddp.py --config job.toml
    python -m launch submit jobs/train_ddp.py --config job.toml --platform slurm --dry_run > job.sh

launch/job.example.toml explains every key of job.toml. --dry_run shows the complete request and the command
of every node; it needs no keys, no network and no SDK. Without it, the command shows the request, asks, and
sends it. It writes a record to output_dir/jobs/ (or the folder BOOTFILE_JOBS), which `status`, `logs` and
`stop` accept. The keys are in HUAWEICLOUD_SDK_AK and HUAWEICLOUD_SDK_SK, and sending needs
`pip install huaweicloudsdkmodelarts`.

Every run writes its outputs below its own prefix. --resume_from uses the prefix of an earlier run, which must
have ended: the service copies its files to the nodes, and the job resumes from them.

Exit codes: 0 created, or shown; 1 the answer was no; 2 bad input, or the service refused.
"""

import argparse
import datetime
import json
import os
import shlex

from common.console.arguments import Parser
from common.ground.exits import BadInput
from common.ground.files import ROOT
from common.object_store import store as object_store
from launch import confirm, manifests, records
from launch.platforms import request, templates
from launch.platforms import service as modelarts
from launch.platforms.config import PLATFORMS, JobConfig, load
from launch.platforms.job import ENDED, Job
from launch.profiles import MODELARTS_JOB


def main(arguments: list[str]) -> int:
    """Show, send or write a job, and return the exit code. Raises BadInput."""
    args = _parse_args(arguments)
    config = load(args.config, args.job, args.platform)
    if args.snapshot:
        _check_snapshot(args.snapshot, config)
    elif not any(os.path.isfile(os.path.join(folder, config.job)) for folder in ("", ROOT)):
        raise BadInput(
            f"JOB {config.job}: no such file here or in {ROOT}; for other code name the folder that `pack` "
            "made: --snapshot FOLDER"
        )
    run = request.make_run_name(config.name)
    if args.platform != "modelarts":
        if not args.dry_run:
            _, command = templates.COMMANDS[args.platform]
            raise BadInput(f"{args.platform} has its own tool: --dry_run prints the file, then {command}")
        print(templates.render(args.platform, config, run, args.resume_from), end="")
        return 0
    if args.resume_from:
        object_store.parse(args.resume_from)
    outputs = request.make_outputs(config.outputs, run, args.resume_from)
    if args.resume_from and not config.prefetch_to_local:
        raise BadInput("--resume_from needs prefetch_to_local = true: the job would find an empty folder")
    body = request.make_body(config, outputs)
    print(json.dumps(body, indent=2, ensure_ascii=False))
    if not args.dry_run:
        return _send(args, config, run, outputs, body)
    print(f"\n({MODELARTS_JOB} stands for the name that the service makes from the job's id)")
    for node, (command, variables) in enumerate(request.make_node_starts(config)):
        print(f"\nnode {node}: {command}")
        for name, value in variables.items():
            print(f"  {name}={value if value.startswith('<') else shlex.quote(value)}")
    return 0


def _parse_args(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.prog = "python -m launch submit"
    add = parser.add_argument
    add("job", metavar="JOB", help="path of the boot file in the code: jobs/train_ddp.py")
    add("--config", required=True, metavar="FILE", help="job.toml")
    add("--platform", choices=PLATFORMS, default="modelarts", help="default: modelarts")
    add("--dry_run", action="store_true", help="show everything and send nothing")
    add("--resume_from", metavar="URL", help="outputs of an earlier run, to continue")
    add("--snapshot", metavar="FOLDER", help="folder that `pack` made; it must contain JOB")
    add("--yes", action="store_true", help="send without asking")
    return parser.parse_args(arguments)


def _check_snapshot(folder: str, config: JobConfig) -> None:
    """Raise BadInput if the boot file is not in the snapshot, or if job.toml names another snapshot."""
    if not os.path.isfile(os.path.join(folder, manifests.NAME)):
        raise BadInput(f"--snapshot {folder} has no {manifests.NAME}: name the folder that `pack` made")
    if not os.path.isfile(os.path.join(folder, config.job)):
        raise BadInput(f"JOB {config.job} is not in the snapshot {folder}")
    name = os.path.basename(os.path.abspath(folder))
    if config.code and config.snapshot != name:
        raise BadInput(f"code = {config.code!r} is not the snapshot {folder}: {name}")


def _send(args: argparse.Namespace, config: JobConfig, run: str, outputs: dict[str, str], body: dict) -> int:
    place = modelarts.find_endpoint(config.region, config.endpoint)
    project = modelarts.find_project(config.project_id)
    service = modelarts.connect(place, project)
    if args.resume_from:
        _check_ended(service, place, project, outputs)
    print(f"service {place} project {project}")
    if not confirm.ask("create this job", args.yes):
        print("nothing was sent")
        return 1
    path = os.path.join(records.FOLDER, f"{run}.json")
    record = {
        "id": None,
        "name": config.name,
        "run": run,
        "job": config.job,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "endpoint": place,
        "project_id": project,
        "nodes": config.resources.node_count,
        "code": config.code,
        "outputs": outputs,
        "log_url": config.log_url,
    }
    records.write(path, record)  # first: a job that costs money must have a record
    try:
        record["id"] = service.create(body)
    except modelarts.ServiceError as error:
        if error.status is not None and error.status < 500:  # it was certainly refused
            os.unlink(path)
            raise
        raise BadInput(
            f"{error}; whether it was created is not known: look for {config.name} in the console"
        ) from error
    print(f"job {record['id']}", flush=True)
    records.write(path, record)
    print(f"record {path}\nnext: python -m launch logs {shlex.quote(path)} -f")
    return 0


def _check_ended(service: modelarts.ModelArts, place: str, project: str, outputs: dict[str, str]) -> None:
    """Raise BadInput if a recorded job that writes to these outputs is still active."""
    for record in records.read_all():
        here = (record["endpoint"], record["project_id"]) == (place, project)
        theirs = set(record["outputs"].values())
        if not (here and record.get("id") and theirs & set(outputs.values())):
            continue
        try:
            phase = Job(record, service).refresh().phase
        except modelarts.ServiceError as error:
            if error.status == 404:  # deleted
                continue
            raise
        if phase not in ENDED:
            raise BadInput(
                f"--resume_from {outputs['train_url']}: job {record['id']} is {phase} and writes there; "
                "an output may belong to one active job only"
            )
