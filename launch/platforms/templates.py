"""Fill the job files for the tools of other platforms.

templates/ has one file for each platform, as its tool reads it. `$name` is a key of [platform.NAME] in
job.toml, or one of the values that render() adds. A line that begins with `?` is left out if a value is
missing. launch/profiles.py lists the variables that each platform then sets, and
common/platform/topology.py reads them. The files follow the vendors' documents; none was sent to a live
service.
"""

import json
import os
import shlex
import string
from typing import Any

from common.ground.exits import BadInput
from common.object_store import store as object_store
from launch.platforms.config import JobConfig
from launch.platforms.request import make_outputs

COMMANDS = {
    "pai-dlc": 'aliyun pai-dlc create-job --body "$(cat FILE)"',
    "sagemaker": "aws sagemaker create-training-job --cli-input-json file://FILE",
    "kubeflow": "kubectl create -f FILE",
    "slurm": "sbatch FILE",
}
_FILES = {
    "pai-dlc": "pai-dlc.json",
    "sagemaker": "sagemaker.json",
    "kubeflow": "kubeflow.yaml",
    "slurm": "slurm.sh",
}
_DEFAULTS = {"python": "python", "namespace": "default", "volume_gb": 100, "log_dir": "."}


def render(platform: str, config: JobConfig, run: str, resume_from: str | None = None) -> str:
    """Return the content of the file for one of COMMANDS.

    run: the name of this run; its outputs are below that name
    resume_from: the outputs of an earlier run, used instead

    Raises BadInput for a missing or an unknown key.
    """
    table = config.platform[platform]  # type: ignore[index]
    if resume_from and not resume_from.startswith("/"):
        object_store.parse(resume_from)
    inputs = config.inputs | table.inputs
    outputs = make_outputs(config.outputs | table.outputs, run, resume_from)
    values = _describe(config, run)
    values["mounts"] = [{"Uri": url, "MountPath": folder} for folder, url in table.mounts.items()]
    if platform == "sagemaker":
        values |= _describe_channels(table.code or config.code or "", inputs, outputs)
        inputs = {name: f"/opt/ml/input/data/{name}" for name in inputs}
        outputs = {"train_url": "/opt/ml/checkpoints"}
    arguments = [f"--{name}={value}" for name, value in (config.parameters | inputs | outputs).items()]
    values["shell_arguments"] = shlex.join(arguments)
    if platform == "kubeflow":
        arguments = [word.replace("$(", "$$(") for word in arguments]  # Kubernetes expands $(NAME)
    return _fill(platform, table.model_extra or {}, values | {"arguments": arguments})


def _describe(config: JobConfig, run: str) -> dict[str, Any]:
    """Return the values of every template; None: not given."""
    nodes, gpus = config.resources.node_count, config.resources.gpus_per_node
    hours, restarts = config.auto_stop.hours, config.retries.faults
    dash_name = run.replace("_", "-").strip("-")
    return {
        "run": run,
        "dash_name": dash_name,
        "dns_name": dash_name.lower(),
        "job": config.job,
        "nodes": nodes,
        "workers": nodes - 1 or None,
        "gpus": gpus or None,
        "gpu_count": gpus,
        "processes": gpus or 1,
        "hours": hours,
        "minutes": hours and 60 * hours,
        "seconds": hours and 3600 * hours,
        "restarts": restarts,
        "restart_policy": "OnFailure" if restarts else "Never",
        "requeue": "requeue" if restarts else "no-requeue",
        "environment": config.environment,
        "named_variables": [{"name": name, "value": value} for name, value in config.environment.items()],
        "variables": [f"{name}={value}" for name, value in config.environment.items()],
    }


def _describe_channels(code: str, inputs: dict[str, str], outputs: dict[str, str]) -> dict[str, Any]:
    """Return the channels of SageMaker. The output is the checkpoint folder, which the service restores after
    a restart. Raises BadInput."""
    if list(outputs) != ["train_url"]:
        raise BadInput(f"sagemaker needs one output, train_url: [outputs] has {', '.join(outputs) or 'none'}")
    for url in (code, *inputs.values(), *outputs.values()):
        if not url.startswith("s3://"):
            raise BadInput(
                f"sagemaker reads s3:// only: {url or 'code is missing'} (see [platform.sagemaker])"
            )
    channels = []
    for name, url in {"code": code, **inputs}.items():
        source = {"S3DataType": "S3Prefix", "S3Uri": f"{url}/", "S3DataDistributionType": "FullyReplicated"}
        channels.append({"ChannelName": name, "DataSource": {"S3DataSource": source}})
    return {"train_url": outputs["train_url"], "channels": channels}


def _fill(platform: str, settings: dict[str, Any], values: dict[str, Any]) -> str:
    """Return the template with its values. settings: the keys of [platform.NAME]. Raises BadInput."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates", _FILES[platform])
    with open(path, encoding="utf-8") as file:
        text = file.read()
    marks = {match["named"] or match["braced"] for match in string.Template.pattern.finditer(text)}
    keys = sorted(marks - values.keys())
    for name in settings.keys() - keys:
        raise BadInput(f"[platform.{platform}] {name}: unknown key: expected one of {', '.join(keys)}")
    values = {name: value for name, value in (_DEFAULTS | settings | values).items() if value is not None}
    write = _to_shell if path.endswith(".sh") else _to_json
    texts = {name: write(values[name]) for name in marks & values.keys()}
    lines = []
    for line in text.splitlines(keepends=True):
        try:
            lines.append(string.Template(line.removeprefix("?")).substitute(texts))
        except KeyError as error:
            if not line.startswith("?"):
                name = f"[platform.{platform}] {error.args[0]}"
                raise BadInput(f"{name} is missing (launch/job.example.toml shows it)") from None
    return "".join(lines)


def _to_shell(value: Any) -> str:
    return shlex.join(value) if isinstance(value, list) else shlex.quote(str(value))


def _to_json(value: Any) -> str:
    """Return a value as JSON; a text is without quotes, which are in the template."""
    text = json.dumps(value, ensure_ascii=False)
    return text[1:-1] if isinstance(value, str) else text
