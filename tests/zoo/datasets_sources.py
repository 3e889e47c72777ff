"""Hugging Face datasets: 3 epochs of a stream that combines two shuffled streams, with set_epoch.

OPTIONS: how they are combined ("interleave" or "concatenate"). Each rank has its part of both.
"""

import torch
from datasets.distributed import split_dataset_by_node
from start import OPTIONS, RANK, WORLD_SIZE, record, samples, train

import datasets

COMBINE = {"interleave": datasets.interleave_datasets, "concatenate": datasets.concatenate_datasets}


def collate(rows):
    return torch.tensor([row["x"] for row in rows])


if WORLD_SIZE > 1:
    torch.distributed.init_process_group("gloo")
streams = []
for half in samples.split(16):
    stream = datasets.Dataset.from_dict({"x": half.tolist()}).to_iterable_dataset(num_shards=4)
    streams.append(split_dataset_by_node(stream, RANK, WORLD_SIZE).shuffle(seed=0, buffer_size=8))
stream = COMBINE[OPTIONS[0]](streams)
loader = torch.utils.data.DataLoader(stream, 4 // WORLD_SIZE, collate_fn=collate)
for epoch in range(3):
    stream.set_epoch(epoch)
    for batch in loader:
        record(batch, epoch + 1)
        train(batch)
