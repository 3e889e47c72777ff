"""Train a ResNet-18 on one device: the script that every variant is read against.

    python jobs/train.py --dataset digits --epochs 12         real digits, no download, 30 s on two cores
    python jobs/train.py --custom_data=true --max_steps 20    smoke test on generated images
    python jobs/train.py --dataset cifar10 --data_url FOLDER  on a GPU if there is one

On a platform: upload the repository, take this file as the boot file, and enter the arguments. After each
epoch there is a plain state_dict `epoch_<n>.pth` in --output_dir, beside metrics.jsonl and TensorBoard
events.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # before any other `datasets`
from common.entry import entry  # Ctrl-C is one line from here on, also while torch is imported

# isort: split
import torch

from common import arguments, evaluation, metrics, models
from common.checkpoint import checkpointer
from common.distributed import process_group
from datasets.loaders.engines.memory import memory_loader
from datasets.memory import cifar10, digits, fashion_mnist
from datasets.sampling.sampler import BatchSampler, SequentialBatchSampler

DATASETS = {"cifar10": cifar10, "digits": digits, "fashion_mnist": fashion_mnist}


@entry
def main():
    parser = arguments.Parser(__doc__)
    # data
    parser.add_argument("--dataset", choices=DATASETS, default="cifar10", help="default: cifar10")
    parser.add_argument(
        "--data_url", help="folder that holds the data set (default: input_dir/ beside jobs/)"
    )
    parser.add_argument(
        "--custom_data", type=arguments.boolean, default=False, help="true: generated images instead"
    )
    # output
    parser.add_argument(
        "--output_dir", "--train_url", help="folder for results (default: a new one in output_dir/)"
    )
    parser.add_argument("--report_every", type=arguments.positive_int, default=50, help="steps (default: 50)")
    # optimization
    parser.add_argument("--enable_gpu", type=arguments.boolean, help="default: true if there is a GPU")
    parser.add_argument(
        "--lr", type=arguments.positive_float, default=0.1, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=arguments.positive_int, default=20, help="default: 20")
    parser.add_argument(
        "--batch_size", type=arguments.positive_int, default=128, help=arguments.BATCH_SIZE_HELP
    )
    parser.add_argument(
        "--seed", type=arguments.seed, default=0, help="of weights, order and crops (default: 0)"
    )
    parser.add_argument(
        "--max_steps", type=arguments.positive_int, help="end after this many steps (default: no limit)"
    )
    # restarts
    checkpointer.add_arguments(parser)

    args = arguments.parse(parser)
    device = process_group.device(args)

    torch.manual_seed(args.seed)
    log = metrics.Log(args.output_dir)
    log.lap("set-up")

    train_set, test_set = DATASETS[args.dataset].load(args.data_url, args.custom_data)
    train_order = BatchSampler(len(train_set), args.batch_size, args.seed, args.epochs, args.max_steps)
    test_order = SequentialBatchSampler(len(test_set), batch=1000)

    train_loader = memory_loader(train_set, train_order, device, augment=True)
    test_loader = memory_loader(test_set, test_order, device)
    log.data(train_set, test_set)

    model = models.resnet18(train_set.channels, train_set.classes).to(
        device, memory_format=torch.channels_last
    )
    forward = model

    steps = train_loader.total_steps
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )

    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=steps, cycle_momentum=False
    )
    loss_function = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    # [loss_sum, correct, count] since the last report
    window = torch.zeros(3, dtype=torch.float64, device=device)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "receipt": train_loader.receipt}

    keeper = checkpointer.Recovery(args, state)
    step = keeper.resume(steps, len(train_loader))

    log.training(train_loader, step, steps)

    for epoch in train_loader.epochs_from(step):
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            logits = forward(images)
            loss = loss_function(logits, labels)

            loss.backward()
            if keeper.finite(loss):
                window += evaluation.sums(loss, logits, labels)
                optimizer.step()
            scheduler.step()

            step += 1
            if step % args.report_every and step % len(train_loader) and not keeper.due(step):
                continue

            train_loader.commit(step, args.output_dir)

            log.train(epoch, step, window, scheduler.get_last_lr()[0])
            window.zero_()
            keeper.save(step)

        totals = evaluation.evaluate(model, test_loader, loss_function)
        keeper.leave_if_asked(step)

        keeper.save_weights(epoch, totals)
        log.validation(epoch, step, totals)
    log.finish()
    keeper.finish()


if __name__ == "__main__":
    main()
