# PYTHON_ARGCOMPLETE_OK
"""Train a ResNet-18 to the same bits on 1 to 8 processes: train_ddp.py plus blocks marked as new.

    python jobs/train_exact.py --dataset digits --epochs 2                          one process
    python jobs/train_exact.py --dataset digits --epochs 2 --processes_per_node 4   the same bits
    torchrun --nproc-per-node=8 jobs/train_exact.py

Any number of processes up to --exact_shards, which a restart may change, on CPUs of one kind, and with
--cpu_level on others, too. BatchNorm sees one shard, so the losses are not those of train_ddp.py. Price:
guides/exact.md.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # our `datasets`, not PyPI's
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # if this file is a link
from common.distributed.entry import entry  # before torch, so that Ctrl-C ends its import cleanly

# isort: split
import torch

from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler
from common.checkpoint.checkpointer import Checkpointer, TrainingParser
from common.compute import models
from common.console.arguments import BATCH_SIZE_HELP, boolean, positive_float, positive_int, seed
from common.run import evaluation
from common.run.run import Run
from datasets.loaders.engines.memory import make_loader
from datasets.memory import image_set


@entry  # bad input ends the job with one line `error: ...` and exit code 2
def main() -> None:
    # The parser adds --output_dir, --report_every, --max_steps, --resume, --save_every, --weights and more.
    parser = TrainingParser(__doc__)
    data = parser.add_argument_group("data and model", role="identity")  # other values: another run
    data.add_argument("--dataset", choices=image_set.NAMES, default="cifar10", help="default: cifar10")
    data.add_argument("--custom_data", type=boolean, default=False, help="true: use generated images")
    data.add_argument("--width", type=positive_int, default=64, help=models.WIDTH_HELP)
    data.add_argument("--data_url", role="operation", help="folder of the data set (default: input_dir/)")
    data.add_argument("--batch_size", type=positive_int, default=128, help=BATCH_SIZE_HELP)
    data.add_argument("--seed", type=seed, default=0, help="seed of all random numbers (default: 0)")
    optimization = parser.add_argument_group("optimization")
    optimization.add_argument("--lr", type=positive_float, default=0.1, help="peak LR (default: %(default)s)")
    optimization.add_argument("--epochs", type=positive_int, default=20, help="default: %(default)s")

    ### 分布式改造 (distributed) 1/6, find the rank of this process; --rank and --world_size count nodes ###
    from common.distributed import launcher, process_group
    from common.parallel.batchnorm import convert_sync_batchnorm

    process_group.add_arguments(parser)
    ### 分布式改造 (distributed) 1/6, find the rank of this process; --rank and --world_size count nodes ###

    ### 新增 (new) 1/13, a step is V shards on any number of processes: each a forward and backward pass ###
    from functools import partial

    from common.elastic import agent
    from common.parallel import exact_shards

    help = f"{exact_shards.HELP} (default: 8)"
    data.add_argument("--exact_shards", type=positive_int, default=8, metavar="V", help=help)
    lost = parser.add_argument_group("lost processes", role="operation")
    lost.add_argument("--elastic", **agent.OPTION)
    ### 新增 (new) 1/13, a step is V shards on any number of processes: each a forward and backward pass ###
    args = parser.parse_args()

    run = Run(args)  # finds the device, and opens the output folder and the log
    device = run.device
    log = run.log

    ### 新增 (new) 2/13, replace processes that die: the others run main() again, and resume() from memory ###
    if args.elastic:  # starts the processes of the node as below, and exits with their code
        agent.start(run.topology, args, run.output.hold)
    ### 新增 (new) 2/13, replace processes that die: the others run main() again, and resume() from memory ###

    ### 分布式改造 (distributed) 2/6, one process per GPU: started by torchrun, or here; then they connect ###
    topology = run.print_topology()
    if topology.starts_processes:  # started once for the node: start the others, wait, exit with their code
        sys.exit(launcher.start(topology, args.grace))
    torch.distributed.init_process_group(**process_group.meet(args, topology))  # nccl on GPUs, else gloo
    rank = torch.distributed.get_rank()
    world_size = torch.distributed.get_world_size()
    ### 分布式改造 (distributed) 2/6, one process per GPU: started by torchrun, or here; then they connect ###

    ### 新增 (new) 3/13, a process computes neighbouring shards, each with its own BatchNorm ###
    shards = exact_shards.Shards(args.exact_shards, device)
    # block 4/6 calls it: BatchNorm is not synchronised, and after a step its buffers are those of shard 0
    convert_sync_batchnorm = torch.nn.Identity()  # noqa: F811
    ### 新增 (new) 3/13, a process computes neighbouring shards, each with its own BatchNorm ###
    torch.manual_seed(args.seed)

    # A step's samples and their random parts are a function of (seed, step): a restart continues exactly.
    train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    log.print_data(train_set, test_set)
    train_sampler = BatchSampler(
        len(train_set), args.batch_size, args.seed, args.epochs, args.max_steps, args.epoch_steps
    )
    test_sampler = SequentialBatchSampler(len(test_set), 250)

    ### 分布式改造 (distributed) 3/6, each rank reads its own part of every global batch ###
    train_sampler = train_sampler.for_rank(rank, world_size)
    test_sampler = test_sampler.for_rank(rank, world_size)  # every test sample once: no padding
    ### 分布式改造 (distributed) 3/6, each rank reads its own part of every global batch ###

    ### 新增 (new) 4/13, a batch of the loader is one shard, with random numbers by (seed, step, shard) ###
    train_sampler = train_sampler.split(shards.count)
    test_sampler = test_sampler.split(shards.count)  # no batch has samples of two shards
    ### 新增 (new) 4/13, a batch of the loader is one shard, with random numbers by (seed, step, shard) ###
    train_loader = make_loader(train_set, train_sampler, device, augment=True)
    test_loader = make_loader(test_set, test_sampler, device)

    model = models.resnet18(train_set.channels, train_set.classes, args.width)
    model = model.to(device).to(memory_format=torch.channels_last)
    forward = model  # variants wrap `forward`; `model` stays the raw module, which is saved and evaluated

    ### 分布式改造 (distributed) 4/6, average the gradients, and BatchNorm over the global batch ###
    model = convert_sync_batchnorm(model)  # torch.nn.SyncBatchNorm; it needs nccl, so over gloo our own
    device_ids = [device.index] if device.type != "cpu" else None
    forward = torch.nn.parallel.DistributedDataParallel(model, device_ids=device_ids)
    forward.broadcast_buffers = False  # equal on all ranks: no need to send them before every forward pass
    ### 分布式改造 (distributed) 4/6, average the gradients, and BatchNorm over the global batch ###

    ### 新增 (new) 5/13, shards.add() adds the gradients of all shards in one fixed binary tree ###
    shards.attach(forward)  # as in no_sync(): backward() does not communicate
    ### 新增 (new) 5/13, shards.add() adds the gradients of all shards in one fixed binary tree ###

    total_steps = train_sampler.total_steps
    recipe = models.FUSED[device.type] | {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=total_steps, cycle_momentum=False
    )
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    running = evaluation.zero_sums(device, 3)  # float64: loss_sum, correct, count since a report

    ### 新增 (new) 6/13, the figures of each shard have a row of their own ###
    running = evaluation.zero_sums(device, shards.count, 3)  # since a report
    sums = torch.zeros_like(running)  # of one step
    ### 新增 (new) 6/13, the figures of each shard have a row of their own ###

    checkpoint = Checkpointer(
        run,
        model=model,
        forward=forward,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=train_loader,
        val_loader=test_loader,
    )

    ### 新增 (new) 7/13, a process that replaces a lost one gets the figures since the last report ###
    checkpoint.running = running
    ### 新增 (new) 7/13, a process that replaces a lost one gets the figures since the last report ###
    step = checkpoint.resume()  # 0, or the step of the newest checkpoint

    for epoch in train_loader.epochs_from(step):  # after a restart: first the rest of the epoch
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            logits = forward(inputs)
            loss = criterion(logits, targets)
            loss.backward()

            ### 新增 (new) 8/13, after its last shard a step has the mean gradients of all shards ###
            sums[shards.index] = evaluation.batch_sums(loss, logits, targets)
            loss = shards.add(loss)  # the mean over all shards, after the last one of this process
            if loss is None:  # another shard of this step follows
                continue
            ### 新增 (new) 8/13, after its last shard a step has the mean gradients of all shards ###
            if checkpoint.accepts(loss):  # finite on all ranks; on a GPU the optimizer skips the step
                ### 新增 (new) 9/13, the figures of a step are those of all its shards ###
                # - running += evaluation.batch_sums(loss, logits, targets)
                running += shards.gather(sums)  # on all ranks: a process that is lost takes no figures along
                ### 新增 (new) 9/13, the figures of a step are those of all its shards ###
                optimizer.step()
            scheduler.step()
            step += 1
            due = checkpoint.end_step()
            if due.report:  # after --report_every, and before a save
                ### 分布式改造 (distributed) 5/6, sum the figures over all ranks; rank 0 prints and writes ###

                ### 新增 (new) 10/13, they were summed over the ranks in each step: see 9/13 ###
                # - torch.distributed.all_reduce(running)
                ### 新增 (new) 10/13, they were summed over the ranks in each step: see 9/13 ###
                ### 分布式改造 (distributed) 5/6, sum the figures over all ranks; rank 0 prints and writes ###

                ### 新增 (new) 11/13, add the rows in the binary tree ###
                # - log.report(running, scheduler)  # waits for the device, and sets `running` to 0
                log.report(exact_shards.sum_rows(running), scheduler)
                running.zero_()
                ### 新增 (new) 11/13, add the rows in the binary tree ###
            if due.save:  # after --save_every, and if the platform has sent SIGTERM: then it exits
                checkpoint.save()

        ### 新增 (new) 12/13, evaluate this rank's shards of the test set, with a row of sums for each ###
        # - val_sums = evaluation.evaluate(model, test_loader, criterion, log.metrics, checkpoint.must_stop)
        evaluate = partial(
            evaluation.evaluate,
            model,
            criterion=criterion,
            metrics=log.metrics,
            stop=checkpoint.must_stop,
        )
        val_sums = shards.rows(evaluate, test_loader)
        ### 新增 (new) 12/13, evaluate this rank's shards of the test set, with a row of sums for each ###

        ### 分布式改造 (distributed) 6/6, sum the evaluation over all ranks; rank 0 writes the weights ###
        torch.distributed.all_reduce(val_sums)
        ### 分布式改造 (distributed) 6/6, sum the evaluation over all ranks; rank 0 writes the weights ###

        ### 新增 (new) 13/13, add the rows in the binary tree ###
        val_sums = exact_shards.sum_rows(val_sums)
        ### 新增 (new) 13/13, add the rows in the binary tree ###
        checkpoint.save_weights(epoch, val_sums)  # or exits, if the evaluation was stopped
        log.validation(val_sums)
    checkpoint.finish()  # waits for the last save and upload, and prints the TIME COST table


if __name__ == "__main__":
    main()
