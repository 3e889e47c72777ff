"""The keys of job.toml, and what may stand at each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.object_store import store as object_store


@dataclass(frozen=True)
class Key:
    """form: what may stand there, as errors say it. accept(value) -> bool."""

    kind: type
    form: str
    accept: Callable[[Any], bool] = lambda value: True


def _words(longest: int) -> Callable[[Any], bool]:
    return lambda text: 0 < len(text) <= longest and text.isprintable()


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAMED = Key(str, "1 to 64 of A-Z a-z 0-9 _ -", NAME.fullmatch)
_TEXT = Key(str, "a text of 1 to 1024 printable characters", _words(1024))
_WORD = Key(str, "a text of 1 to 256 characters without spaces", re.compile(r"[!-~]{1,256}").fullmatch)
_COUNT = Key(int, "a whole number of at least 1", lambda number: number >= 1)
_NODES = Key(int, "a whole number of at least 1 and at most 10000", lambda number: 1 <= number <= 10_000)
_FLAG = Key(bool, "true or false")
_TABLE = Key(dict, "a table")
URL = Key(str, "obs://bucket/prefix or s3://bucket/prefix", object_store.is_url)
FOLDER = Key(str, "an absolute path", re.compile(r"/[!-~]*").fullmatch)


def _up_to(most: int, least: int = 1) -> Key:
    return Key(int, f"a whole number in {least}..{most}", lambda number: least <= number <= most)


TOP = {
    "name": _NAMED,
    "description": Key(str, "a text of at most 256 characters", lambda text: len(text) <= 256),
    "code": URL,
    "region": Key(str, "a region's id such as cn-north-4", re.compile(r"[a-z0-9-]{1,64}").fullmatch),
    "endpoint": Key(str, "https://host", re.compile(r"https?://[A-Za-z0-9.\[\]:-]+").fullmatch),
    "project_id": _NAMED,
    "workspace_id": _NAMED,
    "log_url": URL,
    "prefetch_to_local": _FLAG,
} | dict.fromkeys(
    (
        "image", "resources", "inputs", "outputs", "parameters", "environment", "retries", "auto_stop",
        "schedule", "platform",
    ),
    _TABLE,
)  # fmt: skip
ANNOTATIONS = {  # of [retries], as the service's documents and its SDK's JobMetadata name them
    "faults": "fault-tolerance/job-retry-num",
    "pods": "fault-tolerance/pod-retry-num",
    "unconditional": "fault-tolerance/job-unconditional-retry",
    "hang": "fault-tolerance/hang-retry",
}
_ANYWHERE = {"python": _WORD, "inputs": _TABLE, "outputs": _TABLE}
PLATFORMS = {
    "pai-dlc": {
        "workspace_id": _WORD, "image": _WORD, "code_dir": FOLDER, "ecs_spec": _WORD, "resource_id": _WORD,
        "cpu": _COUNT, "memory_gib": _COUNT, "mounts": _TABLE, **_ANYWHERE,
    },
    "sagemaker": {
        "image": _WORD, "role_arn": _WORD, "instance_type": _WORD, "volume_gb": _COUNT, "code": URL,
        **_ANYWHERE,
    },
    "kubeflow": {
        "image": _WORD, "code_dir": FOLDER, "namespace": _WORD, "volume_claim": _WORD, "volume_path": FOLDER,
        **_ANYWHERE,
    },
    "slurm": {
        "code_dir": FOLDER, "partition": _WORD, "account": _WORD, "cpus_per_task": _COUNT, "log_dir": FOLDER,
        **_ANYWHERE,
    },
}  # fmt: skip
REQUIRED = {
    "pai-dlc": ("workspace_id", "image", "code_dir"),
    "sagemaker": ("image", "role_arn", "instance_type"),
    "kubeflow": ("image", "code_dir"),
    "slurm": ("code_dir",),
}
TABLES = {
    "image": {"engine_name": _WORD, "engine_version": _WORD, "image_url": _WORD, "command": _TEXT},
    "resources": {
        "flavor_id": _WORD, "node_count": _NODES, "pool_id": _WORD, "gpus_per_node": _up_to(64, 0),
    },
    "retries": {"faults": _up_to(128), "pods": _up_to(128), "unconditional": _FLAG, "hang": _FLAG},
    "auto_stop": {"hours": _COUNT},
    "schedule": {"priority": _up_to(3), "preemptible": _FLAG},
    "platform": dict.fromkeys(PLATFORMS, _TABLE),
}  # fmt: skip
