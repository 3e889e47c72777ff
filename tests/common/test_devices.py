"""How many GPUs of a node are used, counted with fake devices: the processes are real, the GPUs are not."""

import argparse
import textwrap

import pytest
import torch

from common.exits import BadInput
from common.process_group import _device, _topology
from tests.conftest import ROOT, free_port, run

GPUS = 4

# The job itself, in real processes, up to the moment in which they would meet.
FAKE = textwrap.dedent(f"""
    import runpy, sys, torch
    torch.cuda.device_count = lambda: {GPUS}
    torch.cuda.set_device = lambda device: None
    sys.path.insert(0, {str(ROOT)!r})
    from common import process_group, rendezvous

    def meet(topology, timeout, backend):
        device = process_group._device(argparse_namespace, topology)
        with open(sys.argv[-1], "a") as file:
            file.write(f"{{topology.rank}} {{topology.world_size}} {{device}}\\n")
        sys.exit(0)

    original = process_group.join
    def join(args):
        global argparse_namespace
        argparse_namespace = args
        return original(args)

    process_group.join, rendezvous.meet = join, meet
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
""")


@pytest.mark.parametrize("node", [0, 1])
def test_every_gpu_of_a_node_gets_a_process(node, tmp_path):
    found = tmp_path / "found"
    run(
        "-c", FAKE, "jobs/train_ddp.py", "--dataset=digits", f"--output_dir={tmp_path}", "--world_size=2",
        f"--rank={node}", f"--init_method=tcp://127.0.0.1:{free_port()}", "--not_an_argument", found,
    )  # fmt: skip
    assert sorted(found.read_text().splitlines()) == [
        f"{GPUS * node + local_rank} {2 * GPUS} cuda:{local_rank}" for local_rank in range(GPUS)
    ]


def test_the_pattern_of_the_modelarts_sample_uses_one_gpu_of_a_node():
    """One process per node and model.cuda(): every parameter is on cuda:0, and so is what DDP computes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = torch.nn.Linear(2, 2, device="cuda")
    assert {str(parameter.device) for parameter in model.parameters()} == {"cuda:0"}


def _args(**values):
    given = dict(enable_gpu=None, init_method=None, rank=None, world_size=None, processes_per_node=None)
    return argparse.Namespace(**given | values)


def test_choice_of_device(monkeypatch):
    touched = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", touched.append)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    args = _args()
    assert _topology(args).processes_per_node == 2
    _device(args, _topology(args))
    assert touched == [], "a process that only starts others leaves the GPUs alone"
    assert str(_device(_args(enable_gpu=False), _topology(_args(enable_gpu=False)))) == "cpu"
    assert _topology(_args(enable_gpu=False)).processes_per_node == 1
    args = _args(processes_per_node=1)
    assert str(_device(args, _topology(args))) == "cuda:0" and touched == [torch.device("cuda:0")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadInput, match=r"--enable_gpu=true, but torch .* sees no GPU"):
        _topology(_args(enable_gpu=True))
