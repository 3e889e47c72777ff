"""The signs of a platform or of a launcher of processes. Without one, a process is the only one of its node.

are_set() looks at the names of the variables only, and at one file. It may see a sign where the table has no
platform, and it sees one wherever platforms.py does (tests/common/platform/test_signs.py). This module
imports no torch.
"""

import os
import re
from collections.abc import Mapping

MEMBER = "BOOTFILE_MEMBER"  # the name of a process that an agent has started (common/elastic/agent.py)
HELD = "BOOTFILE_OUTPUT_HELD"  # set by a process that holds the output folder for those that it starts
STARTED_BY = "BOOTFILE_STARTED_BY"  # process id of the parent; set by a job that starts its own processes

# Options that platforms add to the command line of a job, and launchers.
INJECTED = frozenset({"init_method", "rank", "world_size", "local_rank", "node_rank", "num_gpus"})
# SageMaker writes resourceconfig.json into this folder of each container.
SAGEMAKER_CONFIG = "/opt/ml/input/config"
# A name of a rank, if its value is a number: (beginning of the name of its size)
RANK = re.compile(
    r"(\w*?)(?:RANK|RANK_?ID|NODE_RANK|MACHINE_RANK|PE|PROCID|PROCNO|PROCESS_ID|TRAINER_ID|WORKER_ID|NODE_ID"
    r"|NODE_INDEX|V?NODENUM|TASKID|ORDINAL)"
)
SIZES = (  # other ends of its name
    "SIZE", "WORLD_SIZE", "RANK_SIZE", "NPROCS", "NNODES", "NUM_NODES", "NUM_MACHINES", "NUM_PROCESSES",
    "NUM_WORKER", "WORKER_NUM", "TRAINERS_NUM",
)  # fmt: skip
LAUNCHERS = re.compile(  # launchers whose rank above 0 is a sign without a size
    r"(OMPI|MV2|MVP|PMIX?|PALS|ALPS|JSM|HOROVOD|MPI|MPIRUN|FLUX_TASK|DMLC|AWS_BATCH|SLURM|CROSS|NODE|PBS|LSF_PM)_"
)
# Names of the platforms in the table. MASTER_ADDR and MASTER_PORT are none: users set them, too.
_NAMES = re.compile(
    r"(?:MA|VC|VK|MLP|SM|SKYPILOT|DSTACK|SLURM|PET|AZUREML|TORCHELASTIC|OMPI|MV2|MVP|PMI|MPI|JSM|HOROVOD|FLUX"
    r")_.*|\w*(?:RANK|WORLD_SIZE)|RANK_\w+|NPROC_PER_NODE|JOB_COMPLETION_INDEX|ASCEND_DEVICE_ID"
    r"|TPU_WORKER_HOSTNAMES|TF_CONFIG|CLUSTER_SPEC"
)


def are_set(env: Mapping[str, str]) -> bool:
    """Return whether a variable or a file shows a platform, or a launcher of processes."""
    for name, value in env.items():
        match = RANK.fullmatch(name)
        # a program's own option may have such a name, too: NVPL_BLAS_DEBUG_CPU_TYPE=1
        is_rank = match and value.strip().isdigit()
        has_size = match and any(match[1] + end in env for end in SIZES)
        if _NAMES.fullmatch(name) or (is_rank and (has_size or LAUNCHERS.match(name))):
            return True
    return os.path.isfile(os.path.join(SAGEMAKER_CONFIG, "resourceconfig.json"))
