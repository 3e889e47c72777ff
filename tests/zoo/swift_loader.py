"""ms-swift: its DataLoaderShard with a DistributedSampler, 3 epochs with set_epoch, as its trainer calls it.

OPTIONS: none.
"""

import torch
from start import RANK, WORLD_SIZE, record, samples, train
from swift.dataloader import DataLoaderShard

order = torch.utils.data.DistributedSampler(samples, WORLD_SIZE, RANK, seed=0)
loader = DataLoaderShard(samples, batch_size=4 // WORLD_SIZE, sampler=order)
for epoch in range(3):
    loader.set_epoch(epoch)
    for batch in loader:
        record(batch, epoch + 1)
        train(batch)
