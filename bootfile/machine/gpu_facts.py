"""Describe the GPU that computed. A run on the CPU does not load this module."""

import contextlib
import os
from typing import Any

import torch

from bootfile.ground import accelerator
from bootfile.machine.differences import NONE, Facts


def describe(module: Any) -> Facts:
    """Return the facts of a GPU and its libraries, see facts.describe(). module: of torch."""
    facts: Facts = {"GPU": accelerator.kind()}
    with contextlib.suppress(RuntimeError, AttributeError):  # it has no name, or the driver does not answer
        facts["GPU"] = module.get_device_name()
    if accelerator.kind() != "cuda":
        return facts
    # each of these settings chooses another algorithm, and so other bits
    cudnn = torch.backends.cudnn
    is_on = {"benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic}
    is_on["TF32"] = _uses_tf32(cudnn, getattr(cudnn, "conv", None))
    of_rnn = _uses_tf32(cudnn, getattr(cudnn, "rnn", None))
    # named where it differs only: the facts of earlier versions have one setting for both
    is_on[f"TF32 of RNN {of_rnn}"] = of_rnn != is_on["TF32"]
    facts["CUDA"] = torch.version.cuda or NONE
    facts["cuDNN"] = " ".join([str(cudnn.version()), *(name for name, on in is_on.items() if on)])
    matmul = torch.backends.cuda.matmul
    facts["TF32 of matmul"] = str(_uses_tf32(matmul, matmul))
    facts["cuBLAS workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "default")
    return facts


def _uses_tf32(legacy: Any, operator: Any) -> bool:
    """Return whether operators use TF32. legacy: has allow_tf32, which torch refuses to read if the setting
    was chosen by fp32_precision (torch 2.9), which `operator` has."""
    try:
        return bool(legacy.allow_tf32)
    except RuntimeError:
        return bool(operator.fp32_precision == "tf32")
