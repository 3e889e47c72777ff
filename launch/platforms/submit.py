"""Create a job on a managed platform: ModelArts by its service, others by the file that their own tool takes.

    python -m launch submit jobs/train_ddp.py --config job.toml --dry_run
    python -m launch submit jobs/train_ddp.py --config job.toml
    python -m launch submit jobs/train_ddp.py --config job.toml --platform slurm --dry_run --to job.sh

launch/job.example.toml explains every key of job.toml. --dry_run shows the request as it would be sent and
what every node would then run; it needs no keys, no network and no SDK. Without it the request is shown in
short, sent when you agree, and a record is written to output_dir/jobs/ (or the folder BOOTFILE_JOBS), which
`status`, `logs` and `stop` take. The keys stand in HUAWEICLOUD_SDK_AK and HUAWEICLOUD_SDK_SK, and sending
needs `pip install huaweicloudsdkmodelarts`.

Every run writes its outputs below a prefix of its own. --resume_from goes on in that of an earlier one, which
must have ended: the service brings its content back to the nodes, and the job resumes from it.

Exit codes: 0 created, or shown; 1 not agreed to; 2 bad input, or the service refused.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import sys

from common.arguments import Parser
from common.exits import BadInput
from common.files import write_text
from common.object_store import store as object_store
from launch import manifests, own_file
from launch.platforms import config as job_config
from launch.platforms import consent, platform_files
from launch.platforms import phases as job_phases
from launch.platforms import records as job_records
from launch.platforms import request as job_request
from launch.platforms import service as modelarts
from launch.platforms.config import JobConfig


def main(arguments: list[str]) -> int:
    """Show, send or write, and return the exit code. Raises BadInput."""
    args = _arguments(arguments)
    config = job_config.load(args.config, args.job, args.platform)
    if args.snapshot:
        _check_snapshot(args.snapshot, config)
    elif not any(os.path.isfile(os.path.join(folder, config.job)) for folder in ("", job_records.ROOT)):
        raise BadInput(
            f"JOB {config.job}: no such file here or in {job_records.ROOT}; for other code name the folder "
            "that `pack` made: --snapshot FOLDER"
        )
    run = job_request.run_name(config.name)
    if args.platform != "modelarts":
        if not args.dry_run:
            command = platform_files.COMMANDS[args.platform]
            raise BadInput(
                f"{args.platform} has its own tool: --dry_run --to FILE writes the file, then {command}"
            )
        _show_file(platform_files.render(args.platform, config, run, args.resume_from), args)
        return 0
    if args.to:
        raise BadInput(
            "--to is for the files of other platforms: --platform pai-dlc|sagemaker|kubeflow|slurm"
        )
    outputs = _outputs(config, run, args.resume_from)
    body = job_request.body(config, outputs)
    if args.dry_run:
        _show(config, body)
        return 0
    return _send(args, config, run, outputs, body)


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.prog = "python -m launch submit"
    parser.add_argument("job", metavar="JOB", help="the boot file's path in the code: jobs/train_ddp.py")
    parser.add_argument("--config", required=True, metavar="FILE", help="job.toml")
    parser.add_argument(
        "--platform", choices=job_config.PLATFORMS, default="modelarts", help="default: modelarts"
    )
    parser.add_argument("--dry_run", action="store_true", help="show everything and send nothing")
    parser.add_argument("--to", metavar="FILE", help="of another platform's file (default: standard output)")
    parser.add_argument("--force", action="store_true", help="replace the file at --to whatever it holds")
    parser.add_argument("--resume_from", metavar="URL", help="outputs of an earlier run, to go on in")
    parser.add_argument(
        "--snapshot", metavar="FOLDER", help="what `pack` made of the code: JOB must be in it"
    )
    parser.add_argument("--yes", action="store_true", help="send without asking")
    return parser.parse_args(arguments)


def _check_snapshot(folder: str, config: JobConfig) -> None:
    """The boot file is in the code, and the code is what job.toml names. Raises BadInput."""
    path = os.path.join(folder, manifests.NAME)
    try:
        with open(path, "rb") as file:
            manifest = manifests.parsed(file.read())
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    if manifest is None:
        raise BadInput(f"{path} is no manifest of a snapshot that `pack` has made")
    paths = [entry["path"] for entry in manifest["files"]]
    if config.job not in paths:
        known = ", ".join(sorted(name for name in paths if name.startswith("jobs/"))) or "none"
        raise BadInput(f"JOB {config.job} is not in the snapshot {folder}: its jobs are {known}")
    if config.code and config.snapshot != manifests.folder_name(manifest):
        raise BadInput(
            f"code = {config.code!r} is not the snapshot {folder}: {manifests.folder_name(manifest)}"
        )


def _outputs(config: JobConfig, run: str, resume_from: str | None) -> dict[str, str]:
    outputs = job_request.outputs(config, run)
    if resume_from is None:
        return outputs
    object_store.parse(resume_from)
    if list(outputs) != ["train_url"]:
        raise BadInput(
            f"--resume_from needs one output, train_url: [outputs] has {', '.join(outputs) or 'none'}"
        )
    if not config.prefetch_to_local:
        raise BadInput("--resume_from needs prefetch_to_local = true: else the job finds an empty folder")
    return {"train_url": resume_from.rstrip("/")}


def _show(config: JobConfig, body: dict) -> None:
    print(json.dumps(body, indent=2, ensure_ascii=False))
    print(f"\n({job_request.JOB_NAME} stands for the name that the service makes of the job's id)")
    for node, start in enumerate(job_request.starts(config)):
        print(f"\nnode {node}: {start.command}")
        for name, value in start.environment.items():
            print(f"  {name}={value if value.startswith('<') else shlex.quote(value)}")


def _show_file(text: str, args: argparse.Namespace) -> None:
    path = args.to
    if path is None:
        sys.stdout.write(text)
        return
    if os.path.exists(path) and os.path.samefile(path, args.config):
        raise BadInput(f"--to {path} is the file of --config: name another file")
    before_run, run = job_request.RUN.split(text, maxsplit=1)[0], job_request.RUN.pattern
    own_file.check(path, re.compile(f"\\A{re.escape(before_run)}{run}"), args.force)
    try:
        write_text(path, text)
    except OSError as error:
        raise BadInput(f"--to {path}: {error.strerror}") from error
    print(f"wrote {path}")


def _send(args, config: JobConfig, run: str, outputs: dict[str, str], body: dict) -> int:
    place = modelarts.endpoint(config.region, config.endpoint)
    project = modelarts.project(config.project_id)
    service = modelarts.connect(place, project)
    if args.resume_from:
        _check_ended(service, place, project, outputs)
    _summarize(config, place, project, outputs)
    if not args.yes and not consent.agreed("create this job?"):
        print("nothing was sent")
        return 1
    path = os.path.join(job_records.FOLDER, f"{run}.json")
    record = {
        "id": None,
        "name": config.name,
        "run": run,
        "job": config.job,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "endpoint": place,
        "project_id": project,
        "nodes": config.nodes,
        "code": config.code,
        "outputs": outputs,
        "log_url": config.log_url or None,
    }
    job_records.write(path, record)  # before: a job that is paid for must not be one that nobody can find
    try:
        record["id"] = service.create(body)
    except modelarts.ServiceError as error:
        if error.status is not None and error.status < 500:  # refused for sure
            os.unlink(path)
            raise
        raise BadInput(
            f"{error}; whether it was created is not known: look for {config.name} in the console"
        ) from error
    print(f"job {record['id']}", flush=True)
    job_records.write(path, record)
    print(f"record {path}\nnext: python -m launch logs {shlex.quote(path)} -f")
    return 0


def _check_ended(service, place: str, project: str, outputs: dict[str, str]) -> None:
    """No job of ours that writes there is still active. Raises BadInput."""
    for record in job_records.all_records():
        here = (record["endpoint"], record.get("project_id")) == (place, project)
        theirs = set(record.get("outputs", {}).values())
        if not (here and record.get("id") and theirs & set(outputs.values())):
            continue
        try:
            phase = job_phases.phase(service.show(record["id"]))
        except modelarts.ServiceError as error:
            if error.status == 404:  # deleted
                continue
            raise
        if phase not in job_phases.ENDED:
            raise BadInput(
                f"--resume_from {outputs['train_url']}: job {record['id']} is {phase} and writes there; "
                "an output may belong to one active job only"
            )


def _summarize(config: JobConfig, place: str, project: str, outputs: dict[str, str]) -> None:
    resources = config.resources
    image = config.image.get("image_url") or config.image["engine_version"]
    lines = [
        ("service", f"{place} project {project}"),
        ("job", f"{config.name}: {config.job} of {config.code}"),
        ("image", image),
        ("nodes", f"{config.nodes} x {resources.get('flavor_id') or resources['pool_id']}"),
        *((f"input {name}", url) for name, url in config.inputs.items()),
        *((f"output {name}", url) for name, url in outputs.items()),
        ("arguments", " ".join(f"--{name}={value}" for name, value in config.parameters.items()) or "none"),
        ("environment", " ".join(f"{name}={value}" for name, value in config.environment.items())),
        ("logs", config.log_url or "not kept"),
        ("restarts", ", ".join(f"{name}={value}" for name, value in config.annotations.items()) or "none"),
        ("ends after", f"{config.auto_stop_hours} hours" if config.auto_stop_hours else "no limit"),
    ]
    for name, value in lines:
        print(f"{name:<18}{value}")
