"""An object store for tests: moto's HTTP server, a process on a free port of 127.0.0.1."""

import functools
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import environment, free_port, wait_for_port

CREDENTIALS = {  # moto accepts all
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "NO_PROXY": "127.0.0.1",
}
_SERVER = """
import ctypes, os, signal, sys
parent = int(sys.argv.pop(1))
if sys.platform == "linux":  # it ends with the test, even if that is killed
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
from moto.server import main
main(sys.argv[1:])
"""


class ObjectStoreServer:
    """A server that runs until close(), or until the end of the `with` block.

    environment: the variables that a client needs, with credentials. tls: the folder of the files server.pem
    (key and certificates) and ca.pem of a server with https, as MinIO with a certificate of one's own.
    """

    def __init__(self, *buckets: str, tls: Path | None = None):
        self.port = free_port()
        words = [sys.executable, "-c", _SERVER, str(os.getpid()), "-H", "127.0.0.1", "-p", str(self.port)]
        if tls:
            words += ["-s", "-c", str(tls / "server.pem"), "-k", str(tls / "server.pem")]
        self._trusted = str(tls / "ca.pem") if tls else None
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, env=environment(**CREDENTIALS), **quiet)
        url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.environment = CREDENTIALS | {"AWS_ENDPOINT_URL_S3": url}
        wait_for_port(self.port, self.process)
        for bucket in buckets:
            self.create(bucket)

    @functools.cache  # noqa: B019  a client takes 50 ms; threads may share it
    def client(self):
        """Return a boto3 client, to read and to damage objects."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL_S3"],
            verify=self._trusted,
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )

    def create(self, bucket: str) -> None:
        self.client().create_bucket(Bucket=bucket)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
