"""Read and write records of the jobs that `submit` created, so that other verbs need no id.

    {"format": 1, "id": ..., "name": ..., "run": ..., "job": ..., "created": UTC time, "endpoint": ...,
     "project_id": ..., "nodes": ..., "code": URL, "outputs": {name: URL}, "log_url": URL}

id is null if it is not known whether the service accepted the job. A record holds no secret.
"""

import contextlib
import glob
import json
import os
from typing import TYPE_CHECKING, Any, Literal

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import explained, write_atomic
from common.ground.files import ROOT

if TYPE_CHECKING:
    import pydantic
else:
    pydantic = import_optional("pydantic", "records of jobs are checked with pydantic")

FOLDER = os.path.expanduser(os.environ.get("BOOTFILE_JOBS", "")) or os.path.join(ROOT, "output_dir", "jobs")
ID = r"^[A-Za-z0-9-]{1,64}$"  # the id of a job


class _Record(pydantic.BaseModel):
    """The keys of a record that other verbs need; it may have more."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True)
    format: Literal[1]
    id: str | None = pydantic.Field(pattern=ID)
    endpoint: str
    project_id: str
    outputs: dict[str, str] = pydantic.Field({})


def write(path: str, record: dict[str, Any]) -> None:
    """Write a record that only its owner may read, and the folders above it. Raises BadInput."""
    with explained(f"{path} cannot be written"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        write_atomic(path, json.dumps({"format": 1} | record, indent=2) + "\n", mode=0o600)


def read(path: str) -> dict[str, Any]:
    """Read and check a record. Raises BadInput."""
    try:
        with explained(path), open(path, "rb") as file:
            return _Record.model_validate_json(file.read()).model_dump()
    except pydantic.ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        reason = f"{'.'.join(map(str, wrong['loc']))} {wrong['msg']}"
        raise BadInput(f"{path} is not a record of a job that `submit` wrote: {reason}") from None


def read_all() -> list[dict[str, Any]]:
    """Return all valid records in FOLDER."""
    records = []
    for path in sorted(glob.glob(os.path.join(glob.escape(FOLDER), "*.json"))):
        with contextlib.suppress(BadInput):  # not a record, or one of another version
            records.append(read(path))
    return records


def find(text: str) -> dict[str, Any] | None:
    """Return the record for a path, a name in FOLDER or a job's id; None without one. Raises BadInput."""
    paths = (text, os.path.join(FOLDER, text), os.path.join(FOLDER, f"{text}.json"))
    path = next(filter(os.path.isfile, paths), "")
    if not path:
        return next((record for record in read_all() if record["id"] == text), None)
    record = read(path)
    if not record["id"]:
        job = f"job {record.get('name')} was created: see the console"
        raise BadInput(f"{path}: it is not known whether {job}")
    return record
