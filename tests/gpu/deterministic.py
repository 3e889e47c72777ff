"""Run a job with deterministic algorithms, so that two runs on one GPU can be compared bit for bit.

python -m tests.gpu.deterministic jobs/train.py --dataset digits ...

If an operation has no deterministic form, a warning names it.
"""

import os
import runpy
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use

import torch


def main() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
