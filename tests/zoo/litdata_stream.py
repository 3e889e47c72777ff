"""LitData: a StreamingDataLoader over chunks on disk, its state_dict in the checkpoint, 3 epochs.

OPTIONS: step of the checkpoint; number of workers.
"""

import os

import litdata
import torch
from litdata.streaming.cache import Cache
from start import OPTIONS, OUT, load, receipt, record, samples, save, stop, train

SAVE, WORKERS = int(OPTIONS[0]), int(OPTIONS[1])


def main():
    folder = os.path.abspath(os.path.join(OUT, "chunks"))
    if not os.path.exists(folder):
        cache = Cache(folder, chunk_size=8)
        for number, sample in enumerate(samples):
            cache[number] = {"x": sample.reshape(2, 2)}
        cache.done()
        cache.merge()
    torch.manual_seed(0)
    loader = litdata.StreamingDataLoader(
        litdata.StreamingDataset(folder, shuffle=True), batch_size=4, num_workers=WORKERS
    )
    state = load() or {"epoch": 0}
    if "loader" in state:
        loader.load_state_dict(state["loader"])
    for epoch in range(state["epoch"], 3):
        for batch in (each["x"].reshape(-1, 4) for each in loader):
            record(batch, epoch + 1)
            train(batch)
            if receipt.step == SAVE:
                save({"epoch": epoch, "loader": loader.state_dict()})
            stop()


if __name__ == "__main__":
    main()
