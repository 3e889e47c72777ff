"""Parse an s3:// or obs:// URL, find the endpoint of its store in the environment, and check the keys of its
objects as paths of this node."""

import functools
import hashlib
import ipaddress
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import PARTIAL, explained
from common.object_store.errors import of_the_disk

SCRATCH = "BOOTFILE_SCRATCH"
_CACHE = "/cache"  # ModelArts' local disk
_USE_HTTPS = "S3_USE_HTTPS"
_USE_VARIABLES = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
_LABEL = "[a-z0-9_-]{1,63}"
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_URL = re.compile(r"(s3|obs)://([^/]*)/?(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")


class Location(NamedTuple):
    """The parts of a URL. scheme: "s3" or "obs"; prefix: without slashes at its ends, may be empty."""

    scheme: str
    bucket: str
    prefix: str

    def full(self, key: str) -> str:
        """Return the key in the bucket for a key below the prefix."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def url(self, key: str = "") -> str:
        """Return the URL of a key below the prefix, safe to print."""
        return printable("/".join(filter(None, [f"{self.scheme}://{self.bucket}", self.prefix, key])))


def parse(url: str) -> Location:
    """Parse s3://bucket[/prefix] or obs://bucket[/prefix]. Raises BadInput; it never shows a password."""
    match = _URL.fullmatch(url)
    if not match:
        raise BadInput(
            f"{printable(url.rpartition('@')[2])} is not s3://bucket/prefix or obs://bucket/prefix"
        )
    scheme, bucket, prefix = match.groups()
    if "@" in bucket or ("@" in url and not _BUCKET.fullmatch(bucket)):  # a password may hold a slash
        raise BadInput(f"a {scheme}:// URL holds a user name or a password: {_USE_VARIABLES}")
    if not _BUCKET.fullmatch(bucket):
        raise BadInput(
            f"{printable(url)}: {printable(bucket)!r} is not a bucket name (3 to 63 of a-z, 0-9 and -; a "
            "name with dots has no certificate)"
        )
    # keys become paths on the node: none may leave its folder
    prefix = prefix.strip("/")
    if (prefix and {"", ".", ".."} & set(prefix.split("/"))) or not prefix.isprintable():
        raise BadInput(f"{printable(url)}: the prefix holds an empty part, . or .., or a control character")
    return Location(scheme, bucket, prefix)


class Endpoint(NamedTuple):
    """A server. url: None for Amazon's. style: "virtual" (bucket.host) or "path" (host/bucket)."""

    url: str | None
    region: str | None
    style: str

    @property
    def name(self) -> str:
        """The name of the server for messages."""
        return urlsplit(self.url).netloc if self.url else "the S3 endpoint"


def find_endpoint(scheme: str, bucket: str = "") -> Endpoint:
    """Return the server of s3:// or obs:// URLs. bucket: to choose the style of its address.

    It is the first of S3_ENDPOINT (as ModelArts sets it), AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL. Without
    these, obs:// is OBS in OBS_REGION or AWS_DEFAULT_REGION, and s3:// is Amazon's. S3_USE_HTTPS=0 allows
    http to other machines, with a warning, and makes it the default of an address. Raises BadInput.
    """
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
    if scheme == "obs":
        region = os.environ.get("OBS_REGION") or region
    names = ("S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    if variable := next(filter(os.environ.get, names), None):
        url = _check_endpoint(variable, os.environ[variable])
    elif scheme != "obs":
        return Endpoint(None, region, "virtual")
    else:
        region = (region or "").lower()
        if not re.fullmatch("[a-z0-9-]+", region):
            raise BadInput(
                f"obs:// needs a region such as cn-north-4, not {printable(region)!r}: set OBS_REGION, or "
                "the endpoint in AWS_ENDPOINT_URL_S3"
            )
        url = f"https://obs.{region}.myhuaweicloud.com"
    host = urlsplit(url).hostname or ""
    # the address of OBS names its region, which the signature of a request needs
    match = re.fullmatch(r"obs\.([a-z0-9-]+)\.myhuaweicloud\.\w+", host)
    region = match[1] if match else region or "us-east-1"
    # the name of a private server often resolves, and that of a bucket on it does not
    in_path = _address(host) or (bucket and _resolves(host) and not _resolves(f"{bucket}.{host}"))
    return Endpoint(url, region, "path" if in_path else "virtual")


def _check_endpoint(name: str, text: str) -> str:
    """Return an endpoint as scheme://host[:port]. Raises BadInput; it never shows a password."""
    if "://" not in text:
        protocol = "http" if os.environ.get(_USE_HTTPS) == "0" else "https"
        text = f"{protocol}://{text}"
    if not is_server(text):
        raise BadInput(f"{name} is not the address of an object store: expected https://HOST[:PORT]")
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise BadInput(f"{name} holds a user name or a password: {_USE_VARIABLES}")
    url = f"{parts.scheme}://{parts.netloc}"
    check_encrypted(url)
    return url


def is_server(url: str) -> bool:
    """Return whether this is the address of a server, https://HOST[:PORT] or http://..., also with a user."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        # a path or a query would be lost: the requests would go to another address
        has_more = parts.path not in ("", "/") or parts.query or parts.fragment
        is_valid = parts.scheme in ("http", "https") and parts.port != 0 and not has_more
    except ValueError:  # a port that is not one, or brackets without an IPv6 address
        return False
    return is_valid and url.isprintable() and bool(_HOST.fullmatch(host) or _address(host))


@functools.cache  # one warning per process
def check_encrypted(url: str) -> None:
    """Raise BadInput if data and tokens would leave this machine unencrypted. S3_USE_HTTPS=0: only warn."""
    if not is_clear_text(url):
        return
    if os.environ.get(_USE_HTTPS) != "0":
        needed = f"https:// is needed for any other machine ({_USE_HTTPS}=0 allows http)"
        raise BadInput(f"the endpoint {url} is not encrypted: {needed}")
    print(f"warning: {url} is not encrypted: others on the network can read data and tokens", file=sys.stderr)


def is_clear_text(url: str) -> bool:
    """Return whether data and session tokens leave this machine unencrypted."""
    parts = urlsplit(url)
    address = _address(parts.hostname or "")
    return parts.scheme == "http" and not (address and address.is_loopback)


def _resolves(host: str) -> bool:
    """Return whether the name of a host has an address."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address of localhost or of a host that is written as one, else None."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return None


def check_keys(keys: Iterable[str], url: str) -> None:
    """Raise BadInput, before a transfer begins, if a key is not a valid path of a file below a folder, or if
    two keys exclude each other: `a` and `a/b`. A key of another program could lead outside of the folder."""
    keys = set(keys)
    folders: set[str] = set()
    for key in keys:
        parts = key.split("/")
        is_text = key.isprintable() and "\\" not in key
        is_long = not is_text or len(os.fsencode(key)) > 3000 or max(map(len, map(os.fsencode, parts))) > 255
        if not is_text or is_long or {"", ".", ".."} & set(parts) or parts[-1].startswith(PARTIAL):
            raise BadInput(
                f"{url}: key {printable(key):.300} is not a valid path of a file: expected names of at most "
                "255 bytes without a backslash or control character, not ., .. or that of an unfinished "
                "download"
            )
        # the folders that this key needs: no other key may be a file of that name
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    for key in keys & folders:
        raise BadInput(f"{url}: key {printable(key)} is both a file and a folder of other keys")


def make_path(folder: str, key: str) -> str:
    """Make the parent folders of a key's file below a folder, and return its path. Check the key before.
    Raises BadInput if a file has the name of a parent folder, or if a link leads out of the folder."""
    path = os.path.join(folder, key)
    inside = os.path.realpath(folder)
    parent = os.path.dirname(path)
    # before the folders are made: one of them may be a link that another program has put there
    if os.path.commonpath([inside, os.path.realpath(parent)]) != inside:
        raise BadInput(f"key {printable(key)}: a link leads out of {folder}")
    try:
        os.makedirs(parent, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(f"key {printable(key)}: its folder is a file ({error.filename})") from error
    except OSError as error:
        raise of_the_disk(error, path) from error
    return path


def scratch_folder(kind: str, url: str) -> str:
    """Make this user's private folder for a URL on the node's scratch disk, and return its absolute path. A
    restart on the same node finds the same folder. It is below BOOTFILE_SCRATCH, else below /cache if that is
    writable, else below the system's temporary folder. kind: "staged" or "outputs". Raises BadInput."""
    location = parse(url)
    where = find_endpoint(location.scheme)
    # from the server and the URL: the same bucket name at two servers gives two folders
    digest = hashlib.sha256("\0".join([where.url or "", *location]).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", f"{location.bucket}-{location.prefix}".rstrip("-"))[-40:]
    has_cache = os.path.isdir(_CACHE) and os.access(_CACHE, os.W_OK | os.X_OK)
    default = _CACHE if has_cache else tempfile.gettempdir()
    place = os.path.expanduser(os.environ.get(SCRATCH, "")) or default
    of_user = os.path.join(os.path.abspath(place), f"bootfile-{os.getuid()}")
    path = os.path.join(of_user, kind, f"{name}-{digest}")
    with explained(f"cannot create scratch folder {path} (set {SCRATCH} to another place)"):
        os.makedirs(of_user, mode=0o700, exist_ok=True)
        if os.path.islink(of_user) or os.lstat(of_user).st_uid != os.getuid():
            raise BadInput(f"{of_user} belongs to another user: set {SCRATCH} to a folder of your own")
        os.makedirs(path, mode=0o700, exist_ok=True)
    return path
