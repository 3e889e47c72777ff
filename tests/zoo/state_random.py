"""NeMo Automodel: its StatefulRNG and Checkpointer on 2 ranks, each with a part of the model and dropout.

OPTIONS: none.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import torch
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
from nemo_automodel.components.training.rng import StatefulRNG
from start import OUT, RANK, SAVED, WORLD_SIZE, batches, model, optimizer, receipt, write

if WORLD_SIZE == 1:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.run([*launcher, *sys.argv]).returncode)
torch.distributed.init_process_group("gloo")
numbers, checkpointer = StatefulRNG(seed=0, ranked=True), Checkpointer.__new__(Checkpointer)
vars(checkpointer).update(tp_rank=RANK, pp_rank=0, dp_rank=0, process_group=None)  # tensor parallelism of 2
checkpointer.config = SimpleNamespace(allow_legacy_pickle_restore=False)
scope = "global_ranks" if hasattr(checkpointer, "save_on_global_ranks") else "dp_ranks"  # as its recipes do
if os.path.exists(SAVED):
    saved = torch.load(SAVED)
    model.load_state_dict(saved["models"][RANK])
    receipt.load_state_dict(saved["receipt"])
    folder = os.path.join(OUT, f"random-{receipt.step}")
    getattr(checkpointer, f"load_on_{scope}")(numbers, "rng", folder)
for batch in batches(24):
    part = torch.nn.functional.dropout(batch, 0.5)
    optimizer.zero_grad()
    model(part)["loss"].backward()
    optimizer.step()
    if receipt.step % 2 == 0:
        folder = os.path.join(OUT, f"random-{receipt.step}")
        getattr(checkpointer, f"save_on_{scope}")(numbers, "rng", folder)
        models = [None, None]
        torch.distributed.all_gather_object(models, model.state_dict())
        if RANK == 0:
            write({"models": models, "receipt": receipt.state_dict()})
        torch.distributed.barrier()
torch.distributed.destroy_process_group()
