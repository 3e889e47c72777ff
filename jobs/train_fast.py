# PYTHON_ARGCOMPLETE_OK
"""Train a ResNet-18 with every speed-up: train.py plus one marked block for each, with its measured gain.

    python jobs/train_fast.py --dataset digits --epochs 8 --batch_size 128 --lr 0.03    real digits
    python jobs/train_fast.py --dataset cifar10 --data_url FOLDER --epochs 16 --short_recipe true

With the same --batch_size it gets the data of train.py: the receipts are equal (without --short_recipe). A
gain is the time of a step without the block over the time with it, all other blocks in place, on 2 CPU cores
with AMX (`python -m tests.benchmarks.blocks`); not run on a GPU.
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

    ### 新增 (new) 1/10, fewer and larger steps: 1.09x with 512 samples instead of 128 ###
    parser.set_defaults(batch_size=512, lr=0.4)
    optimization.add_argument("--compile", role="operation", type=boolean, help="default: true on a GPU")
    short = "true: blocks 2, 4, 5 and 7, for CIFAR-10 in 16 epochs (default: false)"
    optimization.add_argument("--short_recipe", type=boolean, default=False, help=short)
    ### 新增 (new) 1/10, fewer and larger steps: 1.09x with 512 samples instead of 128 ###
    args = parser.parse_args()

    run = Run(args)  # finds the device, and opens the output folder and the log
    device = run.device
    log = run.log
    torch.manual_seed(args.seed)

    # A step's samples and their random parts are a function of (seed, step): a restart continues exactly.
    train_set, test_set = image_set.load(args.dataset, args.data_url, args.custom_data)
    log.print_data(train_set, test_set)

    ### 新增 (new) 2/10, crops at the border show the image mirrored, not black: gain not measured ###
    import dataclasses

    train_set = dataclasses.replace(train_set, reflect=args.short_recipe)
    ### 新增 (new) 2/10, crops at the border show the image mirrored, not black: gain not measured ###
    train_sampler = BatchSampler(
        len(train_set), args.batch_size, args.seed, args.epochs, args.max_steps, args.epoch_steps
    )
    test_sampler = SequentialBatchSampler(len(test_set), 250)

    ### 新增 (new) 3/10, the images stay on the device: 1.0x here; on a GPU nothing is copied ###
    if device.type == "cuda":
        test_sampler = SequentialBatchSampler(len(test_set), 2_500)  # fewer launches; equal up to rounding
    # - train_loader = make_loader(train_set, train_sampler, device, augment=True)
    # - test_loader = make_loader(test_set, test_sampler, device)
    from datasets.loaders.engines.memory import resident_loader

    make = resident_loader if device.type != "cpu" else make_loader
    train_loader = make(train_set, train_sampler, device, augment=True)
    test_loader = make(test_set, test_sampler, device)
    ### 新增 (new) 3/10, the images stay on the device: 1.0x here; on a GPU nothing is copied ###

    ### 新增 (new) 4/10, every second epoch shows the other mirror image: gain not measured ###
    from datasets.sampling.augment import alternating_flip

    if args.short_recipe:
        train_loader.plan.augment = alternating_flip
    ### 新增 (new) 4/10, every second epoch shows the other mirror image: gain not measured ###

    model = models.resnet18(train_set.channels, train_set.classes, args.width)

    ### 新增 (new) 5/10, convolutions begin by passing their input on (Dirac): gain not measured ###
    for module in model.modules():
        if args.short_recipe and isinstance(module, torch.nn.Conv2d):
            torch.nn.init.dirac_(module.weight.data[: module.in_channels])
    ### 新增 (new) 5/10, convolutions begin by passing their input on (Dirac): gain not measured ###
    model = model.to(device).to(memory_format=torch.channels_last)
    forward = model  # variants wrap `forward`; `model` stays the raw module, which is saved and evaluated

    total_steps = train_sampler.total_steps
    recipe = models.FUSED[device.type] | {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)

    ### 新增 (new) 6/10, fused optimizer: one kernel, and the device does not wait: 1.01x to 1.15x ###
    if torch.__version__ >= "2.4":  # compared as versions; earlier ones have it for GPUs only
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe | {"fused": True})
    ### 新增 (new) 6/10, fused optimizer: one kernel, and the device does not wait: 1.01x to 1.15x ###
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=total_steps, cycle_momentum=False
    )
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    ### 新增 (new) 7/10, smoother targets for a short training: gain not measured ###
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.2 if args.short_recipe else 0.1)
    ### 新增 (new) 7/10, smoother targets for a short training: gain not measured ###
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

    ### 新增 (new) 8/10, fewer launches by CUDA graphs; not on a CPU, which gains 1.03x after 47 s ###
    from common.compute import precision
    from common.parallel.compilation import compile_module

    # cuDNN tries its algorithms for each convolution once: another run may find another one the fastest
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled()
    if precision.half_type(device) == torch.float16:
        log.info("warning: this GPU has no units for bfloat16 (before Ampere): use jobs/train_amp.py")
    if args.compile if args.compile is not None else device.type != "cpu":
        with log.timed("compilation"), torch.autocast(device.type, dtype=torch.bfloat16):
            images = train_loader.example(args.batch_size)
            forward = compile_module(model, [images], log.info, graphs=True)
    log.use(autocast=torch.autocast(device.type, dtype=torch.bfloat16))  # the log names the precision
    ### 新增 (new) 8/10, fewer launches by CUDA graphs; not on a CPU, which gains 1.03x after 47 s ###
    step = checkpoint.resume()  # 0, or the step of the newest checkpoint

    for epoch in train_loader.epochs_from(step):  # after a restart: first the rest of the epoch
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()

            ### 新增 (new) 9/10, half the bytes, matrix units for bfloat16: 2.82x ###
            # - logits = forward(inputs)
            # - loss = criterion(logits, targets)
            # - loss.backward()
            with torch.autocast(device.type, dtype=torch.bfloat16):  # on GPUs before Ampere: train_amp.py
                logits = forward(inputs)
                loss = criterion(logits, targets)
            loss.backward()
            ### 新增 (new) 9/10, half the bytes, matrix units for bfloat16: 2.82x ###
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

        ### 新增 (new) 10/10, at the end also the mirror images: cross entropy 0.763 to 0.759 ###
        # - val_sums = evaluation.evaluate(model, test_loader, criterion, log.metrics, checkpoint.must_stop)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            mirrored = train_set.flip and train_loader.step == total_steps
            val_sums = evaluation.evaluate(
                model, test_loader, criterion, log.metrics, checkpoint.must_stop, mirrored=mirrored
            )
        ### 新增 (new) 10/10, at the end also the mirror images: cross entropy 0.763 to 0.759 ###
        checkpoint.save_weights(epoch, val_sums)  # or exits, if the evaluation was stopped
        log.validation(val_sums)
    checkpoint.finish()  # waits for the last save and upload, and prints the TIME COST table


if __name__ == "__main__":
    main()
