"""Hugging Face datasets in torchdata's StatefulDataLoader, 3 epochs, continued in epoch 2.

OPTIONS: step of the checkpoint; "epoch" if the loop calls set_epoch of the stream.
"""

from start import OPTIONS, load, receipt, record, samples, save, stop, train
from torchdata.stateful_dataloader import StatefulDataLoader

import datasets


def main():
    examples = datasets.Dataset.from_dict({"x": samples.tolist()}).with_format("torch")
    stream = examples.to_iterable_dataset(num_shards=4)
    loader = StatefulDataLoader(stream, 4, num_workers=2, persistent_workers=True)
    state = load() or {"epoch": 0}
    if "loader" in state:
        loader.load_state_dict(state["loader"])
    for epoch in range(state["epoch"], 3):
        if "epoch" in OPTIONS:
            stream.set_epoch(epoch)
        for batch in loader:
            record(batch["x"], epoch + 1)
            train(batch["x"])
            if receipt.step == int(OPTIONS[0]):
                save({"epoch": epoch, "loader": loader.state_dict()})
            stop()


if __name__ == "__main__":
    main()
