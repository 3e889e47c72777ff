"""A job uses all GPUs of a node. The processes are real, the GPUs are fake."""

import argparse
import socket
import textwrap
import types
import warnings

import pytest
import torch

from bootfile.ground.errors import BadInput
from bootfile.machine.cores import available_cores
from common.distributed import accelerators, devices
from common.distributed.devices import find_topology, select
from tests.conftest import ROOT, environment, free_port, run

GPUS = 2

# The job itself, in real processes, until they would connect.
FAKE = textwrap.dedent(f"""
    import os, runpy, sys, torch
    torch.cuda.device_count = lambda: {GPUS}
    sys.path.insert(0, {str(ROOT)!r})
    from common.distributed import accelerators, process_group
    did = []
    accelerators.open_gpu = lambda device: did.append(str(device))
    place = lambda topology: did.append(f"{{topology.rank}} {{topology.world_size}}")
    process_group.meet = lambda args, topology: place(topology) or {{}}

    def connect():
        did.append(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])
        with open(sys.argv[-1], "a") as file:
            file.write(" ".join(did) + "\\n")
        sys.exit(0)

    torch.distributed.init_process_group = connect
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
""")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("job", "node", "processes"),
    [("train_ddp.py", 0, 2 * GPUS), pytest.param("imagenet.py", 1, GPUS, marks=pytest.mark.thorough)],
)
def test_every_process_of_a_node_opens_its_gpu_before_it_connects(job, node, processes, tmp_path):
    found = tmp_path / "found"
    env = environment()
    del env["TORCHINDUCTOR_COMPILE_THREADS"]
    run(
        "-c", FAKE, f"jobs/{job}", f"--output_dir={tmp_path}", "--world_size=2",
        f"--rank={node}", f"--init_method=tcp://127.0.0.1:{free_port()}", "--batch_size=64",
        *([f"--processes_per_node={processes}"] if processes > GPUS else []),
        "--not_an_argument", found, env=env,
    )  # fmt: skip
    threads = max(1, available_cores() // processes)
    assert sorted(found.read_text().splitlines()) == sorted(
        f"cuda:{local_rank % GPUS} {processes * node + local_rank} {2 * processes} {threads}"
        for local_rank in range(processes)
    )


OLD_DRIVER = textwrap.dedent(f"""
    import runpy, sys, torch, warnings
    sys.path.insert(0, {str(ROOT)!r})
    def refuse(device):
        warnings.warn("CUDA initialization:\\nin many lines")
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\\nUpdate it")
    torch.cuda.device_count = lambda: 2
    torch.cuda.set_device = refuse
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
""")


@pytest.mark.thorough
@pytest.mark.parametrize("job", ["train", "train_ddp"])
def test_an_old_driver_is_one_line_before_the_data(job, tmp_path):
    """The error comes before the data are loaded: NVML counts GPUs even if torch cannot use the driver."""
    done = run(
        "-c", OLD_DRIVER, f"jobs/{job}.py", "--data_url=not/a/folder", f"--output_dir={tmp_path / 'out'}",
        code=2,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if not line.startswith("rank ")]
    assert len(errors) == 1 and errors[0].startswith("error: torch ")
    assert "is too old (found version 11040)." in errors[0]
    assert not (tmp_path / "out" / "starts.jsonl").exists()


def _args(**values):
    given = dict(enable_gpu=None, init_method=None, rank=None, world_size=None, processes_per_node=None)
    args = argparse.Namespace(**given | values)
    return args, find_topology(args)


def test_choice_of_device(monkeypatch):
    touched = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("common.distributed.accelerators.open_gpu", touched.append)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    args, topology = _args()
    select(args, topology)
    assert topology.processes_per_node == 2 and topology.starts_processes
    assert touched == [], "a process that only starts others leaves the GPUs alone"
    assert str(select(*_args(enable_gpu=False))) == "cpu"
    assert _args(enable_gpu=False)[1].processes_per_node == 1
    assert str(select(*_args(processes_per_node=1))) == "cuda:0" and touched == [torch.device("cuda:0")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match=r"--enable_gpu=true, but torch .* sees no GPU"):
        select(*_args(enable_gpu=True))
    monkeypatch.setenv("MA_NUM_GPUS", "8")
    with pytest.raises(BadInput, match="promised 8 GPUs"):
        select(*_args())
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):  # variables of torchrun
        monkeypatch.setenv(name, "1" if name in ("WORLD_SIZE", "MASTER_PORT") else "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(BadInput, match="promised 8 GPUs"):
        select(*_args())


@pytest.mark.parametrize("rank, local_rank, device", [(3, 0, "cuda:0"), (4, 1, "cuda:1"), (5, 2, "cuda:0")])
def test_each_process_of_a_node_has_a_gpu(monkeypatch, rank, local_rank, device):
    """Three processes on each of two nodes with two GPUs: the place on the node decides."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    opened = []
    monkeypatch.setattr(accelerators, "open_gpu", opened.append)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": 6,
        "LOCAL_WORLD_SIZE": 3,
        "MASTER_PORT": 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert str(select(*_args())) == device and opened == [torch.device(device)]
    args = argparse.Namespace(enable_gpu=None)  # a job of one process
    with pytest.raises(BadInput, match="this job is one process, but launcher started 6"):
        select(args, find_topology(args))


def test_a_gpu_that_cannot_be_used_is_one_line(monkeypatch):
    def refuse(device):
        warnings.warn("CUDA initialization:\nin many lines", stacklevel=1)
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nUpdate it")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(BadInput, match=r"cannot use the GPU .*\(found version 11040\)\.; install .*=false$"):
        accelerators.open_gpu(torch.device("cuda:1"))


@pytest.mark.parametrize("visible, name", [("4, 7", "7"), ("", "1"), ("4", "1")])
def test_a_gpu_without_a_uuid_has_the_number_of_the_node(monkeypatch, visible, name):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    properties = types.SimpleNamespace(uuid=None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(devices.accelerator, "kind", lambda: "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert accelerators.identify_gpu() == f"{socket.gethostname()} {name}"
    properties.uuid = "GPU-1"
    assert accelerators.identify_gpu() == "GPU-1"
