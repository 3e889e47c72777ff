"""What is sent to ModelArts to create a job, and what the service will then start on every node.

The body is that of POST /v2/{project_id}/training-jobs; tests hold it against the classes of the vendor's
SDK. One field is not in them: `prefetch_to_local` of an output, the console's "pre-download", without which a
restarted job finds its output folder empty. The vendor's API has it where algorithms are created; that it is
taken where jobs are was not seen. job.toml can leave it out.
"""

import datetime
import posixpath
import re
import secrets
import shlex
from typing import Any, NamedTuple

from common.object_store import store as object_store
from launch.platforms.config import JobConfig
from launch.simulate.profiles import Folders, profile

_MOUNT = "/home/ma-user/modelarts"  # MA_MOUNT_PATH
_JOB_DIR = f"{_MOUNT}/user-job-dir"
_PORT = 6666  # seen in the service's init_method
JOB_NAME = "modelarts-job-simulated"  # as launch/simulate/profiles.py has it


class NodeStart(NamedTuple):
    """What is started on one node: a command line as a shell would take it, and what is added to its
    environment."""

    command: str
    environment: dict[str, str]


RUN = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{6}")  # what run_name() adds


def run_name(name: str) -> str:
    """A name that no other run has: <name>-<UTC time>-<random>."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def outputs(config: JobConfig, run: str) -> dict[str, str]:
    """Names and URLs of a run's outputs. An output path may belong to one active job only, so each has the
    run's name in it."""
    return {name: f"{url}/{run}" for name, url in config.outputs.items()}


def body(config: JobConfig, outputs: dict[str, str]) -> dict[str, Any]:
    """The JSON of the request."""
    metadata = {"name": config.name, "workspace_id": config.workspace_id, "description": config.description}
    resources = {name: value for name, value in config.resources.items() if name != "gpus_per_node"}
    spec: dict[str, Any] = {"resource": {"node_count": 1} | resources}
    if config.log_url:
        spec["log_export_path"] = {"obs_url": f"obs:/{_path(config.log_url)}"}  # here, they write it as a URL
    if config.auto_stop_hours:
        spec["auto_stop"] = {"time_unit": "HOURS", "duration": config.auto_stop_hours}
    if config.schedule:
        spec["schedule_policy"] = dict(config.schedule)
    return {
        "kind": "job",
        "metadata": {name: value for name, value in metadata.items() if value}
        | ({"annotations": dict(config.annotations)} if config.annotations else {}),
        "algorithm": _algorithm(config, outputs),
        "spec": spec,
    }


def _algorithm(config: JobConfig, outputs: dict[str, str]) -> dict[str, Any]:
    algorithm: dict[str, Any] = {"code_dir": _path(config.code)}
    if "image_url" in config.image:
        algorithm["command"] = _command(config)
        algorithm["engine"] = {"image_url": config.image["image_url"]}
    else:
        algorithm["boot_file"] = _path(config.code) + config.job
        algorithm["engine"] = dict(config.image)
    algorithm["parameters"] = [{"name": name, "value": value} for name, value in config.parameters.items()]
    algorithm["inputs"] = [
        _channel(name, url, local)
        for (name, url), local in zip(config.inputs.items(), _inputs(config), strict=True)
    ]
    prefetch = {"prefetch_to_local": True} if config.prefetch_to_local else {}
    algorithm["outputs"] = [
        _channel(name, url, local) | prefetch
        for (name, url), local in zip(outputs.items(), _outputs(config), strict=True)
    ]
    algorithm["environments"] = dict(config.environment)
    return algorithm


def _channel(name: str, url: str, local: str) -> dict[str, Any]:
    remote = {"obs": {"obs_url": _path(url)}}
    return {"name": name, "local_dir": local, "access_method": "parameter", "remote": remote}


def _path(url: str) -> str:
    """obs://bucket/prefix as the service writes a folder: /bucket/prefix/."""
    place = object_store.parse(url)
    return "/".join(["", place.bucket, *filter(None, [place.prefix]), ""])


def _inputs(config: JobConfig) -> list[str]:
    return [f"{_MOUNT}/inputs/{name}_{index}" for index, name in enumerate(config.inputs)]


def _outputs(config: JobConfig) -> list[str]:
    return [f"{_MOUNT}/outputs/{name}_{index}" for index, name in enumerate(config.outputs)]


def _command(config: JobConfig) -> str:
    """Of a custom image; the service appends the parameters, the inputs and the outputs."""
    boot_file = posixpath.join(_JOB_DIR, config.snapshot, config.job)
    return config.image.get("command") or f"python {shlex.quote(boot_file)}"


def starts(config: JobConfig) -> list[NodeStart]:
    """What every node runs: launch/simulate/profiles.py has what the platform adds, job.toml the rest."""
    custom = "image_url" in config.image
    hosts = [f"{JOB_NAME}-worker-{node}.{JOB_NAME}" for node in range(config.nodes)]
    folders = Folders(
        code=posixpath.join(_JOB_DIR, config.snapshot),
        inputs=f"{_MOUNT}/inputs",
        outputs=f"{_MOUNT}/outputs",
        scratch="/cache",
        logs=f"{_MOUNT}/log",
    )
    command = (
        _command(config) if custom else f"python {shlex.quote(posixpath.join(folders.code, config.job))}"
    )
    given = [f"--{name}={value}" for name, value in config.parameters.items()]
    given += [f"--{name}={folder}" for name, folder in zip(config.inputs, _inputs(config), strict=True)]
    given += [f"--{name}={folder}" for name, folder in zip(config.outputs, _outputs(config), strict=True)]
    found = []
    for node in range(config.nodes):
        platform = "modelarts-custom" if custom else "modelarts"
        (start,) = profile(platform, node, config.nodes, config.gpus or 1, hosts, _PORT, folders, config.gpus)
        added = [word for word in start.arguments if not word.startswith(("--data_url=", "--train_url="))]
        environment = start.environment | {"MA_CURRENT_IP": f"<address of node {node}>"}
        if custom:
            del environment["MASTER_PORT"]  # the user's to set: the platform names no port here
        words = " ".join([command, *map(shlex.quote, [*given, *added])])
        found.append(NodeStart(words, environment | config.environment))
    return found
