"""The command-line words and environment variables with which each platform starts a node, as data.

The sources are the vendors' documents and SDKs, read in November 2026; none was verified on a live account.
This module starts nothing.

If a platform fixes the port, the given port replaces it. If it leaves the port to the user, the given port is
set as MASTER_PORT, as users' scripts do. Nodes that share one machine's address cannot all use the platform's
port.
"""

import json
import os
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from bootfile.ground.errors import BadInput

MODELARTS_JOB = "modelarts-job-simulated"  # the real name contains the job's id
VARIABLES = re.compile(  # names of variables that a platform or a launcher sets
    r"(MA|VC|VK|PET|SLURM|SRUN|SM|MLP|SKYPILOT|DSTACK|AZUREML|TORCHELASTIC|RANK|ASCEND_DEVICE"
    r"|OMPI|PMIX?|MV2|MVP|PALS|JSM|HOROVOD|FLUX|AWS_BATCH)_.*|MPI_LOCAL(RANKID|NRANKS)"
    r"|((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|NPROC_PER_NODE|MASTER_(ADDR|PORT)|PYTHONPATH"
    r"|BOOTFILE_STARTED.*"
)


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


@dataclass(frozen=True)
class _Profile:
    """Templates of a Start. Variables with an empty value are omitted.

    between_nodes: additional arguments if there is more than one node
    each_rank: whether the platform starts one process for every rank
    """

    environment: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    between_nodes: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    each_rank: bool = False


_MASTER = {"MASTER_ADDR": "{master}", "MASTER_PORT": "{port}"}
_PET = {
    "PET_NNODES": "{nodes}", "PET_NODE_RANK": "{node}", "PET_NPROC_PER_NODE": "{processes}",
    "PET_MASTER_ADDR": "{master}", "PET_MASTER_PORT": "{port}",
}  # fmt: skip
# An input named data_url and an output named train_url arrive as folders.
_CHANNELS = ("--data_url={folders.inputs}/data_url_0", "--train_url={folders.outputs}/train_url_0")
# The code is below user-job-dir, and its parent is on PYTHONPATH. Both counters start at 1: MA_SCHEDULE_CNT
# counts how often the job was scheduled, MA_PROC_START_CNT how often its command started in this container.
_MODELARTS = {
    "MA_HOME": "{home}", "MA_MOUNT_PATH": "{mount}", "MA_JOB_DIR": "{code_parent}",
    "MA_LOG_DIR": "{folders.logs}", "MA_NUM_HOSTS": "{nodes}", "MA_NUM_GPUS": "{gpus}",
    "MA_TASK_NAME": "worker", "MA_VJ_NAME": MODELARTS_JOB,
    "MA_CURRENT_IP": "{host}", "MA_CURRENT_INSTANCE_NAME": MODELARTS_JOB + "-worker-{node}",
    "VC_WORKER_NUM": "{nodes}", "VC_WORKER_HOSTS": "{hosts}", "VC_TASK_INDEX": "{node}",
    "PYTHONPATH": "{code_parent}", "PYTHONUNBUFFERED": "1", "MA_SCHEDULE_CNT": "1", "MA_PROC_START_CNT": "1",
}  # fmt: skip
_RANK_TABLE = {
    "RANK_TABLE_FILE": "{folders.logs}/jobstart_hccl.json", "RANK_ID": "{rank}", "RANK_SIZE": "{world_size}",
    "ASCEND_DEVICE_ID": "{local_rank}", "MASTER_PORT": "{port}",
}  # fmt: skip
_TORCHRUN = (
    "-m", "torch.distributed.run", "--nnodes={nodes}", "--nproc-per-node={processes}", "--node-rank={node}",
    "--master-addr={master}", "--master-port={port}",
)  # fmt: skip
# torch's own names, but RANK and WORLD_SIZE count nodes; NPROC_PER_NODE is the number of GPUs.
_PAI_DLC = _Profile(_MASTER | {"RANK": "{node}", "WORLD_SIZE": "{nodes}", "NPROC_PER_NODE": "{gpus}"})

PROFILES: dict[str, _Profile] = {
    # The preset image starts one boot file per node. With several nodes, arguments give the node's rank and
    # the number of nodes as world size. With one node they are missing, even if it has several GPUs.
    "modelarts": _Profile(
        _MODELARTS,
        (*_CHANNELS, "--num_gpus={gpus}"),
        ("--init_method=tcp://{url_host}:{port}", "--rank={node}", "--world_size={nodes}"),
    ),
    # A custom image: the user's command picks the port.
    "modelarts-custom": _Profile(_MODELARTS | {"MASTER_PORT": "{port}"}, _CHANNELS),
    # Ascend-Powered-Engine starts the boot file once per NPU, with a table of all NPUs in a file; with
    # MA_RUN_METHOD=torchrun it starts torchrun once per node. Users set MASTER_PORT.
    "modelarts-npu": _Profile(_MODELARTS | _RANK_TABLE, _CHANNELS, each_rank=True),
    "modelarts-npu-torchrun": _Profile(
        _MODELARTS | {"MA_RUN_METHOD": "torchrun"}, _CHANNELS, prefix=_TORCHRUN
    ),
    "pai-dlc": _PAI_DLC,
    # The variables hold a JSON list of host names and the node's own name, but no rank and no port.
    "sagemaker": _Profile({
        "SM_HOSTS": "{named_hosts}", "SM_CURRENT_HOST": "{host}", "SM_NUM_GPUS": "{gpus}",
        "SM_CHANNELS": '["training"]', "SM_CHANNEL_TRAINING": "{folders.inputs}",
        "SM_MODEL_DIR": "{folders.outputs}", "SM_OUTPUT_DATA_DIR": "{folders.outputs}",
        "MASTER_PORT": "{port}",
    }),
    # One process per rank. Variables have torch's names and count processes; LOCAL_WORLD_SIZE is missing.
    "azureml": _Profile(
        _MASTER | {
            "WORLD_SIZE": "{world_size}", "NODE_RANK": "{node}", "AZUREML_NODE_COUNT": "{nodes}",
            "RANK": "{rank}", "LOCAL_RANK": "{local_rank}",
        },
        each_rank=True,
    ),
    # The PyTorchJob operator mixes levels: RANK is the pod's, WORLD_SIZE counts pods x processes.
    "kubeflow": _Profile(_MASTER | {"RANK": "{node}", "WORLD_SIZE": "{world_size}"} | _PET),
    # Trainer sets only torchrun's options, as variables. A job without torchrun must read them
    # itself.
    "kubeflow-v2": _Profile(_PET),
    # A master task and a worker task with the pytorch plugin: RANK and WORLD_SIZE count pods, while
    # VC_TASK_INDEX counts within a task and is 0 on two nodes.
    "volcano": _Profile(_MASTER | {
        "RANK": "{node}", "WORLD_SIZE": "{nodes}", "VC_MASTER_HOSTS": "{master}", "VC_MASTER_NUM": "1",
        "VC_TASK_INDEX": "{task_index}", "VK_TASK_INDEX": "{task_index}", "VC_WORKER_HOSTS": "{workers}",
        "VC_WORKER_NUM": "{worker_count}",
    }),
    "volcengine": _Profile({
        "MLP_ROLE_INDEX": "{node}", "MLP_WORKER_NUM": "{nodes}", "MLP_WORKER_GPU": "{gpus}",
        "MLP_WORKER_0_HOST": "{master}", "MLP_WORKER_0_PORT": "{port}",
    }),
    # srun starts one process per task, block by block. Users export MASTER_PORT in the batch script.
    "slurm": _Profile(
        {
            "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "{world_size}",
            "SLURM_NNODES": "{nodes}", "SLURM_NODEID": "{node}", "SLURM_TASKS_PER_NODE": "{tasks_per_node}",
            "SLURM_JOB_NODELIST": "{hosts}", "MASTER_PORT": "{port}", "SLURM_PROCID": "{rank}",
            "SLURM_LOCALID": "{local_rank}",
        },
        each_rank=True,
    ),
    "skypilot": _Profile({
        "SKYPILOT_NODE_RANK": "{node}", "SKYPILOT_NUM_NODES": "{nodes}", "SKYPILOT_NODE_IPS": "{host_lines}",
        "SKYPILOT_NUM_GPUS_PER_NODE": "{gpus}", "MASTER_PORT": "{port}",
    }),
    "dstack": _Profile({
        "DSTACK_NODE_RANK": "{node}", "DSTACK_NODES_NUM": "{nodes}", "DSTACK_NODES_IPS": "{host_lines}",
        "DSTACK_MASTER_NODE_IP": "{master}", "DSTACK_GPUS_PER_NODE": "{gpus}", "MASTER_PORT": "{port}",
    }),
    "baidu": _PAI_DLC,
    # The launcher starts the node's processes and sets all variables that they need.
    "torchrun": _Profile(prefix=_TORCHRUN),
    # torchrun's predecessor, deprecated but still shipped. It also passes --local-rank as first argument.
    "launch": _Profile(prefix=("-m", "torch.distributed.launch", *_TORCHRUN[2:])),
    "plain": _Profile(),
}  # fmt: skip


def make_rank_table(host_names: list[str], processes: int) -> str:
    """Return the text of RANK_TABLE_FILE, in version 1.0 of CANN's form, without the NPUs' addresses."""
    servers = []
    for node, host in enumerate(host_names):
        devices = []
        for local_rank in range(processes):
            devices.append({"device_id": str(local_rank), "rank_id": str(node * processes + local_rank)})
        servers.append({"server_id": host, "device": devices})
    return json.dumps({"status": "completed", "version": "1.0", "server_list": servers})


def make_starts(
    name: str,
    node: int,
    nodes: int,
    processes: int,
    host_names: list[str],
    port: int,
    folders: Folders,
    gpus: int = 0,
) -> list[Start]:
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
    parent = os.path.dirname(folders.code)
    values = {
        "node": node, "nodes": nodes, "processes": processes, "world_size": nodes * processes, "gpus": gpus,
        "master": master, "port": port, "url_host": f"[{master}]" if ":" in master else master,
        "host": host_names[node], "hosts": ",".join(host_names), "host_lines": "\n".join(host_names),
        "named_hosts": json.dumps(host_names), "workers": ",".join(host_names[1:]),
        "worker_count": nodes - 1 or "", "task_index": max(0, node - 1), "folders": folders, "mount": mount,
        "home": os.path.dirname(mount), "code_parent": parent,
        "tasks_per_node": f"{processes}(x{nodes})" if nodes > 1 else processes,
    }  # fmt: skip
    profile = PROFILES[name]
    arguments = profile.arguments
    if nodes > 1:
        arguments += profile.between_nodes
    starts = []
    # one Start for each process that the platform itself starts
    for local_rank in range(processes if profile.each_rank else 1):
        values |= {"local_rank": local_rank, "rank": node * processes + local_rank}
        environment = {}
        for variable, template in profile.environment.items():
            text = template.format(**values)
            if text:
                environment[variable] = text
        prefix_words = [template.format(**values) for template in profile.prefix]
        words = [template.format(**values) for template in arguments]
        starts.append(Start(prefix_words, words, environment))
    return starts
