"""A trial pass changes no state, also if it fails."""

import argparse
import copy
import shutil

import pytest
import torch

from bootfile.exact.buckets import backward_without_trace, settle_buckets
from common.parallel import compilation
from common.parallel.compilation import compile_module
from tests.conftest import ROOT, environment, run, run_ranks


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images):
        return images.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient")


class _Model(torch.nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fails, self.norm = fails, torch.nn.BatchNorm2d(2)

    def forward(self, images):
        output = torch.nn.functional.dropout(self.norm(images), 0.5)
        return _NoGradient.apply(output) if self.fails else output


def _same(model, before, random):
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_no_trace(fails):
    model = _Model(fails)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    try:
        backward_without_trace(model, model, torch.ones(2, 2, 3, 3), passes=2)
        assert not fails
    except ValueError:
        assert fails
    _same(model, before, random)


@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch.compiler.set_stance came with torch 2.6")
def test_settling_the_buckets_compiles_nothing():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = _Model(fails=False)
    forward = torch.nn.Sequential(torch.compile(model, backend=backend))
    forward.static_graph = False
    settle_buckets(forward, torch.ones(2, 2, 3, 3))
    assert not compiled
    forward(torch.ones(2, 2, 3, 3))
    assert compiled


CACHED = """
import sys, torch
from common.parallel.compilation import compile_module
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
print("compiled", compile_module(model, [torch.ones(4, 8)], print) is not model)
"""


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch 2.1 cannot keep the cache that it makes")
def test_a_cut_file_of_the_compile_cache_is_not_used(tmp_path):
    cache = tmp_path / "cache"
    variables = environment(TORCHINDUCTOR_CACHE_DIR=str(cache), PYTHONPATH=str(ROOT))
    assert "compiled True" in run("-c", CACHED, env=variables, fresh=True).stdout
    written = [*cache.rglob("*.py")]
    for path in written:
        path.write_text(path.read_text()[:700])
    shown = run("-c", CACHED, env=variables, fresh=True).stdout
    assert written and "compiled True" in shown and f"compile cache {cache} has a damaged file" in shown


@pytest.mark.thorough
def test_what_cannot_be_compiled_stays_as_it_is():
    model, said = _Model(fails=True), []
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert compile_module(model, [torch.ones(2, 2, 3, 3)], said.append) is model
    assert len(said) == 1 and said[0].startswith("not compiled: ")
    _same(model, before, random)


OVERLAP = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
from common.parallel import compilation
from common.parallel.compilation import compile_module
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
layers = [torch.nn.Linear(512 if layer else 64, 512) for layer in range(5)]
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.MaxPool2d(2), torch.nn.AdaptiveAvgPool2d(4),
                            torch.nn.Flatten(), *layers).to(memory_format=torch.channels_last)
forward = DistributedDataParallel(model, bucket_cap_mb=1)

def hook(_, bucket):
    with torch.profiler.record_function("bucket"):
        future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

forward.register_comm_hook(None, hook)
sizes = [torch.ones(2, 3, side, side).to(memory_format=torch.channels_last) for side in (12, 16)]
assert compile_module(forward, sizes, print) is forward and forward.module is not model
torch.compiler.set_stance("fail_on_recompile")
for images in (*sizes, *sizes):  # DistributedDataParallel makes its buckets after the first step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(images).sum().backward()
names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
assert names.count("bucket") > 1 and names.index("bucket") < max(
    place for place, name in enumerate(names) if name == "aten::mm"), names
"""


@pytest.mark.thorough
@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch.compiler.set_stance came with torch 2.6")
def test_buckets_are_sent_during_the_compiled_backward_pass(tmp_path):
    """All sizes of images are compiled ahead. The gradient of max pooling is not a float32 scatter."""
    env = environment(TORCH_LOGS="aot_graphs", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    graphs = run("-c", OVERLAP, fresh=True, env=env).stderr
    assert "aten.max_pool2d_with_indices_backward.default" in graphs and "scatter" not in graphs


RANKS = """
import os, sys, torch
from torch.nn.parallel import DistributedDataParallel
from common.parallel import compilation
from bootfile.processes import ranks
torch.distributed.init_process_group("gloo")
failing, rank = int(sys.argv[1]), ranks.rank()
begun, store = [], ranks.store()

def backward(forward, module, images, passes):
    begun.append(images.shape[-1])
    if store.add("begun", 1) <= 2 and rank == 1:
        raise RuntimeError("rank 1 has begun before rank 0 has compiled")
    if rank == failing:
        raise RuntimeError("no compiler")

torch.compile = lambda module, **options: torch.nn.Sequential(module)
compilation.backward_without_trace = backward
model = torch.nn.Linear(4, 4)
forward = DistributedDataParallel(model)
images = [torch.ones(2, 4), torch.ones(2, 4)]
fast = compilation.compile_module(forward, images, lambda line: print(line) if rank == 0 else None)
assert fast is forward and (forward.module is model) == (failing >= 0)
torch.distributed.barrier()
"""


@pytest.mark.parametrize("failing", [-1, 1])
def test_all_ranks_train_compiled_or_none(failing):
    """The first process of a node compiles before the others."""
    first, _ = run_ranks("-c", RANKS, failing)
    assert first.stdout.startswith("not compiled: RuntimeError: no compiler") == (failing == 1)


@pytest.mark.parametrize(
    ("compiles", "exact_shards", "version", "is_compiled"),
    [
        (None, None, "2.1.0", True),
        (None, 8, "2.10.0", True),
        (None, 8, "2.9.1", False),
        (True, 8, "2.9.1", True),
    ],
)
def test_exact_shards_are_compiled_where_the_bits_were_measured(
    compiles, exact_shards, version, is_compiled, monkeypatch
):
    """Torch before 2.10 chooses kernels by their time, which may be others after a restart."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    args = argparse.Namespace(compile=compiles, exact_shards=exact_shards)
    lines = []
    assert compilation.is_chosen(args, torch.device("cuda", 0), lines.append) == is_compiled
    assert len(lines) == (not is_compiled) and all("--compile true" in line for line in lines)
    assert compilation.is_chosen(args, torch.device("cpu"), lines.append) == bool(compiles)
