"""What each platform starts on a node, as data: command-line words and environment variables.

From the vendors' documents and SDKs, read in November 2026; none of it was observed on a live account.
Nothing is started here.

If a platform fixes a port or leaves it to the user, the given port replaces it (MASTER_PORT, as users'
scripts export it): nodes that share one machine's address cannot all use the platform's.
"""

import json
import os
from dataclasses import dataclass, field
from typing import NamedTuple

from common.exits import BadInput

MODELARTS_JOB = "modelarts-job-simulated"  # the real name contains the job's id


class Folders(NamedTuple):
    """A node's folders: absolute paths.

    code: the uploaded repository. inputs and outputs: what platforms fill before the start and collect after
    the end. scratch: fast, and lost at the end. logs: one file per node.
    """

    code: str
    inputs: str
    outputs: str
    scratch: str
    logs: str


@dataclass(frozen=True)
class Start:
    """One command, `python *prefix JOB *the_users_arguments *arguments`, and the variables that are added."""

    prefix: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Profile:
    """Templates of a Start. between_nodes: further arguments, with more than one node. each_rank: one start
    for every rank. Variables that come out empty are left out."""

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
_LAUNCHER = (
    "--nnodes={nodes}", "--nproc-per-node={processes}", "--node-rank={node}", "--master-addr={master}",
    "--master-port={port}",
)  # fmt: skip
# An input named data_url and an output named train_url arrive as folders.
_CHANNELS = ("--data_url={folders.inputs}/data_url_0", "--train_url={folders.outputs}/train_url_0")
# The code is below user-job-dir, and its parent is on PYTHONPATH. The last two counters start at 1: the times
# that the job was scheduled, and that its command was started in this container.
_MODELARTS = {
    "MA_HOME": "{home}", "MA_MOUNT_PATH": "{mount}", "MA_JOB_DIR": "{code_parent}",
    "MA_LOG_DIR": "{folders.logs}", "MA_NUM_HOSTS": "{nodes}", "MA_NUM_GPUS": "{gpus}",
    "MA_TASK_NAME": "worker", "MA_VJ_NAME": MODELARTS_JOB,
    "MA_CURRENT_IP": "{host}", "MA_CURRENT_INSTANCE_NAME": MODELARTS_JOB + "-worker-{node}",
    "VC_WORKER_NUM": "{nodes}", "VC_WORKER_HOSTS": "{hosts}", "VC_TASK_INDEX": "{node}",
    "PYTHONPATH": "{code_parent}", "PYTHONUNBUFFERED": "1", "MA_SCHEDULE_CNT": "1", "MA_PROC_START_CNT": "1",
}  # fmt: skip
# torch's own names, but RANK and WORLD_SIZE count nodes; NPROC_PER_NODE is the number of GPUs.
_PAI_DLC = _Profile(_MASTER | {"RANK": "{node}", "WORLD_SIZE": "{nodes}", "NPROC_PER_NODE": "{gpus}"})

PROFILES: dict[str, _Profile] = {
    # The preset image: one boot file per node. With several nodes, arguments tell its rank, and the world
    # size is the number of nodes. With one node nothing is told, whatever the number of GPUs.
    "modelarts": _Profile(
        _MODELARTS,
        (*_CHANNELS, "--num_gpus={gpus}"),
        ("--init_method=tcp://{url_host}:{port}", "--rank={node}", "--world_size={nodes}"),
    ),
    # A custom image: the user's command picks the port.
    "modelarts-custom": _Profile(_MODELARTS | {"MASTER_PORT": "{port}"}, _CHANNELS),
    "pai-dlc": _PAI_DLC,
    # A JSON list of names and the own name in it; no rank, no port. Channels are folders of input.
    "sagemaker": _Profile({
        "SM_HOSTS": "{named_hosts}", "SM_CURRENT_HOST": "{named_host}", "SM_NUM_GPUS": "{gpus}",
        "SM_CHANNELS": '["training"]', "SM_CHANNEL_TRAINING": "{folders.inputs}",
        "SM_MODEL_DIR": "{folders.outputs}", "SM_OUTPUT_DATA_DIR": "{folders.outputs}",
        "MASTER_PORT": "{port}",
    }),
    # One process per rank with torch's names, which count processes; LOCAL_WORLD_SIZE is missing.
    "azureml": _Profile(
        _MASTER | {
            "WORLD_SIZE": "{world_size}", "NODE_RANK": "{node}", "AZUREML_NODE_COUNT": "{nodes}",
            "RANK": "{rank}", "LOCAL_RANK": "{local_rank}",
        },
        each_rank=True,
    ),
    # The PyTorchJob operator mixes levels: RANK is the pod's, WORLD_SIZE counts pods x processes.
    "kubeflow": _Profile(_MASTER | {"RANK": "{node}", "WORLD_SIZE": "{world_size}"} | _PET),
    # Trainer sets torchrun's options as variables, and nothing else; a job without torchrun reads them
    # itself.
    "kubeflow-v2": _Profile(_PET),
    # A master task and a worker task with the pytorch plugin: RANK and WORLD_SIZE count pods, while
    # VC_TASK_INDEX counts within a task and is 0 twice.
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
    # The launcher starts the node's processes and sets all that they need.
    "torchrun": _Profile(prefix=("-m", "torch.distributed.run", *_LAUNCHER)),
    # torchrun's predecessor, deprecated and still shipped: it also passes --local-rank as first argument.
    "launch": _Profile(prefix=("-m", "torch.distributed.launch", *_LAUNCHER)),
    "plain": _Profile(),
}  # fmt: skip


def get_arguments(name: str) -> list[str]:
    """Return the options that platform `name` (of PROFILES) passes to a script by itself."""
    found = PROFILES[name]
    return [text.partition("=")[0] for text in (*found.arguments, *found.between_nodes)]


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
    """Return what platform `name` (of PROFILES) starts on node number `node`.

    processes: per node. Platforms that start one process per rank (azureml, slurm) give as many starts; all
    others give one, which starts the others itself, or whose prefix is a launcher that does. Of those only
    Kubeflow tells the number: if nodes have no GPUs, pass --processes_per_node. host_names: the address of
    every node, in order; all may be the same. port: free on the first of them. gpus: of each node, as the
    platform promises to the job. Raises BadInput for an unknown name or node, and for what the platform does
    not have (plain: a second node).
    """
    if name not in PROFILES:
        raise BadInput(f"unknown platform {name!r}: expected one of {', '.join(PROFILES)}")
    if not 0 <= node < nodes or len(host_names) != nodes:
        raise BadInput(f"node {node} of {nodes} with {len(host_names)} host names")
    if name == "plain" and nodes > 1:
        raise BadInput(f"platform plain tells a job nothing, so it cannot start {nodes} nodes")
    master, mount, parent = host_names[0], os.path.dirname(folders.inputs), os.path.dirname(folders.code)
    named = host_names
    if len(set(named)) < nodes:  # the list must tell nodes apart; only the first is ever looked up
        named = [master, *(f"algo-{number}" for number in range(2, nodes + 1))]
    values = {
        "node": node, "nodes": nodes, "processes": processes, "world_size": nodes * processes, "gpus": gpus,
        "master": master, "port": port, "url_host": f"[{master}]" if ":" in master else master,
        "host": host_names[node], "hosts": ",".join(host_names), "host_lines": "\n".join(host_names),
        "named_hosts": json.dumps(named), "named_host": named[node], "workers": ",".join(host_names[1:]),
        "worker_count": nodes - 1 or "", "task_index": max(0, node - 1), "folders": folders, "mount": mount,
        "home": os.path.dirname(mount), "code_parent": parent,
        "tasks_per_node": f"{processes}(x{nodes})" if nodes > 1 else processes,
    }  # fmt: skip
    found, starts = PROFILES[name], []
    for local_rank in range(processes if found.each_rank else 1):
        values |= {"local_rank": local_rank, "rank": node * processes + local_rank}
        filled = {variable: text.format(**values) for variable, text in found.environment.items()}
        arguments = found.arguments + (found.between_nodes if nodes > 1 else ())
        starts.append(
            Start(
                [text.format(**values) for text in found.prefix],
                [text.format(**values) for text in arguments],
                {variable: text for variable, text in filled.items() if text},
            )
        )
    return starts
