"""Build the request that creates a job on ModelArts, and show what the service will start on every node.

The body is that of POST /v2/{project_id}/training-jobs; tests compare it with the classes of the vendor's
SDK. They lack one field: `prefetch_to_local` of an output, the console's "pre-download". Without it a
restarted job finds its output folder empty. The vendor's API documents it for algorithms; it was not tested
whether jobs accept it. job.toml can leave it out.
"""

import datetime
import posixpath
import re
import secrets
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from common.exits import BadInput
from common.object_store import store as object_store
from launch.platforms.config import JobConfig
from launch.profiles import MODELARTS_JOB, Folders, make_starts

_MOUNT = "/home/ma-user/modelarts"  # MA_MOUNT_PATH
_JOB_DIR = f"{_MOUNT}/user-job-dir"
_PORT = 6666  # seen in the service's init_method
RUN = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{6}")  # the suffix that make_run_name() adds


class NodeStart(NamedTuple):
    """The start of one node: a command line for a shell, and the additional variables."""

    command: str
    environment: dict[str, str]


def make_run_name(name: str) -> str:
    """Return a unique name of a run: <name>-<UTC time>-<random>."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def make_outputs(outputs: Mapping[str, str], run: str, resume_from: str | None = None) -> dict[str, str]:
    """Return names and places of a run's outputs: below the run's own prefix, or at `resume_from`. Two active
    jobs must not share an output. Raises BadInput."""
    if resume_from is None:
        return {name: f"{place.rstrip('/')}/{run}" for name, place in outputs.items()}
    if list(outputs) != ["train_url"]:
        raise BadInput(
            f"--resume_from needs one output, train_url: [outputs] has {', '.join(outputs) or 'none'}"
        )
    return {"train_url": resume_from.rstrip("/")}


def make_body(config: JobConfig, outputs: dict[str, str]) -> dict[str, Any]:
    """Return the body of the request."""
    metadata = {
        "name": config.name, "workspace_id": config.workspace_id, "description": config.description,
        "annotations": dict(config.annotations),
    }  # fmt: skip
    resources = {name: value for name, value in config.resources.items() if name != "gpus_per_node"}
    spec: dict[str, Any] = {"resource": {"node_count": 1} | resources}
    if config.log_url:
        spec["log_export_path"] = {"obs_url": f"obs:/{_path(config.log_url)}"}  # a URL, in this field only
    if config.auto_stop_hours:
        spec["auto_stop"] = {"time_unit": "HOURS", "duration": config.auto_stop_hours}
    if config.schedule:
        spec["schedule_policy"] = dict(config.schedule)
    return {
        "kind": "job",
        "metadata": {name: value for name, value in metadata.items() if value},
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
    prefetch = {"prefetch_to_local": True} if config.prefetch_to_local else {}
    return algorithm | {
        "parameters": [{"name": name, "value": value} for name, value in config.parameters.items()],
        "inputs": _channels("inputs", config.inputs),
        "outputs": [channel | prefetch for channel in _channels("outputs", outputs)],
        "environments": dict(config.environment),
    }


def _channels(kind: str, urls: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name, "local_dir": local, "access_method": "parameter",
            "remote": {"obs": {"obs_url": _path(urls[name])}},
        }
        for name, local in _folders(kind, urls).items()
    ]  # fmt: skip


def _path(url: str) -> str:
    """Return obs://bucket/prefix as the service writes a folder: /bucket/prefix/."""
    place = object_store.parse(url)
    return "/".join(["", place.bucket, *filter(None, [place.prefix]), ""])


def _folders(kind: str, names: Iterable[str]) -> dict[str, str]:
    """Return names and folders on a node. kind: inputs or outputs."""
    return {name: f"{_MOUNT}/{kind}/{name}_{index}" for index, name in enumerate(names)}


def _command(config: JobConfig) -> str:
    """Return a custom image's own command, else that of the boot file. The service appends the arguments."""
    boot_file = posixpath.join(_JOB_DIR, config.snapshot, config.job)
    return config.image.get("command") or f"python {shlex.quote(boot_file)}"


def make_node_starts(config: JobConfig) -> list[NodeStart]:
    """Return the start of every node, from launch/profiles.py and job.toml."""
    custom = "image_url" in config.image
    hosts = [f"{MODELARTS_JOB}-worker-{node}.{MODELARTS_JOB}" for node in range(config.nodes)]
    folders = Folders(
        code=posixpath.join(_JOB_DIR, config.snapshot),
        inputs=f"{_MOUNT}/inputs",
        outputs=f"{_MOUNT}/outputs",
        scratch="/cache",
        logs=f"{_MOUNT}/log",
    )
    channels = _folders("inputs", config.inputs) | _folders("outputs", config.outputs)
    found = []
    for node in range(config.nodes):
        platform = "modelarts-custom" if custom else "modelarts"
        (start,) = make_starts(
            platform, node, config.nodes, config.gpus or 1, hosts, _PORT, folders, config.gpus
        )
        added = [word for word in start.arguments if not word.startswith(("--data_url=", "--train_url="))]
        environment = start.environment | {"MA_CURRENT_IP": f"<address of node {node}>"}
        if custom:
            del environment["MASTER_PORT"]  # set by the user: the platform does not set a port here
        words = [*(f"--{name}={value}" for name, value in {**config.parameters, **channels}.items()), *added]
        command = " ".join([_command(config), *map(shlex.quote, words)])
        found.append(NodeStart(command, environment | dict(config.environment)))
    return found
