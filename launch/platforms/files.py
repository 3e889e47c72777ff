"""Write job files for the tools of other platforms.

The files follow the vendors' documents; none was sent to a live service. A file names the location of the
code: the image, a volume, or, on SageMaker, a channel. launch/profiles.py lists the variables that each
platform then sets, and common/topology.py reads them.
"""

import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from typing import Any

from common.exits import BadInput
from common.object_store import store as object_store
from launch.platforms.config import RETRIES, JobConfig
from launch.platforms.request import make_outputs

COMMANDS = {
    "pai-dlc": 'aliyun pai-dlc create-job --body "$(cat FILE)"',
    "sagemaker": "aws sagemaker create-training-job --cli-input-json file://FILE",
    "kubeflow": "kubectl create -f FILE",
    "slurm": "sbatch FILE",
}
_SAGEMAKER_DATA, _SAGEMAKER_CHECKPOINTS = "/opt/ml/input/data", "/opt/ml/checkpoints"
# Without SageMaker's toolkit in the image, only a file names the hosts; jobs read the toolkit's variables.
_SAGEMAKER_START = (
    "import json,os,sys;c=json.load(open('/opt/ml/input/config/resourceconfig.json'));"
    "os.environ.update(SM_HOSTS=json.dumps(c['hosts']),SM_CURRENT_HOST=c['current_host']);"
    "os.execv(sys.executable,[sys.executable]+sys.argv[1:])"
)


def render(platform: str, config: JobConfig, run: str, resume_from: str | None = None) -> str:
    """Return the content of the file for one of COMMANDS.

    run: the name of this run; its outputs are below that name
    resume_from: the outputs of an earlier run, used instead

    Raises BadInput if the platform does not accept a value.
    """
    table = config.platform[platform]
    if resume_from and not resume_from.startswith("/"):
        object_store.parse(resume_from)
    inputs = {**config.inputs, **table.get("inputs", {})}
    outputs = make_outputs({**config.outputs, **table.get("outputs", {})}, run, resume_from)
    if platform == "sagemaker":
        return _to_json(_sagemaker(config, table, run, inputs, outputs))
    given = {**config.parameters, **inputs, **outputs}
    boot_file = posixpath.join(table["code_dir"], config.job)
    command = [
        table.get("python", "python"),
        boot_file,
        *(f"--{name}={value}" for name, value in given.items()),
    ]
    if platform == "slurm":
        return _slurm(config, table, run, command)
    return _to_json((_pai_dlc if platform == "pai-dlc" else _kubeflow)(config, table, run, command))


def _pai_dlc(config: JobConfig, table: Mapping[str, Any], run: str, command: list[str]) -> dict[str, Any]:
    """Return the body of CreateJob. DLC makes the first worker the master."""
    if ("ecs_spec" in table) == ("resource_id" in table):
        raise BadInput("[platform.pai-dlc] needs either ecs_spec, or resource_id with cpu and memory_gib")
    spec: dict[str, Any] = {"Type": "Worker", "Image": table["image"], "PodCount": config.nodes}
    job: dict[str, Any] = {"DisplayName": run, "WorkspaceId": table["workspace_id"], "JobType": "PyTorchJob"}
    if "ecs_spec" in table:
        spec["EcsSpec"] = table["ecs_spec"]
    else:
        if not {"cpu", "memory_gib"} <= set(table):
            raise BadInput("[platform.pai-dlc] resource_id needs cpu and memory_gib")
        job["ResourceId"] = table["resource_id"]
        spec["ResourceConfig"] = {
            "CPU": str(table["cpu"]), "Memory": f"{table['memory_gib']}Gi", "GPU": str(config.gpus),
        }  # fmt: skip
    mounts = table.get("mounts", {})
    for folder, uri in mounts.items():
        if (
            not folder.startswith("/")
            or not isinstance(uri, str)
            or not re.fullmatch(r"[a-z]+://[^\s@]+", uri)
        ):
            raise BadInput(f'[platform.pai-dlc] mounts {folder} is not "/folder" = "oss://bucket.host/path/"')
    job |= {
        "JobSpecs": [spec],
        "UserCommand": shlex.join(command),
        "Envs": dict(config.environment),
        "DataSources": [{"Uri": uri, "MountPath": folder} for folder, uri in mounts.items()],
    }
    if config.auto_stop_hours:
        job["JobMaxRunningTimeMinutes"] = 60 * config.auto_stop_hours
    return job


def _sagemaker(
    config: JobConfig, table: Mapping[str, Any], run: str, inputs: dict[str, str], outputs: dict[str, str]
) -> dict[str, Any]:
    """Return the body of CreateTrainingJob. The output is the checkpoint folder, which SageMaker restores
    after a restart."""
    name = run.replace("_", "-").strip("-")
    _check_name("sagemaker", name, r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", "63 of A-Z a-z 0-9 -")
    code = table.get("code", config.code)
    if list(outputs) != ["train_url"]:
        raise BadInput(f"sagemaker needs one output, train_url: [outputs] has {', '.join(outputs) or 'none'}")
    for url in (code, *inputs.values(), *outputs.values()):
        if not url.startswith("s3://"):
            raise BadInput(
                f"sagemaker reads s3:// only: {url or 'code is missing'} (see [platform.sagemaker])"
            )
        object_store.parse(url)
    words = [f"--{key}={value}" for key, value in config.parameters.items()]
    words += [f"--{channel}={_SAGEMAKER_DATA}/{channel}" for channel in inputs]
    words.append(f"--train_url={_SAGEMAKER_CHECKPOINTS}")
    for word in (*words, *config.environment.values()):
        if len(word) > (256 if word in words else 512):
            raise BadInput(
                f"sagemaker takes arguments of 256 and variables of 512 characters: {word[:60]}..."
            )
    boot_file = f"{_SAGEMAKER_DATA}/code/{config.job}"
    job: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": table["role_arn"],
        "AlgorithmSpecification": {
            "TrainingImage": table["image"],
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [table.get("python", "python"), "-c", _SAGEMAKER_START, boot_file],
            "ContainerArguments": words,
        },
        "InputDataConfig": [_s3_channel(channel, url) for channel, url in {"code": code, **inputs}.items()],
        "OutputDataConfig": {"S3OutputPath": outputs["train_url"]},
        "CheckpointConfig": {"S3Uri": outputs["train_url"], "LocalPath": _SAGEMAKER_CHECKPOINTS},
        "ResourceConfig": {
            "InstanceType": table["instance_type"],
            "InstanceCount": config.nodes,
            "VolumeSizeInGB": table.get("volume_gb", 100),
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600 * (config.auto_stop_hours or 24)},
        "Environment": dict(config.environment),
    }
    restarts = _restarts(config)
    if restarts:
        job["RetryStrategy"] = {"MaximumRetryAttempts": min(restarts, 30)}  # the service's limit
    return job


def _s3_channel(name: str, url: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"{url.rstrip('/')}/",
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}}


def _kubeflow(config: JobConfig, table: Mapping[str, Any], run: str, command: list[str]) -> dict[str, Any]:
    """Return a PyTorchJob (kubeflow.org/v1). The operator sets each pod's rank and number of processes.
    kubectl accepts JSON."""
    name = run.lower().replace("_", "-").strip("-")
    _check_name("kubeflow", name, r"[a-z0-9]([a-z0-9-]{0,52}[a-z0-9])?", "54 of a-z 0-9 -")
    if ("volume_claim" in table) != ("volume_path" in table):
        raise BadInput("[platform.kubeflow] needs both volume_claim and volume_path, or neither")
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]  # default: 64 MB, too small for loaders
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if "volume_claim" in table:
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": table["volume_claim"]}})
        mounts.append({"name": "work", "mountPath": table["volume_path"]})
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": table["image"],
        "command": [word.replace("$(", "$$(") for word in command],
        "env": [{"name": key, "value": value} for key, value in config.environment.items()],
        "volumeMounts": mounts,
    }
    if config.gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": config.gpus}}
    replica = {
        "restartPolicy": "OnFailure" if _restarts(config) else "Never",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }
    policy: dict[str, Any] = {"cleanPodPolicy": "None"}  # deleting a pod deletes its logs
    if config.auto_stop_hours:
        policy["activeDeadlineSeconds"] = 3600 * config.auto_stop_hours
    if _restarts(config):
        policy["backoffLimit"] = _restarts(config)
    replicas = {"Master": {"replicas": 1} | replica}
    if config.nodes > 1:
        replicas["Worker"] = {"replicas": config.nodes - 1} | replica
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "namespace": table.get("namespace", "default")},
        "spec": {
            "nprocPerNode": str(config.gpus or 1),
            "runPolicy": policy,
            "pytorchReplicaSpecs": replicas,
        },
    }


def _slurm(config: JobConfig, table: Mapping[str, Any], run: str, command: list[str]) -> str:
    """Return a batch script. srun starts one process per GPU, which reads its rank from the step's
    variables."""
    log = posixpath.join(table.get("log_dir", ""), "%x-%j.log")
    options = {
        "job-name": run,
        "nodes": config.nodes,
        "ntasks-per-node": config.gpus or 1,
        "gpus-per-node": config.gpus or None,
        "cpus-per-task": table.get("cpus_per_task"),
        "partition": table.get("partition"),
        "account": table.get("account"),
        "time": f"{config.auto_stop_hours}:00:00" if config.auto_stop_hours else None,
        "output": log,
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines.append(f"#SBATCH --{'requeue' if _restarts(config) else 'no-requeue'}")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in config.environment.items()]
    cores = f" --cpus-per-task={table['cpus_per_task']}" if "cpus_per_task" in table else ""  # not inherited
    start = f"srun --kill-on-bad-exit=1 --distribution=block{cores} {shlex.join(command)}"
    return "\n".join(["#!/bin/bash", *lines, "", "set -e", *exports, start]) + "\n"


def _restarts(config: JobConfig) -> int:
    return int(config.annotations.get(RETRIES, 0))


def _check_name(platform: str, name: str, pattern: str, form: str) -> None:
    if not re.fullmatch(pattern, name):
        raise BadInput(f"{platform} does not accept the name {name} (name, time, random): at most {form}")


def _to_json(job: dict[str, Any]) -> str:
    return json.dumps(job, indent=2, ensure_ascii=False) + "\n"
