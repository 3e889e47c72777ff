"""Read and check job.toml: launch/job.example.toml explains every key.

The classes below are the tables of the file. Each error is one line with the file, the key and the reason. It
does not show the value, which may be a secret.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from bootfile.console.words import mask_words
from bootfile.ground.errors import BadInput, import_optional
from common.console.config import read
from common.ground.files import is_url
from common.object_store import location as object_store
from common.platform.signs import INJECTED
from launch import secret_scan
from launch.profiles import VARIABLES

if TYPE_CHECKING:
    import pydantic
else:
    pydantic = import_optional("pydantic", "job.toml is checked with pydantic")

_Other = Literal[
    "pai-dlc", "sagemaker", "kubeflow", "kubeflow-v1", "kubernetes", "slurm", "skypilot"
]  # platforms for whose tools a file is written
TABLES = {"sagemaker-sdk": "sagemaker"}  # another form of a file: the table with its keys
PLATFORMS = ("modelarts", *get_args(_Other), *TABLES)
UNBUFFERED = "PYTHONUNBUFFERED"  # otherwise a killed node loses its last log lines
_MOST_VARIABLES = 100  # that the creator of a job gives (vendor's page ma_drawer_129, 2026-08-04)
_INTERFACES = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}  # variables that ModelArts sets, too
_SNAPSHOT = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{12}")


def _to_text(value: Any) -> str:
    """Return a value of one line as text for arguments and variables: true and false in lower case."""
    text = str(value).lower() if isinstance(value, bool) else str(value)  # as command lines have it
    is_line = "\0" not in text and text.splitlines() in ([], [text])  # YAML has more ends of lines than \n
    if not isinstance(value, str | bool | int | float) or not is_line:
        raise ValueError("expected a text of one line, a number, true or false")
    return text


def _check_url(url: str) -> str:
    if not is_url(url):  # pydantic makes the line, with the table and the key
        raise ValueError("expected obs://bucket/prefix or s3://bucket/prefix")
    # raises BadInput, which load() completes with the name of the file
    object_store.parse(url)
    return url.rstrip("/")


def _check_place(place: str) -> str:
    is_folder = place.startswith("/") and place.strip("/")  # of a volume
    return place.rstrip("/") if is_folder else _check_url(place)


def _check_storage(storage: str) -> str:
    if storage.startswith(("pfs://", "obs://")):  # a bucket; else a share of SFS Turbo
        _check_url(re.sub("^pfs:", "obs:", storage))
    elif not re.fullmatch(r"[^/\s:]+:/(?!/)\S*", storage):
        raise ValueError("expected HOST:/PATH, pfs://bucket/path or obs://bucket/path")
    return re.sub("(?<!:)/+$", "", storage)  # HOST:/ is all of a share


def _check_job(job: str) -> str:
    if not re.fullmatch(r"(?!/)[A-Za-z0-9_./-]+\.py", job) or ".." in job.split("/"):
        raise BadInput(f"JOB {job}: expected the path of a .py file in the code, such as jobs/train_ddp.py")
    return job.removeprefix("./")


def _check_argument(name: str) -> str:
    if name.replace("-", "_") in INJECTED:
        raise ValueError(f"the platform passes --{name} itself")
    return name


def _check_variable(name: str) -> str:
    if VARIABLES.fullmatch(name) and name != "MASTER_PORT":
        raise ValueError("the platform sets this variable: remove it")
    return name


_Name = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Word = Annotated[str, pydantic.Field(pattern=r"^[!-~]{1,256}$")]
_Url = Annotated[str, pydantic.AfterValidator(_check_url)]
_Place = Annotated[str, pydantic.AfterValidator(_check_place)]
_Folder = Annotated[str, pydantic.Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")]
_Storage = Annotated[str, pydantic.AfterValidator(_check_storage)]
_Count = Annotated[int, pydantic.Field(ge=1, le=128)]
_Channel = Annotated[_Name, pydantic.AfterValidator(_check_argument)]
_Argument = Annotated[
    str, pydantic.Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$"), pydantic.AfterValidator(_check_argument)
]
_Variable = Annotated[
    str, pydantic.Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$"), pydantic.AfterValidator(_check_variable)
]
_Text = Annotated[str, pydantic.BeforeValidator(_to_text)]
_VariableText = Annotated[_Text, pydantic.Field(pattern=r"^[^$]{0,4096}$")]  # the platform expands nothing


_Event = Literal[
    "JobStarted", "JobCompleted", "JobFailed", "JobTerminated", "JobRestarted", "JobHanged", "JobPreempted"
]


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


def _refuse_secret(name: str) -> None:
    rights = "give the job its rights by an agency, a role or a mounted secret of the platform"
    raise ValueError(f"{name} looks like a secret, and all who see the job would see it: {rights}")


class Image(_Table):
    """A preset image (engine_name, engine_version), or the user's own (image_url) with a command."""

    engine_name: _Word | None = None
    engine_version: _Word | None = None
    image_url: _Word | None = None
    command: Annotated[str, pydantic.Field(pattern=r"^[^\x00-\x1f]{1,1024}$")] | None = None

    @pydantic.field_validator("command")
    @classmethod
    def _refuse_secrets(cls, command: str | None) -> str | None:
        for name in mask_words((command or "").split())[1]:  # the names of what it would hide
            _refuse_secret(name)
        return command


_IMAGES = [{"engine_name", "engine_version"}, {"image_url"}, {"image_url", "command"}]


class Resources(_Table):
    """The nodes. gpus_per_node is not sent to the service: the flavor decides."""

    flavor_id: _Word | None = None
    pool_id: _Word | None = None
    node_count: int = pydantic.Field(default=1, ge=1, le=10_000)
    gpus_per_node: int = pydantic.Field(default=1, ge=0, le=64)


class Retries(_Table):
    """Restarts after a fault, with the service's names, from its documents and its SDK."""

    faults: _Count | None = pydantic.Field(default=None, serialization_alias="fault-tolerance/job-retry-num")
    pods: _Count | None = pydantic.Field(default=None, serialization_alias="fault-tolerance/pod-retry-num")
    unconditional: bool | None = pydantic.Field(
        default=None, serialization_alias="fault-tolerance/job-unconditional-retry"
    )
    hang: bool | None = pydantic.Field(default=None, serialization_alias="fault-tolerance/hang-retry")
    hccl_op: bool | None = pydantic.Field(default=None, serialization_alias="fault-tolerance/hccl_op_retry")


class AutoStop(_Table):
    """The limit of a job's duration."""

    hours: int | None = pydantic.Field(default=None, ge=1)


class Schedule(_Table):
    """The order of jobs in a dedicated pool, and which of its nodes a job gets (SDK: RequiredAffinity)."""

    priority: int | None = pydantic.Field(default=None, ge=1, le=3)
    preemptible: bool | None = None
    affinity_type: Literal["cabinet", "hyperinstance", "networkTopology"] | None = None
    affinity_group_size: int | None = pydantic.Field(default=None, ge=1)


class Notification(_Table):
    """Messages about a job, to a topic of the vendor's Simple Message Notification."""

    topic_urn: _Word | None = None
    events: list[_Event] | None = pydantic.Field(default=None, min_length=1)


class PlatformTable(_Table):
    """The values of a file of launch/platforms/templates, by the names in it.

    code, inputs, outputs: replace those of the job
    mounts: folder on a node -> URL
    """

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Word | int | bool]
    code: _Url | None = None
    inputs: dict[_Channel, _Place] = pydantic.Field({})
    outputs: dict[_Channel, _Place] = pydantic.Field({})
    mounts: dict[_Word, _Word] = pydantic.Field({})


class JobConfig(_Table):
    """A job, as a checked job.toml describes it. A run writes below its own prefix of each output.

    job: the boot file's path in the code, from the command line
    """

    job: str
    name: _Name
    description: str = pydantic.Field(default="", max_length=256)
    code: _Url | None = None
    region: str = pydantic.Field(default="", pattern=r"^[a-z0-9-]{1,64}$")
    endpoint: str = ""
    project_id: _Name | None = None
    workspace_id: _Name | None = None
    log_url: _Url | None = None
    prefetch_to_local: bool = True
    image: Image = Image()
    resources: Resources = Resources()
    volumes: dict[_Folder, _Storage] = pydantic.Field({})
    inputs: dict[_Channel, _Place] = pydantic.Field({})
    outputs: dict[_Channel, _Place] = pydantic.Field({})
    parameters: dict[_Argument, _Text] = pydantic.Field({})
    environment: dict[_Variable, _VariableText] = pydantic.Field({UNBUFFERED: "1"})
    retries: Retries = Retries()
    auto_stop: AutoStop = AutoStop()
    schedule: Schedule = Schedule()
    notification: Notification = Notification()
    platform: dict[_Other, PlatformTable] = pydantic.Field({})

    @pydantic.field_validator("parameters", "environment", mode="before")
    @classmethod
    def _refuse_secrets(cls, table: Any) -> Any:
        if not isinstance(table, dict):  # pydantic refuses it after this function
            return table
        for name, value in table.items():
            if secret_scan.looks_secret(name, str(value)):
                _refuse_secret(name)
        return table

    @pydantic.field_validator("environment")
    @classmethod
    def _set_unbuffered(cls, table: dict[str, str]) -> dict[str, str]:
        return {UNBUFFERED: "1"} | table

    @property
    def snapshot(self) -> str:
        """Return the last component of the code's URL, which is the folder's name on a node."""
        return (self.code or "").rpartition("/")[2]


def load(path: str, job: str, platform: str = "modelarts") -> JobConfig:
    """Read and check job.toml for one of PLATFORMS. job: its boot file in the code. Raises BadInput."""
    job = _check_job(job)
    try:
        content = read(path)
        if "job" in content:
            raise BadInput("job: unknown key: JOB is an argument of the command")
        config = JobConfig.model_validate(content | {"job": job})
        name: Any = TABLES.get(platform, platform)
        if platform != "modelarts" and name not in config.platform:
            raise BadInput(f"[platform.{name}] is missing (launch/job.example.toml shows it)")
        _check_names(config, config.platform.get(name, PlatformTable.model_validate({})))
        if platform == "modelarts":
            _check_modelarts(config)
        return config
    except pydantic.ValidationError as error:
        # without pydantic's own text, which may show values
        raise BadInput(f"{path}: {_explain(error)}") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error.__cause__


def _check_names(config: JobConfig, table: PlatformTable) -> None:
    """Raise BadInput if two tables give the same argument, or two outputs have the same URL. table: that of
    the platform, whose inputs and outputs replace those of the job."""
    outputs = config.outputs | table.outputs
    # the job would get the argument twice, and - and _ are the same there
    words = [*(config.inputs | table.inputs), *outputs, *config.parameters]
    for name, count in Counter(name.replace("-", "_") for name in words).items():
        if count > 1:
            raise BadInput(f"{name} is given twice in [inputs], [outputs] and [parameters]")
    if len(set(outputs.values())) < len(outputs):
        raise BadInput("[outputs] has the same URL twice: every output needs its own")


def _check_modelarts(config: JobConfig) -> None:
    # what pydantic does not see: keys that depend on each other, and that other platforms do not need
    image = config.image
    resources = config.resources
    # the service copies the folder of the code as it is, so it must be one that pack has made
    if not _SNAPSHOT.fullmatch(config.snapshot):
        expected = "obs://bucket/prefix/name-abcdef012345, as `pack` names it"
        raise BadInput(f"code = {config.code!r} is not the URL of an uploaded snapshot: expected {expected}")
    if image.model_fields_set not in _IMAGES:
        given = ", ".join(sorted(image.model_fields_set))
        expected = ", ".join(sorted(_IMAGES[0]))
        raise BadInput(f"[image] has {given or 'nothing'}: expected {expected}, or image_url with a command")
    if not (resources.flavor_id or resources.pool_id):
        raise BadInput("[resources] has neither flavor_id nor pool_id")
    if config.schedule.model_fields_set and not resources.pool_id:
        raise BadInput("[schedule] needs a dedicated pool: [resources] has no pool_id")
    dependent = [name for name, value in config.retries if value and name != "faults"]
    if dependent and not config.retries.faults:
        raise BadInput(f"[retries] {', '.join(dependent)}: the service needs faults with it, such as 3")
    if len(config.notification.model_fields_set) == 1:
        raise BadInput("[notification] needs topic_urn and events")
    for name in config.environment.keys() & _INTERFACES:
        raise BadInput(f"[environment] {name}: ModelArts sets this variable: remove it")
    if len(config.environment) > _MOST_VARIABLES:
        counted = f"{len(config.environment)} variables, with {UNBUFFERED}"
        raise BadInput(f"[environment] has {counted}: a job of ModelArts takes at most {_MOST_VARIABLES}")
    check_volumes(config, (*config.inputs.values(), *config.outputs.values()))


def check_volumes(config: JobConfig, places: Iterable[str]) -> None:
    """Raise BadInput for a folder that is not in a volume of ModelArts."""
    for place in places:  # or a URL, which the service copies
        in_volume = any(f"{place}/".startswith(f"{folder}/") for folder in config.volumes)
        if place.startswith("/") and not in_volume:
            raise BadInput(f"{place} is not in a folder of [volumes], and the nodes lose all others")


def _explain(error: Any) -> str:
    """Return one line for the first mistake of a ValidationError: table, key, reason."""
    first = error.errors(include_url=False)[0]  # the user mends one after the other
    parts = [str(part) for part in first["loc"] if part != "[key]"]
    # [platform.NAME] key, or [table] key
    *tables, key = parts[: 3 if parts[0] == "platform" else 2]
    place = f"[{'.'.join(tables)}] {key}" if tables else key
    if first["type"] == "missing":
        return f"{place} is missing (launch/job.example.toml shows it)"
    if first["type"] == "extra_forbidden":
        table: Any = JobConfig.model_fields[tables[0]].annotation if tables else JobConfig
        keys = [name for name in table.model_fields if name != "job"]  # which the file does not have
        return f"{place}: unknown key: expected one of {', '.join(keys)}"
    return f"{place}: {first.get('ctx', {}).get('error', first['msg'])}"
