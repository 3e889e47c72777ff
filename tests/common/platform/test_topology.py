"""Ranks are right on every platform: recorded environments, simulated ones, contradictions."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

import psutil
import pytest

from bootfile.ground.errors import BadInput
from common.platform.place import default_grace, is_first_on_node, promised_gpus, resolve
from common.platform.platforms import first_host
from common.platform.signs import STARTED_BY
from common.platform.topology import Topology
from launch.profiles import PROFILES, Folders, make_rank_table, make_starts
from tests.conftest import QUICK, ROOT, environment, names, run


def _resolve(env=None, processes_per_node=1, **args):
    given = dict.fromkeys(("init_method", "rank", "world_size")) | args
    return resolve(argparse.Namespace(processes_per_node=processes_per_node, **given), env or {})


def _words(text):
    """Return the environment variables of `NAME=value NAME=value`."""
    return dict(word.split("=", 1) for word in text.split())


LAUNCHED = _words("RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=1234")
TORCHRUN = LAUNCHED | _words(
    "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=True GROUP_RANK=1 "
    "GROUP_WORLD_SIZE=2 ROLE_RANK=5 ROLE_WORLD_SIZE=8"
)
MODELARTS = _words(
    "MA_HOME=/home/ma-user MA_MOUNT_PATH=/home/ma-user/modelarts "
    "MA_JOB_DIR=/home/ma-user/modelarts/user-job-dir MA_NUM_HOSTS=2 MA_NUM_GPUS=8 MA_TASK_NAME=worker "
    "MA_VJ_NAME=modelarts-job-10ec3221 MA_CURRENT_IP=172.16.0.79 VC_WORKER_NUM=2 VC_TASK_INDEX=1 "
    "VC_WORKER_HOSTS=modelarts-job-10ec3221-worker-0.modelarts-job-10ec3221,"
    "modelarts-job-10ec3221-worker-1.modelarts-job-10ec3221"
)
PAI = _words(
    "MASTER_ADDR=dlc18isgeayd-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 NPROC_PER_NODE=8 "
    "NVIDIA_VISIBLE_DEVICES=all"
)
VOLCENGINE = _words(
    "MLP_ROLE=worker MLP_ROLE_INDEX=3 MLP_WORKER_NUM=4 MLP_WORKER_GPU=8 MLP_WORKER_0_HOST=10.8.3.21 "
    "MLP_WORKER_0_PORT=2222"
)
VOLCANO = _words("VC_TRAINER_HOSTS=job-trainer-0.job,job-trainer-1.job VC_TRAINER_NUM=2 VK_TASK_INDEX=1")
VOLCANO_PLUGIN = _words(
    "MASTER_ADDR=job-master-0.job MASTER_PORT=23456 WORLD_SIZE=3 RANK=1 VC_MASTER_HOSTS=job-master-0.job "
    "VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job VC_WORKER_NUM=2 VC_TASK_INDEX=0 VK_TASK_INDEX=0"
)
SAGEMAKER = _words(
    'SM_HOSTS=["algo-1","algo-2","algo-3"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8 SM_NUM_CPUS=96 '
    "SM_NETWORK_INTERFACE_NAME=eth0 SM_MODEL_DIR=/opt/ml/model "
    "SM_CHANNEL_TRAINING=/opt/ml/input/data/training"
)
# Of sm_drivers/scripts/environment.py in sagemaker-train 1.27.0, on the second of two nodes.
SAGEMAKER_SDK = _words(
    "SM_INPUT_CONFIG_DIR=/opt/ml/input/config SM_MASTER_ADDR=algo-1 SM_MASTER_PORT=7777 SM_ENTRY_SCRIPT=null "
    "SM_SOURCE_DIR=/opt/ml/input/data/code SM_HPS={} SM_CURRENT_HOST=algo-2 SM_HOST_COUNT=2 "
    "SM_CURRENT_HOST_RANK=1 SM_NETWORK_INTERFACE_NAME=eth0 SM_NUM_CPUS=2 SM_NUM_GPUS=0 SM_NUM_NEURONS=0 "
    "TRAINING_JOB_NAME=small"
) | {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CHANNELS": '["code", "sm_drivers"]'}
AZUREML = _words(
    "AZUREML_RUN_ID=calm_tree_1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105 WORLD_SIZE=8 NODE_RANK=1 RANK=6 "
    "LOCAL_RANK=2"
)
KUBEFLOW = _words(
    "MASTER_ADDR=mnist-master-0 MASTER_PORT=23456 RANK=1 WORLD_SIZE=16 PET_NNODES=2 PET_NODE_RANK=1 "
    "PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=mnist-master-0 PET_MASTER_PORT=23456 PYTHONUNBUFFERED=1"
)
KUBEFLOW_V2 = _words(
    "PET_NNODES=3 PET_NODE_RANK=2 PET_NPROC_PER_NODE=4 PET_MASTER_ADDR=pytorch-node-0-0.pytorch "
    "PET_MASTER_PORT=29400"
)
KUBERNETES = KUBEFLOW_V2 | _words("JOB_COMPLETION_INDEX=2 PET_MASTER_ADDR=run-0.run")
SLURM = _words(
    "SLURM_JOB_ID=8675309 SLURM_STEP_ID=0 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_NTASKS=12 "
    "SLURM_NNODES=3 SLURM_TASKS_PER_NODE=4(x3) SLURM_JOB_NODELIST=node[009-010],gpu7 SLURM_GPUS_ON_NODE=4"
)
# A node has one task for four GPUs: a process, but not one per rank.
ONE_TASK = SLURM | _words("SLURM_NTASKS=3 SLURM_TASKS_PER_NODE=1(x3) SLURM_PROCID=2 SLURM_LOCALID=0")
OPENMPI = _words(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
    "OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=8 PMIX_RANK=5 PMIX_NAMESPACE=1246822401"
)
MPICH = _words("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=9")
# Of mpirun in a batch script, on a node where srun started mpirun's daemon.
DAEMON = SLURM | _words("SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_PROCID=1 SLURM_NODEID=1 SLURM_LOCALID=0")
DEEPSPEED = _words(
    "RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=h MASTER_PORT=29500"
)
SKYPILOT = _words(
    "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8 SKYPILOT_TASK_ID=sky-2026-11-01"
) | {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
DSTACK = _words(
    "DSTACK_NODE_RANK=1 DSTACK_NODES_NUM=2 DSTACK_GPUS_PER_NODE=8 DSTACK_GPUS_NUM=16 "
    "DSTACK_MASTER_NODE_IP=10.1.0.3"
) | {"DSTACK_NODES_IPS": "10.1.0.4\n10.1.0.3"}  # the first node need not be the first of the list
FIRST_WORKER = "modelarts-job-10ec3221-worker-0.modelarts-job-10ec3221"
SLURM_PORT = 61440 + 8675309 % 4096


def test_nothing_injected_is_one_node():
    assert _resolve() == Topology(0, 1, 1, None, None, None, "node", "plain")
    assert _resolve(processes_per_node=4).world_size == 4
    assert _resolve(processes_per_node=None).world_size == 1
    assert resolve(argparse.Namespace(), {}).source == "plain"
    assert str(_resolve()).endswith("node_rank=0 master=none")
    assert (
        _resolve(_words("NPROC_PER_NODE=8 MASTER_ADDR=h SLURM_PROCID=0 MA_HOME=/home/ma-user"), None)
        == _resolve()
    )
    assert resolve(argparse.Namespace(), PAI | {"WORLD_SIZE": "1", "RANK": "0"}).world_size == 1


@pytest.mark.parametrize(
    "env, topology",
    [
        (TORCHRUN, Topology(1, 2, 4, 1, "h", 1234, "process", "torchrun")),
        (LAUNCHED, Topology(1, 2, 4, 1, "h", 1234, "process", "launcher")),
        (MODELARTS, Topology(1, 2, 5, None, FIRST_WORKER, 29500, "node", "modelarts-environment")),
        (
            {"MA_NUM_HOSTS": "1", "MA_NUM_GPUS": "8", "VC_TASK_INDEX": "7"},
            Topology(0, 1, 5, None, None, None, "node", "modelarts-environment"),
        ),
        (
            {name: MODELARTS[name] for name in ("MA_JOB_DIR", "VC_WORKER_HOSTS", "VC_TASK_INDEX")},
            Topology(1, 2, 5, None, FIRST_WORKER, 29500, "node", "modelarts-environment"),
        ),
        (PAI, Topology(2, 3, 5, None, "dlc18isgeayd-master-0", 23456, "node", "pai-dlc-or-baidu")),
        (VOLCENGINE, Topology(3, 4, 5, None, "10.8.3.21", 2222, "node", "volcengine")),
        (VOLCANO, Topology(1, 2, 5, None, "job-trainer-0.job", 29500, "node", "volcano")),
        (VOLCANO_PLUGIN, Topology(1, 3, 5, None, "job-master-0.job", 23456, "node", "volcano")),
        ({"VC_WORKER_HOSTS": "h"}, Topology(0, 1, 5, None, "h", 29500, "node", "volcano")),
        (SAGEMAKER, Topology(1, 3, 5, None, "algo-1", 29500, "node", "sagemaker")),
        (SAGEMAKER_SDK, Topology(1, 2, 5, None, "algo-1", 29500, "node", "sagemaker")),
        (SAGEMAKER_SDK | TORCHRUN, Topology(1, 2, 4, 1, "h", 1234, "process", "torchrun")),
        (AZUREML, Topology(1, 2, 4, 2, "10.0.0.4", 6105, "process", "azureml")),
        (
            AZUREML | _words("NODE_RANK=0 RANK=2 AZUREML_NODE_COUNT=1"),
            Topology(0, 1, 8, 2, "10.0.0.4", 6105, "process", "azureml"),
        ),
        (KUBEFLOW, Topology(1, 2, 5, None, "mnist-master-0", 23456, "node", "kubeflow")),
        (KUBEFLOW_V2, Topology(2, 3, 5, None, "pytorch-node-0-0.pytorch", 29400, "node", "kubeflow-v2")),
        (
            _words("PET_NNODES=2 PET_NODE_RANK=1 MASTER_ADDR=h MASTER_PORT=65535"),
            Topology(1, 2, 5, None, "h", 65535, "node", "kubeflow-v2"),
        ),
        ({"PET_NNODES": "1"}, Topology(0, 1, 5, None, None, None, "node", "kubeflow-v2")),
        (KUBERNETES, Topology(2, 3, 5, None, "run-0.run", 29400, "node", "kubernetes")),
        (
            _words("JOB_COMPLETION_INDEX=0 PET_NNODES=1"),
            Topology(0, 1, 5, None, None, None, "node", "kubernetes"),
        ),
        # an Indexed Job whose pods do not belong together: the index is that of another job
        (_words("JOB_COMPLETION_INDEX=3"), Topology(0, 1, 5, None, None, None, "node", "plain")),
        (
            _words("JOB_COMPLETION_INDEX=3 PET_NNODES=1"),
            Topology(0, 1, 5, None, None, None, "node", "kubernetes"),
        ),
        (
            _words("JOB_COMPLETION_INDEX=3 PET_NNODES=1 PET_NODE_RANK=0 PET_MASTER_ADDR=localhost"),
            Topology(0, 1, 5, None, "localhost", 29500, "node", "kubernetes"),
        ),
        (_words("WORLD_SIZE=1"), Topology(0, 1, 5, None, None, None, "node", "environment")),
        (SLURM, Topology(2, 3, 4, 1, "node009", SLURM_PORT, "process", "slurm")),
        (
            _words(
                "SLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NNODES=1 MASTER_ADDR=h"
            ),
            Topology(0, 1, 2, 1, "h", 61440, "process", "slurm"),
        ),
        (  # a step on two of the job's three nodes
            SLURM
            | _words("SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=gpu7,gpu8")
            | _words("SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1 SLURM_NODEID=1 SLURM_LOCALID=0")
            | _words("SLURM_GPUS_ON_NODE=1"),
            Topology(1, 2, 1, 0, "gpu7", SLURM_PORT, "process", "slurm"),
        ),
        (ONE_TASK, Topology(2, 3, 5, None, "node009", SLURM_PORT, "node", "slurm")),
        (
            ONE_TASK | {"SLURM_GPUS_ON_NODE": "2"},
            Topology(2, 3, 5, None, "node009", SLURM_PORT, "node", "slurm"),
        ),
        (  # another step of the same job, which may run at the same time
            SLURM | {"SLURM_STEP_ID": "1"},
            Topology(2, 3, 4, 1, "node009", 61440 + (8675309 + 61) % 4096, "process", "slurm"),
        ),
        (  # salloc without srun
            {name: SLURM[name] for name in SLURM if name not in ("SLURM_PROCID", "SLURM_LOCALID")},
            Topology(0, 1, 5, None, None, None, "node", "plain"),
        ),
        (SKYPILOT, Topology(1, 2, 5, None, "10.0.0.5", 29500, "node", "skypilot")),
        (DSTACK, Topology(1, 2, 5, None, "10.1.0.3", 29500, "node", "dstack")),
        (
            _words("RANK=1 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=1234"),
            Topology(1, 2, 5, None, "h", 1234, "node", "environment"),
        ),
    ],
)
def test_recorded_environments(env, topology):
    """The values have the form of the vendors' documents. No platform has 5 processes per node. If a platform
    starts the processes, its number is used."""
    assert _resolve(env, processes_per_node=5) == topology


NODE_SOURCES = {  # platforms that start one process per node: the source that their variables name
    "modelarts": "modelarts-arguments", "modelarts-custom": "modelarts-environment",
    "pai-dlc": "pai-dlc-or-baidu", "baidu": "pai-dlc-or-baidu", "sagemaker": "sagemaker",
    "kubeflow": "kubeflow", "kubeflow-v1": "kubeflow", "kubeflow-v2": "kubeflow-v2",
    "kubernetes": "kubernetes", "volcano": "volcano", "volcengine": "volcengine",
    "skypilot": "skypilot", "dstack": "dstack", "plain": "plain",
}  # fmt: skip
SILENT = {"kubeflow", "kubeflow-v1", "kubeflow-v2", "kubernetes", "volcano", "plain"}
PROMISE = {"modelarts-npu", *NODE_SOURCES} - SILENT  # they tell the number of GPUs
RANK_SOURCES = {  # they start one process per rank
    "azureml": "azureml", "slurm": "slurm", "modelarts-npu": "rank-table",
}  # fmt: skip
SOURCES = NODE_SOURCES | RANK_SOURCES
LAYOUTS = [(1, 4), (2, 2), (4, 1)]
HOSTS = [f"10.77.0.{number}" for number in range(1, 5)]
FOLDERS = Folders(
    "/ma/modelarts/user-job-dir/code", "/ma/modelarts/inputs", "/ma/modelarts/outputs", "/c", "/l"
)


@pytest.mark.parametrize("nodes, processes", LAYOUTS)
@pytest.mark.parametrize("name", SOURCES)
def test_profiles(name, nodes, processes, tmp_path):
    hosts, source = HOSTS[:nodes], SOURCES[name]
    folders = FOLDERS._replace(logs=str(tmp_path))
    (tmp_path / "jobstart_hccl.json").write_text(make_rank_table(hosts, processes))
    if name == "plain" and nodes > 1:
        with pytest.raises(BadInput, match=f"cannot start {nodes} nodes"):
            make_starts(name, 0, nodes, processes, hosts, 4321, FOLDERS)
        return
    level = "process" if name in RANK_SOURCES else "node"
    master, port = (None, None) if name == "plain" else (hosts[0], 4321)
    if nodes == 1 and name == "modelarts":  # its arguments come with the second node
        source, port = "modelarts-environment", 29500
    ranks = []
    for node in range(nodes):
        starts = make_starts(name, node, nodes, processes, hosts, 4321, folders, gpus=2)
        assert len(starts) == (processes if level == "process" else 1)
        for local_rank, start in enumerate(starts):
            topology = _resolve(start.environment, processes, **_parsed(start.arguments))
            own = local_rank if level == "process" else None
            assert topology == Topology(node, nodes, processes, own, master, port, level, source)
            assert start.prefix == [] and promised_gpus(start.environment) == (2 if name in PROMISE else None)
            ranks.append(topology.rank)
    assert ranks == list(range(0, 4, 1 if level == "process" else processes))


def _parsed(words):
    """Parse the words as train_ddp.py does: unknown options are ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--init_method")
    for name in ("--rank", "--world_size"):
        parser.add_argument(name, type=int)
    return vars(parser.parse_known_args(words)[0])


def test_all_profiles_are_tested():
    assert set(PROFILES) == {*SOURCES, "torchrun", "launch", "modelarts-npu-torchrun"}


# The example of "Preparing the Ranktable Resource Configuration File", template 1, hiascend.com
RANK_TABLE = """
{"status": "completed", "version": "1.0", "server_count": "2", "server_list": [
    {"server_id": "node_0", "device": [
        {"device_id": "0", "device_ip": "192.168.1.8", "rank_id": "0"},
        {"device_id": "1", "device_ip": "192.168.1.9", "rank_id": "1"}]},
    {"server_id": "node_1", "device": [
        {"device_id": "0", "device_ip": "192.168.2.8", "rank_id": "2"},
        {"device_id": "1", "device_ip": "192.168.2.9", "rank_id": "3"}]}]}
"""
NPU = _words("RANK_ID=3 RANK_SIZE=4 ASCEND_DEVICE_ID=1")


def test_a_rank_table_of_ascend_places_each_process(tmp_path):
    table = tmp_path / "jobstart_hccl.json"
    table.write_text(RANK_TABLE)
    env = NPU | {"RANK_TABLE_FILE": str(table)}
    assert _resolve(env, 5) == Topology(1, 2, 2, 1, "node_0", 29500, "process", "rank-table")
    assert _resolve(MODELARTS | env, 5).master_host == FIRST_WORKER
    named = _words("MASTER_ADDR=h MASTER_PORT=1234")
    assert _resolve(MODELARTS | env | named, 5) == Topology(1, 2, 2, 1, "h", 1234, "process", "rank-table")
    run_method = MODELARTS | TORCHRUN | {"MA_RUN_METHOD": "torchrun", "RANK_TABLE_FILE": str(table)}
    assert _resolve(run_method, 5) == Topology(1, 2, 4, 1, "h", 1234, "process", "torchrun")


@pytest.mark.parametrize(
    ("size", "text"),
    [("4", None), ("4", "{"), ("4", "[]"), ("4", '{"server_list": []}'),
     ("4", '{"server_list": [{"server_id": "a"}]}'), ("8", RANK_TABLE), ("x", RANK_TABLE)],
)  # fmt: skip
def test_rank_tables_that_are_refused(size, text, tmp_path):
    table = tmp_path / "jobstart_hccl.json"
    if text is not None:
        table.write_text(text)
    env = NPU | {"RANK_TABLE_FILE": str(table), "RANK_SIZE": size}
    with pytest.raises(BadInput, match=r"jobstart_hccl\.json|RANK_SIZE=x") as refusal:
        _resolve(env)
    assert "\n" not in str(refusal.value)


def test_torchrun_on_npus_as_modelarts_starts_it():
    (start,) = make_starts("modelarts-npu-torchrun", 1, 2, 8, ["a", "b"], 6666, FOLDERS, gpus=8)
    assert start.prefix[:2] == ["-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--nproc-per-node=8", "--node-rank=1", "--master-addr=a"} <= {*start.prefix}
    assert start.environment["MA_RUN_METHOD"] == "torchrun" and start.environment["MA_NUM_GPUS"] == "8"


def test_what_modelarts_injects():
    """They are the folders and counters of the vendor's documents, and an argument that no job knows."""
    (first,) = make_starts("modelarts", 1, 2, 8, ["a", "b"], 6666, FOLDERS, gpus=8)
    folders = ["--data_url=/ma/modelarts/inputs/data_url_0", "--train_url=/ma/modelarts/outputs/train_url_0"]
    place = ["--num_gpus=8", "--init_method=tcp://a:6666", "--rank=1", "--world_size=2"]
    assert first.arguments == folders + place
    expected = _words(
        "MA_MOUNT_PATH=/ma/modelarts MA_JOB_DIR=/ma/modelarts/user-job-dir MA_NUM_GPUS=8 MA_SCHEDULE_CNT=1 "
        "MA_PROC_START_CNT=1 PYTHONPATH=/ma/modelarts/user-job-dir VC_WORKER_HOSTS=a,b MA_CURRENT_IP=b"
    )
    assert expected.items() <= first.environment.items()
    (alone,) = make_starts("modelarts", 0, 1, 8, ["a"], 6666, FOLDERS, gpus=8)
    assert alone.arguments == [*folders, "--num_gpus=8"], "on one node the platform passes no rank"
    (custom,) = make_starts("modelarts-custom", 1, 2, 8, ["a", "b"], 6666, FOLDERS)
    assert custom.arguments == folders and custom.environment["MASTER_PORT"] == "6666"


@pytest.mark.parametrize("host", ["job-0.job", "[fd00::7]"])
def test_modelarts_arguments_count_nodes(host):
    expected = Topology(1, 2, 8, None, host.strip("[]"), 6666, "node", "modelarts-arguments")
    assert (expected.world_size, expected.rank) == (16, 8)
    assert str(expected) == (
        "topology source=modelarts-arguments level=node nodes=2 processes_per_node=8 node_rank=1 "
        f"master={host}:6666"
    )
    for init_method in (f"{host}:6666", f"tcp://{host}:6666"):
        assert _resolve(init_method=init_method, rank=1, world_size=2, processes_per_node=8) == expected


def test_a_launcher_counts_processes_and_wins():
    arguments = dict(init_method="tcp://other:1", rank=0, world_size=2, processes_per_node=3)
    topology = _resolve(LAUNCHED, **arguments)
    assert (topology.nodes, topology.processes_per_node, topology.master_host) == (2, 4, "h")
    assert (topology.world_size, topology.rank) == (8, 5)
    for platform in (TORCHRUN, MODELARTS, PAI, SLURM, KUBEFLOW, SAGEMAKER):
        assert _resolve(platform | LAUNCHED, **arguments).rank == 5
    assert _resolve(AZUREML | TORCHRUN).source == "torchrun"


def test_a_process_that_the_job_started_repeats_the_arguments_of_its_parent():
    """The parent has used the arguments and the platform's variables, so the child ignores both."""
    arguments = dict(init_method="tcp://h:1", rank=1, world_size=2, processes_per_node=4)
    for platform in (MODELARTS, VOLCANO_PLUGIN, _words("NODE_RANK=7 AZUREML_NODE_COUNT=9")):
        topology = _resolve(platform | LAUNCHED | {STARTED_BY: "1"}, **arguments)
        assert topology == Topology(1, 2, 4, 1, "h", 1234, "process", "launcher")


def test_arguments_of_one_node():
    one = Topology(0, 1, 1, None, None, None, "node", "modelarts-arguments")
    assert _resolve(rank=0) == _resolve(world_size=1) == _resolve(rank=0, world_size=1) == one
    topology = _resolve(init_method="h:65535")
    assert topology == Topology(0, 1, 1, None, "h", 65535, "node", "modelarts-arguments")


def test_arguments_win_over_a_platform_that_agrees_and_take_the_rest_from_it():
    address = ("tcp://elsewhere:6666", "elsewhere", 6666)
    arguments = Topology(1, 2, 8, None, *address[1:], "node", "modelarts-arguments")
    assert _resolve(MODELARTS, 8, init_method=address[0], rank=1, world_size=2) == arguments
    assert _resolve(MODELARTS, 8, init_method=address[0], world_size=2) == arguments
    assert _resolve(MODELARTS, 8, init_method=address[0], rank=1) == arguments
    topology = _resolve(MODELARTS, 8, init_method=address[0])
    assert (topology.master_host, topology.source) == ("elsewhere", "modelarts-environment")
    assert _resolve(MODELARTS, 8, rank=1, world_size=2).master_host == FIRST_WORKER
    master = _words("MASTER_ADDR=h MASTER_PORT=1234")
    assert _resolve(master, 8, init_method="env://", rank=1, world_size=2).master_port == 1234
    assert _resolve(KUBEFLOW, 8, init_method="env://").master_host == "mnist-master-0"
    assert _resolve(VOLCANO_PLUGIN | MODELARTS).source == "modelarts-environment", "the more specific"
    assert _resolve(KUBEFLOW | SLURM).source == "slurm"
    assert _resolve(ONE_TASK, 4, rank=2, world_size=3).rank == 8


@pytest.mark.parametrize(
    "env, given, processes",
    [
        (PAI, None, 8),
        (PAI, 2, 2),
        (PAI | {"NPROC_PER_NODE": "gpu"}, None, 1),
        (PAI | {"NPROC_PER_NODE": "0"}, None, 1),
        (KUBEFLOW, None, 8),
        (KUBEFLOW_V2, None, 4),
        (KUBEFLOW_V2 | {"PET_NPROC_PER_NODE": "auto"}, None, 1),
        (KUBEFLOW_V2, 1, 1),
        (AZUREML | _words("NODE_RANK=0 RANK=2"), 4, 4),  # the first node of two, and no LOCAL_WORLD_SIZE
        (MODELARTS, None, 1),
    ],
)
def test_processes_per_node(env, given, processes):
    assert _resolve(env, given).processes_per_node == processes


@pytest.mark.parametrize(
    "env, gpus",
    [
        (MODELARTS, 8), (VOLCENGINE, 8), (SAGEMAKER, 8), (PAI, 8), (SKYPILOT, 8), (DSTACK, 8),
        (MODELARTS | {"MA_NUM_GPUS": "0"}, None), (PAI | {"NPROC_PER_NODE": "auto"}, None),
        (KUBEFLOW_V2, None), (TORCHRUN, None), ({}, None),
        ({"NPROC_PER_NODE": "8"}, None),  # a variable of the user
    ],
)  # fmt: skip
def test_promised_gpus(env, gpus):
    assert promised_gpus(env) == gpus


@pytest.mark.parametrize(
    "text, name",
    [
        ("gpu3", "gpu3"), ("node[001-004,7],gpu3", "node001"), ("r[1-2]n[09-10]-ib,x-1.y", "r1n09-ib"),
        ("", None), ("node[1-", None), ("node]1", None), ("node[a-b]", None), ("n[1-2-3]", None),
    ],
)  # fmt: skip
def test_first_host_of_a_slurm_list(text, name):
    if name:
        assert first_host(text) == name
        return
    with pytest.raises(BadInput, match="not a Slurm host list"):
        first_host(text)


NODE_ARGUMENTS = dict(init_method="tcp://h:6666", rank=0, world_size=2)


@pytest.mark.parametrize(
    "args, message",
    [
        (dict(rank=None), "--world_size without --rank"),
        (dict(world_size=None, rank=1), "--rank without --world_size"),
        (dict(rank=2), "--rank 2 --world_size 2: the rank is not in 0..1"),
        (dict(world_size=0), "--rank 0 --world_size 0: the rank is not in 0..-1"),
        (dict(init_method=None), "--world_size 2, but no variable names"),
        (dict(init_method="env://"), "--world_size 2, but no variable names"),
        (dict(init_method="tcp://h:0"), "h:0 is not tcp://host:port with a port in 1..65535"),
        (dict(init_method="tcp://h"), "tcp://h is not tcp://host:port"),
        (dict(init_method="[fd00::7:6666"), "[fd00::7:6666 is not tcp://host:port"),
        (dict(processes_per_node=10**6), "processes are too many"),
    ],
)
def test_arguments_that_are_wrong_by_themselves(args, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        _resolve(**NODE_ARGUMENTS | args)


@pytest.mark.parametrize(
    "env, changed, args, message",
    [
        (MODELARTS, "MA_NUM_HOSTS=4 VC_WORKER_NUM=4", {}, "MA_NUM_HOSTS=4 contradicts VC_WORKER_HOSTS="),
        (MODELARTS, "", NODE_ARGUMENTS, "--rank 0 --world_size 2, which count nodes, contradict MA"),
        (MODELARTS, "", dict(world_size=4), "--rank 1 --world_size 4, which count nodes, contradict MA_NUM"),
        ({}, "MA_NUM_HOSTS=4 VC_TASK_INDEX=0", {}, "VC_TASK_INDEX=0, but no variable names"),
        ({}, "MA_NUM_HOSTS=4", {}, "MA_NUM_HOSTS=4, but VC_TASK_INDEX is not set"),
        ({}, "MA_NUM_HOSTS=four", {}, "MA_NUM_HOSTS=four is not a whole number"),
        ({}, f"MA_NUM_HOSTS={'9' * 5000}", {}, "is not a whole number"),
        ({}, "MA_NUM_HOSTS=1_0", {}, "MA_NUM_HOSTS=1_0 is not a whole number"),
        ({}, "MA_NUM_HOSTS=0", {}, "MA_NUM_HOSTS=0 VC_TASK_INDEX (one node): rank 0 is not in 0..-1"),
        (MODELARTS, "MASTER_PORT=65536", {}, "MASTER_PORT=65536 is not a port in 1..65535"),
        (PAI, "RANK=3", {}, "WORLD_SIZE=3 RANK=3: rank 3 is not in 0..2"),
        (VOLCANO, "VC_TASK_INDEX=0", {}, "VC_TASK_INDEX=0 contradicts VK_TASK_INDEX=1"),
        (VOLCANO, "VC_PS_HOSTS=job-ps-0.job", {}, "VC_PS_HOSTS and VC_TRAINER_HOSTS are 2 groups of pods"),
        (SAGEMAKER, "SM_CURRENT_HOST=algo-9", {}, "SM_CURRENT_HOST=algo-9: expected a JSON list of host"),
        (SAGEMAKER, "SM_HOSTS=algo-1,algo-2", {}, "SM_HOSTS=algo-1,algo-2 SM_CURRENT_HOST=algo-2: expected"),
        (KUBEFLOW_V2, "PET_NNODES=1", {}, "PET_NNODES=1 PET_NODE_RANK=2: rank 2 is not in 0..0"),
        (SKYPILOT, "SKYPILOT_NUM_NODES=1 SKYPILOT_NODE_IPS=10.0.0.5", {}, "rank 1 is not in 0..0"),
        ({}, "RANK=0", {}, "RANK=0, but WORLD_SIZE is not set"),
        ({}, "WORLD_SIZE=2", {}, "WORLD_SIZE=2, but RANK is not set"),
        (KUBEFLOW_V2, "PET_NNODES=1:3", {}, "PET_NNODES=1:3 is not a whole number"),
        (KUBERNETES, "JOB_COMPLETION_INDEX=1", {}, "PET_NODE_RANK=2 contradicts JOB_COMPLETION_INDEX=1"),
        (KUBERNETES, "PET_NNODES=2", {}, "PET_NNODES=2 PET_NODE_RANK=2: rank 2 is not in 0..1"),
        (KUBERNETES, "PET_NNODES=1", {}, "PET_NNODES=1 PET_NODE_RANK=2: rank 2 is not in 0..0"),
        (SLURM, "SLURM_TASKS_PER_NODE=4(x2),3", {}, "SLURM_TASKS_PER_NODE=4(x2),3 do not fit: every"),
        (SLURM, "SLURM_NTASKS=11", {}, "SLURM_NTASKS=11 SLURM_NNODES=3 SLURM_TASKS_PER_NODE=4(x3) do not"),
        (SLURM, "SLURM_PROCID=8 SLURM_NODEID=1 SLURM_LOCALID=4", {}, "do not fit"),
        ({}, "SLURM_PROCID=1 SLURM_NTASKS=2", {}, "SLURM_NODEID is not set"),
        (SLURM, "", NODE_ARGUMENTS | dict(rank=2, world_size=3), "count nodes, but slurm started 4 "),
        (SLURM, "", NODE_ARGUMENTS | dict(world_size=12), "--world_size 12, which count nodes, contradict"),
        ({}, "DSTACK_NODE_RANK=2", {}, "DSTACK_NODE_RANK=2, but DSTACK_NODES_NUM is not set"),
        (MPICH, "", dict(rank=0, world_size=2), "contradict PMI_RANK=1 PMI_SIZE=2"),
        # launchers
        (LAUNCHED, "LOCAL_RANK=2", {}, "RANK=5 LOCAL_RANK=2 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 contradict"),
        (LAUNCHED, "WORLD_SIZE=6", {}, "contradict each other"),
        (TORCHRUN, "GROUP_RANK=0", {}, "GROUP_RANK=0 GROUP_WORLD_SIZE=2 contradict each other"),
        (TORCHRUN, "GROUP_WORLD_SIZE=3", {}, "GROUP_RANK=1 GROUP_WORLD_SIZE=3 contradict each other"),
        (LAUNCHED, "LOCAL_WORLD_SIZE=0", {}, "LOCAL_WORLD_SIZE=0 contradict each other"),
        (LAUNCHED, "MASTER_PORT=0", {}, "MASTER_PORT=0 is not a port in 1..65535"),
        # Two processes on the first node, one on the second: 3 are not divisible by 2.
        (TORCHRUN, "WORLD_SIZE=3 LOCAL_WORLD_SIZE=2 RANK=1 GROUP_RANK=0", {}, "GROUP_WORLD_SIZE=2 contra"),
        # Three and one: the second node's process would accept 4 = 4 x 1.
        (TORCHRUN, "WORLD_SIZE=4 LOCAL_WORLD_SIZE=1 RANK=3 LOCAL_RANK=0", {}, "GROUP_WORLD_SIZE=2 contra"),
        (AZUREML, "AZUREML_NODE_COUNT=4", {}, "NODE_RANK=1 AZUREML_NODE_COUNT=4 contradict each other"),
        (AZUREML, "NODE_RANK=0", dict(processes_per_node=2), "NODE_RANK=0 contradict each other, with 2"),
        (AZUREML, "NODE_RANK=0 RANK=1 LOCAL_RANK=1", dict(processes_per_node=3), "each other, with 3"),
        ({}, "LOCAL_RANK=0", {}, "LOCAL_RANK is set, but RANK is not"),
        ({}, "TORCHELASTIC_RUN_ID=none", {}, "TORCHELASTIC_RUN_ID is set, but LOCAL_RANK is not"),
    ],
)  # fmt: skip
def test_a_platform_that_contradicts_itself_or_the_arguments(env, changed, args, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        _resolve(env | _words(changed), **args)


@pytest.mark.parametrize(
    "env, place",
    [
        (OPENMPI | {"MASTER_ADDR": "h"}, (1, 2, 4, 1, "h", "process", "openmpi")),
        (OPENMPI | SAGEMAKER, (1, 2, 4, 1, "algo-1", "process", "openmpi")),
        (OPENMPI | DAEMON | {"MASTER_ADDR": "h"}, (1, 2, 4, 1, "h", "process", "openmpi")),
        (OPENMPI | {"AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"}, (1, 2, 4, 1, "10.0.0.4", "process", "openmpi")),
        (
            OPENMPI | _words("OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 MASTER_ADDR=h"),
            (5, 8, 3, None, "h", "node", "openmpi"),  # one process per node starts the others
        ),
        (MPICH, (0, 1, 2, 1, "127.0.0.1", "process", "mpich-or-intel")),
        (
            _words("FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_NNODES=2 MASTER_ADDR=h"),
            (1, 2, 2, 1, "h", "process", "flux"),
        ),
        (DEEPSPEED, (1, 2, 2, 1, "h", "process", "launcher")),
        (
            _words("RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"),
            (0, 1, 4, 1, "127.0.0.1", "process", "launcher"),
        ),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}', "CLUSTER_SPEC": "x"}, ()),
        # A script that sets the variables of torchrun from those of MPI.
        (
            OPENMPI | _words("RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 MASTER_ADDR=h MASTER_PORT=1"),
            (1, 2, 4, 1, "h", "process", "launcher"),
        ),
        # Not one of several: one process, and launchers inside MPI.
        (_words("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_UNIVERSE_SIZE=8 PMIX_RANK=0"), ()),
        (_words("PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 NODE_RANK=0 NNODES=1"), ()),
        (_words("FLUX_LORA_RANK=16 PAGE_RANK=2 OMPI_MCA_btl_tcp_RANK=x SLURM_ARRAY_TASK_ID=3"), ()),
        (_words("PMIX_RANK=0") | TORCHRUN, (1, 2, 4, 1, "h", "process", "torchrun")),
        (_words("PBS_NODENUM=0 NODE_RANK=0"), ()),
        (OPENMPI | TORCHRUN, (1, 2, 4, 1, "h", "process", "torchrun")),
        (MODELARTS | {"PMIX_RANK": "1"}, (1, 2, 3, None, FIRST_WORKER, "node", "modelarts-environment")),
    ],
)
def test_mpi(env, place):
    node_rank, nodes, count, local_rank, host, level, source = place or (0, 1, 3, None, None, "node", "plain")
    found = _resolve(env, processes_per_node=3)
    assert found == Topology(node_rank, nodes, count, local_rank, host, found.master_port, level, source)


def test_jobs_of_several_launchers_on_one_node_have_ports_of_their_own(monkeypatch):
    """The launcher is the parent of the leader of this process group; in between there may be a script."""
    leader = os.getppid()
    launcher = psutil.Process(leader).ppid()
    monkeypatch.setattr(os, "getpgrp", lambda: leader)
    assert _resolve(MPICH).master_port == 61440 + launcher % 4096


def test_arguments_that_repeat_the_variables_of_mpi():
    """mpirun ... --rank $OMPI_COMM_WORLD_RANK --world_size $OMPI_COMM_WORLD_SIZE"""
    assert _resolve(MPICH, rank=1, world_size=2) == _resolve(MPICH)


BATCH = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}
BATCH |= _words("SLURM_LOCALID=0 SLURM_NODEID=0")
# variables of a notebook
STALE = _words("RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=9994")
IS_STALE = r"RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 contradict .* started several"


@pytest.mark.parametrize(
    "env, message",
    [
        (OPENMPI, "no variable names .*-x MASTER_ADDR"),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "LOCAL_RANK=2 .*ppr:N:node"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "7"}, "SIZE=7 .*do not fit"),
        (_words("PMI_RANK=0 PMI_SIZE=2"), "PMI_RANK=0 PMI_SIZE=2: this is one of several"),
        (_words("PMIX_RANK=1"), "PMIX_RANK=1: .*torchrun"),
        (_words("PMIX_RANK=0 PMIX_NAMESPACE=prterun-host-1"), "PMIX_RANK=0: .*env -u"),
        (_words("PMI_RANK=0"), "PMI_RANK=0: "),
        (_words("ALPS_APP_PE=3"), "ALPS_APP_PE=3: "),
        (_words("NODE_RANK=0 NNODES=2"), "NNODES=2 NODE_RANK=0: "),
        (_words("PMI_SIZE=2"), "PMI_SIZE=2: "),
        (_words("XRT_SHARD_ORDINAL=0 XRT_SHARD_WORLD_SIZE=8"), "XRT_SHARD_WORLD_SIZE=8: "),
        (_words("PADDLE_TRAINER_ID=0 PADDLE_TRAINERS_NUM=2"), "PADDLE_TRAINERS_NUM=2 "),
        (_words("PROCESS_ID=0 NUM_PROCESSES=2"), "NUM_PROCESSES=2 PROCESS_ID=0: "),
        (_words("MACHINE_RANK=0 NUM_MACHINES=2"), "NUM_MACHINES=2: "),
        (_words("RANK_ID=0 RANK_SIZE=8"), "RANK_SIZE=8: "),
        (_words("_CONDOR_PROCNO=0 _CONDOR_NPROCS=2"), "_CONDOR_NPROCS=2 "),
        (_words("TPU_WORKER_ID=0 TPU_WORKER_HOSTNAMES=a,b"), "TPU_WORKER_HOSTNAMES=a,b: "),
        (_words("OTHER_WORLD_RANK=0 OTHER_WORLD_SIZE=2"), "OTHER_WORLD_SIZE=2: "),
        (_words("PBS_VNODENUM=1"), "PBS_VNODENUM=1: "),
        (_words("AWS_BATCH_JOB_NODE_INDEX=0 AWS_BATCH_JOB_NUM_NODES=2"), "AWS_BATCH_JOB_NUM_NODES=2: "),
        ({"PMI_RANK": "2", "PET_NNODES": "1"}, "PMI_RANK=2: "),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'}, "TF_CONFIG=.*one of several"),
        (BATCH, r"SLURM_NTASKS=12: a batch script .*srun .*guides/slurm\.md"),
        ({name: value for name, value in BATCH.items() if name != "SLURM_NTASKS"}, "not as 3 tasks"),
        (
            {name: value for name, value in BATCH.items() if name != "SLURM_NTASKS"}
            | {"SLURM_NTASKS_PER_NODE": "4"},
            "not as 12 tasks",
        ),
        (SLURM | STALE, IS_STALE),
        (OPENMPI | _words("OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1") | STALE, IS_STALE),
        (MPICH | STALE, IS_STALE),
    ],
)
def test_one_of_several_processes_that_cannot_find_the_others(env, message):
    with pytest.raises(BadInput, match=message):
        _resolve(env)


def test_torchrun_of_one_node_in_each_task():
    """srun -N2 torchrun --nproc-per-node=4 without --nnodes. With --standalone the user has said so."""
    env = SLURM | TORCHRUN | _words("RANK=1 LOCAL_RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 GROUP_RANK=0")
    env |= _words("GROUP_WORLD_SIZE=1 TORCHELASTIC_RUN_ID=none")
    with pytest.raises(BadInput, match=r"GROUP_WORLD_SIZE=1 contradicts SLURM_PROCID=.*torchrun --nnodes"):
        _resolve(env)
    assert _resolve(env | {"TORCHELASTIC_RUN_ID": "f2c1"}).nodes == 1


@pytest.mark.parametrize(
    "env",
    [
        BATCH | STALE,
        _words("SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_NNODES=2") | STALE,
        _words("LORA_RANK=8 PMI_SIZE=1") | STALE,
        _words("NODE_ID=ip-10-0-0-1 NPROCS=16"),  # the name of a machine, and its cores
    ],
)
def test_one_process_in_an_allocation(env):
    assert _resolve(env).world_size == 1


@pytest.mark.skipif(not shutil.which("mpirun"), reason="needs Open MPI")
def test_mpirun_starts_one_job(tmp_path):
    """Also if a shell script is between mpirun and Python: all ranks find one port."""
    start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "sh", "-c", '"$@"; exit $?', "-"]
    job = [sys.executable, "jobs/train_ddp.py", *QUICK, "--max_steps=2", f"--output_dir={tmp_path}"]
    options = dict(cwd=ROOT, env=environment(), capture_output=True, text=True)
    done = subprocess.run([*start, *job], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("topology source=openmpi") == done.stdout.count("= 2 processes x 64") == 1
    alone = subprocess.run([*start, sys.executable, "jobs/train.py"], **options)
    assert alone.returncode == 2 and names(alone.stderr, "one process", "openmpi started 2")


def test_the_file_of_sagemaker_without_its_variables(tmp_path):
    env = {"SM_INPUT_CONFIG_DIR": str(tmp_path)}
    assert _resolve(env).source == "plain"
    file = tmp_path / "resourceconfig.json"
    for host, rank in (("algo-1", 0), ("algo-2", 1), ("algo-3", 2)):
        file.write_text(json.dumps({"current_host": host, "hosts": ["algo-3", "algo-1", "algo-2"]}))
        place = _resolve(env, processes_per_node=8)
        assert place == Topology(rank, 3, 8, None, "algo-1", 29500, "node", "sagemaker")
    for text in ("{", '{"hosts": ["algo-1"]}', '{"hosts": ["algo-1"], "current_host": "algo-2"}'):
        file.write_text(text)
        with pytest.raises(BadInput, match=r"resourceconfig\.json: expected a JSON list"):
            _resolve(env)


def test_a_folder_that_cannot_be_searched_is_not_sagemaker():
    # the error of this name is, as "Permission denied", not that of a file that is missing
    assert _resolve({"SM_INPUT_CONFIG_DIR": "x" * 300}).source == "plain"


@pytest.mark.parametrize(
    "env, grace", [(SAGEMAKER, 100), (SAGEMAKER_SDK | TORCHRUN, 100), (MODELARTS, 25), ({}, 25), (PAI, 25)]
)
def test_the_grace_of_a_platform(env, grace):
    assert default_grace(env) == grace


@pytest.mark.parametrize(
    "name",
    ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "ASCEND_DEVICE_ID"],
)
def test_the_first_process_of_a_node_prints_for_it(monkeypatch, name):
    for rank in ("0", "1"):
        monkeypatch.setattr(os, "environ", {name: rank})
        assert is_first_on_node() == (rank == "0")
    monkeypatch.setattr(os, "environ", {name: "0", STARTED_BY: "1"})
    assert not is_first_on_node(), "its parent has printed"


def test_torch_is_not_imported():
    script = "import sys, common.platform.topology, launch.profiles; sys.exit('torch' in sys.modules)"
    run("-c", script, env=environment(PYTHONPATH=str(ROOT)), fresh=True)
