"""torchdata: a StatefulDataLoader with shuffle=True for 4 epochs, its state_dict in each checkpoint.

OPTIONS: step of the checkpoint; number of workers; "seeds" if the restarted run has another seed.
"""

import torch
from start import OPTIONS, OUT, load, receipt, record, samples, save, stop, train
from torchdata.stateful_dataloader import StatefulDataLoader

SAVE, WORKERS = int(OPTIONS[0]), int(OPTIONS[1])


def main():
    torch.manual_seed(1 if "seeds" in OPTIONS and OUT == "restarted" else 0)
    loader = StatefulDataLoader(samples, 4, shuffle=True, num_workers=WORKERS)
    if state := load():
        loader.load_state_dict(state)
    for epoch in range(receipt.step // 8, 4):
        for batch in loader:
            record(batch, epoch + 1)
            train(batch)
            if receipt.step == SAVE and SAVE % 8:
                save(loader.state_dict())
            stop()
        if receipt.step == SAVE:
            save(loader.state_dict())


if __name__ == "__main__":
    main()
