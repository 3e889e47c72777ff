"""boto3's client as S3, OBS and a server on this machine need it: where, by whom, how long to wait."""

import functools
import ipaddress
import os
import re
import sys
from typing import NamedTuple
from urllib.parse import urlsplit

from common.exits import BadInput, import_optional

CONNECT_TIMEOUT = 10.0  # seconds
_HOST = re.compile(r"[a-z0-9._:-]+")
_USE_HTTPS = "S3_USE_HTTPS"
_NEEDS_HTTPS = f"https:// is needed for any other machine ({_USE_HTTPS}=0 allows http)"


class Endpoint(NamedTuple):
    """url: None for Amazon's own. style: "virtual" (bucket.host) or "path" (host/bucket)."""

    url: str | None
    region: str | None
    style: str

    @property
    def shown(self) -> str:
        return urlsplit(self.url).netloc if self.url else "the S3 endpoint"


def endpoint(scheme: str) -> Endpoint:
    """Where s3:// or obs:// is, by the environment: S3_ENDPOINT (as ModelArts sets it), AWS_ENDPOINT_URL_S3,
    AWS_ENDPOINT_URL, or OBS in OBS_REGION or AWS_DEFAULT_REGION. Raises BadInput.

    Certificates are always checked. S3_USE_HTTPS=0 allows http to other machines, and means it for an address
    without a protocol: connect() then prints a warning.
    """
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
    if scheme == "obs":
        region = os.environ.get("OBS_REGION") or region
    for name in ("S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if os.environ.get(name):
            url = _checked(name, os.environ[name])
            break
    else:
        if scheme != "obs":
            return Endpoint(None, region, "virtual")
        if not region:
            raise BadInput(
                "obs:// needs to know where: set OBS_REGION (cn-north-4, ...), or the endpoint in "
                "AWS_ENDPOINT_URL_S3"
            )
        url = _checked("OBS_REGION", f"https://obs.{region}.myhuaweicloud.com")
    host = urlsplit(url).hostname
    if match := re.fullmatch(r"obs\.([a-z0-9-]+)\.myhuaweicloud\.\w+", host):
        region = match[1]
    return Endpoint(url, region or "us-east-1", "path" if _is_bare(host) else "virtual")


def _checked(name: str, text: str) -> str:
    """The endpoint as scheme://host[:port]. Raises BadInput, without a password that stands in it."""
    if "://" not in text:
        text = f"{'http' if os.environ.get(_USE_HTTPS) == '0' else 'https'}://{text}"
    try:
        parts = urlsplit(text)
        fine = (
            parts.scheme in ("http", "https")
            and _HOST.fullmatch(parts.hostname or "")
            and (parts.port is None or parts.port)
        )
    except ValueError:
        fine = False
    if not fine:
        raise BadInput(f"{name} is no address of an object store: https://HOST[:PORT] is expected")
    if "@" in parts.netloc:
        raise BadInput(f"{name} holds a user name or a password: credentials have variables of their own")
    url = f"{parts.scheme}://{parts.netloc}"
    if _in_clear_text(url) and os.environ.get(_USE_HTTPS) != "0":
        raise BadInput(f"{name}={url} is not encrypted: {_NEEDS_HTTPS}")
    return url


def _in_clear_text(url: str) -> bool:
    """Whether data and session tokens leave this machine without encryption."""
    parts = urlsplit(url)
    try:
        local = parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        local = False
    return parts.scheme == "http" and not local


def _is_bare(host: str) -> bool:
    """Whether no bucket's name can stand before it."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return host == "localhost"


def connect(scheme: str, where: Endpoint, connections: int, read_timeout: float):
    """A client. Credentials: boto3's own ways (AWS_*, its files, roles), and OBS_ACCESS_KEY_ID,
    OBS_SECRET_ACCESS_KEY and OBS_SECURITY_TOKEN. Raises BadInput where boto3 is not installed, and what boto3
    raises.

    It makes one attempt at each request, so that waits have one bound: object_store_requests tries again.

    notes: with "adaptive" retries, whose limiter all threads share, 70 requests of 16 threads took 67 s and
    failed where bursts of 503 struck 60 % of them; "standard" and pauses of our own took 7 s (2 cores, moto).
    """
    boto3 = import_optional("boto3", "object stores need boto3")
    from botocore.config import Config

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
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=read_timeout,
            retries={"mode": "standard", "total_max_attempts": 1},
            max_pool_connections=connections,
            s3={"addressing_style": where.style},
            # stores beside Amazon's do not know the newer checksums
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
        **keys,
    )
    if _in_clear_text(client.meta.endpoint_url):  # boto3's files may name an endpoint, too
        if os.environ.get(_USE_HTTPS) != "0":
            raise BadInput(f"the endpoint {client.meta.endpoint_url} is not encrypted: {_NEEDS_HTTPS}")
        _warn_of_clear_text(client.meta.endpoint_url)
    return client


@functools.cache
def _warn_of_clear_text(url: str) -> None:
    """Once per process."""
    print(f"warning: {url} is not encrypted: others on the network can read data and tokens", file=sys.stderr)
