"""Compile networks for an H200 on a machine without a GPU: python -m tests.support.sm90 FOLDER

torch.compile traces a network on the CPU. Its graphs are moved to fake CUDA tensors, and Inductor generates
their code for the properties of an H200. Triton compiles one of the kernels with its own ptxas.
FOLDER/found.json holds a record of each network.
"""

import ast
import functools
import importlib
import json
import re
import sys
import types
from pathlib import Path

import torch
import torch._inductor.compile_fx as compile_fx
import torch.utils._triton
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch._inductor import config, graph
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torchvision.models.resnet import Bottleneck, ResNet

from common import models
from common.performance import compilation

CUDA = torch.device("cuda", 0)
H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30, multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20,
    shared_memory_per_multiprocessor=233472, gcnArchName="", is_integrated=0, uuid="", clock_rate=1980000,
    memory_clock_rate=3201000, memory_bus_width=6144,
)  # fmt: skip


class _Generated(Exception):
    """Raised when the code is generated: it cannot run here."""


class _Small(torch.nn.Module):
    """Two convolutions and a fault: "break" (two graphs), "mutates" (its input) or "layout" (not kept)."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.first, self.second = (torch.nn.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        self.norm = torch.nn.BatchNorm2d(64)

    def forward(self, images):
        if self.fault == "mutates":
            images.add_(1)
        features = torch.relu(self.norm(self.first(images)))
        if self.fault == "break":
            torch._dynamo.graph_break()
        if self.fault == "layout":
            features = features.contiguous()
        return self.second(features)


def trace(model, images):
    """Return the graphs that torch.compile makes of a training step of the model, as train_fast.py compiles
    it: dictionaries of name, graph, inputs, static (indices of the inputs whose address stays)."""
    found = []

    def compile_inner(module, inputs, static_input_idxs=(), is_backward=False, **_):
        name = "backward" if is_backward else "forward"
        found.append({"name": name, "graph": module, "inputs": inputs, "static": list(static_input_idxs)})
        outputs = [getattr(each, "meta", {}).get("val") for each in module.graph.output_node().args[0]]

        def run(_):  # nothing is computed
            return [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype)
                if isinstance(each, torch.Tensor)
                else each
                for each in outputs
            ]

        run._boxed_call = True
        return run

    torch._dynamo.reset()
    counters.clear()
    backend = functools.partial(compile_fx.compile_fx, inner_compile=compile_inner)
    real = torch.compile
    torch.compile = functools.partial(real, backend=backend)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            compilation.compile_module(model, images, sys.exit)  # every log line is a failure
    finally:
        torch.compile = real
    return found


def pretend():
    """Give torch the properties of an H200 that Inductor asks of the device and of Triton's driver."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: CUDA,
    )
    triton.runtime.driver.set_active(target)
    constants = {
        "is_available": True, "current_device": 0, "device_count": 1, "get_device_properties": H200,
        "get_compute_capability": 90, "synchronize": None, "set_device": None, "is_triton_capable": True,
        "raise_if_triton_unavailable": None, "get_raw_stream": 0, "exchange_device": 0,
        "maybe_exchange_device": 0, "get_device_capability": (9, 0), "is_bf16_supported": True,
        "_exchange_device": 0, "_maybe_exchange_device": 0, "_lazy_init": None, "get_device_name": H200.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    }  # fmt: skip
    for name, value in constants.items():
        for place in (torch.cuda, CudaInterface, CudaInterface.Worker):
            if hasattr(place, name):
                function = functools.partial(lambda value, *_, **__: value, value)
                setattr(place, name, function if place is torch.cuda else staticmethod(function))
    fake_tensor.init_gpu_context = lambda *_: None
    torch._C._select_conv_backend = lambda *_, **__: torch._C._ConvBackend.Cudnn
    torch._C._conv_determine_backend_memory_format = lambda *_, **__: torch.channels_last
    for each in vars(torch.utils._triton).values():
        getattr(each, "cache_clear", int)()  # cached answers say that there is no GPU
    config.compile_threads, config.fx_graph_cache, config.triton.cudagraphs = 1, False, False


def generate(found):
    """Return the code for sm_90 of a graph of trace()."""
    module, code = found["graph"], []
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=CUDA)
            if isinstance(each, torch.Tensor)
            else each
            for each in found["inputs"]
        ]
        FakeTensorProp(module, mode).propagate(*inputs)

    def stop(lowering):
        text = codegen(lowering)[0]
        code.append(getattr(text, "value", text))
        raise _Generated

    codegen, graph.GraphLowering.codegen = graph.GraphLowering.codegen, stop
    try:
        compile_fx.compile_fx_inner(
            module, inputs, static_input_idxs=found["static"], is_backward=found["name"] == "backward"
        )
    except Exception:
        if not code:
            raise
    finally:
        graph.GraphLowering.codegen = codegen
    return code[0]


def describe_inputs(nodes, static):
    """Return a record of a graph: the inputs that it changes, and those among them whose address moves."""
    inputs = [node for node in nodes if node.op == "placeholder"]
    changed = [node.args[0] for node in nodes if node.target is torch.ops.aten.copy_.default]
    fixed = [inputs[each] for each in static]
    moving = [node.name for node in changed if node in inputs and node not in fixed]
    return {"changed": len(changed), "moving": moving}


def describe_code(code):
    """Return a record of the code: convolutions, kernels, and the kernels that change a layout: Inductor
    gives them two axes, because they read and write memory that is contiguous along different axes."""
    return {
        "convolutions": len(re.findall(r"= (?:extern_kernels|torch\.ops\.aten)\.convolution", code)),
        "kernels": code.count("@triton.jit"),
        "of two axes": re.findall(r"def (triton_\w+)\([^)]*YBLOCK", code),
    }


def compile_kernel(code, folder):
    """Compile a kernel of BatchNorm and ReLU to a cubin, and return it. folder: is in sys.path."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernels = dict(re.findall(r"async_compile\.triton\('(triton_poi\w+)', '''(.*?)'''", code, re.DOTALL))
    name = next(name for name in kernels if "relu" in name)
    head, _, rest = kernels[name].partition("triton_helpers.set_driver_to_gpu()")
    (folder / f"{name}.py").write_text(head + rest[rest.index("@triton.jit") :])
    kernel = getattr(importlib.import_module(name), name)
    signature = ast.literal_eval(re.search(r"'signature': ({.*?})", rest)[1])
    blocks = {(place,): 256 for place, kind in enumerate(signature.values()) if kind == "constexpr"}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=blocks)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def main(folder):
    small, large = torch.zeros(128, 32, 32, 3), torch.zeros(32, 224, 224, 3)
    wide = torch.zeros(64, 16, 16, 64)
    networks = {
        "resnet18": (models.resnet18(3, 10), small),
        "bottlenecks": (ResNet(Bottleneck, [1, 1, 1, 1]), large),  # ResNet-50, one block of each width
        **{fault: (_Small(fault), wide) for fault in ("break", "mutates", "layout")},
    }
    record, graphs = {}, {}
    for name, (model, images) in networks.items():
        graphs[name] = trace(model.to(memory_format=torch.channels_last), images.permute(0, 3, 1, 2))
        record[name] = {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": len(counters["graph_break"]),
            "passes": [describe_inputs(each["graph"].graph.nodes, each["static"]) for each in graphs[name]],
        }
    pretend()
    for name in ("resnet18", "bottlenecks", "layout"):
        codes = [generate(each) for each in graphs[name]]
        record[name]["codes"] = [describe_code(each) for each in codes]
        if name == "resnet18":
            record["cubin"] = len(compile_kernel(codes[0], folder))
    (folder / "found.json").write_text(json.dumps(record))


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    main(Path(sys.argv[1]))
