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
from collections.abc import Mapping
from typing import Any

from bootfile.ground.errors import BadInput
from common.object_store import location as object_store
from launch.platforms.config import JobConfig
from launch.profiles import MODELARTS_JOB, Folders, make_starts

_MOUNT = "/home/ma-user/modelarts"  # MA_MOUNT_PATH
_JOB_DIR = f"{_MOUNT}/user-job-dir"
_PORT = 6666  # seen in the service's init_method


def make_run_name(name: str) -> str:
    """Return a unique name of a run: <name>-<UTC time>-<random>."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def make_outputs(outputs: Mapping[str, str], run: str, resume_from: str | None = None) -> dict[str, str]:
    """Return names and places of a run's outputs: below the run's own prefix, or at `resume_from`. Two active
    jobs must not share an output. Raises BadInput."""
    if resume_from is None:
        return {name: f"{place.rstrip('/')}/{run}" for name, place in outputs.items()}
    if not (resume_from.startswith("/") and resume_from.strip("/")):
        object_store.parse(resume_from)
    if list(outputs) != ["train_url"]:
        given = ", ".join(outputs) or "none"
        raise BadInput(f"--resume_from needs one output, train_url: [outputs] has {given}")
    return {"train_url": resume_from.rstrip("/")}


def make_body(config: JobConfig, outputs: dict[str, str]) -> dict[str, Any]:
    """Return the body of the request."""
    code = _path(config.code or "")
    image = config.image
    hours = config.auto_stop.hours
    # a restarted job finds the files of the job before it
    prefetch = {"prefetch_to_local": True} if config.prefetch_to_local else {}
    channels = [channel | prefetch for channel in _channels("outputs", outputs)]
    retries = config.retries.model_dump(exclude_none=True, by_alias=True)
    # the service has the affinity in a table of its own
    schedule = config.schedule.model_dump(exclude_none=True)
    affinity = {name: schedule.pop(name) for name in [*schedule] if name.startswith("affinity_")}
    if affinity:
        schedule["required_affinity"] = affinity
    # the service passes the folders of its copies, but not those of volumes
    places = config.inputs | outputs
    parameters = config.parameters | {name: place for name, place in places.items() if place.startswith("/")}
    metadata = {
        "name": config.name,
        "workspace_id": config.workspace_id,
        "description": config.description,
        "annotations": {name: str(value).lower() for name, value in retries.items()},
    }
    # an image of the user has a command, and no boot file
    program = {"command": _command(config)} if image.image_url else {"boot_file": code + config.job}
    algorithm: dict[str, Any] = {
        "code_dir": code,
        **program,
        "engine": image.model_dump(exclude_none=True, exclude={"command"}),
        "parameters": [{"name": name, "value": value} for name, value in parameters.items()],
        "inputs": _channels("inputs", config.inputs),
        "outputs": channels,
        "environments": config.environment,
    }
    spec = {
        "resource": config.resources.model_dump(exclude_none=True, exclude={"gpus_per_node"}),
        "volumes": [_volume(folder, storage) for folder, storage in config.volumes.items()],
        "schedule_policy": schedule,
        "notification": config.notification.model_dump(exclude_none=True),
        "log_export_path": config.log_url and {"obs_url": f"obs:/{_path(config.log_url)}"},  # only here a URL
        "auto_stop": hours and {"time_unit": "HOURS", "duration": hours},
    }
    return {
        "kind": "job",
        "metadata": _without_empty(metadata),
        "algorithm": algorithm,
        "spec": _without_empty(spec),
    }


def _without_empty(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that have a value."""
    return {name: value for name, value in table.items() if value}


def _volume(folder: str, storage: str) -> dict[str, dict[str, Any]]:
    kind, _, _ = storage.partition("://")
    if kind in ("obs", "pfs"):  # a bucket, or a parallel file system
        path = _path(re.sub("^pfs:", "obs:", storage)).rstrip("/")
        return {kind: {f"{kind}_path": path, "local_path": folder}}
    return {"nfs": {"nfs_server_path": storage, "local_path": folder, "read_only": False}}


def _channels(kind: str, places: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the entries of the inputs or outputs that the service copies. kind: see _folders()."""
    return [
        {
            "name": name,
            "local_dir": local,
            "access_method": "parameter",
            "remote": {"obs": {"obs_url": _path(places[name])}},
        }
        for name, local in _folders(kind, places).items()
        if local != places[name]  # a folder of a volume: nothing is copied
    ]


def _path(url: str) -> str:
    """Return obs://bucket/prefix as the service writes a folder: /bucket/prefix/."""
    place = object_store.parse(url)
    return "/".join(["", place.bucket, *filter(None, [place.prefix]), ""])


def _folders(kind: str, places: Mapping[str, str]) -> dict[str, str]:
    """Return names and folders on a node: those of volumes, or of copies. kind: inputs or outputs."""
    # the service numbers its copies in this order
    return {
        name: place if place.startswith("/") else f"{_MOUNT}/{kind}/{name}_{index}"
        for index, (name, place) in enumerate(places.items())
    }


def _command(config: JobConfig) -> str:
    """Return a custom image's own command, else that of the boot file. The service appends the arguments."""
    boot_file = posixpath.join(_JOB_DIR, config.snapshot, config.job)
    return config.image.command or f"python {shlex.quote(boot_file)}"


def make_node_starts(config: JobConfig, outputs: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Return (command line, additional variables) of every node, from launch/profiles.py and job.toml."""
    custom = bool(config.image.image_url)
    nodes = config.resources.node_count
    gpus = config.resources.gpus_per_node
    hosts = [f"{MODELARTS_JOB}-worker-{node}.{MODELARTS_JOB}" for node in range(nodes)]
    code = posixpath.join(_JOB_DIR, config.snapshot)
    folders = Folders(code, f"{_MOUNT}/inputs", f"{_MOUNT}/outputs", "/cache", f"{_MOUNT}/log")
    channels = _folders("inputs", config.inputs) | _folders("outputs", outputs)
    platform = "modelarts-custom" if custom else "modelarts"
    starts = []
    for node in range(nodes):
        (start,) = make_starts(platform, node, nodes, gpus or 1, hosts, _PORT, folders, gpus)
        # the profile has channels of its own, those of job.toml take their place
        added = [word for word in start.arguments if not word.startswith(("--data_url=", "--train_url="))]
        variables = start.environment | {"MA_CURRENT_IP": f"<address of node {node}>"} | config.environment
        if custom and "MASTER_PORT" not in config.environment:
            del variables["MASTER_PORT"]  # the platform does not set a port here
        words = [f"--{name}={value}" for name, value in (config.parameters | channels).items()]
        starts.append((" ".join([_command(config), *map(shlex.quote, [*words, *added])]), variables))
    return starts
