# PYTHON_ARGCOMPLETE_OK
"""Train a ResNet-50, or another torchvision classifier, on folders of images, on every GPU of any machines.

    python jobs/imagenet.py --custom_data=true --arch resnet18 --image_size 32 --epochs 4 --warmup 1 \\
        --batch_size 32 --lr 0.02                                                try it anywhere
    python jobs/imagenet.py --data_url IMAGENET --output_dir OUT                 every GPU of this machine
    torchrun --nproc-per-node=8 jobs/imagenet.py --data_url IMAGENET --batch_size 2048 --lr 2.048
    python jobs/imagenet.py --data_url IMAGENET --pack /cache/imagenet    decoded once, read by all
    python jobs/imagenet.py --data_url IMAGENET --cache redis://user@host    read once, for all nodes
    python jobs/imagenet.py --data_url FOLDER --weights DEFAULT --freeze --optimizer adamw       fine-tune
    python jobs/imagenet.py --data_url IMAGENET --prof 100                       images/s, then stop
    python jobs/imagenet.py --fp16 --batch-size 512 --workers 10 --prof --use-dali IMAGENET    as published

IMAGENET holds train/<class>/* and val/<class>/*, or <class>/* alone, which --val_share splits. The recipe,
and so the defaults, are those of NVIDIA's ResNet-50 v1.5 (DeepLearningExamples), whose options may be spelled
as there: SGD with momentum 0.875, weight decay 1/32768 without BatchNorm and biases, --lr 0.256 for 256
samples, cosine after a warm-up, label smoothing 0.1. Every --data_backend delivers the same samples and
crops, so it may change at any restart. A first run needs at most the ten options that --help begins with.
"""

import argparse
import contextlib
import functools
import os
import sys
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # our `datasets`, not PyPI's
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # if this file is a link
from common.distributed.entry import entry  # before torch, so that Ctrl-C ends its import cleanly

# isort: split
import torch
from torch.nn.parallel import DistributedDataParallel

from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from bootfile.sampling import sampler
from common.checkpoint import weights
from common.checkpoint.checkpointer import Checkpointer, TrainingParser
from common.compute import averaging, classifiers, losses, networks, optimizers, precision, recompute
from common.console import arguments
from common.console.arguments import FLAG, IDENTITY, OPERATION, boolean, positive_int
from common.distributed import process_group
from common.parallel import compilation, exact_shards
from common.platform import node
from common.run import evaluation, metrics
from common.run.run import Run
from datasets.loaders import aliases, backends, image_folders
from datasets.sampling import effects

WARM_UP_BATCHES = 10  # of --prof
FIRST_OPTIONS = (  # --help begins with them
    "data_url", "custom_data", "arch", "image_size", "weights", "epochs", "batch_size", "lr", "output_dir",
    "evaluate",
)  # fmt: skip


def parse_args() -> arguments.Arguments:
    # The parser adds --output_dir, --max_steps, --enable_gpu, --resume, --save_every, --weights and more.
    parser = TrainingParser(__doc__)
    parser.first = FIRST_OPTIONS
    image_folders.add_arguments(parser)  # --data_url, --data_backend, --pack, --cache, --image_size, ...
    add = parser.add_argument_group("model").add_argument
    help = "network of torchvision, or timm:NAME (default: resnet50)"
    add("-a", "--arch", role=IDENTITY, type=networks.arch, default="resnet50", help=help)
    help = "further arguments of the network's class, such as {drop_path_rate = 0.1} (TOML)"
    add("--model_kwargs", default=classifiers.NO_KWARGS, metavar="TABLE", help=help)
    add("--freeze", **FLAG, help="train only the head; needs --weights FILE or DEFAULT")
    add("--amp", **FLAG | {"default": None}, help="mixed precision (default: true on a GPU)")
    help = "true: torch.compile (default: true on a GPU; with --exact_shards from torch 2.10 on)"
    add("--compile", role=OPERATION, type=boolean, help=help)
    help = "compute blocks twice: less memory, more time; not compiled"
    add("--grad_checkpointing", role=OPERATION, **FLAG, help=help)
    help = "evaluate a moving average of the weights: 0.9999"
    add("--ema", type=averaging.decay, metavar="DECAY", help=help)
    add = parser.add_argument_group("optimization").add_argument
    add("--epochs", type=positive_int, default=90, help="default: 90")
    add("-b", "--batch_size", role=IDENTITY, type=positive_int, default=256, help=arguments.BATCH_SIZE_HELP)
    optimizers.add_arguments(add)
    add("--accumulate", type=positive_int, default=1, help="micro-batches per step and process (default: 1)")
    help = f"{exact_shards.HELP} (default: none)"
    add("--exact_shards", role=IDENTITY, type=positive_int, metavar="V", help=help)
    losses.add_arguments(add)
    help = "seed of all random numbers (default: 0)"
    add("--seed", role=IDENTITY, type=arguments.seed, default=0, help=help)
    names = ("acc", "loss", "class_acc", "top5", "f1")
    help = "metric that chooses best.pth (default: acc or f1)"
    add("--best_metric", type=metric_name, choices=names, help=help)
    help = "stop after N evaluations in a row without a better score (default: none)"
    add("--early_stopping", role=OPERATION, type=positive_int, metavar="N", help=help)
    add = parser.add_argument_group("what to do").add_argument
    help = "measure images/s over N batches (default: 100), after 10 that are not counted, then stop"
    add("--prof", type=positive_int, nargs="?", const=100, metavar="N", help=help)
    add("--training_only", **FLAG, help="do not evaluate")
    add = parser.add_argument_group("output", role=OPERATION).add_argument
    help = "time between two reports in the log: 10s, 50 (steps) or 1epoch (default: 10s)"
    add("-p", "--report_every", "--print_freq", type=arguments.interval, default="10s", help=help)
    aliases.add_arguments(parser)
    process_group.add_arguments(parser)
    parser.checks += [aliases.merge, optimizers.check, check]
    return parser.parse_args()


def metric_name(name: str) -> str:
    """Return our name of a metric for --best_metric; top1 is that of timm."""
    return "acc" if name == "top1" else name


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that follow from others. Raises BadInput if options contradict each other."""
    if args.evaluate and args.training_only:
        raise BadInput("--evaluate and --training_only exclude each other")
    if args.freeze and not args.weights and args.resume in ("auto", "never"):
        raise BadInput("--freeze needs --weights FILE or DEFAULT: the backbone would stay random")
    if (args.first_image_size or 0) > args.image_size:
        raise BadInput(f"--first_image_size {args.first_image_size} exceeds --image_size {args.image_size}")
    for name in ("momentum", "label_smoothing", "layer_decay"):
        if (getattr(args, name) or 0) > 1:
            raise BadInput(f"--{name} {getattr(args, name)} is not in 0..1")
    if args.grad_checkpointing and args.compile:
        raise BadInput("--grad_checkpointing and --compile true exclude each other")
    follows: dict[str, Any] = {"compile": False} if args.grad_checkpointing else {}
    if args.exact_shards and args.data_backend == "auto":
        follows["data_backend"] = "threads"  # not the fastest one here: backends round pixels differently
    if not args.prof:
        return follows
    steps = WARM_UP_BATCHES + args.prof  # a small data set is read several times
    only = {"training_only": True, "report_every": arguments.interval(str(steps)), "evaluate_every": 0}
    return follows | only | {"resume": "never", "max_steps": steps, "epochs": max(args.epochs, steps)}


@entry
def main() -> None:
    args = parse_args()
    run = Run(args)
    _, world_size = run.join()  # step by step: train_ddp.py
    run = run.replaced(image_folders.complete(args))  # mean, std, crop share: the model's own
    args = run.args
    device = run.device
    log = run.log
    # see train_exact.py
    shards = exact_shards.Shards(args.exact_shards, device) if args.exact_shards else None
    # First the checks that need only the arguments: the scan of the images may take hours.
    parts, kind = (args.exact_shards, "shards") if shards else (world_size, "processes")
    if args.accumulate > 1:
        kind = f"({parts} {kind} x {args.accumulate} of --accumulate)"
    micro_batch = sampler.split_batch(args.batch_size, parts * args.accumulate, kind)
    trained = None if args.evaluate else micro_batch
    classifiers.check(args.arch, args.image_size, trained, args.first_image_size, args.model_kwargs)
    if args.val_image_size:
        classifiers.check(args.arch, args.image_size, None, args.val_image_size, args.model_kwargs)
    if args.layer_decay < 1:  # refuses a network without blocks; 10: any number of classes
        make = functools.partial(classifiers.build, args.arch, 10, args.image_size, args.model_kwargs)
        optimizers.count_following(classifiers.on_meta(make))
    image_folders.check_paths(resume=args.resume, weights=weights.file_of(args, run.output))
    drawn = effects.from_args(args, args.batch_size // (args.exact_shards or world_size))
    stores = image_folders.open_stores(args, device, log)  # the pack and the cache
    indexes = image_folders.open_indexes(args, device, log)  # scans the images once, for all runs
    train_loader, val_loader = image_folders.open_loaders(args, device, log, stores, indexes, micro_batch)
    train_loader.effects = drawn
    classes = len(train_loader.plan.index.classes)
    has_sets = train_loader.plan.index.labels.ndim > 1  # an image may have several labels
    log.use(metrics.of_classes(classes, has_sets, args.best_metric))
    criterion = losses.build(args, has_sets)
    # Your own augmentation: train_loader.transform = a function of (images uint8 [n, 3, H, W], labels).

    torch.manual_seed(args.seed)
    # cuDNN tries its algorithms for each convolution once: another run may find another one the fastest.
    torch.backends.cudnn.benchmark = not (shards or torch.are_deterministic_algorithms_enabled())
    model = classifiers.build(args.arch, classes, args.image_size, args.model_kwargs)
    model = model.to(device).to(memory_format=torch.channels_last)
    if args.freeze:
        classifiers.freeze(model, args.arch, args.image_size, args.model_kwargs)
    if args.grad_checkpointing:
        recompute.checkpoint_blocks(model, args.arch)
    autocast, scaler = precision.choose(device, args.amp)
    log.use(autocast=autocast)  # its first lines name the precision
    if device.type == "cpu" and not args.evaluate:
        shape = (3, args.image_size, args.image_size)
        node.check_memory(model, shape, micro_batch, share=0.5 if args.amp else 1)
    forward = model
    if world_size > 1 or shards:
        device_ids = [device.index] if device.type != "cpu" else None
        # No static_graph: no_sync(), which --accumulate needs, breaks with it (pytorch/pytorch#143580).
        forward = DistributedDataParallel(forward, device_ids=device_ids, gradient_as_bucket_view=True)
        forward.broadcast_buffers = False  # rank 0's are sent before an evaluation
    if not args.evaluate and compilation.is_chosen(args, device, log.info):
        with log.timed("compilation"), autocast:
            examples = [train_loader.example(micro_batch, size) for size in train_loader.plan.sizes]
            forward = compilation.compile_module(forward, examples, log.info)
    if shards:
        shards.attach(forward)
    no_sync = forward.no_sync if isinstance(forward, DistributedDataParallel) else contextlib.nullcontext
    steps_per_epoch = len(train_loader)
    total_steps = train_loader.total_steps
    optimizer = optimizers.build(args, model, device)
    scheduler = optimizers.build_scheduler(args, optimizer, steps_per_epoch, total_steps)
    if args.warmup * steps_per_epoch > total_steps and not (args.evaluate or args.prof):
        log.info(f"warning: --warmup {args.warmup:g} epochs is longer than the run: the rate only rises")
    checkpoint = Checkpointer(
        run,
        model=model,
        forward=forward,
        criterion=criterion,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=train_loader,
        val_loader=None if args.training_only else val_loader,
    )
    checkpoint.add(scaler=scaler)
    evaluated = model
    if args.ema:
        ema = averaging.MovingAverage(model, args.ema)
        checkpoint.add(ema=ema)
        evaluated = ema.module
    # loss_sum, correct, count since a report; a row for each shard
    running = evaluation.zero_sums(device, args.exact_shards or 1, 3)
    sums = torch.zeros_like(running)  # the figures of one step

    # With --evaluate resume() returns the last step: an epoch without batches follows, and evaluates.
    for epoch in train_loader.epochs_from(checkpoint.resume()):
        model.train()
        for images, targets in train_loader:  # [n], or [n, classes] with --mixup, --cutmix or several labels
            optimizer.zero_grad()
            labels = targets if has_sets or targets.ndim == 1 else targets.argmax(1)
            loss = torch.zeros((), device=device)
            logits = []
            micro_batches = list(zip(images.split(micro_batch), targets.split(micro_batch), strict=True))
            for number, (micro_images, micro_targets) in enumerate(micro_batches, start=1):
                is_last = number == len(micro_batches)  # gradients are averaged over the ranks once a step
                with contextlib.nullcontext() if is_last else no_sync():
                    with autocast:
                        output = forward(micro_images)
                        micro_loss = criterion(output, micro_targets) / len(micro_batches)
                    scaler.scale(micro_loss).backward()
                loss += micro_loss.detach()
                logits.append(output.detach())
            row = shards.index if shards else 0
            sums[row] = evaluation.batch_sums(loss, torch.cat(logits), labels)
            if train_loader.is_removed:  # --without has all samples of this shard
                sums[row] = 0
            step_loss = shards.add(loss) if shards else loss
            if step_loss is None:  # another shard of this step follows
                continue
            scaler.unscale_(optimizer)
            if checkpoint.accepts(step_loss):
                running += sums
                optimizers.clip(args, model)
                scaler.step(optimizer)
                if args.ema:
                    ema.update_parameters(model, checkpoint.found_inf)
            scaler.update()
            scheduler.step()
            due = checkpoint.end_step()
            if due.report:
                if world_size > 1:
                    torch.distributed.all_reduce(running)
                log.report(exact_shards.sum_rows(running), scheduler)
                running.zero_()
            if due.save:
                checkpoint.save()
        if not args.training_only:
            ranks.broadcast_buffers(evaluated)

            def evaluate(part: Any) -> torch.Tensor:
                return evaluation.evaluate(evaluated, part, criterion, log.metrics, checkpoint.must_stop)

            with autocast:
                val_rows = shards.rows(evaluate, val_loader) if shards else evaluate(val_loader)[None]
            if world_size > 1:
                torch.distributed.all_reduce(val_rows)
            val_sums = exact_shards.sum_rows(val_rows)
            checkpoint.save_weights(epoch, val_sums, evaluated)
            log.validation(val_sums)
            if checkpoint.stop_early(args.early_stopping):
                break
    checkpoint.finish()  # waits for the last save and upload
    if args.prof:
        log.info(backends.profile(args, train_loader.backend, log.profiled_seconds))
    elif not args.evaluate:
        backends.log_waiting(train_loader, log)


if __name__ == "__main__":
    main()
