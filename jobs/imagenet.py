"""Train a ResNet-50, or another torchvision classifier, on folders of images, on every GPU of any machines.

    python jobs/imagenet.py --custom_data=true --arch resnet18 --image_size 64 --epochs 2    try it anywhere
    python jobs/imagenet.py --data_url IMAGENET --output_dir OUT                 every GPU of this machine
    torchrun --nproc-per-node=8 jobs/imagenet.py --data_url IMAGENET --batch_size 2048 --lr 2.048
    python jobs/imagenet.py --data_url IMAGENET --pack /cache/imagenet    decoded once, read by all
    python jobs/imagenet.py --data_url IMAGENET --prof 100                       images/s, then stop

IMAGENET holds train/<class>/* and val/<class>/*. The recipe, and so the defaults, are those of NVIDIA's
ResNet-50 v1.5 (DeepLearningExamples): SGD with momentum 0.875, weight decay 1/32768 without BatchNorm and
biases, --lr 0.256 for 256 samples, cosine after a warm-up, label smoothing 0.1. Every --data_backend delivers
the same samples and crops, so it may change at any restart.
"""

import contextlib
import itertools
import math
import os
import sys
import time

import torch
import torchvision
from torchvision.transforms import v2

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # before any other `datasets`
from common import arguments, evaluation, exits, metrics, process_group, recovery
from datasets import image_folder, loaders, random_folder
from datasets.loaders import measure
from datasets.loaders.synthetic import SyntheticIndex
from datasets.order import Order, Sequential
from datasets.plan import Plan
from datasets.stores import pack
from datasets.stores.files import FileStore

WARM_UP_BATCHES = 10  # of --prof


def parsed():
    parser = arguments.Parser(__doc__)
    # data
    parser.add_argument("--data_url", help="folder with train/<class>/* and val/<class>/*")
    parser.add_argument("--custom_data", type=arguments.boolean, default=False, help="true: generated images")
    parser.add_argument(
        "--data_backend", default="auto", help=f"{', '.join(loaders.BACKENDS)}; auto measures (default: auto)"
    )
    parser.add_argument("--workers", type=arguments.positive_int, help="of the loader (default: the cores)")
    parser.add_argument("--pack", metavar="FOLDER", help="keep decoded images there, made once, and use them")
    parser.add_argument("--cache_dir", help="folder for the index (default: index/ in --output_dir)")
    parser.add_argument(
        "--max_bad_images",
        type=image_folder.fraction,
        default=0.0,
        help="leave out as many: 0.1%% (default: 0)",
    )
    parser.add_argument(
        "--antialias", type=arguments.boolean, default=True, help="false: rougher and faster resizing"
    )
    parser.add_argument("--image_size", type=arguments.positive_int, default=224, help="default: 224")
    # model
    parser.add_argument("--arch", default="resnet50", help="of torchvision.models (default: resnet50)")
    parser.add_argument("--amp", type=arguments.boolean, help="mixed precision (default: true on a GPU)")
    parser.add_argument("--compile", type=arguments.boolean, default=False, help="torch.compile")
    parser.add_argument("--ema", type=arguments.non_negative_float, help="also average the weights: 0.9999")
    # optimization
    parser.add_argument("--enable_gpu", type=arguments.boolean, help="default: true if there is a GPU")
    parser.add_argument("--epochs", type=arguments.positive_int, default=90, help="default: 90")
    parser.add_argument(
        "--batch_size", type=arguments.positive_int, default=256, help="samples of a step over all processes"
    )
    parser.add_argument(
        "--accumulate", type=arguments.positive_int, default=1, help="parts of a process's batch (default: 1)"
    )
    parser.add_argument("--lr", type=arguments.positive_float, default=0.256, help="peak (default: 0.256)")
    parser.add_argument("--lr_schedule", choices=["cosine", "linear", "step"], default="cosine")
    parser.add_argument("--warmup", type=arguments.non_negative_float, default=8, help="epochs (default: 8)")
    parser.add_argument("--momentum", type=arguments.non_negative_float, default=0.875, help="default: 0.875")
    parser.add_argument(
        "--weight_decay", type=arguments.non_negative_float, default=1 / 32768, help="default: 1/32768"
    )
    parser.add_argument(
        "--bn_weight_decay",
        type=arguments.boolean,
        default=False,
        help="true: BatchNorm and biases decay, too",
    )
    parser.add_argument(
        "--label_smoothing", type=arguments.non_negative_float, default=0.1, help="default: 0.1"
    )
    parser.add_argument(
        "--mixup", type=arguments.non_negative_float, default=0.0, help="alpha (default: 0, none)"
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights, order and crops")
    parser.add_argument("--max_steps", type=arguments.positive_int, help="end after this many steps")
    # what to do
    parser.add_argument("--prof", type=arguments.positive_int, help="time so many batches, then stop")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate what --resume names")
    parser.add_argument("--training_only", action="store_true", help="do not evaluate")
    # output
    parser.add_argument("--output_dir", "--train_url", help="folder for results (default: output_dir/)")
    parser.add_argument(
        "--print_freq", "--report_every", type=arguments.positive_int, default=50, help="steps"
    )
    recovery.add_arguments(parser)
    # distributed
    process_group.add_arguments(parser)
    args = arguments.parse(parser)
    if args.evaluate and args.resume in ("auto", "never"):
        raise exits.BadInput("--evaluate needs --resume PATH: the checkpoint to evaluate")
    return args


def loaded(args, device, rank, world_size, log):
    """(index, loader) for training and for evaluation."""
    backend = args.data_backend if args.data_backend == "auto" else loaders.named(args.data_backend, device)
    cache = args.cache_dir or os.path.join(args.output_dir, "index")
    if args.custom_data:
        args.data_url = random_folder.make(os.path.join(cache, "generated"))
    if backend == "synthetic" and not args.data_url:
        train_index, val_index = SyntheticIndex(1_281_167), SyntheticIndex(50_000)
    else:
        train_index = image_folder.load(args.data_url, "train", cache, args.max_bad_images, None, log.say)
        classes = train_index.classes
        val_index = image_folder.load(args.data_url, "val", cache, args.max_bad_images, classes, log.say)
    args.fingerprint = train_index.fingerprint
    process_group.same_everywhere("data set (fingerprint)", args.fingerprint)

    def stored(index):
        if not args.pack or backend == "synthetic":
            return FileStore(index)
        return pack.build(index, os.path.join(args.pack, f"{index.split}.pack"))

    train_store, val_store = stored(train_index), stored(val_index)
    order = Order(len(train_index), args.batch_size, args.seed, rank, world_size)
    train_plan = Plan(train_index, order, args.image_size, augment=True)
    local_batch = args.batch_size // world_size
    if local_batch % args.accumulate:
        raise exits.BadInput(
            f"--accumulate {args.accumulate} does not divide the {local_batch} samples of a process"
        )
    val_plan = Plan(val_index, Sequential(len(val_index), local_batch, rank, world_size), args.image_size)
    if backend == "auto":
        rates = (
            measure.rates(train_store, train_plan, device, args.workers, antialias=args.antialias)
            if rank == 0
            else {}
        )
        backend = process_group.from_first(max(rates, key=rates.get, default=None))
        log.say(f"data_backend auto: {backend} of {measure.text(rates)}")
    args.data_backend = backend
    train_loader = loaders.build(backend, train_store, train_plan, device, args.workers, args.antialias)
    val_loader = loaders.build(backend, val_store, val_plan, device, args.workers, args.antialias)
    return train_index, train_loader, val_index, val_loader


def optimized(args, model, steps_per_epoch, steps):
    """(optimizer, schedule), the schedule a function of the step."""
    decayed = [each for each in model.parameters() if each.ndim > 1 or args.bn_weight_decay]
    others = [each for each in model.parameters() if each.ndim <= 1 and not args.bn_weight_decay]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum)
    warmup = min(round(args.warmup * steps_per_epoch), steps)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        if args.lr_schedule == "step":
            return 0.1 ** sum(step >= epoch * steps_per_epoch for epoch in (30, 60, 80))
        return 1 - done if args.lr_schedule == "linear" else (1 + math.cos(math.pi * done)) / 2

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@exits.entry
def main():
    args = parsed()
    process_group.device(args)
    device, rank, world_size = process_group.join(args)
    torch.manual_seed(args.seed)
    log = metrics.Log(args.output_dir)
    log.lap("set-up")
    train_index, train_loader, val_index, val_loader = loaded(args, device, rank, world_size, log)
    log.data(train_index, val_index)

    if args.arch not in torchvision.models.list_models(module=torchvision.models):
        raise exits.BadInput(f"--arch {args.arch} is no classifier of torchvision {torchvision.__version__}")
    model = torchvision.models.get_model(args.arch, num_classes=len(train_index.classes))
    model = model.to(device, memory_format=torch.channels_last)
    forward = torch.compile(model) if args.compile else model
    if world_size > 1:
        device_ids = [device.index] if device.type == "cuda" else None
        forward = torch.nn.parallel.DistributedDataParallel(forward, device_ids=device_ids)
        process_group.settle_buckets(forward, torch.zeros(2, 3, args.image_size, args.image_size))

    amp = device.type == "cuda" if args.amp is None else args.amp
    half = torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        half = torch.float16
    mixed = torch.autocast(device.type, dtype=half, enabled=amp)
    scaler = torch.amp.GradScaler(enabled=amp and half == torch.float16)

    steps_per_epoch = len(train_loader)
    steps = min(args.epochs * steps_per_epoch, args.max_steps or sys.maxsize)
    optimizer, scheduler = optimized(args, model, steps_per_epoch, steps)
    loss_function = torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    mixup = None
    if args.mixup:
        mixup = v2.MixUp(alpha=args.mixup, num_classes=len(train_index.classes))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state["receipt"] = train_loader.receipt
    evaluated = model
    if args.ema:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        state["ema"], evaluated = ema, ema.module
    # [loss_sum, correct, count] since the last report
    window = torch.zeros(3, dtype=torch.float64, device=device)

    keeper = recovery.Recovery(args, state)
    step = keeper.resume(steps, steps_per_epoch)
    log.training(train_loader, step, steps)
    timed_from = None

    def validate(epoch):
        process_group.share_buffers(evaluated)
        with mixed:
            totals = evaluation.evaluate(evaluated, val_loader)
        keeper.leave_if_asked(step)
        if world_size > 1:
            torch.distributed.all_reduce(totals)
        if rank == 0 and not args.evaluate:
            keeper.save_weights(epoch, totals, evaluated)
        log.validation(epoch, step, totals)

    if args.evaluate:
        validate(max(1, math.ceil(step / steps_per_epoch)))
        return

    for epoch in range(max(1, math.ceil(step / steps_per_epoch)), math.ceil(steps / steps_per_epoch) + 1):
        train_loader.set_epoch(epoch, step - (epoch - 1) * steps_per_epoch)
        model.train()
        for images, labels in itertools.islice(train_loader, steps - step):
            optimizer.zero_grad()
            targets = labels
            if mixup:
                images, targets = mixup(images, labels)
            loss = torch.zeros((), device=device)
            logits = []
            parts = list(zip(images.chunk(args.accumulate), targets.chunk(args.accumulate), strict=True))
            for number, (inputs, wanted) in enumerate(parts):
                last = number == len(parts) - 1
                with forward.no_sync() if world_size > 1 and not last else contextlib.nullcontext():
                    with mixed:
                        output = forward(inputs)
                        part = loss_function(output, wanted) / len(parts)
                    scaler.scale(part).backward()
                loss += part.detach()
                logits.append(output.detach())
            scaler.unscale_(optimizer)
            scaler.update()
            if keeper.finite(loss):
                window += evaluation.sums(loss, torch.cat(logits), labels)
                optimizer.step()
                if args.ema:
                    ema.update_parameters(model)
            scheduler.step()
            step += 1

            if args.prof and step in (WARM_UP_BATCHES, WARM_UP_BATCHES + args.prof):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if timed_from:
                    rate = args.prof * args.batch_size / (time.perf_counter() - timed_from)
                    log.say(f"prof: {rate:.1f} images/s with {args.data_backend}, {args.prof} batches")
                    return
                timed_from = time.perf_counter()
            if step % args.print_freq and step % steps_per_epoch and not keeper.due(step):
                continue
            delivered = train_loader.receipt.take(device)
            if world_size > 1:
                torch.distributed.all_reduce(window)
                torch.distributed.all_reduce(delivered)
            log.train(epoch, step, window, delivered, scheduler.get_last_lr()[0])
            window.zero_()
            keeper.save(step)
        if not args.training_only:
            validate(epoch)
    seconds = log.training_seconds
    log.finish()
    keeper.finish()
    log.say(measure.advice(train_loader, args.data_backend, seconds, args.workers))


if __name__ == "__main__":
    main()
