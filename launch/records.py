"""Read and write records of the jobs that `submit` created, so that other verbs need no id.

    {"format": 1, "id": ..., "name": ..., "run": ..., "job": ..., "created": UTC time, "endpoint": ...,
     "project_id": ..., "nodes": ..., "code": URL, "outputs": {name: URL}, "log_url": URL}

id is null if it is not known whether the service accepted the job. A record holds no secret.
"""

import json
import os
import re
from typing import Any

from common.exits import BadInput
from common.files import ROOT, write_atomic

FOLDER = os.environ.get("BOOTFILE_JOBS") or os.path.join(ROOT, "output_dir", "jobs")
_ID = re.compile("[A-Za-z0-9-]{1,64}")


def write(path: str, record: dict[str, Any]) -> None:
    """Write a record. Raises BadInput."""
    write_private(path, {"format": 1} | record)


def write_private(path: str, content: dict[str, Any]) -> None:
    """Write a JSON file that only its owner may read, and the folders above it. Raises BadInput."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_atomic(path, json.dumps(content, indent=2) + "\n", mode=0o600)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error


def read(path: str) -> dict[str, Any]:
    """Read and check a record. Raises BadInput."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not a record of a job: {error}") from error
    if not isinstance(record, dict) or record.get("format") != 1:
        raise BadInput(f"{path} is not a record of a job that `submit` wrote")
    outputs = record.setdefault("outputs", {})
    for field, valid in (
        ("id", record.get("id") is None or is_id(record["id"])),
        ("endpoint", isinstance(record.get("endpoint"), str)),
        ("project_id", isinstance(record.get("project_id"), str)),
        ("outputs", isinstance(outputs, dict) and all(isinstance(url, str) for url in outputs.values())),
    ):
        if not valid:
            raise BadInput(f"{path} is not a valid record of a job: its {field} is missing or malformed")
    return record


def read_all() -> list[dict[str, Any]]:
    """Return all valid records in FOLDER."""
    found = []
    for name in sorted(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []:
        if name.endswith(".json") and not name.startswith("."):
            try:
                found.append(read(os.path.join(FOLDER, name)))
            except BadInput:
                continue
    return found


def find(text: str) -> dict[str, Any] | None:
    """Return the record for a path, a name in FOLDER or a job's id; None if it does not exist. Raises
    BadInput."""
    for path in (text, os.path.join(FOLDER, text), os.path.join(FOLDER, f"{text}.json")):
        if os.path.isfile(path):
            record = read(path)
            if not record.get("id"):
                raise BadInput(
                    f"{path}: it is not known whether job {record.get('name')} was created: see the console"
                )
            return record
    return next((record for record in read_all() if record.get("id") == text), None)


def is_id(value: Any) -> bool:
    """Return whether a value has the form of a job's id."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None
