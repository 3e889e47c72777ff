"""Run a job in double precision: `python -m tests.support.float64 jobs/train_ddp.py --dataset digits ...`.

In float32, two runs that add the same numbers in another order diverge: rounding changes the sign of an
activation near zero before a ReLU, and training amplifies the difference. In double precision, a remaining
difference shows an error in the computation.
"""

import runpy
import sys

import torch

if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
