"""Run a job in double precision: `python -m tests.support.float64 jobs/train_ddp.py --dataset digits ...`.

In float32 two runs that add the same numbers in another order drift apart: an activation that lies
within rounding of zero falls on the other side of a ReLU, and training amplifies it. In double precision
what is left is a difference of the mathematics.
"""

import runpy
import sys

import torch

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
