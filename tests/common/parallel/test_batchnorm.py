"""BatchNorm over gloo agrees with torch's BatchNorm over the whole batch, in groups of processes."""

import sys
import textwrap

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.parallel import batchnorm
from tests.conftest import ROOT, run_ranks

pytestmark = pytest.mark.rounding

WORKER = textwrap.dedent("""
    import os, sys
    import torch
    sys.path.insert(0, sys.argv[2])
    from common.parallel.batchnorm import convert_sync_batchnorm

    rank, world, nn = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.nn
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lines = nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten())
            self.planes = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
            self.solids = nn.Sequential(
                nn.Conv3d(3, 6, 3), nn.BatchNorm3d(6, affine=False), nn.ReLU(), nn.Flatten()
            )
            self.same = self.lines[1]  # a second name
            self.head = nn.Sequential(nn.Linear(36 + 6 + 384, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            self.free = nn.BatchNorm1d(1, track_running_stats=False)

        def forward(self, images):
            lines = self.lines(images[:, :, 0])
            planes = self.planes(images).mean((2, 3))
            solids = self.solids(images.unsqueeze(2).expand(-1, -1, 6, -1, -1)[..., :6, :6])
            return self.free(self.head(torch.cat([lines, planes, solids], 1)))

    torch.manual_seed(0)
    model = Net().double()
    images = 5 + 3 * torch.randn(12, 3, 8, 8, dtype=torch.float64)
    images = images.to(memory_format=torch.channels_last)
    keys = list(model.state_dict())
    model = convert_sync_batchnorm(model)
    kinds = {type(each).__name__ for each in model.modules() if "BatchNorm" in type(each).__name__}
    assert (kinds == {"GlooSyncBatchNorm"}) == (world > 1), kinds
    assert list(model.state_dict()) == keys and model.same is model.lines[1] or world > 1
    shard = images.chunk(world)[rank]
    for _ in range(3):
        (model(shard) ** 3).mean().backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world
    grads = [parameter.grad for parameter in model.parameters()]
    model.eval()
    model.free.train()  # torch's evaluates the batch of each process
    result = {"grads": grads, "state": model.state_dict(), "output": model.head(torch.ones(2, 426).double())}
    try:
        convert_sync_batchnorm(nn.BatchNorm1d(2)).train()(torch.ones(1, 2)[: 1 if not rank else 0])
        raise SystemExit("no error")
    except ValueError as error:
        assert "more than 1 value per channel" in str(error), error
    torch.save(result, f"{sys.argv[1]}/{rank}.pt")
    os._exit(0)  # as a job ends: a destructor of gloo may wait for a rank that has left
""")


def _results(tmp_path, processes):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    output = tmp_path / str(processes)
    output.mkdir()
    run_ranks(script, output, ROOT, ranks=processes)
    return [torch.load(output / f"{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is called lo on Linux only")
def test_layers_of_every_dimension_equal_one_process_with_the_whole_batch(tmp_path):
    (alone,) = _results(tmp_path, 1)
    for result in _results(tmp_path, 3):
        for one, other in zip(alone["grads"], result["grads"], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-11)
        for name, one in alone["state"].items():
            torch.testing.assert_close(result["state"][name], one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result["output"], alone["output"], rtol=1e-10, atol=1e-12)


class Activated(torch.nn.BatchNorm2d):
    """As timm's BatchNormAct2d: torch's own conversion would lose the activation."""

    def forward(self, features):
        return super().forward(features).relu()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_layer_that_computes_more_is_refused(backend, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    with pytest.raises(BadInput, match=r"a layer Activated cannot be synchronised.*BatchNorm1d"):
        batchnorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.Linear(1, 1), Activated(2)))
    layer = batchnorm.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm3d(2)))[0]
    assert isinstance(layer, torch.nn.SyncBatchNorm if backend == "nccl" else batchnorm.GlooSyncBatchNorm)
