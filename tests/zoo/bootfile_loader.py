"""Bootfile: its loader for 4 epochs, continued with epochs_from.

OPTIONS: step of the checkpoint; number of workers.
"""

import sys
from pathlib import Path

import torch
from start import OPTIONS, load, receipt, record, samples, save, stop, train

sys.path.insert(0, str(Path(__file__).parents[2]))
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler

SAVE, WORKERS = int(OPTIONS[0]), int(OPTIONS[1])


def main():
    data = torch.utils.data.TensorDataset(samples, torch.arange(len(samples)))
    sampler = BatchSampler(len(samples), 4, seed=0, epochs=4)
    loader = map_style_loader(data, sampler, torch.device("cpu"), workers=WORKERS)
    load()
    for epoch in loader.epochs_from(receipt.step):
        for batch, _ in loader:
            record(batch, epoch)
            train(batch)
            if receipt.step == SAVE:
                save(None)
            stop()


if __name__ == "__main__":
    main()
