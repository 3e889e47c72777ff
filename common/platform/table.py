"""The table of platforms: the variables and command-line words with which each of them starts a node.

A row is a variable and its meaning. platforms.py reads the table: it inverts the meanings, and finds the
place of this process. launch/profiles.py writes it: `simulate` fills the meanings in. So a platform is one
entry here; only what no row can say (lists of Slurm, tables of Ascend) is a function of platforms.py.

The sources are the vendors' documents and SDKs, read in November 2026; none was verified on a live account.
If a platform leaves the port to the user, the port is MASTER_PORT, as users' scripts set it.

To add a platform: an entry in PROFILES; in _READERS of platforms.py _of(NAME), or a function from the
environment to a Claim, more specific platforms first; an environment and its topology in
tests/common/platform/test_topology.py; if a tool submits its jobs, a template in launch/platforms/templates/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Platform:
    """What a platform passes to a node. Variables with an empty value are omitted.

    variables: variable -> meaning, the most telling one of a meaning first. The meanings that are read:
        {node} {nodes}: the index of this node, and their number; several variables must agree
        {hosts} {host_lines}: the names of all nodes; {master} {port}: the address of the first one
        {processes} {gpus}: of a node; {devices}: its GPUs, which have one process each
    arguments: words after those of the user; between_nodes: more of them if there is more than one node.
    prefix: the words before the job. each_rank: whether the platform starts one process for every rank.
    source: the name in the log of what is read from the variables; "": they are not read as rows.
    marks: the platform is recognised if all variables of one of these strings are set.
    grace: the default of --grace, seconds. A platform must leave the job more time after SIGTERM.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    between_nodes: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    each_rank: bool = False
    source: str = ""
    marks: tuple[str, ...] = ()
    grace: float = 25.0

    def is_marked(self, env: Mapping[str, str]) -> bool:
        """Return whether the variables show that this platform has set them."""
        return any(env.keys() >= set(names.split()) for names in self.marks)

    def names(self, *meanings: str) -> list[str]:
        """Return the variables with one of these meanings, in the order of the table."""
        return [name for name, meaning in self.variables.items() if meaning in meanings]


MODELARTS_JOB = "modelarts-job-simulated"  # the real name contains the job's id
_MASTER = {"MASTER_ADDR": "{master}", "MASTER_PORT": "{port}"}
_PET = {  # the options of torchrun, as variables
    "PET_NNODES": "{nodes}", "PET_NODE_RANK": "{node}", "PET_NPROC_PER_NODE": "{processes}",
    "PET_MASTER_ADDR": "{master}", "PET_MASTER_PORT": "{port}",
}  # fmt: skip
# An input named data_url and an output named train_url arrive as folders.
_CHANNELS = ("--data_url={folders.inputs}/data_url_0", "--train_url={folders.outputs}/train_url_0")
# Counters of starts -> their value at the first one. ModelArts counts how often it has scheduled the pod of a
# node, and how often it has started the command there (develop-container-0001, 2025-11-17).
STARTS = {
    "SLURM_RESTART_COUNT": 0, "TORCHELASTIC_RESTART_COUNT": 0, "MA_SCHEDULE_CNT": 1, "MA_PROC_START_CNT": 1,
}  # fmt: skip
# The code is below user-job-dir, and its parent is on PYTHONPATH.
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
# RANK and WORLD_SIZE alone count nodes, as torch's own names do not: a user may set them.
PLAIN = Platform(
    {"WORLD_SIZE": "{nodes}", "RANK": "{node}"} | _MASTER, source="environment", marks=("RANK", "WORLD_SIZE")
)
# Alibaba PAI-DLC and Baidu AIHC set the same names, which count nodes; NPROC_PER_NODE is the number of GPUs.
_PAI_DLC = Platform(
    {**PLAIN.variables, "NPROC_PER_NODE": "{devices}"},
    source="pai-dlc-or-baidu",
    marks=("NPROC_PER_NODE RANK", "NPROC_PER_NODE WORLD_SIZE"),
)
_PYTORCHJOB = Platform(
    _PET | {"RANK": "{node}", "WORLD_SIZE": "{world_size}"} | _MASTER,
    source="kubeflow", marks=("PET_NNODES WORLD_SIZE",),
)  # fmt: skip

PROFILES: dict[str, Platform] = {
    # The preset image starts one boot file per node. With several nodes, arguments give the node's rank and
    # the number of nodes as world size. With one node they are missing, even if it has several GPUs.
    "modelarts": Platform(
        _MODELARTS,
        (*_CHANNELS, "--num_gpus={gpus}"),
        ("--init_method=tcp://{url_host}:{port}", "--rank={node}", "--world_size={nodes}"),
    ),
    # A custom image gets no arguments, and the user's command picks the port. ModelArts runs on Volcano and
    # shares the VC_ names with it.
    "modelarts-custom": Platform(
        _MODELARTS | {"MASTER_PORT": "{port}"}, _CHANNELS,
        source="modelarts-environment", marks=("MA_NUM_HOSTS", "MA_JOB_DIR VC_WORKER_HOSTS"),
    ),
    # Ascend-Powered-Engine starts the boot file once per NPU, with a table of all NPUs in a file; with
    # MA_RUN_METHOD=torchrun it starts torchrun once per node. Users set MASTER_PORT.
    "modelarts-npu": Platform(_MODELARTS | _RANK_TABLE, _CHANNELS, each_rank=True),
    "modelarts-npu-torchrun": Platform(
        _MODELARTS | {"MA_RUN_METHOD": "torchrun"}, _CHANNELS, prefix=_TORCHRUN
    ),
    "pai-dlc": _PAI_DLC,
    "volcengine": Platform(
        {
            "MLP_ROLE_INDEX": "{node}", "MLP_WORKER_NUM": "{nodes}", "MLP_WORKER_GPU": "{gpus}",
            "MLP_WORKER_0_HOST": "{master}", "MLP_WORKER_0_PORT": "{port}",
        },
        source="volcengine", marks=("MLP_WORKER_NUM",),
    ),
    # The variables hold a JSON list of host names and the node's own name, but no rank and no port. SIGKILL
    # follows 120 s after SIGTERM.
    "sagemaker": Platform(
        {
            "SM_HOSTS": "{named_hosts}", "SM_CURRENT_HOST": "{host}", "SM_NUM_GPUS": "{gpus}",
            "SM_CHANNELS": '["training"]', "SM_CHANNEL_TRAINING": "{folders.inputs}",
            "SM_MODEL_DIR": "{folders.outputs}", "SM_OUTPUT_DATA_DIR": "{folders.outputs}",
            "MASTER_PORT": "{port}",
        },
        grace=100.0,
    ),
    "skypilot": Platform(
        {
            "SKYPILOT_NODE_RANK": "{node}", "SKYPILOT_NUM_NODES": "{nodes}",
            "SKYPILOT_NODE_IPS": "{host_lines}", "SKYPILOT_NUM_GPUS_PER_NODE": "{gpus}",
            "MASTER_PORT": "{port}",
        },
        source="skypilot", marks=("SKYPILOT_NODE_RANK",),
    ),
    "dstack": Platform(
        {
            "DSTACK_NODE_RANK": "{node}", "DSTACK_NODES_NUM": "{nodes}", "DSTACK_NODES_IPS": "{host_lines}",
            "DSTACK_MASTER_NODE_IP": "{master}", "DSTACK_GPUS_PER_NODE": "{gpus}", "MASTER_PORT": "{port}",
        },
        source="dstack", marks=("DSTACK_NODE_RANK",),
    ),
    # srun starts one process per task, block by block. Users export MASTER_PORT in the batch script.
    "slurm": Platform(
        {
            "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "{world_size}",
            "SLURM_NNODES": "{nodes}", "SLURM_NODEID": "{node}", "SLURM_TASKS_PER_NODE": "{tasks_per_node}",
            "SLURM_JOB_NODELIST": "{hosts}", "MASTER_PORT": "{port}", "SLURM_PROCID": "{rank}",
            "SLURM_LOCALID": "{local_rank}",
        },
        each_rank=True,
    ),
    # A pod of an Indexed Job. The controller sets the index only. The manifest of `submit` sets the options
    # of torchrun, which must agree with it; Trainer does so, too.
    "kubernetes": Platform(
        _PET | {"JOB_COMPLETION_INDEX": "{node}"},
        source="kubernetes", marks=("JOB_COMPLETION_INDEX PET_NNODES",),
    ),
    # The PyTorchJob operator mixes levels: RANK is the pod's, WORLD_SIZE counts pods x processes.
    "kubeflow": _PYTORCHJOB,
    "kubeflow-v1": _PYTORCHJOB,
    # Trainer sets only torchrun's options. A job without torchrun must read them itself.
    "kubeflow-v2": Platform(_PET, source="kubeflow-v2", marks=("PET_NNODES",)),
    # A master task and a worker task with the pytorch plugin: RANK and WORLD_SIZE count pods, while
    # VC_TASK_INDEX counts within a task and is 0 on two nodes.
    "volcano": Platform(_MASTER | {
        "RANK": "{node}", "WORLD_SIZE": "{nodes}", "VC_MASTER_HOSTS": "{master}", "VC_MASTER_NUM": "1",
        "VC_TASK_INDEX": "{task_index}", "VK_TASK_INDEX": "{task_index}", "VC_WORKER_HOSTS": "{workers}",
        "VC_WORKER_NUM": "{worker_count}",
    }),
    "baidu": _PAI_DLC,
    # One process per rank. Variables have torch's names and count processes; LOCAL_WORLD_SIZE is missing.
    "azureml": Platform(
        _MASTER | {
            "WORLD_SIZE": "{world_size}", "NODE_RANK": "{node}", "AZUREML_NODE_COUNT": "{nodes}",
            "RANK": "{rank}", "LOCAL_RANK": "{local_rank}",
        },
        each_rank=True,
    ),
    # The launcher starts the node's processes and sets all variables that they need.
    "torchrun": Platform(prefix=_TORCHRUN),
    # torchrun's predecessor, deprecated but still shipped. It also passes --local-rank as first argument.
    "launch": Platform(prefix=("-m", "torch.distributed.launch", *_TORCHRUN[2:])),
    "plain": Platform(),
}  # fmt: skip

_COMM_WORLD = "{0}_RANK {0}_SIZE {0}_LOCAL_RANK {0}_LOCAL_SIZE"
MPI = {  # launcher: its variables of the rank, the size, the local rank, and the local size or the nodes
    "openmpi": _COMM_WORLD.format("OMPI_COMM_WORLD"),
    "mvapich2": _COMM_WORLD.format("MV2_COMM_WORLD"),
    "mvapich": _COMM_WORLD.format("MVP_COMM_WORLD"),
    "mpich-or-intel": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "pals": _COMM_WORLD.format("PMI"),
    "jsm": _COMM_WORLD.format("JSM_NAMESPACE"),
    "horovod": _COMM_WORLD.format("HOROVOD"),
    "flux": "FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID FLUX_JOB_NNODES",
}
