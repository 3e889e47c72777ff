"""A Ray cluster of several nodes on this machine for tests, in a separate process and folder."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_NODES = """
import sys
from ray.cluster_utils import Cluster
more = dict(object_store_memory=200 << 20)
cluster, nodes = Cluster(initialize_head=True, head_node_args=dict(
    num_cpus=int(sys.argv[1]), include_dashboard=False, **more)), {}
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
    """A head and more nodes. address: of the head. environment: the variables that a driver needs."""

    def __init__(self, cpus: int, *more: int):
        self.folder = tempfile.mkdtemp(prefix="rn-")
        self.environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32, "RAY_TMPDIR": self.folder,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NODES, str(cpus)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | self.environment,
            start_new_session=True,
        )  # fmt: skip
        self.address = self._process.stdout.readline().strip()
        assert self.address, "Ray did not start"
        self.environment["RAY_ADDRESS"] = self.address
        for each in more:
            self.add(each)

    def add(self, cpus: int) -> None:
        self._say(f"add {cpus}")

    def remove(self, number: int) -> None:
        """Kill a node that add() made, and all its processes, without notice."""
        self._say(f"remove {number}")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of this cluster whose name or title begins so: ray::Worker are our actors."""
        found = []
        for process in psutil.process_iter():
            try:
                title = " ".join(process.cmdline()) or process.name()
                mine = process.environ().get("RAY_TMPDIR") == self.folder
            except psutil.Error:
                continue
            if mine and Path(title.split()[0]).name.startswith(name):
                found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        return self.processes("ray::Worker")

    def close(self) -> None:
        """Stop the cluster, and kill the processes that are left."""
        for stream in (self._process.stdin, self._process.stdout):
            stream.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        left = self.processes("")
        for process in left:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        psutil.wait_procs(left, 10)

    def _say(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


def wait_until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.1)
