"""Measure uploads and downloads of many small files, compared with a loop over boto3, in one run.

    python -m tests.benchmarks.object_store [--files 1000] [--rounds 5]

upload: `launch upload` of a folder, including listing, sha256 and manifest. stage: what a job does with
--data_url, including fsync. fetch: `launch fetch`. They are compared with boto3's upload_file and
download_file, one file after the other, without checks. All take turns in every round, and every round has
its own prefix and folder.

There are two servers. `loopback` is moto on this machine, one Python process that shares the processor with
the client. It shows the cost of the work; no client can be much faster than moto. `delay` is the same moto
behind a proxy, another Python process, that answers every request 20 ms later, as object stores do within a
region. It shows the cost of waiting. Neither shows the bandwidth or the throttling of a real store.
"""

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time

import boto3

from common.console.arguments import Parser
from datasets import staging
from launch.transfer import fetch, upload
from tests.benchmarks import rounds as machine
from tests.conftest import ROOT
from tests.support.object_store_server import ObjectStoreServer

_SIZE = 100_000  # bytes
_DELAY = 0.02  # seconds


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"{machine.describe()}, boto3 {boto3.__version__}; {args.files} files of {_SIZE} bytes")
    with (
        tempfile.TemporaryDirectory() as folder,
        ObjectStoreServer("bucket") as server,
        _proxy(server) as port,
    ):
        os.environ.update(server.environment)
        data = os.path.join(folder, "data")
        os.mkdir(data)
        for number in range(args.files):
            with open(os.path.join(data, f"{number:06}"), "wb") as file:
                file.write(os.urandom(_SIZE))
        for name, address in (("loopback", server.port), ("delay", port)):
            os.environ["AWS_ENDPOINT_URL_S3"] = f"http://127.0.0.1:{address}"
            _compare(name, data, folder, args.rounds)
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


def _compare(name: str, data: str, folder: str, rounds: int) -> None:
    client = boto3.client("s3")
    files = sorted(os.listdir(data))
    ways = {
        "boto3 upload_file": lambda place: _boto3(client.upload_file, data, files, f"{place}/boto3"),
        "upload": lambda place: upload.upload(data, f"s3://bucket/{place}/ours"),
        "boto3 download_file": lambda place: _boto3(
            client.download_file, _made(folder, place, "boto3"), files, f"{place}/ours"
        ),
        "stage": lambda place: _stage(f"s3://bucket/{place}/ours", _made(folder, place, "scratch")),
        "fetch": lambda place: fetch.fetch(f"s3://bucket/{place}/ours", _made(folder, place, "ours"), False),
    }
    taken = {way: [] for way in ways}
    for number in range(rounds):
        for way, function in ways.items():
            begin = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                function(f"{name}-{number}")
            taken[way].append(time.perf_counter() - begin)
    for way, against in (
        ("upload", "boto3 upload_file"), ("stage", "boto3 download_file"), ("fetch", "boto3 download_file"),
    ):  # fmt: skip
        ratios = sorted(theirs / ours for ours, theirs in zip(taken[way], taken[against], strict=True))
        print(
            f"{name:<9}{way:<7}{statistics.median(taken[way]):7.2f} s  {against:<20}"
            f"{statistics.median(taken[against]):7.2f} s  ratio {statistics.median(ratios):5.2f} "
            f"({ratios[0]:.2f} .. {ratios[-1]:.2f}, {rounds} rounds)",
            flush=True,
        )


def _boto3(function, folder: str, files: list[str], prefix: str) -> None:
    for file in files:
        place = {"Filename": os.path.join(folder, file), "Bucket": "bucket", "Key": f"{prefix}/{file}"}
        function(**place)


def _made(folder: str, *names: str) -> str:
    path = os.path.join(folder, *names)
    os.makedirs(path, exist_ok=True)
    return path


def _stage(url: str, scratch: str) -> None:
    os.environ["BOOTFILE_SCRATCH"] = scratch
    staging.stage(url)


@contextlib.contextmanager
def _proxy(server: ObjectStoreServer):
    """Yield the port of a proxy that answers late."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fault_proxy", str(server.port), str(_DELAY)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
