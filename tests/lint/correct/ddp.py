"""DistributedDataParallel under torchrun, with accumulation and checkpoints within an epoch."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank()


def gather_random_states():
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    return states


def save_checkpoint(args, rank, model, optimizer, scheduler, epoch, batch, step):
    random_states = gather_random_states()
    if rank == 0:
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch,
            "batch": batch,
            "step": step,
            "random": random_states,
            "args": vars(args),
        }
        torch.save(state, os.path.join(args.out, "new.pt"))
        os.replace(os.path.join(args.out, "new.pt"), os.path.join(args.out, "last.pt"))
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--accumulate", type=int, default=4)
    args = parser.parse_args()
    rank = setup()
    torch.manual_seed(rank)
    dataset = TensorDataset(torch.rand(960, 8), torch.randint(0, 4, (960,)))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 8, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    epoch_begin = 0
    skipped = 0
    step = 0
    if args.resume:
        checkpoint = torch.load(os.path.join(args.out, "last.pt"), map_location="cuda")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["random"][rank].cpu())
        epoch_begin = checkpoint["epoch"]
        skipped = checkpoint["batch"]
        step = checkpoint["step"]
    model = DistributedDataParallel(model)
    for epoch in range(epoch_begin, args.epochs):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loader):
            if epoch == epoch_begin and number < skipped:
                continue
            inputs = inputs.cuda() + 0.1 * torch.randn(inputs.shape).cuda()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels.cuda())
            (loss / args.accumulate).backward()
            if (number + 1) % args.accumulate == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if step % 10 == 0:
                    save_checkpoint(args, rank, model, optimizer, scheduler, epoch, number + 1, step)


if __name__ == "__main__":
    main()
