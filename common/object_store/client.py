"""Make boto3's client of a store."""

import os
from typing import Any

from common.ground.exits import import_optional
from common.object_store.location import Endpoint, check_encrypted

_CONNECT_TIMEOUT = 10.0  # seconds


def connect(scheme: str, where: Endpoint, connections: int, read_timeout: float, attempts: int) -> Any:
    """Return boto3's S3 client. Raises BadInput if boto3 is not installed, and any exception of boto3.

    The credentials are those that boto3 reads (AWS_*, its files, roles), and OBS_ACCESS_KEY_ID,
    OBS_SECRET_ACCESS_KEY and OBS_SECURITY_TOKEN.

    scheme: "s3" or "obs".
    where: the server.
    connections: the size of the connection pool.
    read_timeout: seconds without a byte.
    attempts: the number of attempts of each request.
    """
    boto3 = import_optional("boto3", "object stores need boto3")
    from botocore.config import Config
    from botocore.utils import conditionally_calculate_md5

    keys = {}
    given = os.environ.get("OBS_ACCESS_KEY_ID")
    if given and (scheme == "obs" or not os.environ.get("AWS_ACCESS_KEY_ID")):
        keys = {
            "aws_access_key_id": given,
            "aws_secret_access_key": os.environ.get("OBS_SECRET_ACCESS_KEY"),
            "aws_session_token": os.environ.get("OBS_SECURITY_TOKEN") or None,
        }
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=where.url,
        region_name=where.region,
        config=Config(
            connect_timeout=_CONNECT_TIMEOUT,
            read_timeout=read_timeout,
            retries={"mode": "standard", "total_max_attempts": attempts},
            max_pool_connections=connections,
            s3={"addressing_style": where.style},
            request_checksum_calculation="when_required",
        ),
        **keys,
    )
    # Stores other than Amazon's do not know the newer checksums, but check an MD5.
    client.meta.events.register("before-call.s3.GetObject", _ask_for_no_checksum)
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register(f"before-call.s3.{operation}", conditionally_calculate_md5)
    check_encrypted(client.meta.endpoint_url)  # boto3's files may also name an endpoint
    return client


def _ask_for_no_checksum(params: dict, **_: object) -> None:
    # not with response_checksum_validation: s3transfer then takes the size from the store's Content-Range
    params["headers"].pop("x-amz-checksum-mode", None)
