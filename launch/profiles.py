"""Write what a platform gives to a node: the command-line words and the variables of its table.

It takes the name of a platform, the place of a node and its folders, and gives one Start for each process
that the platform itself starts. The given port replaces one that a platform fixes: nodes that share one
machine's address cannot all use it. This module starts nothing.
"""

import json
import math
import os
import re
from typing import NamedTuple

from bootfile.ground.errors import BadInput
from common.platform.table import MODELARTS_JOB as MODELARTS_JOB
from common.platform.table import PROFILES as PROFILES

VARIABLES = re.compile(  # names of variables that a platform or a launcher sets
    r"(MA|VC|VK|PET|SLURM|SRUN|SM|MLP|SKYPILOT|DSTACK|AZUREML|TORCHELASTIC|RANK|ASCEND_DEVICE"
    r"|OMPI|PMIX?|MV2|MVP|PALS|JSM|HOROVOD|FLUX|AWS_BATCH)_.*|MPI_LOCAL(RANKID|NRANKS)"
    r"|((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|NPROC_PER_NODE|MASTER_(ADDR|PORT)|PYTHONPATH"
    r"|BOOTFILE_STARTED.*|JOB_COMPLETION_INDEX"
)
_AFTER_GRACE = 35  # seconds of a pod after --grace, for the end of its processes


class Folders(NamedTuple):
    """A node's folders, as absolute paths.

    code: the uploaded repository
    inputs: filled by the platform before the start
    outputs: collected by the platform after the end
    scratch: fast storage that is lost at the end
    logs: one file per node
    """

    code: str
    inputs: str
    outputs: str
    scratch: str
    logs: str


class Start(NamedTuple):
    """One command, `python *prefix JOB *the_users_arguments *arguments`, and its additional variables."""

    prefix: list[str]
    arguments: list[str]
    environment: dict[str, str]


def find_pod_grace(grace: str) -> int:
    """Return the seconds that Kubernetes waits from SIGTERM to SIGKILL (terminationGracePeriodSeconds).
    grace: the value of --grace, "" for its default. Raises BadInput."""
    try:
        seconds = math.ceil(float(grace or PROFILES["kubernetes"].grace))
    except (ValueError, OverflowError):  # inf cannot be one
        seconds = 0
    if seconds < 1:
        raise BadInput(f"--grace {grace} is not a number of seconds above 0")
    return seconds + _AFTER_GRACE


def make_rank_table(host_names: list[str], processes: int) -> str:
    """Return the text of RANK_TABLE_FILE, in version 1.0 of CANN's form, without the NPUs' addresses."""
    servers = []
    for node, host in enumerate(host_names):
        ranks = range(node * processes, (node + 1) * processes)
        devices = [{"device_id": str(rank % processes), "rank_id": str(rank)} for rank in ranks]
        servers.append({"server_id": host, "device": devices})
    return json.dumps({"status": "completed", "version": "1.0", "server_list": servers})


def make_starts(
    name: str, node: int, nodes: int, processes: int, host_names: list[str], port: int, folders: Folders,
    gpus: int = 0,
) -> list[Start]:  # fmt: skip
    """Return the commands that platform `name` (of PROFILES) starts on node number `node`.

    `simulate` calls it before each start of a node, and `submit` to know what the platform will pass.

    processes: per node. Platforms that start one process per rank (azureml, slurm) give one Start for each.
        The others give one Start: the job starts its other processes, or the prefix is a launcher that does.
        Of these only Kubeflow tells the number: if nodes have no GPUs, pass --processes_per_node
    host_names: the address of every node, in order
    port: a free port of the first node
    gpus: per node, as the platform reports them to the job

    Raises BadInput if platform plain gets a second node.
    """
    if name == "plain" and nodes > 1:
        raise BadInput(f"platform plain passes no rank or address, so it cannot start {nodes} nodes")
    master = host_names[0]
    mount = os.path.dirname(folders.inputs)
    values = {
        "node": node, "nodes": nodes, "processes": processes, "world_size": nodes * processes,
        "gpus": gpus, "devices": gpus, "master": master, "port": port,
        "url_host": f"[{master}]" if ":" in master else master,
        "host": host_names[node], "hosts": ",".join(host_names), "host_lines": "\n".join(host_names),
        "named_hosts": json.dumps(host_names), "workers": ",".join(host_names[1:]),
        "worker_count": nodes - 1 or "", "task_index": max(0, node - 1), "folders": folders, "mount": mount,
        "home": os.path.dirname(mount), "code_parent": os.path.dirname(folders.code),
        "tasks_per_node": f"{processes}(x{nodes})" if nodes > 1 else processes,
    }  # fmt: skip
    profile = PROFILES[name]
    words = profile.arguments + (profile.between_nodes if nodes > 1 else ())
    starts = []
    # one Start for each process that the platform itself starts
    for local_rank in range(processes if profile.each_rank else 1):
        values |= {"local_rank": local_rank, "rank": node * processes + local_rank}
        prefix = [word.format(**values) for word in profile.prefix]
        arguments = [word.format(**values) for word in words]
        variables = {name: meaning.format(**values) for name, meaning in profile.variables.items()}
        starts.append(Start(prefix, arguments, {name: text for name, text in variables.items() if text}))
    return starts
