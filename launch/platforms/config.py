"""What job.toml says of a job, read and checked: launch/job.example.toml explains every key.

Every mistake is one line with the value and the form that is allowed: an unknown key, a wrong type, a missing
key, a name out of the service's limits, what the platform sets itself, what looks like a secret.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from common import platforms
from common.exits import BadInput, import_optional
from common.object_store import store as object_store
from launch.platforms import keys as job_keys
from launch.platforms import secrets as job_secrets

FILES = tuple(job_keys.PLATFORMS)  # platforms for which a file is written
PLATFORMS = ("modelarts", *FILES)
RETRIES = job_keys.ANNOTATIONS["faults"]
UNBUFFERED = "PYTHONUNBUFFERED"  # or the last lines of a node that is killed are lost
_PLATFORM_VARIABLES = re.compile(
    r"(MA_|VC_|VK_|SLURM_|PET_|SM_|TORCHELASTIC_|BOOTFILE_STARTED).*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_ADDR|NCCL_SOCKET_IFNAME|NCCL_IB_HCA|PYTHONPATH"
)
_AS_THEY_STAND = (
    "name", "description", "code", "region", "endpoint", "project_id", "workspace_id", "log_url",
    "prefetch_to_local", "image", "resources", "schedule", "platform",
)  # fmt: skip
_SNAPSHOT = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{12}")
_MOST_VARIABLES, _LONGEST_VALUE = 100, 4096  # of the environment, by the service's documents


@dataclass(frozen=True)
class JobConfig:
    """A job. Empty or None: not given.

    job: the boot file's path in the code. code: the URL of an uploaded snapshot. inputs, outputs: names and
    URLs; those of outputs are what a run's own prefix is made below. parameters, environment: as texts.
    annotations: what the service shall do after faults. platform: tables of the others, by name.
    """

    job: str
    name: str
    description: str = ""
    code: str = ""
    region: str = ""
    endpoint: str = ""
    project_id: str = ""
    workspace_id: str = ""
    log_url: str = ""
    prefetch_to_local: bool = True
    image: Mapping[str, Any] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    auto_stop_hours: int | None = None
    schedule: Mapping[str, Any] = field(default_factory=dict)
    platform: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return self.resources.get("node_count", 1)

    @property
    def gpus(self) -> int:
        """Of each node."""
        return self.resources.get("gpus_per_node", 1)

    @property
    def snapshot(self) -> str:
        """The last component of the code's URL: the folder's name on a node."""
        return self.code.rstrip("/").rpartition("/")[2]


def load(path: str, job: str, platform: str = "modelarts") -> JobConfig:
    """Read a file for one of PLATFORMS. Raises BadInput."""
    try:
        return _checked(_read(path), job, platform)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error.__cause__


def _read(path: str) -> dict:
    toml = _toml()
    try:
        with open(path, "rb") as file:
            return toml.loads(file.read().decode())
    except OSError as error:
        raise BadInput(error.strerror) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"is not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of 5000 digits, deep nesting
        raise BadInput(f"is not TOML: {error}") from error


def _toml():
    """Python's own module from 3.11 on; tomli is the same code for 3.10."""
    try:
        return importlib.import_module("tomllib")
    except ImportError:
        return import_optional("tomli", "cannot be read: Python 3.10 has no TOML reader of its own")


def _checked(data: dict, job: str, platform: str) -> JobConfig:
    _check_table("", data, job_keys.TOP)
    _check_required("", data, job_keys.TOP, ("name",))
    for name, keys in job_keys.TABLES.items():
        _check_table(name, data.get(name, {}), keys)
    tables = data.get("platform", {})
    for name, table in tables.items():
        _check_table(f"platform.{name}", table, job_keys.PLATFORMS[name])
    if platform in FILES:
        required = job_keys.REQUIRED[platform]
        _check_required(
            f"platform.{platform}", tables.get(platform, {}), job_keys.PLATFORMS[platform], required
        )
    else:
        _check_modelarts(data)
    retries = data.get("retries", {})
    config = JobConfig(
        job=_job(job),
        inputs=_channels("inputs", data.get("inputs", {}), folders=False),
        outputs=_channels("outputs", data.get("outputs", {}), folders=False),
        parameters=_parameters(data),
        environment=_environment(data.get("environment", {})),
        annotations={job_keys.ANNOTATIONS[key]: as_text(value) for key, value in retries.items()},
        auto_stop_hours=data.get("auto_stop", {}).get("hours"),
        **{name: data[name] for name in _AS_THEY_STAND if name in data},
    )
    for name, table in tables.items():
        for kind in ("inputs", "outputs"):
            for channel in _channels(f"platform.{name}.{kind}", table.get(kind, {}), folders=True):
                if channel not in data.get(kind, {}):
                    raise BadInput(f"[platform.{name}.{kind}] {channel} is none of [{kind}]")
    return config


def _check_modelarts(data: dict) -> None:
    _check_required("", data, job_keys.TOP, ("code", "image", "resources"))
    for name in ("code", "log_url"):
        if name in data:
            object_store.parse(data[name])
    if not _SNAPSHOT.fullmatch(data["code"].rstrip("/").rpartition("/")[2]):
        raise BadInput(
            f"code = {data['code']!r} is not the URL of an uploaded snapshot: "
            "obs://bucket/prefix/name-abcdef012345, as `python -m launch upload` prints it"
        )
    image, resources = data["image"], data["resources"]
    preset = {"engine_name", "engine_version"} & set(image)
    if len(preset) + 2 * ("image_url" in image) != 2:
        raise BadInput(
            f"[image] has {', '.join(image) or 'nothing'}: it is engine_name and engine_version, or image_url"
        )
    if preset and "command" in image:
        raise BadInput("[image] command belongs to a custom image_url: a preset image runs the boot file")
    if "flavor_id" not in resources and "pool_id" not in resources:
        raise BadInput("[resources] has neither flavor_id nor pool_id")
    if "schedule" in data and "pool_id" not in resources:
        raise BadInput("[schedule] is for a dedicated pool: [resources] has no pool_id")


def _check_table(name: str, table: Mapping[str, Any], keys: Mapping[str, job_keys.Key]) -> None:
    place = f"[{name}] " if name else ""
    for key, value in table.items():
        if key not in keys:
            raise BadInput(f"{place}{key} is no key: {', '.join(keys)}")
        if type(value) is not keys[key].kind or not keys[key].accept(value):  # a bool is an int, too
            raise BadInput(f"{place}{key} = {_shown(key, value, keys[key])} is not {keys[key].form}")


def _shown(name: str, value, key: job_keys.Key) -> str:
    """What is not a table where one belongs may be its content, with secrets in it."""
    return "(not shown)" if key.kind is dict else job_secrets.shown(name, value)


def _check_required(name: str, table: Mapping[str, Any], keys: Mapping[str, job_keys.Key], required) -> None:
    place = f"[{name}] " if name else ""
    for key in required:
        if key not in table:
            raise BadInput(f"{place}{key} is missing: {keys[key].form} (launch/job.example.toml shows it)")


def _job(job: str) -> str:
    if not re.fullmatch(r"(?!/)[A-Za-z0-9_./-]+\.py", job) or ".." in job.split("/"):
        raise BadInput(f"JOB {job!r} is not the path of a .py file in the code, such as jobs/train_ddp.py")
    return job.removeprefix("./")


def _channels(name: str, table: dict, folders: bool) -> dict[str, str]:
    """Names and URLs, or absolute paths where the platform has folders."""
    for channel, place in table.items():
        if not job_keys.NAME.fullmatch(channel):
            raise BadInput(f"[{name}] {channel!r} is no name: 1 to 64 of A-Z a-z 0-9 _ -")
        if _underscored(channel) in platforms.INJECTED:
            raise BadInput(f"[{name}] {channel} is an argument that the platform passes itself")
        if folders and isinstance(place, str) and job_keys.FOLDER.accept(place):
            continue
        if not object_store.is_url(place):
            form = f"{job_keys.URL.form}{' or an absolute path' * folders}"
            raise BadInput(f"[{name}] {channel} = {job_secrets.shown(channel, place)} is not {form}")
        object_store.parse(place)
    places = [place.rstrip("/") for place in table.values()]
    if name == "outputs" and len(set(places)) < len(places):
        raise BadInput("[outputs] has one URL twice: every output needs its own")
    return {channel: place.rstrip("/") for channel, place in table.items()}


def _parameters(data: dict) -> dict[str, str]:
    found = {}
    for name, value in data.get("parameters", {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", name):
            raise BadInput(f"[parameters] {name!r} is no name of an argument: letters, digits, _ and -")
        job_secrets.refuse("parameters", name, str(value))
        if _underscored(name) in platforms.INJECTED:
            shown = job_secrets.shown(name, value, texts=False)
            raise BadInput(f"[parameters] {name} = {shown}: the platform passes --{name} itself")
        for kind in ("inputs", "outputs"):
            if _underscored(name) in map(_underscored, data.get(kind, {})):
                raise BadInput(f"[parameters] {name} stands in [{kind}], too: the platform passes its folder")
        if not isinstance(value, str | bool | int | float) or not _one_line(as_text(value)):
            shown = job_secrets.shown(name, value, texts=False)
            raise BadInput(
                f"[parameters] {name} = {shown} is not a text of one line, a number, true or false"
            )
        found[name] = as_text(value)
    return found


def _environment(table: dict) -> dict[str, str]:
    found = {}
    for name, value in table.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,8191}", name, re.ASCII):
            raise BadInput(f"[environment] {name!r} is no name: letters, digits and _, no digit first")
        if _PLATFORM_VARIABLES.fullmatch(name):
            raise BadInput(f"[environment] {name} is set by the platform: leave it out")
        job_secrets.refuse("environment", name, str(value))
        if not isinstance(value, str | bool | int | float):
            shown = job_secrets.shown(name, value, texts=False)
            raise BadInput(f"[environment] {name} = {shown} is not a text, a number, true or false")
        text = as_text(value)
        if len(text) > _LONGEST_VALUE or "$" in text or not _one_line(text):
            shown = job_secrets.shown(name, text, texts=False)
            raise BadInput(
                f"[environment] {name} = {shown} is not one line of at most "
                f"{_LONGEST_VALUE} characters without $ (the platform expands no variables)"
            )
        found[name] = text
    if found.setdefault(UNBUFFERED, "1") != "1":
        raise BadInput(f"[environment] {UNBUFFERED} is not 1: a log would lose its last lines")
    if len(found) > _MOST_VARIABLES:
        raise BadInput(
            f"[environment] has {len(found)} variables with {UNBUFFERED}: at most {_MOST_VARIABLES}"
        )
    return found


def _underscored(name: str) -> str:
    """Jobs take - for _ in the names of their options."""
    return name.replace("-", "_")


def _one_line(text: str) -> bool:
    return not any(character in text for character in "\0\n\r")


def as_text(value: str | bool | int | float) -> str:
    """As arguments and variables carry it: true and false without capitals."""
    return str(value).lower() if isinstance(value, bool) else str(value)
