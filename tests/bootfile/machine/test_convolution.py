"""The backward pass of a strided 1x1 convolution is right on a CPU with AVX2 and without AVX-512.

oneDNN writes beyond its memory there. Each case runs in a process of its own: without the repair it crashes.
"""

import textwrap

import pytest
import torch
from torch.distributed import fsdp

from bootfile.machine import convolution, processor
from tests.conftest import environment, free_port, run

pytestmark = [
    pytest.mark.rounding,
    pytest.mark.skipif(
        processor.widest() not in ("AVX2", "AVX512"), reason="this CPU has no kernels for AVX2"
    ),
]
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2"}  # as a CPU without AVX-512
SCRIPT = textwrap.dedent("""
    import copy, os, sys, torch
    from torch import nn
    from bootfile.machine import convolution
    convolution.protect()
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(16, 5, 1, 1))
        def forward(self, inputs):
            return nn.functional.conv2d(inputs, self.kernel, stride=2)

    def wrap(network):
        if sys.argv[2] == "ddp":
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            return nn.parallel.DistributedDataParallel(network)
        if sys.argv[2] == "fsdp":
            from torch.distributed.fsdp import fully_shard
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ["MASTER_PORT"] = sys.argv[3]
            # FSDP has contiguous parameters only: the inputs are in channels_last
            network = network.to(memory_format=torch.contiguous_format)
            fully_shard(network, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
            return network
        if sys.argv[2] == "compiled":
            return torch.compile(network)
        return network

    NETWORKS = {
        (3, 32): nn.Conv2d(3, 64, 1, stride=2),
        (4, 8): nn.Conv2d(4, 8, 1, stride=2, bias=False),
        (5, 32): Functional(),
        (6, 8): nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1, stride=(2, 1)), nn.ReLU()),
        (2, 2): nn.Conv2d(2, 8, 1, stride=2),
        (7, 16): nn.Sequential(nn.Conv2d(7, 4, 3, padding=1), nn.Conv2d(4, 16, 1, stride=4)),
        (8, 16): nn.Sequential(nn.Conv2d(8, 8, 1, stride=2, groups=4), nn.Conv2d(8, 4, 1)),
    }
    if sys.argv[2] != "plain":
        layers = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 1, stride=2)]
        NETWORKS = {(4, 8): nn.Sequential(*layers)}
    for (channels, side), network in NETWORKS.items():
        exact = copy.deepcopy(network).double()
        network = wrap(network.to(memory_format=torch.channels_last))
        for step in range(3):
            inputs = torch.randn(8, channels, side, side)
            for own in (network, exact):
                own.zero_grad()
            expected = exact(inputs.double()).square().mean()
            expected.backward()
            loss = network(inputs.to(memory_format=torch.channels_last)).square().mean()
            loss.backward()
            for parameter, other in zip(network.parameters(), exact.parameters()):
                gradient = getattr(parameter.grad, "full_tensor", lambda: parameter.grad)()
                largest = other.grad.abs().max().clamp(min=1e-6)
                difference = (gradient - other.grad).abs().max() / largest
                assert difference < 1e-3, (channels, side, step, difference)
    print("right")
    os._exit(0)
""")


KINDS = ("ddp", "compiled", *(["fsdp"] if hasattr(fsdp, "fully_shard") else []))


@pytest.mark.parametrize(
    "threads, kind",
    [
        (1, "plain"),
        (2, "plain"),
        *(pytest.param(1, kind, marks=pytest.mark.thorough) for kind in KINDS),
    ],
)
def test_the_gradients_are_those_of_float64(threads, kind):
    job = run("-c", SCRIPT, str(threads), kind, str(free_port()), env=environment(**AVX2))
    assert "strides do not match" not in job.stderr  # a warning of DistributedDataParallel
    assert job.stdout == "right\n"


def test_without_the_repair_the_fault_is_there():
    """If this fails, torch has a oneDNN without the fault: delete bootfile/machine/convolution.py."""
    script = SCRIPT.replace("convolution.protect()", "").replace("range(3)", "range(20)")
    job = run("-c", script, "1", "plain", env=environment(**AVX2), code=None)
    assert job.returncode != 0 or "right" not in job.stdout


@pytest.mark.thorough
def test_job_whose_shortcuts_have_few_channels_trains_on(tmp_path):
    """Its shortcuts have 4 channels. It aborted with "corrupted double-linked list"."""
    options = ("--dataset=digits", "--width=4", "--batch_size=64", "--max_steps=40", "--epoch_weights=false")
    run("jobs/train.py", *options, f"--output_dir={tmp_path}", env=environment(**AVX2))


@pytest.mark.parametrize(
    "shape, stride, transposed, affected",
    [
        ((64, 3, 1, 1), (2, 2), False, True),
        ((64, 3, 1, 1), (1, 1), False, False),
        ((64, 8, 1, 1), (2, 2), False, False),
        ((64, 3, 3, 3), (2, 2), False, False),
        ((3, 4, 1, 1), (2, 2), True, False),
    ],
)
def test_what_is_affected(shape, stride, transposed, affected):
    assert convolution.is_affected(torch.empty(shape), stride, transposed) == affected
