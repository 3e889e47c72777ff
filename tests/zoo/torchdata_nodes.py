"""torchdata.nodes: a Loader, its state_dict in the checkpoint, continued in the middle of its second epoch.

OPTIONS: step of the checkpoint; source of the indices ("distributed" or "plain"); "print": state_dict of the
new loader is called before the old state is loaded, as a program does that logs it.
"""

import torch
import torchdata.nodes as tn
from start import OPTIONS, load, receipt, record, samples, save, stop, train
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

SAVE, SOURCE, PRINT = int(OPTIONS[0]), OPTIONS[1], "print" in OPTIONS

if SOURCE == "distributed":
    indices = tn.SamplerWrapper(StatefulDistributedSampler(samples, 1, 0, shuffle=True, seed=0))
else:
    indices = tn.IterableWrapper(range(len(samples)))
node = tn.Mapper(tn.Batcher(indices, 4), lambda chosen: samples[torch.tensor(chosen)])
loader = tn.Loader(node)
if PRINT:
    print(loader.state_dict())
if state := load():
    loader.load_state_dict(state)
for epoch in range(receipt.step // 8, 3):
    for batch in loader:
        record(batch, epoch + 1)
        train(batch)
        if receipt.step == SAVE:
            save(loader.state_dict())
        stop()
