# PYTHON_ARGCOMPLETE_OK
"""Train a ResNet-18 on one device. The baseline that every variant is compared with.

    python jobs/train.py --dataset digits --epochs 12         real digits, no download, 30 s on two cores
    python jobs/train.py --custom_data=true --max_steps 20    smoke test on generated images
    python jobs/train.py --dataset cifar10 --data_url FOLDER  on a GPU if there is one

On a platform: upload the folder that `python -m launch pack jobs/train.py --to packed` makes, take the copy
of this file in it as the boot file, and enter the arguments. After each epoch there is a plain state_dict
`epoch_<n>.pth` in --output_dir, next to metrics.jsonl and TensorBoard events.
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
    args = parser.parse_args()

    run = Run(args)  # finds the device, and opens the output folder and the log
    device = run.device
    log = run.log
    torch.manual_seed(args.seed)

    # A step's samples and their random parts are a function of (seed, step): a restart continues exactly.
    train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    log.print_data(train_set, test_set)
    train_sampler = BatchSampler(
        len(train_set), args.batch_size, args.seed, args.epochs, args.max_steps, args.epoch_steps
    )
    test_sampler = SequentialBatchSampler(len(test_set), 250)
    train_loader = make_loader(train_set, train_sampler, device, augment=True)
    test_loader = make_loader(test_set, test_sampler, device)

    model = models.resnet18(train_set.channels, train_set.classes, args.width)
    model = model.to(device).to(memory_format=torch.channels_last)
    forward = model  # variants wrap `forward`; `model` stays the raw module, which is saved and evaluated

    total_steps = train_sampler.total_steps
    recipe = models.FUSED[device.type] | {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=total_steps, cycle_momentum=False
    )
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    running = evaluation.zero_sums(device, 3)  # float64: loss_sum, correct, count since a report

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
    step = checkpoint.resume()  # 0, or the step of the newest checkpoint

    for epoch in train_loader.epochs_from(step):  # after a restart: first the rest of the epoch
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            logits = forward(inputs)
            loss = criterion(logits, targets)
            loss.backward()
            if checkpoint.accepts(loss):  # finite on all ranks; on a GPU the optimizer skips the step
                running += evaluation.batch_sums(loss, logits, targets)
                optimizer.step()
            scheduler.step()
            step += 1
            due = checkpoint.end_step()
            if due.report:  # after --report_every, and before a save
                log.report(running, scheduler)  # waits for the device, and sets `running` to 0
            if due.save:  # after --save_every, and if the platform has sent SIGTERM: then it exits
                checkpoint.save()
        val_sums = evaluation.evaluate(model, test_loader, criterion, log.metrics, checkpoint.must_stop)
        checkpoint.save_weights(epoch, val_sums)  # or exits, if the evaluation was stopped
        log.validation(val_sums)
    checkpoint.finish()  # waits for the last save and upload, and prints the TIME COST table


if __name__ == "__main__":
    main()
