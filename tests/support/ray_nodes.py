"""A Ray cluster of several nodes on this machine for tests, in a separate process and folder."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from bootfile.processes import sessions

_NODES = """
import sys
from ray.cluster_utils import Cluster
more = dict(object_store_memory=200 << 20)
head = dict(num_cpus=int(sys.argv[1]), include_dashboard=False, **more)
cluster, nodes = Cluster(initialize_head=True, head_node_args=head), {}
print(cluster.address, flush=True)
for line in sys.stdin:
    verb, number = line.split()
    if verb == "add":
        nodes[len(nodes)] = cluster.add_node(wait=False, num_cpus=int(number), **more)
        cluster._wait_for_node(nodes[len(nodes) - 1], 300)  # add_node() itself waits 30 s
    elif verb == "remove":
        cluster.remove_node(nodes[int(number)], allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""


class RayNodes:
    """A head and more nodes on 127.0.0.1. environment: the variables that a driver needs."""

    def __init__(self, cpus: int, *more: int):
        self.folder = tempfile.mkdtemp(prefix="rn-")
        self.environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "RAY_TMPDIR": self.folder,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then takes 127.0.0.1 as this machine's address
            "RAY_worker_niceness": "0",  # with 15 a worker may need minutes to start while tests run
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NODES, str(cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | self.environment, start_new_session=True,
        )  # fmt: skip
        self.address = self._process.stdout.readline().strip()
        assert self.address, "Ray did not start"
        self.environment["RAY_ADDRESS"] = self.address
        for each in more:
            self.add(each)

    def add(self, cpus: int) -> None:
        self._send(f"add {cpus}")

    def remove(self, number: int) -> None:
        """Kill a node that add() made, and all its processes, without notice."""
        self._send(f"remove {number}")

    def kill_head(self) -> None:
        """Kill the head and all nodes, without notice."""
        for process in (*processes(self.folder, "gcs_server"), *processes(self.folder, "raylet")):
            process.kill()

    def workers(self) -> list[psutil.Process]:
        return processes(self.folder, "ray::Worker")

    def close(self) -> None:
        """Stop the cluster, and kill the processes that are left."""
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        sessions.wait_or_kill([self._process], 30)
        left = processes(self.folder)
        for process in left:
            process.kill()
        psutil.wait_procs(left, 10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _send(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


def processes(folder: str, name: str = "") -> list[psutil.Process]:
    """Return the processes of Ray whose RAY_TMPDIR is the folder, and whose name or title begins so.
    ray::Worker are our actors."""
    result = []
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline()) or process.name()
            is_ours = process.environ().get("RAY_TMPDIR") == folder
        except psutil.Error:
            continue
        if is_ours and process.pid != os.getpid() and Path(title.split()[0]).name.startswith(name):
            result.append(process)
    return result
