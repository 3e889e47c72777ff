"""The CPU's synchronised BatchNorm against torch's own over the whole batch, in real groups of processes."""

import sys
import textwrap

import pytest
import torch

from tests.conftest import ROOT, free_port, run

WORKER = textwrap.dedent("""
    import os, sys
    import torch
    sys.path.insert(0, sys.argv[2])
    from common.distributed.batchnorm import convert_sync_batchnorm

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3),
        torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 1),
    ).double()
    images = 5 + 3 * torch.randn(12, 3, 8, 8, dtype=torch.float64)
    images = images.to(memory_format=torch.channels_last)
    keys = list(model.state_dict())
    model = convert_sync_batchnorm(model)
    assert list(model.state_dict()) == keys
    shard = images.chunk(world)[rank]
    for _ in range(3):
        model(shard).square().mean().backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world
    model.eval()
    grads = [parameter.grad for parameter in model.parameters()]
    result = {"grads": grads, "state": model.state_dict(), "output": model(images)}
    torch.save(result, f"{sys.argv[1]}/{rank}.pt")
    torch.distributed.destroy_process_group()
""")


def _results(tmp_path, processes):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    output = tmp_path / str(processes)
    output.mkdir()
    run(
        "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}",
        script, output, ROOT,
    )  # fmt: skip
    return [torch.load(output / f"{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is called lo on Linux only")
def test_equals_one_process_with_the_whole_batch(tmp_path):
    (alone,) = _results(tmp_path, 1)
    for result in _results(tmp_path, 3):
        for one, other in zip(alone["grads"], result["grads"], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
        for name, one in alone["state"].items():
            torch.testing.assert_close(result["state"][name], one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result["output"], alone["output"], rtol=1e-10, atol=1e-12)
