"""Hugging Face datasets: a stream of 64 examples, with its state_dict in each checkpoint.

OPTIONS: steps between two checkpoints; what is done with the stream ("plain", "map" or "shuffle").
"""

import torch
from start import OPTIONS, load, receipt, record, samples, save, stop, train

import datasets

EVERY, KIND = int(OPTIONS[0]), OPTIONS[1]
examples = torch.cat([samples, samples + 1])


def label(example):
    return {**example, "label": 1}


def collate(rows):
    return torch.tensor([row["x"] for row in rows])


stream = datasets.Dataset.from_dict({"x": examples.tolist()}).to_iterable_dataset(num_shards=2)
if KIND == "map":
    stream = stream.map(label)
elif KIND == "shuffle":
    stream = stream.shuffle(seed=0, buffer_size=16)
if state := load():
    stream.load_state_dict(state)
for batch in torch.utils.data.DataLoader(stream, 4, collate_fn=collate):
    record(batch)
    train(batch)
    if receipt.step % EVERY == 0:
        save(stream.state_dict())
    stop()
