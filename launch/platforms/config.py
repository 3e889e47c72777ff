"""Read and check job.toml: launch/job.example.toml explains every key.

Each error is one line with the value and the expected form. Errors are an unknown key, a wrong type, a
missing key, a name outside the service's limits, a value that the platform sets itself, a suspected secret.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from common import platforms
from common.config import read_toml
from common.exits import BadInput
from common.object_store import store as object_store
from launch import secret_scan

UNBUFFERED = "PYTHONUNBUFFERED"  # otherwise a killed node loses its last log lines
_PLATFORM_VARIABLES = re.compile(
    r"(MA_|VC_|VK_|SLURM_|PET_|SM_|TORCHELASTIC_|BOOTFILE_STARTED).*|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE"
    r"|MASTER_ADDR|NCCL_SOCKET_IFNAME|NCCL_IB_HCA|PYTHONPATH"
)
_SNAPSHOT = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{12}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_VARIABLES, _LONGEST_VALUE = 100, 4096  # limits of the environment, from the service's documents


@dataclass(frozen=True)
class _Key:
    """The type and form of a key. form: for messages. accept(value): whether a value of that type is
    valid."""

    kind: type
    form: str
    accept: Callable[[Any], Any] = lambda value: True


_NAMED = _Key(str, "1 to 64 of A-Z a-z 0-9 _ -", _NAME.fullmatch)
_TEXT = _Key(
    str, "a text of 1 to 1024 printable characters", lambda text: 0 < len(text) <= 1024 and text.isprintable()
)
_WORD = _Key(str, "a text of 1 to 256 characters without spaces", re.compile(r"[!-~]{1,256}").fullmatch)
_COUNT = _Key(int, "a whole number of at least 1", lambda number: number >= 1)
_NODES = _Key(int, "a whole number of at least 1 and at most 10000", lambda number: 1 <= number <= 10_000)
_FLAG = _Key(bool, "true or false")
_TABLE = _Key(dict, "a table")
_URL = _Key(str, "obs://bucket/prefix or s3://bucket/prefix", object_store.is_url)
_FOLDER = _Key(str, "an absolute path", re.compile(r"/[!-~]*").fullmatch)


def _up_to(most: int, least: int = 1) -> _Key:
    return _Key(int, f"a whole number in {least}..{most}", lambda number: least <= number <= most)


_TOP = {
    "name": _NAMED,
    "description": _Key(str, "a text of at most 256 characters", lambda text: len(text) <= 256),
    "code": _URL,
    "region": _Key(str, "a region's id such as cn-north-4", re.compile(r"[a-z0-9-]{1,64}").fullmatch),
    "endpoint": _Key(str, "https://host", re.compile(r"https?://[A-Za-z0-9.\[\]:-]+").fullmatch),
    "project_id": _NAMED,
    "workspace_id": _NAMED,
    "log_url": _URL,
    "prefetch_to_local": _FLAG,
} | dict.fromkeys(
    (
        "image", "resources", "inputs", "outputs", "parameters", "environment", "retries", "auto_stop",
        "schedule", "platform",
    ),
    _TABLE,
)  # fmt: skip
_ANNOTATIONS = {  # keys of [retries]: names in the service's documents and its SDK's JobMetadata
    "faults": "fault-tolerance/job-retry-num",
    "pods": "fault-tolerance/pod-retry-num",
    "unconditional": "fault-tolerance/job-unconditional-retry",
    "hang": "fault-tolerance/hang-retry",
}
RETRIES = _ANNOTATIONS["faults"]
_ON_EVERY_PLATFORM = {"python": _WORD, "inputs": _TABLE, "outputs": _TABLE}
_PLATFORM_KEYS = {
    "pai-dlc": {
        "workspace_id": _WORD, "image": _WORD, "code_dir": _FOLDER, "ecs_spec": _WORD, "resource_id": _WORD,
        "cpu": _COUNT, "memory_gib": _COUNT, "mounts": _TABLE, **_ON_EVERY_PLATFORM,
    },
    "sagemaker": {
        "image": _WORD, "role_arn": _WORD, "instance_type": _WORD, "volume_gb": _COUNT, "code": _URL,
        **_ON_EVERY_PLATFORM,
    },
    "kubeflow": {
        "image": _WORD, "code_dir": _FOLDER, "namespace": _WORD, "volume_claim": _WORD,
        "volume_path": _FOLDER, **_ON_EVERY_PLATFORM,
    },
    "slurm": {
        "code_dir": _FOLDER, "partition": _WORD, "account": _WORD, "cpus_per_task": _COUNT,
        "log_dir": _FOLDER, **_ON_EVERY_PLATFORM,
    },
}  # fmt: skip
_REQUIRED = {
    "pai-dlc": ("workspace_id", "image", "code_dir"),
    "sagemaker": ("image", "role_arn", "instance_type"),
    "kubeflow": ("image", "code_dir"),
    "slurm": ("code_dir",),
}
_TABLES = {
    "image": {"engine_name": _WORD, "engine_version": _WORD, "image_url": _WORD, "command": _TEXT},
    "resources": {
        "flavor_id": _WORD, "node_count": _NODES, "pool_id": _WORD, "gpus_per_node": _up_to(64, 0),
    },
    "retries": {"faults": _up_to(128), "pods": _up_to(128), "unconditional": _FLAG, "hang": _FLAG},
    "auto_stop": {"hours": _COUNT},
    "schedule": {"priority": _up_to(3), "preemptible": _FLAG},
    "platform": dict.fromkeys(_PLATFORM_KEYS, _TABLE),
}  # fmt: skip
FILES = tuple(_PLATFORM_KEYS)  # platforms for which a file is written
PLATFORMS = ("modelarts", *FILES)


@dataclass(frozen=True)
class JobConfig:
    """A job, as a checked job.toml describes it. Empty or None: not given.

    job: the boot file's path in the code
    code: the URL of an uploaded snapshot
    inputs, outputs: names and URLs; a run writes below its own prefix of an output
    annotations: the service's options for restarts
    platform: tables of the other platforms, by name
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
        """Return the number of GPUs of each node."""
        return self.resources.get("gpus_per_node", 1)

    @property
    def snapshot(self) -> str:
        """Return the last component of the code's URL, which is the folder's name on a node."""
        return _last_component(self.code)


def load(path: str, job: str, platform: str = "modelarts") -> JobConfig:
    """Read and check job.toml for one of PLATFORMS. Raises BadInput."""
    try:
        return _check(read_toml(path), job, platform)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error.__cause__


def _check(data: dict, job: str, platform: str) -> JobConfig:
    _check_table("", data, _TOP)
    _check_required("", data, _TOP, ("name",))
    for name, keys in _TABLES.items():
        _check_table(name, data.get(name, {}), keys)
    tables = data.get("platform", {})
    for name, table in tables.items():
        _check_table(f"platform.{name}", table, _PLATFORM_KEYS[name])
    if platform == "modelarts":
        _check_modelarts(data)
    else:
        keys, required = _PLATFORM_KEYS[platform], _REQUIRED[platform]
        _check_required(f"platform.{platform}", tables.get(platform, {}), keys, required)
    if not re.fullmatch(r"(?!/)[A-Za-z0-9_./-]+\.py", job) or ".." in job.split("/"):
        raise BadInput(
            f"JOB {job!r} is not the path of a .py file in the code, such as jobs/train_ddp.py or main.py: "
            "name it as `pack` lists it"
        )
    retries = data.get("retries", {})
    given = {name: value for name, value in data.items() if name not in ("retries", "auto_stop")}
    config = JobConfig(**given | {
        "job": job.removeprefix("./"),
        "inputs": _check_channels("inputs", data.get("inputs", {})),
        "outputs": _check_channels("outputs", data.get("outputs", {})),
        "parameters": _check_parameters(data),
        "environment": _check_environment(data.get("environment", {})),
        "annotations": {_ANNOTATIONS[key]: _as_text(value) for key, value in retries.items()},
        "auto_stop_hours": data.get("auto_stop", {}).get("hours"),
    })  # fmt: skip
    for name, table in tables.items():
        for kind in ("inputs", "outputs"):
            for channel in _check_channels(f"platform.{name}.{kind}", table.get(kind, {}), folders=True):
                if channel not in data.get(kind, {}):
                    raise BadInput(f"[platform.{name}.{kind}] {channel} is not in [{kind}]")
    return config


def _check_modelarts(data: dict) -> None:
    _check_required("", data, _TOP, ("code", "image", "resources"))
    for name in ("code", "log_url"):
        if name in data:
            object_store.parse(data[name])
    if not _SNAPSHOT.fullmatch(_last_component(data["code"])):
        raise BadInput(
            f"code = {data['code']!r} is not the URL of an uploaded snapshot: "
            "expected obs://bucket/prefix/name-abcdef012345, as `python -m launch upload` prints it"
        )
    image, resources = data["image"], data["resources"]
    preset = {"engine_name", "engine_version"} & set(image)
    if len(preset) + 2 * ("image_url" in image) != 2:
        raise BadInput(
            f"[image] has {', '.join(image) or 'nothing'}: expected engine_name and engine_version, or "
            "image_url"
        )
    if preset and "command" in image:
        raise BadInput("[image] command needs image_url: a preset image runs the boot file")
    if "flavor_id" not in resources and "pool_id" not in resources:
        raise BadInput("[resources] has neither flavor_id nor pool_id")
    if "schedule" in data and "pool_id" not in resources:
        raise BadInput("[schedule] needs a dedicated pool: [resources] has no pool_id")


def _check_table(name: str, table: Mapping[str, Any], keys: Mapping[str, _Key]) -> None:
    place = f"[{name}] " if name else ""
    for key, value in table.items():
        if key not in keys:
            raise BadInput(f"{place}unknown key {key}: expected one of {', '.join(keys)}")
        if type(value) is not keys[key].kind or not keys[key].accept(value):  # a bool is an int, too
            # A value that replaces a table may be the table's content, with secrets in it.
            shown = "(not shown)" if keys[key].kind is dict else secret_scan.shown(key, value)
            raise BadInput(f"{place}{key} = {shown} is not {keys[key].form}")


def _check_required(
    name: str, table: Mapping[str, Any], keys: Mapping[str, _Key], required: Iterable[str]
) -> None:
    place = f"[{name}] " if name else ""
    for key in required:
        if key not in table:
            raise BadInput(f"{place}{key} is missing: {keys[key].form} (launch/job.example.toml shows it)")


def _check_channels(name: str, table: dict, folders: bool = False) -> dict[str, str]:
    """Check names and URLs, and return them. folders: also accept absolute paths. Raises BadInput."""
    for channel, place in table.items():
        if not _NAME.fullmatch(channel):
            raise BadInput(f"[{name}] {channel!r} is not a valid name: {_NAMED.form}")
        if _underscored(channel) in platforms.INJECTED:
            raise BadInput(f"[{name}] {channel} is an argument that the platform passes itself")
        if folders and isinstance(place, str) and _FOLDER.accept(place):
            continue
        if not object_store.is_url(place):
            form = f"{_URL.form}{' or an absolute path' * folders}"
            raise BadInput(f"[{name}] {channel} = {secret_scan.shown(channel, place)} is not {form}")
        object_store.parse(place)
    places = [place.rstrip("/") for place in table.values()]
    if name == "outputs" and len(set(places)) < len(places):
        raise BadInput("[outputs] has the same URL twice: every output needs its own")
    return dict(zip(table, places, strict=True))


def _check_parameters(data: dict) -> dict[str, str]:
    found = {}
    for name, value in data.get("parameters", {}).items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", name):
            raise BadInput(f"[parameters] {name!r} is not a valid name: letters, digits, _ and -")
        secret_scan.refuse("parameters", name, str(value))
        shown = secret_scan.shown(name, value, texts=False)
        if _underscored(name) in platforms.INJECTED:
            raise BadInput(f"[parameters] {name} = {shown}: the platform passes --{name} itself")
        for kind in ("inputs", "outputs"):
            if _underscored(name) in map(_underscored, data.get(kind, {})):
                raise BadInput(f"[parameters] {name} is also in [{kind}]: the platform passes its folder")
        if not _is_scalar(value) or not _is_one_line(_as_text(value)):
            raise BadInput(
                f"[parameters] {name} = {shown} is not a text of one line, a number, true or false"
            )
        found[name] = _as_text(value)
    return found


def _check_environment(table: dict) -> dict[str, str]:
    found = {}
    for name, value in table.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,8191}", name, re.ASCII):
            raise BadInput(
                f"[environment] {name!r} is not a valid name: letters, digits and _, no digit first"
            )
        if _PLATFORM_VARIABLES.fullmatch(name):
            raise BadInput(f"[environment] {name} is set by the platform: remove it")
        secret_scan.refuse("environment", name, str(value))
        text = _as_text(value)
        if not _is_scalar(value) or len(text) > _LONGEST_VALUE or "$" in text or not _is_one_line(text):
            shown = secret_scan.shown(name, value, texts=False)
            raise BadInput(
                f"[environment] {name} = {shown} is not a number, true, false, or one line of at most "
                f"{_LONGEST_VALUE} characters without $ (the platform expands no variables)"
            )
        found[name] = text
    if found.setdefault(UNBUFFERED, "1") != "1":
        raise BadInput(f"[environment] {UNBUFFERED} must be 1: a log would lose its last lines")
    if len(found) > _MOST_VARIABLES:
        raise BadInput(
            f"[environment] has {len(found)} variables with {UNBUFFERED}: at most {_MOST_VARIABLES}"
        )
    return found


def _last_component(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _underscored(name: str) -> str:
    """Return a name with _ for -: jobs accept both in the names of their options."""
    return name.replace("-", "_")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | bool | int | float)


def _is_one_line(text: str) -> bool:
    return not any(character in text for character in "\0\n\r")


def _as_text(value: str | bool | int | float) -> str:
    """Return a value as text for arguments and variables: true and false in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)
