"""Measure what it costs that all processes of a job meet: they are forked here and call rendezvous.meet().

    python -m tests.benchmarks.rendezvous                             2, 8, 32, 128, 256 and 512 processes
    python -m tests.benchmarks.rendezvous --processes 64 --late 20    the last one comes 20 s after the others

The store is a real TCPStore in rank 0, on 127.0.0.1. The columns:

    seconds      from the first fork until the last process has met the others; and from the last fork
    requests     what the ranks sent to the store, as the kernel counts it (TCP_INFO): the sum, the median of
                 a rank, and the most of a rank (rank 0, and the first one that came, look ten times a second)
    CPU seconds  of rank 0, which holds the store, and of the median rank, without its imports
    open files   of rank 0

A process that has not met the others within --timeout seconds ends itself. A process needs about 10 MB.
"""

import argparse
import gc
import json
import os
import select
import signal
import socket
import statistics
import struct
import time
from typing import Any

from common.distributed import rendezvous
from common.platform.topology import Topology
from tests.benchmarks.rounds import conditions, make_parser

_SIZE_OF_INFO, _SENT = 232, 156  # bytes of struct tcp_info (linux/tcp.h), and where tcpi_data_segs_out is


def count_requests(port: int) -> int:
    """Return the requests that this process has sent to the store at the port, over the open connections. The
    store's client sends each one as one segment, if it is short."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(number))) as connection:
                if connection.getpeername()[1] == port:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE_OF_INFO)
                    total += struct.unpack_from("I", info, _SENT)[0]
        except OSError:  # another kind of file, or not connected
            continue
    return total


def _meet(rank: int, args: argparse.Namespace, count: int, port: int, results: int, end: int) -> None:
    """Meet the others, write the figures of this rank, and wait for the end."""
    signal.alarm(int(args.timeout) + 60)
    os.environ["LOCAL_RANK"] = str(rank)
    began = time.process_time()
    topology = Topology(0, 1, count, rank, "127.0.0.1", port, "process", "fork")
    store = rendezvous.meet(topology, args.timeout, "gloo")
    own = {"met": time.monotonic(), "requests": count_requests(port), "CPU": time.process_time() - began}
    own["files"] = len(os.listdir("/proc/self/fd"))
    os.write(results, f"{json.dumps(own | {'rank': rank})}\n".encode())  # in one piece, because it is short
    select.select([end], [], [])
    if rank == 0:
        own["CPU"] = time.process_time() - began  # it has also served the others
        os.write(results, f"{json.dumps(own | {'rank': rank})}\n".encode())
    del store


def measure(count: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of `count` processes that meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    read, results = os.pipe()
    end, ending = os.pipe()
    children, began, last = [], time.monotonic(), 0.0
    for rank in range(count):
        if rank == count - 1:
            time.sleep(args.late)
            last = time.monotonic()
        children.append(os.fork())
        if not children[-1]:
            os.close(ending)  # otherwise no process sees the end
            try:
                _meet(rank, args, count, port, results, end)
            finally:
                os._exit(0)
    os.close(results)
    with open(read) as lines:
        ranks = [json.loads(lines.readline() or '{"rank": -1}') for _ in range(count)]
        os.close(ending)
        first = json.loads(lines.readline() or '{"rank": -1}')
    os.close(end)
    for child in children:
        os.waitpid(child, 0)
    if any(each["rank"] < 0 for each in (first, *ranks)):
        raise SystemExit(f"error: not all of {count} processes have met within {args.timeout:.0f} s")
    requests = [each["requests"] for each in ranks]
    met = max(each["met"] for each in ranks)
    return {
        "processes": count,
        "seconds": f"{met - began:.1f}",
        "from the last fork": f"{met - last:.2f}",
        "requests": sum(requests),
        "a rank": f"{statistics.median(requests):.0f}",
        "most of a rank": max(requests),
        "CPU seconds of rank 0": f"{first['CPU']:.3f}",
        "of a rank": f"{statistics.median(each['CPU'] for each in ranks):.3f}",
        "open files": first["files"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    sizes = [2, 8, 32, 128, 256, 512]
    parser.add_argument("--processes", type=int, nargs="+", default=sizes, help="default: 2 to 512")
    parser.add_argument(
        "--late", type=float, default=0.0, metavar="SECONDS", help="delay of the last process"
    )
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="default: 180")
    args = parser.parse_args()
    gc.freeze()  # a collection would copy the pages of all objects into each process
    with conditions():
        for number, count in enumerate(args.processes):
            figures = measure(count, args)
            if not number:
                print(f"| {' | '.join(figures)} |\n{'|---' * len(figures)}|")
            print(f"| {' | '.join(map(str, figures.values()))} |", flush=True)


if __name__ == "__main__":
    main()
