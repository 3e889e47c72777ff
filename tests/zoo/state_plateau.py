"""Accelerate: ReduceLROnPlateau with a patience of 3, one step of it after each epoch of 8 steps, 8 epochs.

OPTIONS: "prepared" if Accelerate prepares the scheduler, or "plain"; "two" starts 2 processes.
"""

import subprocess
import sys

from accelerate import Accelerator
from start import OPTIONS, RANK, WORLD_SIZE, avoid_rounding, batches, load, model, optimizer, receipt, save
from torch.optim.lr_scheduler import ReduceLROnPlateau

if "two" in OPTIONS and WORLD_SIZE == 1:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.run([*launcher, *sys.argv]).returncode)
avoid_rounding()
plain = ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
accelerator = Accelerator(cpu=True)
wrapped, optimizer = accelerator.prepare(model, optimizer)
scheduler = accelerator.prepare(plain) if "prepared" in OPTIONS else plain
if (state := load()) is not None:
    plain.load_state_dict(state)
for batch in batches(64):
    accelerator.backward(wrapped(batch)["loss"])
    optimizer.step()
    optimizer.zero_grad()
    if receipt.step % 8 == 0:
        scheduler.step(1.0)  # the loss of the evaluation does not fall
        if RANK == 0:
            save(plain.state_dict())
accelerator.end_training()
