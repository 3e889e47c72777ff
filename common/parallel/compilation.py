"""Compile a model before training, not in its first step, so that the time can be shown separately."""

import argparse
import contextlib
import getpass
import importlib
import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from bootfile.exact.buckets import backward_without_trace
from bootfile.ground.errors import print_line
from bootfile.processes import ranks
from common.distributed import barrier
from common.platform.place import has_local_rank_0

_PASSES = 3  # the second pass records CUDA graphs, the third replays them


def is_chosen(args: argparse.Namespace, device: torch.device, log: Callable[[str], None]) -> bool:
    """Return whether to compile the model of a job with --compile (None: on a GPU) and --exact_shards. With
    exact shards the default is false before torch 2.10: its compiler chooses kernels by their time, so a
    restart may compute other bits. log: called with one line then. On an H200 with torch 2.11 two runs with
    empty caches of the compiler had the same bits (2026-11-28)."""
    if args.compile is not None or device.type != "cuda":
        return bool(args.compile)
    if args.exact_shards and torch.__version__ < "2.10":
        log(
            f"--exact_shards: not compiled, because torch {torch.__version__} may choose other kernels after "
            "a restart: expected torch 2.10 or later, or --compile true"
        )
        return False
    return True


def compile_module(
    forward: torch.nn.Module,
    examples: list[torch.Tensor],
    log: Callable[[str], None],
    graphs: bool = False,
) -> torch.nn.Module:
    """Return the module compiled for batches of these shapes. Call it on every rank.

    If a rank cannot compile it (no compiler, no Triton), the reason is logged and every rank gets the module.
    The module, its weights and its buffers do not change. Source: J. Ansel et al., "PyTorch 2", ASPLOS 2024.

    forward: the model to compile. In a DistributedDataParallel the module is compiled, and its graph is cut
        at the buckets: each is sent while the gradients of earlier layers are computed.
    examples: a batch as in training for each shape, float [n, C, H, W]; other shapes are compiled again.
    log: called with one line.
    graphs: on a GPU, make its kernels a CUDA graph, which overwrites its outputs in the next call.
    """
    mode = "reduce-overhead" if graphs and examples[0].is_cuda else None
    wrapper = None
    module = forward
    if isinstance(forward, DistributedDataParallel):
        wrapper = forward
        module = forward.module
    reason = ""  # why this rank cannot compile the module

    def compile_once() -> torch.nn.Module:
        """Return the compiled module, in its wrapper if there is one, after passes over all examples."""
        # torch.compile() raises if Python is too new for torch
        fast = cast(torch.nn.Module, torch.compile(module, mode=mode, dynamic=False))
        if wrapper:
            wrapper.module = fast
            fast = wrapper
        _configure(len(examples))
        # a collective of a rank that can compile would wait for a rank that cannot
        with wrapper.no_sync() if wrapper else contextlib.nullcontext():
            for example in examples:
                backward_without_trace(fast, module, example, _PASSES)
        return fast

    # two turns: the other processes of a node find the results of the first one in a cache
    for is_first in (True, False):
        if has_local_rank_0() == is_first:
            try:
                fast = _with_empty_cache_after_error(compile_once)
            except Exception as error:  # the compiler raises many types: training continues without it
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        barrier.wait_for_all("compiled first" if is_first else "compiled", "to compile")
    reasons = [reason_of_rank for reason_of_rank in ranks.gather_objects(reason) if reason_of_rank]
    if not reasons:
        return fast
    # one rank with the compiled module would run other kernels than the rest
    log(f"not compiled: {reasons[0]}. Its kernels round differently from those of a compiled run")
    torch._dynamo.reset()
    if wrapper:
        wrapper.module = module
    return forward


def _with_empty_cache_after_error(compile_once: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Return compile_once(). If it fails with the files of torch's cache, call it again with an empty cache:
    a full disk or a kill may have cut a file, and torch writes none again that is there."""
    try:
        return compile_once()
    except Exception:
        utils: Any = importlib.import_module("torch._inductor.utils")
        empty = getattr(utils, "fresh_cache", None) or getattr(utils, "fresh_inductor_cache", None)
        # as torch names it; its function has moved between versions
        default = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default
        # torch 2.1 cannot keep the cache that it makes, from which kernels may be loaded later
        if empty is None or "delete" not in inspect.signature(empty).parameters:
            raise
        if not os.path.isdir(cache) or not os.listdir(cache):
            raise
        torch._dynamo.reset()
        with empty(delete=False):
            compiled = compile_once()
        print_line(f"warning: torch's compile cache {cache} has a damaged file, and was not used: delete it")
        return compiled


def _configure(shapes: int) -> None:
    """Let torch compile a function for as many shapes, and not decompose the gradient of max pooling into a
    float32 scatter in another layout: a step of ResNet-50 would be 3 to 5 % longer (estimated). It is called
    before the first pass, in which torch compiles. shapes: the number of examples."""
    config: Any = importlib.import_module("torch._dynamo.config")
    # with more shapes than the limit torch would run the rest without compiling
    config.cache_size_limit = max(config.cache_size_limit, shapes + 1)
    table = getattr(importlib.import_module("torch._inductor.decomposition"), "decompositions", {})
    table.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)
