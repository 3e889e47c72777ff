"""Fill the job files for the tools of other platforms.

templates/ has a file for each of COMMANDS, as its tool reads it, in jinja2's language. Its names are keys of
[platform.NAME] in job.toml, or values that render() adds. Each value is written as JSON, in a shell script
quoted for the shell. launch/profiles.py lists the variables that each platform then sets, and
common/platform/topology.py reads them. The files follow the vendors' documents; none was sent to a live
service.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable
from typing import Any

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.exit_codes import RESTARTED
from launch.platforms.config import TABLES, JobConfig
from launch.platforms.request import make_outputs
from launch.profiles import find_pod_grace

jinja2 = import_optional("jinja2", "job files need jinja2")
meta = import_optional("jinja2.meta", "job files need jinja2", "jinja2")

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
_LONGEST_LABEL = 44
# keys of [platform.sagemaker] that are not texts
_TYPES: dict[str, type[int]] = {"spot_wait_hours": int, "volume_gb": int, "torchrun": bool}
COMMANDS = {  # platform: (file in templates/, command that submits FILE)
    "pai-dlc": ("pai-dlc.json", 'aliyun pai-dlc create-job --body "$(cat FILE)"'),
    "sagemaker": ("sagemaker.json", "aws sagemaker create-training-job --cli-input-json file://FILE"),
    "sagemaker-sdk": ("sagemaker-sdk.py.j2", "python FILE"),
    "kubeflow": ("kubeflow.yaml", "kubectl create -f FILE"),
    "kubeflow-v1": ("kubeflow-v1.yaml", "kubectl create -f FILE"),
    "kubernetes": ("kubernetes.yaml", "kubectl create -f FILE"),
    "slurm": ("slurm.sh", "sbatch FILE"),
    "skypilot": ("skypilot.yaml", "sky jobs launch FILE"),
}


def render(platform: str, config: JobConfig, run: str, resume_from: str | None = None) -> str:
    """Return the content of the file for one of COMMANDS. run: its name, which its outputs have. resume_from:
    the outputs of an earlier run, used instead. Raises BadInput for a missing or an unknown key."""
    name = TABLES.get(platform, platform)
    table = config.platform[name]  # type: ignore[index]
    settings = table.model_extra or {}  # the keys of the template
    inputs = config.inputs | table.inputs
    outputs = make_outputs(config.outputs | table.outputs, run, resume_from)
    values: dict[str, Any] = {
        "run": run,
        "label": _make_label(run),
        "restarted": RESTARTED,
        "job": config.job,
        "nodes": config.resources.node_count,
        "gpus": config.resources.gpus_per_node,
        "hours": config.auto_stop.hours,
        "restarts": config.retries.faults,
        "environment": config.environment,
        "mounts": table.mounts,
    }
    if platform.startswith("kube"):
        values["pod_grace"] = find_pod_grace(config.parameters.get("grace", ""))
        _check_kept(outputs, [settings.get("volume_path", "")] if "volume_claim" in settings else [])
    if platform in ("pai-dlc", "skypilot"):
        _check_kept(outputs, table.mounts)
    if name == "sagemaker":  # train_url is the checkpoint folder, which it restores after a restart
        # the service mounts the code as one more channel
        values["channels"] = {"code": table.code or config.code or "", **inputs}
        _check_sagemaker(config, inputs, outputs, values["channels"]["code"])
        _check_types(settings)
        values |= outputs
        # the job sees folders, which the service fills and uploads
        inputs = {name: f"/opt/ml/input/data/{name}" for name in inputs}
        outputs = {"train_url": "/opt/ml/checkpoints"}
    if platform == "slurm":  # its script adds the task of an array
        values["outputs"] = outputs
        outputs = {}
    words = config.parameters | inputs | outputs
    values["words"] = words
    quoted = [key for key, word in words.items() if "'" in word]
    if platform == "sagemaker-sdk" and settings.get("torchrun") and quoted:
        # it ends the quotes of the SDK's script, and the rest would be a command
        raise BadInput(f"[parameters] {quoted[0]}: expected a value without ', because torchrun = true")
    values["arguments"] = [f"--{name}={value}" for name, value in words.items()]
    return _fill(platform, settings, values)


def _check_kept(outputs: dict[str, str], volumes: Iterable[Any]) -> None:
    """Raise BadInput for a folder of results that is in none of the volumes: its pod or machine may end."""
    folders = [f"{str(volume).rstrip('/')}/" for volume in volumes]
    for name, place in outputs.items():
        if place.startswith("/") and not f"{place}/".startswith(tuple(folders)):
            expected = "expected a URL, or a folder of mounts, or in volume_path of a volume_claim"
            raise BadInput(f"[outputs] {name}: {place} would be lost with its pod or machine: {expected}")


def _check_sagemaker(config: JobConfig, inputs: dict[str, str], outputs: dict[str, str], code: str) -> None:
    """Raise BadInput for what the service or its SDK would refuse."""
    for channel in inputs.keys() & {"code", "sm_drivers"}:
        raise BadInput(f"[inputs] {channel}: sagemaker has a channel of this name")
    if list(outputs) != ["train_url"]:
        raise BadInput(f"sagemaker needs one output, train_url: it has {', '.join(outputs) or 'none'}")
    for url in (code, *inputs.values(), *outputs.values()):
        if not url.startswith("s3://"):
            raise BadInput(f"sagemaker reads s3:// only: {url or 'code is missing'}")
    if (config.retries.faults or 0) > 30:
        raise BadInput("[retries] faults: sagemaker retries a job at most 30 times")


def _check_types(settings: dict[str, Any]) -> None:
    """Raise BadInput if a key of [platform.sagemaker] has a wrong type, for example a number in quotes."""
    for key, kind in _TYPES.items():
        value = settings.get(key, kind())
        if type(value) is not kind or value < 0:
            expected = "true or false" if kind is bool else "a whole number, 0 or more"
            raise BadInput(f"[platform.sagemaker] {key}: expected {expected}, got {value!r}")


def _fill(platform: str, settings: dict[str, Any], values: dict[str, Any]) -> str:
    """Return the template with its values. settings: the keys of [platform.NAME]. Raises BadInput."""
    file, _ = COMMANDS[platform]
    finalize = _to_shell if file.endswith(".sh") else _to_json  # Python reads these values of JSON, too
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = shlex.join  # a template may have a command line
    environment.globals.clear()  # `namespace` is one of jinja2's
    # what a template of this table asks for and render() does not have is a key of [platform.NAME]
    keys: set[str] = set()
    table = TABLES.get(platform, platform)
    for other, (name, _) in COMMANDS.items():
        if TABLES.get(other, other) == table:
            source, _, _ = environment.loader.get_source(environment, name)
            keys |= meta.find_undeclared_variables(environment.parse(source)) - values.keys()
    for key in settings.keys() - keys:  # a misspelt key would be ignored
        raise BadInput(f"[platform.{table}] {key}: unknown key: expected one of {', '.join(sorted(keys))}")
    try:
        return environment.get_template(file).render(settings | values)
    except jinja2.UndefinedError as error:
        raise BadInput(f"[platform.{table}] {error} (launch/job.example.toml shows it)") from None


def _make_label(run: str) -> str:
    """Return the name of a run as Kubernetes takes it for a Service, with room for what controllers append.
    The end of a long name is kept, which is unique."""
    label = run.lower().replace("_", "-")[-_LONGEST_LABEL:].strip("-")
    return label if re.match("[a-z]", label) else f"run-{label}"


def _to_shell(value: Any) -> str:
    return shlex.join(value) if isinstance(value, list) else shlex.quote(str(value))


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)  # str() of an undefined value raises
