"""Parse the URL of a shared cache (--cache). The URL never contains the password.

    redis://user@cache.example:6379                a server, or one node of a Cluster
    rediss://user@cache.example?ca=/etc/ca.pem     the same, over TLS
    redis://cache.example/3/team                   database 3; keys begin with "team"
    redis://cache.example?form=encoded             the files' bytes instead of small pixels

CA certificates come from ?ca=FILE, BOOTFILE_CACHE_CA or the system. A server's certificate must be for its
host name.
"""

import os
import re
import urllib.parse
from typing import NamedTuple

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from datasets.stores.forms import SIZED

PASSWORD = "BOOTFILE_CACHE_PASSWORD"
PASSWORD_FILE = "BOOTFILE_CACHE_PASSWORD_FILE"
CA = "BOOTFILE_CACHE_CA"
_PORT = 6379


class Address(NamedTuple):
    """The address of a shared cache.

    user: None for the server's default user.
    tls: whether the connections use TLS.
    ca: file of CA certificates, None for the system's.
    database: number of the database.
    prefix: the first part of all keys.
    form: of the samples.
    """

    host: str
    port: int = _PORT
    user: str | None = None
    tls: bool = False
    ca: str | None = None
    database: int = 0
    prefix: str = "bootfile"
    form: str = "decoded"

    def __str__(self) -> str:
        if ":" in self.host:  # an IPv6 address
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Return the Address of a URL. Raises BadInput; its message never contains a possible password.

    Every rank calls it when it opens its stores, before it connects."""
    # first: no later message may show it
    if re.search(r"//[^@/]*:[^@]*@", text):
        raise BadInput(
            f"--cache: remove the password from the URL, which every user of the machine can read; change "
            f"it, and set {PASSWORD}, or {PASSWORD_FILE} to the path of a file with it"
        )
    try:
        parts = urllib.parse.urlsplit(text)
        host = parts.hostname
        port = parts.port or _PORT
    except ValueError:  # the port is not a number, or a bracket is missing
        host = None
    if "," in re.split("[/?]", text.partition("://")[2])[0]:
        raise BadInput("--cache names several hosts: name one; one node of a Cluster is enough")
    if not host or parts.scheme not in ("redis", "rediss"):
        raise BadInput("--cache is not redis://host[:port] or rediss://host[:port]")
    user = urllib.parse.unquote(parts.username) if parts.username else None
    address = Address(host, port, user, parts.scheme == "rediss")
    query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
    form = query.get("form", "decoded")
    if query.keys() - {"ca", "form"} or form not in SIZED:
        raise BadInput(f"--cache {address}: only ca=FILE and form={'|'.join(SIZED)} are valid after the ?")
    ca = query.get("ca") or os.environ.get(CA)
    if ca and not os.path.isfile(ca):
        raise BadInput(f"--cache: the file of certificates {ca} does not exist")
    # /database/prefix, both optional: a number is a database
    folders = [folder for folder in parts.path.split("/") if folder]
    database = int(folders.pop(0)) if folders and re.fullmatch("[0-9]{1,9}", folders[0]) else 0
    prefix = folders.pop(0) if folders else "bootfile"
    if folders or not re.fullmatch(r"[\w.:-]+", prefix):
        raise BadInput(f"--cache {address}: only [/database][/prefix] is valid after the host")
    return address._replace(ca=ca, database=database, prefix=prefix, form=form)


def password() -> str | None:
    """Return the password from the file in BOOTFILE_CACHE_PASSWORD_FILE, or from BOOTFILE_CACHE_PASSWORD;
    None if neither is set. Raises BadInput if the file cannot be read."""
    path = os.environ.get(PASSWORD_FILE)
    if path:
        failure = f"{PASSWORD_FILE}: cannot read {path}"
        with explained(failure, UnicodeDecodeError), open(os.path.expanduser(path), encoding="utf-8") as file:
            return file.read().rstrip("\r\n") or None
    return os.environ.get(PASSWORD) or None
