"""A small file for every job that was sent, so that other verbs need no id: where it runs, and where its
outputs and logs are. No secret is in it.

    {"format": 1, "id": ..., "name": ..., "run": ..., "job": ..., "created": UTC time, "endpoint": ...,
     "project_id": ..., "nodes": ..., "code": URL, "outputs": {name: URL}, "log_url": URL}

id is null while it is not known whether the service took the job.
"""

import json
import os
import re
import sys
from typing import Any

from common.exits import BadInput
from common.files import ROOT, write_text
from launch.platforms import service as modelarts

FOLDER = os.environ.get("BOOTFILE_JOBS") or os.path.join(ROOT, "output_dir", "jobs")
HELP = "the job's id, or its record: a file, or the name of one in output_dir/jobs/ (or in $BOOTFILE_JOBS)"


def write(path: str, record: dict[str, Any]) -> None:
    """Raises BadInput."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_text(path, json.dumps({"format": 1} | record, indent=2) + "\n", mode=0o600)
    except OSError as error:
        raise BadInput(f"the job's record {path} cannot be written: {error.strerror}") from error


def read(path: str) -> dict[str, Any]:
    """Raises BadInput."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is no record of a job: {error}") from error
    if not isinstance(record, dict) or record.get("format") != 1 or "endpoint" not in record:
        raise BadInput(f"{path} is no record of a job that `submit` has written")
    outputs = record.get("outputs", {})
    for field, valid in (
        ("id", record.get("id") is None or _is_id(record["id"])),
        ("endpoint", isinstance(record["endpoint"], str)),
        ("project_id", isinstance(record.get("project_id"), str)),
        ("outputs", isinstance(outputs, dict) and all(isinstance(url, str) for url in outputs.values())),
    ):
        if not valid:
            raise BadInput(f"{path} is not a valid record of a job: its {field} is missing or malformed")
    return record


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9-]{1,64}", value) is not None


def all_records() -> list[dict[str, Any]]:
    """Those in FOLDER that can be read."""
    found = []
    for name in sorted(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []:
        if name.endswith(".json") and not name.startswith("."):
            try:
                found.append(read(os.path.join(FOLDER, name)))
            except BadInput:
                continue
    return found


def find(text: str) -> dict[str, Any]:
    """The record that a user means: a file, the name of one in FOLDER, or an id; an id without a record
    takes the place and the project from the environment. Raises BadInput."""
    if record := known(text):
        return record
    if not _is_id(text):
        raise BadInput(f"{text} is no file, and no id of a job")
    for what, names in (
        ("region", ("MODELARTS_REGION", "MODELARTS_ENDPOINT")),
        ("project", ("HUAWEICLOUD_SDK_PROJECT_ID",)),
    ):
        if not any(os.environ.get(name) for name in names):
            raise BadInput(
                f"job {text} has no record in {FOLDER}, and no {what} is set: set the variable {names[0]}"
            )
    return {"id": text, "endpoint": modelarts.endpoint(), "project_id": modelarts.project()}


def known(text: str) -> dict[str, Any] | None:
    """The record of a job that was sent from here; None if there is none. Raises BadInput."""
    for path in (text, os.path.join(FOLDER, text), os.path.join(FOLDER, f"{text}.json")):
        if os.path.isfile(path):
            record = read(path)
            if not record.get("id"):
                raise BadInput(
                    f"{path}: it is not known whether the service took job {record.get('name')}: look for it "
                    "in the console"
                )
            return record
    return next((record for record in all_records() if record.get("id") == text), None)


def service(record: dict[str, Any]) -> modelarts.ModelArts:
    """The service that the job runs on. Raises BadInput."""
    place = modelarts.endpoint(url=record["endpoint"])
    if not modelarts.is_expected(place):
        print(
            f"warning: the record of job {record['id']} names {place}, which is not a host of "
            f"{modelarts.DOMAIN}: it gets requests that your keys have signed, and the session token",
            file=sys.stderr,
            flush=True,
        )
    return modelarts.connect(place, record["project_id"])
