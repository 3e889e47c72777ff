"""Parse the URL of a shared cache (--cache). The URL never contains the password.

    redis://user@cache.example:6379                    a server, or the address of a Cluster
    rediss://user@a:6379,b:6379,c:6379?ca=/etc/ca.pem  nodes of a Cluster, over TLS
    redis://cache.example/3/team                       database 3; keys begin with "team"
    redis://cache.example?form=encoded                 the files' bytes instead of small pixels

A few nodes of a Cluster are enough; they list the others. The scheme and the user may be repeated with every
host. CA certificates come from ?ca=FILE, BOOTFILE_CACHE_CA or the system. A server's certificate must be for
its host name.
"""

import os
import re
import urllib.parse
from typing import NamedTuple

from common.exits import BadInput
from datasets.stores.forms import SIZED

PASSWORD, PASSWORD_FILE, CA = "BOOTFILE_CACHE_PASSWORD", "BOOTFILE_CACHE_PASSWORD_FILE", "BOOTFILE_CACHE_CA"
_PORT = 6379


class Address(NamedTuple):
    """The address of a shared cache.

    hosts: (name, port) of a server, or of several nodes of a Cluster.
    user: None for the server's default user.
    tls: whether the connections use TLS.
    ca: file of CA certificates, None for the system's.
    database: number of the database.
    prefix: the first part of all keys.
    form: of the samples.
    or_default: if the server refuses the user, try the user "default" with the same password.
    """

    hosts: tuple[tuple[str, int], ...]
    user: str | None = None
    tls: bool = False
    ca: str | None = None
    database: int = 0
    prefix: str = "bootfile"
    form: str = "decoded"
    or_default: bool = False

    def __str__(self) -> str:
        return ",".join(named(*host) for host in self.hosts)


def named(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(text: str) -> Address:
    """Return the Address of a URL. Raises BadInput; its message never contains a possible password."""
    if re.search(r"//[^@/]*:[^@]*@", text):
        raise BadInput(
            f"--cache: remove the password from the URL, which every user of the machine can read; change "
            f"it, and set {PASSWORD}, or {PASSWORD_FILE} to the path of a file with it"
        )
    scheme, _, rest = text.partition("://")
    if scheme not in ("redis", "rediss") or not rest:
        raise BadInput("--cache is not redis://host[:port] or rediss://host[:port]")
    rest = rest.replace(f",{scheme}://", ",")
    user, hosts = _user(rest), []
    *first, last = rest.split(",")
    host = re.split("[/?]", last)[0]
    tail = last[len(host) :]
    for number, item in enumerate((*first, host), start=1):
        if "@" in item and _user(item) != user:
            raise BadInput("--cache has several users, expected one")
        try:
            part = urllib.parse.urlsplit(f"//{item.rpartition('@')[2]}")
            found, port = part.hostname, part.port or _PORT
        except ValueError:
            found = None
        if not found or part.path or part.query:
            raise BadInput(f"--cache: number {number} of its hosts is not host[:port]")
        hosts.append((found, port))
    where = f"--cache {','.join(named(*each) for each in hosts)}"
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(tail).query, keep_blank_values=True))
    form = query.get("form", "decoded")
    if query.keys() - {"ca", "form"} or form not in SIZED:
        wrong = [key for key in re.findall(r"[?&]([a-z_]+)=[^&]", tail) if key != "ca"]
        raise BadInput(
            f"{where}: only ca=FILE and form={'|'.join(SIZED)} are valid after the question mark"
            + (f", not this value of {', '.join(wrong)}=" if wrong else "")
        )
    ca = query.get("ca") or os.environ.get(CA)
    if ca and not os.path.isfile(ca):
        raise BadInput(f"--cache: the file of certificates {ca} does not exist")
    folders = [each for each in urllib.parse.urlsplit(tail).path.split("/") if each]
    database = int(folders.pop(0)) if folders and re.fullmatch("[0-9]{1,9}", folders[0]) else 0
    prefix = folders.pop(0) if folders else "bootfile"
    if folders or not re.fullmatch(r"[\w.:-]+", prefix):
        raise BadInput(f"{where}: only [/database][/prefix] is valid after the hosts")
    return Address(tuple(hosts), user, scheme == "rediss", ca, database, prefix, form)


def _user(item: str) -> str | None:
    user, found, _ = item.split(",")[0].rpartition("@")
    return urllib.parse.unquote(user) if found and user else None


def password() -> str | None:
    """Return the password from the file in BOOTFILE_CACHE_PASSWORD_FILE, or from BOOTFILE_CACHE_PASSWORD;
    None if neither is set. Raises BadInput if the file cannot be read."""
    if path := os.environ.get(PASSWORD_FILE):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().rstrip("\r\n") or None
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{PASSWORD_FILE}: cannot read {path}: {error}") from error
    return os.environ.get(PASSWORD) or None
