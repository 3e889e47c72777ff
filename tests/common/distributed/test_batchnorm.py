"""Both synchronised BatchNorms agree with torch's BatchNorm over the whole batch, in groups of processes.

The BatchNorm for GPUs runs here with formulas instead of CUDA's operators: this tests its own code.
"""

import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules._functions import SyncBatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from common.distributed import batchnorm
from tests.conftest import ROOT, free_port, run
from tests.support import batchnorm_operators

WORKER = textwrap.dedent("""
    import os, sys
    import torch
    sys.path.insert(0, sys.argv[2])
    from common.distributed.batchnorm import convert_sync_batchnorm

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo")
    if sys.argv[3] == "nccl":
        from torch.nn.modules._functions import SyncBatchNorm
        from common.distributed import batchnorm
        from common.distributed.batchnorm import _NormalizeOnGPU
        from tests.support import batchnorm_operators

        if not hasattr(torch.distributed, "all_gather_single"):  # then gloo may have no such operation
            gather = torch.distributed.all_gather
            batchnorm._gather = lambda output, own: gather(list(output.chunk(world)), own)
        batchnorm_operators.register()
        torch.distributed.get_backend = lambda: "nccl"
        torch.manual_seed(rank)
        given = torch.randn(2, 3, 4, 4), torch.rand(3), torch.randn(3)
        results = []
        torchs = (SyncBatchNorm.apply, torch.distributed.group.WORLD, world)
        for apply, *group in ((_NormalizeOnGPU.apply,), torchs):
            features, weight, bias = (each.clone().requires_grad_() for each in given)
            statistics = torch.zeros(3), torch.ones(3)
            output = apply(features, weight, bias, *statistics, 1e-5, 0.1, *group)
            output.pow(3).sum().backward()
            results.append([output, *statistics, features.grad, weight.grad, bias.grad])
        assert all(torch.equal(ours, torchs) for ours, torchs in zip(*results)), results
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3),
        torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(64, 1),
    ).double()
    images = 5 + 3 * torch.randn(12, 3, 8, 8, dtype=torch.float64)
    images = images.to(memory_format=torch.channels_last)
    keys = list(model.state_dict())
    model = convert_sync_batchnorm(model)
    converted = {"gloo": "_SyncBatchNorm2d", "nccl": "_SyncBatchNorm"}[sys.argv[3]]
    assert type(model[1]).__name__ == (converted if world > 1 else "BatchNorm2d")
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


def _results(tmp_path, processes, backend):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    output = tmp_path / str(processes)
    output.mkdir()
    run(
        "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={free_port()}",
        script, output, ROOT, backend,
    )  # fmt: skip
    return [torch.load(output / f"{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is called lo on Linux only")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_equals_one_process_with_the_whole_batch(tmp_path, backend):
    (alone,) = _results(tmp_path, 1, backend)
    for result in _results(tmp_path, 3, backend):
        for one, other in zip(alone["grads"], result["grads"], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
        for name, one in alone["state"].items():
            torch.testing.assert_close(result["state"][name], one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result["output"], alone["output"], rtol=1e-10, atol=1e-12)


class _NoWait(TorchDispatchMode):
    """A mode that fails on an operation for which the host waits for the device."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        masks = [each for each in (args[1] if name == "index" else ()) if each is not None]
        if name in ("nonzero", "_local_scalar_dense", "masked_select") or any(
            mask.dtype == torch.bool for mask in masks
        ):
            raise AssertionError(f"the host waits for {name}")
        return operation(*args, **kwargs or {})


@pytest.mark.skipif(torch.__version__ < "2.14", reason="earlier versions ask for a driver")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_the_host_never_waits_for_the_gpu(precision, monkeypatch):
    """On fake CUDA tensors, torch's SyncBatchNorm waits in each forward pass, and ours does not."""
    batchnorm_operators.register()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(batchnorm, "_gather", lambda output, tensor: None)
    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: None, raising=False)
    with FakeTensorMode():
        features = torch.randn(8, 3, 4, 4, device="cuda", dtype=precision)
        features = features.to(memory_format=torch.channels_last)
        weight, bias, running_mean, running_var = (torch.ones(3, device="cuda") for _ in range(4))
        context = SimpleNamespace(needs_input_grad=(True, True, True))
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        statistics = (running_mean, running_var, 1e-5, 0.1)
        with _NoWait():
            output = batchnorm._NormalizeOnGPU.forward(context, features, weight, bias, *statistics)
            gradients = batchnorm._NormalizeOnGPU.backward(context, torch.ones_like(output))
        for found, like in zip((output, *gradients[:3]), (features, features, weight, bias), strict=True):
            assert (found.shape, found.dtype, found.device) == (like.shape, like.dtype, like.device)
        group = SimpleNamespace(_get_backend_name=lambda: "nccl")
        with _NoWait(), pytest.raises(AssertionError, match="the host waits for index"):
            SyncBatchNorm.forward(context, features, weight, bias, *statistics, group, 4)
