"""Train a ResNet-50, or another torchvision classifier, on folders of images, on every GPU of any machines.

    python jobs/imagenet.py --custom_data=true --arch resnet18 --image_size 64 --epochs 2    try it anywhere
    python jobs/imagenet.py --data_url IMAGENET --output_dir OUT                 every GPU of this machine
    torchrun --nproc-per-node=8 jobs/imagenet.py --data_url IMAGENET --batch_size 2048 --lr 2.048
    python jobs/imagenet.py --data_url IMAGENET --pack /cache/imagenet    decoded once, read by all
    python jobs/imagenet.py --data_url IMAGENET --cache redis://user@host    read once, for all nodes
    python jobs/imagenet.py --data_url IMAGENET --prof 100                       images/s, then stop
    python jobs/imagenet.py --fp16 --batch-size 512 --workers 10 --prof --use-dali IMAGENET    as published

IMAGENET holds train/<class>/* and val/<class>/*, or <class>/* alone, which --val_share splits. The recipe,
and so the defaults, are those of NVIDIA's ResNet-50 v1.5 (DeepLearningExamples), whose options may be spelled
as there: SGD with momentum 0.875, weight decay 1/32768 without BatchNorm and biases, --lr 0.256 for 256
samples, cosine after a warm-up, label smoothing 0.1. Every --data_backend delivers the same samples and
crops, so it may change at any restart.
"""

import contextlib
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # before any other `datasets`
from common.entry import entry  # Ctrl-C is one line from here on, also while torch is imported

# isort: split
import torch
from torch.nn.parallel import DistributedDataParallel
from torchvision.transforms import v2

from common import arguments, evaluation, exits, metrics, models, schedule
from common.arguments import FLAG, boolean, positive_int
from common.checkpoint import checkpointer
from common.distributed import process_group
from datasets.folders import image_folder, listing, random_folder
from datasets.loaders import backends, measure, published
from datasets.loaders.engines.synthetic import SyntheticIndex
from datasets.loaders.ray import cluster as ray_cluster
from datasets.sampling import augment
from datasets.sampling.plan import Plan
from datasets.sampling.sampler import BatchSampler, SequentialBatchSampler
from datasets.stores import tiers

WARM_UP_BATCHES = 10  # of --prof


def parsed():
    parser = arguments.Parser(__doc__)
    add, number = parser.add_argument, arguments.non_negative_float
    # data
    add("--data_url", help="folder with train/<class>/* and val/<class>/*")
    share = {"type": image_folder.val_share, "default": listing.VAL_SHARE, "metavar": "SHARE"}
    add("--val_share", **share, help="for validation, of a folder without train/ and val/ (default: 10%%)")
    add("--stage", type=boolean, default=True, help="false: read an s3:// --data_url as it is needed")
    add("--custom_data", type=boolean, default=False, help="true: generated images instead")
    add("--data_backend", default="auto", help=f"auto (default): measured; {', '.join(backends.BACKENDS)}")
    add("-j", "--workers", type=positive_int, help="threads or processes of the loader (default: the cores)")
    add("--ray_address", default="auto", metavar="HOST:PORT", help=ray_cluster.HELP)
    add("--pack", metavar="FOLDER", help="keep decoded images there, made once, and read them")
    add("--cache", metavar="URL", help="shared by all nodes: redis://[user@]host[:port][,host...], rediss://")
    add("--cache_mode", choices=tiers.MODES, default="active", help="active: filled, and gone at the end")
    add("--cache_dir", metavar="FOLDER", help="for the index (default: index/ in --output_dir)")
    add("--max_bad_images", type=image_folder.fraction, default=0.0, help="share to leave out: 0.1%% (0)")
    add("--antialias", type=boolean, default=True, help="false: rougher and faster resizing")
    add("--image_size", type=positive_int, default=224, help="default: 224")
    # model
    add("-a", "--arch", type=models.arch, default="resnet50", help="of torchvision.models (resnet50)")
    add("--amp", **FLAG | {"default": None}, help="mixed precision (default: true on a GPU)")
    add("--compile", type=boolean, default=False, help="true: torch.compile")
    add("--ema", type=number, help="also average the weights, with this decay: 0.9999")
    # optimization
    add("--enable_gpu", type=boolean, help="default: true if there is a GPU")
    add("--epochs", type=positive_int, default=90, help="default: 90")
    add("-b", "--batch_size", type=positive_int, default=256, help=arguments.BATCH_SIZE_HELP)
    add("--accumulate", type=positive_int, default=1, help="parts of a process's batch (default: 1)")
    add("--lr", type=arguments.positive_float, default=0.256, help="peak (default: 0.256)")
    add("--lr_schedule", choices=schedule.KINDS, default="cosine", help=schedule.HELP)
    add("--warmup", type=number, default=8.0, help="epochs in which the rate rises (default: 8)")
    add("--momentum", type=number, default=0.875, help="default: 0.875")
    add("--weight_decay", type=number, default=1 / 32768, help="default: 1/32768")
    add("--bn_weight_decay", **FLAG, help="BatchNorm and biases decay, too")
    add("--label_smoothing", type=number, default=0.1, help="default: 0.1")
    add("--mixup", type=number, default=0.0, help="alpha, drawn by each process (default: 0, none)")
    add("--seed", type=arguments.seed, default=0, help="of weights, order and crops (default: 0)")
    add("--max_steps", type=positive_int, help="end after this many steps (default: no limit)")
    # what to do
    help = "print images/s of N batches (default: 100) after 10, and stop"
    add("--prof", type=positive_int, nargs="?", const=100, metavar="N", help=help)
    add("--training_only", action="store_true", help="do not evaluate")
    # output
    add("--output_dir", "--train_url", help="folder for results (default: a new one in output_dir/)")
    add("-p", "--print_freq", "--report_every", type=positive_int, default=50, help="steps (default: 50)")
    checkpointer.add_arguments(parser)
    published.add_arguments(parser)
    process_group.add_arguments(parser)
    add("--gradient_compression", choices=["none", "bf16"], default="none", help="default: none")
    args = arguments.parse(parser)
    published.merge(args)
    if args.evaluate and args.training_only:
        raise exits.BadInput("--evaluate and --training_only exclude each other")
    for name in ("ema", "momentum", "label_smoothing"):
        if (getattr(args, name) or 0) > 1:
            raise exits.BadInput(f"--{name} {getattr(args, name)} is not in 0..1")
    if args.prof:  # leaves nothing, and does not go on from anything
        args.resume, args.max_steps, args.training_only = "never", WARM_UP_BATCHES + args.prof, True
    return args


def loaded(args, device, rank, world_size, log):
    """(index, loader) for training, and (index, loader) for evaluation, in one tuple."""
    # What the arguments alone decide comes first: the scan of the images may take hours, and leaves an index.
    backend = (
        args.data_backend if args.data_backend == "auto" else backends.resolve(args.data_backend, device)
    )
    place = {"rank": rank, "world_size": world_size}
    local_batch = BatchSampler(args.batch_size, args.batch_size, args.seed, **place).largest
    if local_batch % args.accumulate:
        raise exits.BadInput(
            f"--accumulate {args.accumulate} does not divide the {local_batch} samples of a process"
        )
    models.check(args.arch, args.image_size, None if args.evaluate else local_batch // args.accumulate)
    for name in ("pack", "cache_dir"):
        arguments.check_folder(f"--{name}", getattr(args, name))
    for name, path in (("resume", args.resume), ("weights", args.weights)):
        if process_group.from_first(path not in (None, "auto", "never") and not os.path.exists(path)):
            raise exits.BadInput(f"--{name} {path}: there is no such file or folder")
    if backend == "ray":
        ray_cluster.join(args.ray_address, process_group.from_first, rank, world_size, log.say)
        exits.on_success(ray_cluster.leave)
    if backend == "synthetic":
        args.pack = args.cache = None
    opened = tiers.Stores(args.pack, args.cache, args.cache_mode, backend in backends.CACHED, log.say)
    exits.on_success(opened.close)
    cache = args.cache_dir or os.path.join(args.output_dir, "index")
    if args.custom_data:
        args.data_url = random_folder.make(os.path.join(cache, "generated"))

    def read(split, classes):
        bad = args.max_bad_images
        return image_folder.load(
            args.data_url, split, cache, bad, classes, log.say, args.stage, args.val_share
        )

    if backend == "synthetic" and not args.data_url:
        train_index, val_index = SyntheticIndex(1_281_167, "train"), SyntheticIndex(50_000, "val")
    else:
        train_index = read("train", None)
        classes = train_index.classes
        val_index = train_index
        if not args.training_only:
            val_index = read("val", classes)
    limits = args.epochs, args.max_steps
    order = BatchSampler(len(train_index), args.batch_size, args.seed, *limits, **place)
    train_store, val_store = opened.open(train_index), opened.open(val_index)
    process_group.meet_again()
    prints = {index.split: index.fingerprint for index in (train_index, val_index)}
    process_group.same_everywhere("data set (fingerprints)", prints)
    train_plan = Plan(train_index, order, augment.random_resized_crop, args.image_size)
    val_order = SequentialBatchSampler(len(val_index), local_batch // args.accumulate, **place)
    val_plan = Plan(val_index, val_order, augment.center_crop, args.image_size)
    if backend == "auto":
        rates = {}
        if rank == 0:
            rates = measure.rates(train_store, train_plan, device, args.workers, antialias=args.antialias)
        backend = process_group.from_first(max(rates, key=rates.get, default=None))
        log.say(f"data_backend auto: {backend} of {measure.text(rates)}")
    args.data_backend = backend
    train_loader = backends.build(backend, train_store, train_plan, device, args.workers, args.antialias)
    val_loader = backends.build(backend, val_store, val_plan, device, args.workers, args.antialias)
    for loader in (train_loader, val_loader):
        exits.on_success(loader.close)
    return train_index, train_loader, val_index, val_loader


@entry
def main():
    args = parsed()
    process_group.device(args)
    device, rank, world_size = process_group.join(args)
    torch.manual_seed(args.seed)
    log = metrics.Log(args.output_dir)
    log.lap("set-up")
    train_index, train_loader, val_index, val_loader = loaded(args, device, rank, world_size, log)
    log.data(train_index, [] if val_index is train_index else val_index)

    torch.manual_seed(args.seed)
    model = models.classifier(args.arch, len(train_index.classes), args.image_size)
    model = model.to(device, memory_format=torch.channels_last)
    forward = model
    if world_size > 1:
        device_ids = [device.index] if device.type == "cuda" else None
        # No static_graph: no_sync(), which --accumulate needs, breaks with it (pytorch/pytorch#143580).
        forward = DistributedDataParallel(forward, device_ids=device_ids, gradient_as_bucket_view=True)
        process_group.compress_gradients(forward, args.gradient_compression)
        process_group.settle_buckets(forward, torch.zeros(2, 3, args.image_size, args.image_size))

    forward = torch.compile(forward) if args.compile else forward

    amp = device.type == "cuda" if args.amp is None else args.amp
    half = torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        half = torch.float16
    mixed = torch.autocast(device.type, dtype=half, enabled=amp)
    scalers = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp  # torch < 2.3
    scaler = scalers.GradScaler(enabled=amp and half == torch.float16)

    steps_per_epoch = len(train_loader)
    steps = train_loader.total_steps
    decayed = [each for each in model.parameters() if each.ndim > 1 or args.bn_weight_decay]
    others = [each for each in model.parameters() if each.ndim <= 1 and not args.bn_weight_decay]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum)
    factor = schedule.factor(args.lr_schedule, args.warmup, args.epochs, steps_per_epoch, steps)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    loss_function = torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    mixup = v2.MixUp(alpha=args.mixup, num_classes=len(train_index.classes)) if args.mixup else None
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    state["receipt"] = train_loader.receipt
    evaluated = model
    if args.ema:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        state["ema"], evaluated = ema, ema.module
    # [loss_sum, correct, count] since the last report
    window = torch.zeros(3, dtype=torch.float64, device=device)

    keeper = checkpointer.Recovery(args, state)
    step = keeper.resume(steps, steps_per_epoch)
    log.training(train_loader, step, steps)
    times = []  # of --prof

    def validated():
        process_group.share_buffers(evaluated)
        with mixed:
            totals = evaluation.evaluate(evaluated, val_loader, loss_function)
        keeper.leave_if_asked(step)
        if world_size > 1:
            torch.distributed.all_reduce(totals)
        return totals

    for epoch in train_loader.epochs_from(step):
        model.train()
        for images, labels in train_loader:
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

            if args.prof:
                if device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter())
                continue
            if step % args.print_freq and step % steps_per_epoch and not keeper.due(step):
                continue
            train_loader.commit(step, args.output_dir)
            if world_size > 1:
                torch.distributed.all_reduce(window)
            log.train(epoch, step, window, scheduler.get_last_lr()[0])
            window.zero_()
            keeper.save(step)
        if not args.training_only:
            totals = validated()
            if rank == 0:
                keeper.save_weights(epoch, totals, evaluated)
            log.validation(epoch, step, totals)
    if args.prof:
        if len(times) <= WARM_UP_BATCHES:
            raise exits.BadInput(f"--prof: {len(times)} batches in --epochs {args.epochs} are too few")
        count, seconds = len(times) - WARM_UP_BATCHES, times[-1] - times[WARM_UP_BATCHES - 1]
        log.say(measure.profile(count * args.batch_size, seconds, count, args.data_backend, args.arch))
        arguments.remind(log.say)
        return
    seconds, waited = log.training_seconds, torch.tensor(train_loader.waited, device=device)
    if world_size > 1:
        torch.distributed.all_reduce(waited, torch.distributed.ReduceOp.MAX)
    log.finish()
    keeper.finish()
    if rank == 0 and not args.evaluate:
        backend, waited = args.data_backend, waited.item()
        log.say(measure.advice(train_loader, backend, waited, seconds, args.workers, args.antialias))


if __name__ == "__main__":
    main()
