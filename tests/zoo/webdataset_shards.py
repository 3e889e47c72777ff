"""WebDataset: 3 epochs over 8 shards of 4 samples, with shardshuffle.

OPTIONS: none.
"""

import os

import torch
import webdataset
from start import OUT, record, samples, train

os.makedirs(OUT, exist_ok=True)
shards = [os.path.join(OUT, f"{number}.tar") for number in range(8)]
for number, path in enumerate(shards):
    with webdataset.TarWriter(path) as writer:
        for key, sample in enumerate(samples[4 * number : 4 * number + 4]):
            writer.write({"__key__": f"{number}-{key}", "x.npy": sample.numpy()})

stream = webdataset.WebDataset(shards, shardshuffle=8).decode().to_tuple("x.npy")
loader = torch.utils.data.DataLoader(stream, 4)
for epoch in range(3):
    for (batch,) in loader:
        record(batch, epoch + 1)
        train(batch)
