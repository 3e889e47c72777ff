"""What each platform starts on a node, as data: command-line words and environment variables.

From the vendors' documents and SDKs, read in November 2026; none of it was observed on a live account. Pure
Python: nothing is run here.

Where a platform fixes a port or leaves it to the user, the given one takes its place (MASTER_PORT, as users'
scripts export it): nodes that share one machine's address cannot all have the platform's.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from common.exits import BadInput


@dataclass(frozen=True)
class Folders:
    """Where a node finds things: absolute paths of folders.

    code: the uploaded repository. inputs and outputs: what platforms fill before the start and take away
    after it. scratch: fast, and lost at the end. logs: one file per node.
    """

    code: str
    inputs: str
    outputs: str
    scratch: str
    logs: str


@dataclass(frozen=True)
class Start:
    """One command, `python *prefix JOB *the_users_arguments *arguments`, and what is added to its
    environment."""

    prefix: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Node:
    index: int
    nodes: int
    processes: int
    hosts: list[str]
    port: int
    folders: Folders
    gpus: int

    @property
    def master(self) -> str:
        return self.hosts[0]


def profile(
    name: str,
    node: int,
    nodes: int,
    processes: int,
    host_names: list[str],
    port: int,
    folders: Folders,
    gpus: int = 0,
) -> list[Start]:
    """What platform `name` (of PROFILES) starts on node number `node`.

    processes: per node. Platforms that start one process per rank (azureml, slurm) give as many starts; all
    others give one, which starts the others itself, or whose prefix is a launcher that does. Of the former
    only Kubeflow tells it how many: where nodes have no GPUs, pass --processes_per_node. host_names: the
    address of every node, in order; all may be the same. port: free on the first of them. gpus: on each
    node, what the platform promises the job. Raises BadInput for an unknown name or node, and for what the
    platform does not have (plain: a second node).
    """
    if name not in PROFILES:
        raise BadInput(f"platform {name!r} is none of {', '.join(PROFILES)}")
    if not 0 <= node < nodes or len(host_names) != nodes:
        raise BadInput(f"node {node} of {nodes} with {len(host_names)} host names")
    return PROFILES[name](_Node(node, nodes, processes, host_names, port, folders, gpus))


def _modelarts(node: _Node) -> list[Start]:
    """The preset image: one boot file per node. On several nodes arguments tell it where it stands, with the
    number of nodes as world size; on one node nothing is said, however many GPUs it has.

    An input named data_url and an output named train_url arrive as folders. Further arguments come that no
    script asked for.
    """
    arguments = [
        f"--data_url={os.path.join(node.folders.inputs, 'data_url_0')}",
        f"--train_url={os.path.join(node.folders.outputs, 'train_url_0')}",
        f"--num_gpus={node.gpus}",
    ]
    if node.nodes > 1:
        arguments += [
            f"--init_method=tcp://{_bracketed(node.master)}:{node.port}",
            f"--rank={node.index}",
            f"--world_size={node.nodes}",
        ]
    return [Start(arguments=arguments, environment=_modelarts_environment(node))]


def _modelarts_custom(node: _Node) -> list[Start]:
    """A custom image: the same folders and variables, but no arguments beyond the inputs and outputs; the
    user's command picks the port."""
    start = _modelarts(node)[0]
    environment = start.environment | {"MASTER_PORT": str(node.port)}
    return [Start(arguments=start.arguments[:2], environment=environment)]


def _modelarts_environment(node: _Node) -> dict[str, str]:
    """The code lies below user-job-dir and its parent is on PYTHONPATH. The two counters start at 1 and
    count the times that the job was scheduled and that its command was started in this container."""
    parent, mount = os.path.dirname(node.folders.code), os.path.dirname(node.folders.inputs)
    return {
        "MA_HOME": os.path.dirname(mount),
        "MA_MOUNT_PATH": mount,
        "MA_JOB_DIR": parent,
        "MA_LOG_DIR": node.folders.logs,
        "MA_NUM_HOSTS": str(node.nodes),
        "MA_NUM_GPUS": str(node.gpus),
        "MA_TASK_NAME": "worker",
        "MA_VJ_NAME": "modelarts-job-simulated",
        "MA_CURRENT_IP": node.hosts[node.index],
        "MA_CURRENT_INSTANCE_NAME": f"modelarts-job-simulated-worker-{node.index}",
        "MA_SCHEDULE_CNT": "1",
        "MA_PROC_START_CNT": "1",
        "VC_WORKER_NUM": str(node.nodes),
        "VC_WORKER_HOSTS": ",".join(node.hosts),
        "VC_TASK_INDEX": str(node.index),
        "PYTHONPATH": parent,
        "PYTHONUNBUFFERED": "1",
    }


def _pai_dlc(node: _Node) -> list[Start]:
    """torch's own names, but RANK and WORLD_SIZE count nodes; NPROC_PER_NODE is the number of GPUs. Baidu
    AIHC sets the same."""
    counts = {"RANK": str(node.index), "WORLD_SIZE": str(node.nodes), "NPROC_PER_NODE": str(node.gpus)}
    return [Start(environment=_master(node) | counts)]


def _sagemaker(node: _Node) -> list[Start]:
    """A JSON list of names and the own name in it; no rank, no port. Channels are folders of input."""
    hosts = node.hosts
    if len(set(hosts)) < node.nodes:  # the list must tell nodes apart; only the first is ever looked up
        hosts = [node.master, *(f"algo-{number}" for number in range(2, node.nodes + 1))]
    environment = {
        "SM_HOSTS": json.dumps(hosts),
        "SM_CURRENT_HOST": hosts[node.index],
        "SM_NUM_GPUS": str(node.gpus),
        "SM_CHANNELS": json.dumps(["training"]),
        "SM_CHANNEL_TRAINING": node.folders.inputs,
        "SM_MODEL_DIR": node.folders.outputs,
        "SM_OUTPUT_DATA_DIR": node.folders.outputs,
        "MASTER_PORT": str(node.port),
    }
    return [Start(environment=environment)]


def _azureml(node: _Node) -> list[Start]:
    """One process per rank with torch's names, which count processes; LOCAL_WORLD_SIZE is missing."""
    shared = _master(node) | {
        "WORLD_SIZE": str(node.nodes * node.processes),
        "NODE_RANK": str(node.index),
        "AZUREML_NODE_COUNT": str(node.nodes),
    }
    return [
        Start(environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)})
        for local_rank, rank in _ranks(node)
    ]


def _kubeflow(node: _Node) -> list[Start]:
    """The PyTorchJob operator mixes levels: RANK is the pod's, WORLD_SIZE counts pods x processes."""
    mixed = {"RANK": str(node.index), "WORLD_SIZE": str(node.nodes * node.processes)}
    return [Start(environment=_master(node) | mixed | _pet(node))]


def _kubeflow_v2(node: _Node) -> list[Start]:
    """Trainer sets torchrun's options as variables, and nothing else; a job started without torchrun reads
    them itself."""
    return [Start(environment=_pet(node))]


def _volcano(node: _Node) -> list[Start]:
    """A master task and a worker task with the pytorch plugin: RANK and WORLD_SIZE count pods, while
    VC_TASK_INDEX counts within a task and is 0 twice."""
    workers = node.hosts[1:]
    index = str(max(0, node.index - 1))
    environment = _master(node) | {
        "RANK": str(node.index),
        "WORLD_SIZE": str(node.nodes),
        "VC_MASTER_HOSTS": node.master,
        "VC_MASTER_NUM": "1",
        "VC_TASK_INDEX": index,
        "VK_TASK_INDEX": index,
    }
    if workers:
        environment |= {"VC_WORKER_HOSTS": ",".join(workers), "VC_WORKER_NUM": str(len(workers))}
    return [Start(environment=environment)]


def _volcengine(node: _Node) -> list[Start]:
    environment = {
        "MLP_ROLE_INDEX": str(node.index),
        "MLP_WORKER_NUM": str(node.nodes),
        "MLP_WORKER_GPU": str(node.gpus),
        "MLP_WORKER_0_HOST": node.master,
        "MLP_WORKER_0_PORT": str(node.port),
    }
    return [Start(environment=environment)]


def _slurm(node: _Node) -> list[Start]:
    """srun starts one process per task, block by block. Users export MASTER_PORT in the batch script."""
    tasks = node.nodes * node.processes
    shared = {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": str(node.nodes),
        "SLURM_NODEID": str(node.index),
        "SLURM_TASKS_PER_NODE": f"{node.processes}(x{node.nodes})" if node.nodes > 1 else str(tasks),
        "SLURM_JOB_NODELIST": ",".join(node.hosts),
        "MASTER_PORT": str(node.port),
    }
    return [
        Start(environment=shared | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank)})
        for local_rank, rank in _ranks(node)
    ]


def _skypilot(node: _Node) -> list[Start]:
    environment = {
        "SKYPILOT_NODE_RANK": str(node.index),
        "SKYPILOT_NUM_NODES": str(node.nodes),
        "SKYPILOT_NODE_IPS": "\n".join(node.hosts),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(node.gpus),
        "MASTER_PORT": str(node.port),
    }
    return [Start(environment=environment)]


def _dstack(node: _Node) -> list[Start]:
    environment = {
        "DSTACK_NODE_RANK": str(node.index),
        "DSTACK_NODES_NUM": str(node.nodes),
        "DSTACK_NODES_IPS": "\n".join(node.hosts),
        "DSTACK_MASTER_NODE_IP": node.master,
        "DSTACK_GPUS_PER_NODE": str(node.gpus),
        "MASTER_PORT": str(node.port),
    }
    return [Start(environment=environment)]


def _torchrun(node: _Node) -> list[Start]:
    """The launcher starts the node's processes and sets all that they need."""
    return [Start(prefix=["-m", "torch.distributed.run", *_launcher_options(node)])]


def _launch(node: _Node) -> list[Start]:
    """torchrun's predecessor, deprecated and still there: it also passes --local-rank as first argument."""
    return [Start(prefix=["-m", "torch.distributed.launch", *_launcher_options(node)])]


def _plain(node: _Node) -> list[Start]:
    if node.nodes > 1:
        raise BadInput(f"platform plain says nothing to a job, so it cannot start {node.nodes} nodes")
    return [Start()]


PROFILES: dict[str, Callable[[_Node], list[Start]]] = {
    "modelarts": _modelarts,
    "modelarts-custom": _modelarts_custom,
    "pai-dlc": _pai_dlc,
    "sagemaker": _sagemaker,
    "azureml": _azureml,
    "kubeflow": _kubeflow,
    "kubeflow-v2": _kubeflow_v2,
    "volcano": _volcano,
    "volcengine": _volcengine,
    "slurm": _slurm,
    "skypilot": _skypilot,
    "dstack": _dstack,
    "baidu": _pai_dlc,
    "torchrun": _torchrun,
    "launch": _launch,
    "plain": _plain,
}


def _master(node: _Node) -> dict[str, str]:
    return {"MASTER_ADDR": node.master, "MASTER_PORT": str(node.port)}


def _pet(node: _Node) -> dict[str, str]:
    return {
        "PET_NNODES": str(node.nodes),
        "PET_NODE_RANK": str(node.index),
        "PET_NPROC_PER_NODE": str(node.processes),
        "PET_MASTER_ADDR": node.master,
        "PET_MASTER_PORT": str(node.port),
    }


def _ranks(node: _Node) -> list[tuple[int, int]]:
    """(local rank, rank) of the node's processes."""
    return [(local, node.index * node.processes + local) for local in range(node.processes)]


def _launcher_options(node: _Node) -> list[str]:
    return [
        f"--nnodes={node.nodes}",
        f"--nproc-per-node={node.processes}",
        f"--node-rank={node.index}",
        f"--master-addr={node.master}",
        f"--master-port={node.port}",
    ]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
