"""PyTorch alone: a loop of 4 epochs, continued in the middle of epoch 2.

OPTIONS: step of the checkpoint; what chooses the order ("sampler": a DistributedSampler with set_epoch,
"generator": a generator that is saved at the start of each epoch); number of workers.
"""

import itertools

import torch
from start import OPTIONS, RANK, WORLD_SIZE, load, receipt, record, samples, save, stop, train

SAVE, ORDER, WORKERS = int(OPTIONS[0]), OPTIONS[1], int(OPTIONS[2])


def main():
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    sampler = torch.utils.data.RandomSampler(samples, generator=generator)
    if ORDER == "sampler":
        sampler = torch.utils.data.DistributedSampler(samples, WORLD_SIZE, RANK, seed=0)
    loader = torch.utils.data.DataLoader(samples, 4 // WORLD_SIZE, sampler=sampler, num_workers=WORKERS)
    if (state := load()) is not None:
        generator.set_state(state)
    first_epoch, skipped = divmod(receipt.step, 8)
    for epoch in range(first_epoch, 4):
        if ORDER == "sampler":
            sampler.set_epoch(epoch)
        state = generator.get_state()
        for batch in itertools.islice(loader, skipped if epoch == first_epoch else 0, None):
            record(batch, epoch + 1)
            train(batch)
            if receipt.step == SAVE and RANK == 0:
                save(state)
            stop()


if __name__ == "__main__":
    main()
