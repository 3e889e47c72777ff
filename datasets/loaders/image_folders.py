"""Open the stores, the indexes and the loaders of a folder of images, by options."""

import argparse
import contextlib
import functools
import os
from typing import Any

import numpy as np
import torch

from bootfile import records
from bootfile.ground.again import refusal
from bootfile.ground.errors import BadInput
from bootfile.ground.files import read_file
from bootfile.ground.numbers import parse_number
from bootfile.processes import ranks
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler
from common.checkpoint import weights
from common.compute import networks
from common.console.arguments import IDENTITY, OPERATION, boolean, positive_int
from common.distributed import barrier
from common.distributed.barrier import beating
from common.ground import endings
from common.run import starts
from common.run.log import Log
from common.run.output import Output, local_output
from common.run.run import JobParser
from datasets.folders import image_folder, listing, random_folder
from datasets.loaders import backends, preprocessing
from datasets.loaders.backends import SyntheticIndex
from datasets.loaders.image_loader import ImageLoader
from datasets.loaders.ray import pool as ray_pool
from datasets.sampling import augment, effects
from datasets.stores import forms, tiers

BALANCED = "balanced"
WEIGHTS_HELP = (
    "how often an image is drawn (not a weight in the loss). balanced: every class equally often; FILE: "
    "lines 'NAME WEIGHT', one for each class or each image (default: each image once)"
)
_MOST_BYTES = 2**30  # bytes of a file
_SYNTHETIC = {"train": 1_281_167, "val": 50_000}  # images of ImageNet


def add_arguments(parser: JobParser) -> None:
    """Add the options of open_stores(), open_indexes() and open_loaders()."""
    add = parser.add_argument_group("data").add_argument
    add("--data_url", role=OPERATION, help="folder with train/<class>/* and val/<class>/*, or 'shards/*.tar'")
    help = "share of each class that validates a folder without train/ and val/ (default: 10%%)"
    add("--val_share", type=listing.val_share, default=listing.VAL_SHARE, metavar="SHARE", help=help)
    help = "names of the folders of the splits, if others than train/ and val/; none: all folders are classes"
    add("--splits", role=IDENTITY, type=listing.two_names, metavar="TRAIN,VAL", help=help)
    add("--custom_data", role=IDENTITY, type=boolean, default=False, help="true: use generated images")
    names = ", ".join(backends.BACKENDS)
    help = f"auto (default): measured; {names}"
    add("--data_backend", role=OPERATION, default="auto", metavar="NAME", help=help)
    help = "threads or processes that read the data (default: one for each core)"
    add("-j", "--workers", role=OPERATION, type=positive_int, help=help)
    add("--ray_address", role=OPERATION, default="auto", metavar="HOST:PORT", help=ray_pool.HELP)
    help = "store the images once in this folder, and read them from it"
    add("--pack", role=OPERATION, metavar="FOLDER", help=help)
    help = (
        f"decoded (default): pixels; jpeg: small JPEGs of quality {forms.QUALITY}; jpeg_crop: these, "
        "decoded only where the crop is; jpeg_full: so, but in the size of the files; encoded: the files"
    )
    add("--pack_form", choices=forms.FORMS, default="decoded", help=help)
    help = "cache for all nodes: redis://[user@]host[:port] or rediss://..."
    add("--cache", role=OPERATION, metavar="URL", help=help)
    help = "active (default): filled while training, deleted afterwards; offline: read-only"
    add("--cache_mode", role=OPERATION, choices=tiers.MODES, default="active", help=help)
    help = "folder for the index (default: index/ in --output_dir)"
    add("--cache_dir", role=OPERATION, metavar="FOLDER", help=help)
    help = "share of unreadable images to skip, for example 0.1%% (default: 0)"
    add("--max_bad_images", type=listing.fraction, default=0.0, metavar="SHARE", help=help)
    add("--class_weights", metavar="balanced|FILE", help=WEIGHTS_HELP)
    preprocessing.add_arguments(add)
    help = "pixels (default: 224)"
    add("--image_size", role=IDENTITY, type=networks.image_size, metavar="N", default=224, help=help)
    help = "pixels in evaluations (default: --image_size)"
    add("--val_image_size", role=OPERATION, type=networks.image_size, metavar="N", help=help)
    help = "size in the first 70%% of the epochs; then it rises to --image_size (default: the same)"
    add("--first_image_size", role=IDENTITY, type=networks.image_size, metavar="PIXELS", help=help)
    effects.add_arguments(parser.add_argument_group("augmentation").add_argument)


def complete(args: argparse.Namespace) -> dict[str, Any]:
    """Return mean, std, crop share and interpolation of the model. Call it on every rank. Raises BadInput."""
    return ranks.call_on_first(lambda: preprocessing.complete(args))  # the other ranks get its result


def open_stores(args: argparse.Namespace, device: torch.device, log: Log) -> tiers.Stores:
    """Return the stores of --pack and --cache. They are closed when the job ends. Call it on every rank,
    before open_indexes(): it checks all options of add_arguments(), and the scan may take hours. Raises
    BadInput."""
    backend = _backend(args, device)
    # all options are checked before the scan, which may take hours
    for name in ("pack", "cache_dir"):
        if getattr(args, name):
            local_output(getattr(args, name), f"--{name}")
    if backend in backends.CACHED and not (args.pack or args.cache):
        raise BadInput(
            f"--data_backend {backend} needs --cache URL or --pack FOLDER, such as --pack /dev/shm/packs"
        )
    if args.pack and args.cache:
        raise BadInput("--pack and --cache contradict each other: images come from one of them")
    if args.pack_form != "decoded" and not args.pack:
        raise BadInput(f"--pack_form {args.pack_form}: there is no pack; name its folder with --pack")
    if args.class_weights != BALANCED:
        check_paths(class_weights=args.class_weights)
    # now: a cluster that does not answer would else be noticed after the scan
    if backend == "ray":
        pool = ray_pool.connect(args.ray_address, args.workers or backends.cores())
        endings.at_success("loaders", pool.shutdown)
    # a synthetic one reads no images
    places: tuple[Any, Any] = (None, None) if backend == "synthetic" else (args.pack, args.cache)
    stores = tiers.Stores(*places, args.cache_mode, log.info, args.pack_form)
    # not after an error: threads may still read then, and the process ends anyway
    endings.at_success("loaders", stores.close)
    return stores


def open_indexes(args: argparse.Namespace, device: torch.device, log: Log) -> tuple[Any, Any]:
    """Return (training index, evaluation index); one index twice if the job needs only one.

    The first process of each node scans the images, unless an earlier run has left its index in --cache_dir.
    args: those of add_arguments(), output, batch_size, max_steps, evaluate, training_only, weights, resume.
    Raises BadInput.
    """
    cache = args.cache_dir or log.output.index_folder
    folder = random_folder.make(os.path.join(cache, "generated")) if args.custom_data else args.data_url
    if _backend(args, device) == "synthetic" and not folder:
        counts = dict(_SYNTHETIC)
        if args.max_steps:  # a trial: its evaluation takes no longer than its training
            counts["val"] = min(counts["val"], args.max_steps * args.batch_size)
        return SyntheticIndex(counts["train"], "train"), SyntheticIndex(counts["val"], "val")

    # the first rank has the records of the run
    known, is_new = ranks.call_on_first(lambda: _read_run(args, log.output))
    # one process of each node scans, the others wait and open its files
    scan = functools.partial(_scan_splits, args, folder, cache, log, known, is_new)
    indexes = image_folder.load_on_nodes(folder, scan)
    return indexes[0], indexes[-1]


def _read_run(args: argparse.Namespace, output: Output) -> tuple[list[dict], bool]:
    """Return (the starts of the run that is continued, evaluated or fine-tuned, whether this start begins a
    new run). open_indexes() calls it on rank 0. Raises BadInput."""

    def read_starts(path: str | None) -> list[dict]:
        """Return the starts of the run of a file of weights or a checkpoint; [] for published weights."""
        return records.read_starts(weights.run_folder(path)) if path and os.path.exists(path) else []

    continued = []
    if args.resume == "auto":
        continued = starts.read_output(output)
    elif args.resume != "never":
        continued = read_starts(args.resume)
    # `known`: the starts of the run whose weights this start continues from, evaluates or begins with
    known = (read_starts(args.weights) if args.evaluate else []) or continued
    # a run at whose step this one begins has also chosen the classes
    is_new = not known and not (args.from_run and records.read_starts(args.from_run))
    return known or read_starts(args.weights), is_new


def _scan_splits(
    args: argparse.Namespace, folder: str, cache: str, log: Log, known: list[dict], labelled: bool
) -> list[image_folder.ImageFolderIndex]:
    """Return the indexes that a job needs: [train, val], or one of them. The first process of each node calls
    it, and the others wait: it reads each image whose index is not in `cache`. Raises BadInput.

    known: see _read_run(). labelled: as for image_folder.load(): a run that is continued keeps its
    classes."""
    division = {"val_share": args.val_share, "splits": args.splits, "labelled": labelled}
    others = {"cache": cache, "max_bad": args.max_bad_images, "log": log.info}

    def load(split: str, **options: Any) -> image_folder.ImageFolderIndex:
        """Return the index of a split, and log what it holds."""
        index = image_folder.load(folder, split, **others, **division, **options)
        if index.division and known and "division" not in known[-1]:
            raise BadInput(
                f"the run of these weights divided {folder} in the way of version 0.31 and earlier: images "
                "of its training would validate it. Version 0.55.0 (commit 7fefafdc) has that way; else "
                f"move its validation images to {folder}/val"
            )
        log.info(f"{split}: {index.describe()}")
        return index

    if args.evaluate:
        return [load("val", classes=_class_names(args, folder, log.output))]
    # first: the classes of the training set number those of the evaluation
    train = load("train", least=args.batch_size)
    if args.training_only:
        return [train]
    val = load("val", classes=train.classes)
    if train.labels.ndim != val.labels.ndim:
        one = "train" if train.labels.ndim == 1 else "val"
        raise BadInput(
            f"{folder}: images of one split have several labels, those of {one} have one: write `path label,`"
        )
    return [train, val]


def open_loaders(
    args: argparse.Namespace,
    device: torch.device,
    log: Log,
    stores: tiers.Stores,
    indexes: tuple[Any, Any],
    eval_batch: int,
) -> tuple[ImageLoader, ImageLoader]:
    """Return (training loader, evaluation loader), on every rank. They are closed when the job ends.

    args: those of add_arguments(), batch_size, exact_shards (None: one shard per process), seed, epochs,
    max_steps, epoch_steps, training_only (the second loader is then not used). With --data_backend auto a new
    run measures the backends, and a restart takes that of the run. indexes: those of open_indexes().
    eval_batch: images of an evaluation batch of one rank. Raises BadInput.
    """
    train_index, val_index = indexes
    # a pack may be written here, for hours, and on one node longer than on the others
    with beating("prepared"):
        train_store = stores.open(train_index)
        val_store = stores.open(val_index)
    # smaller images of a pack or a cache would be enlarged
    if (args.pack or args.cache) and train_store.form not in forms.WHOLE:
        _check_size("--image_size", args.image_size, train_index, train_store.form)
        option = "--val_image_size" if args.val_image_size else "--image_size"
        _check_size(option, args.val_image_size or args.image_size, val_index, train_store.form)
    barrier.wait_for_all("prepared", "to prepare")
    # all ranks compare: nodes with other files would train on different data without a sign of it
    fingerprints = {index.split: index.fingerprint for index in indexes}
    ranks.assert_equal_across_ranks("data set (fingerprints)", fingerprints)
    train_plan = _plan_training(args, train_index)
    prepared = preprocessing.values(vars(args))
    shard = {"rank": ranks.rank(), "world_size": ranks.world_size()}
    val_sampler = SequentialBatchSampler(len(val_index), eval_batch, **shard, shards=args.exact_shards or 0)
    crop = functools.partial(augment.center_crop, share=prepared.crop_share)
    val_plan = Plan(val_index, val_sampler, crop, args.val_image_size or args.image_size)
    backend = _backend(args, device)
    if backend == "auto":
        backend = _choose_backend(args, device, log, train_store, train_plan)
    delivery = {"workers": args.workers, **prepared._asdict()}
    del delivery["crop_share"]
    train_loader = backends.build(backend, train_store, train_plan, device, **delivery)
    val_loader = backends.build(backend, val_store, val_plan, device, **delivery)
    # when main() has succeeded; threads and workers that still read end here
    for loader in (train_loader, val_loader):
        endings.at_success("loaders", loader.close)
    if args.evaluate:
        log.info(f"data test={len(val_index)} source={val_index.source}")
    else:
        log.print_data(train_index, [] if val_index is train_index else val_index)  # []: nothing is evaluated
    return train_loader, val_loader


def _plan_training(args: argparse.Namespace, index: Any) -> Plan:
    """Return the plan of the training for this rank. Every rank calls it in open_loaders(); with
    --class_weights they wait for rank 0, which reads the file."""
    # in an evaluation no training batch is made, but the sampler needs one sample for each rank
    least = ranks.world_size() if args.evaluate else 0
    size = max(len(index), least)
    batch = least or args.batch_size
    drawn = None
    if args.class_weights and not args.evaluate:  # only rank 0 needs the file
        drawn = ranks.call_on_first(lambda: torch.from_numpy(read_class_weights(args.class_weights, index)))
    steps = {"max_steps": args.max_steps, "epoch_steps": args.epoch_steps}
    # a function of (seed, epoch, step): every rank computes the ids of its part by itself
    sampler = BatchSampler(size, batch, args.seed, args.epochs, **steps, weights=drawn)
    sampler = sampler.for_rank(rank=ranks.rank(), world_size=ranks.world_size())
    if args.exact_shards and not args.evaluate:
        sampler = sampler.split(args.exact_shards)
    image_size = functools.partial(progressive_size, args.epochs, args.first_image_size, args.image_size)
    return Plan(index, sampler, augment.random_resized_crop, image_size)


def _choose_backend(args: argparse.Namespace, device: torch.device, log: Log, store: Any, plan: Plan) -> str:
    """Return the backend of the run's last start, or in a new run the one that rank 0 measures as the best.
    Every rank calls it if --data_backend is auto. store, plan: of the training."""
    # rank 0 has the records of the run
    backend = ranks.call_on_first(lambda: _last_backend(args, device, log.output))
    if backend:
        log.info(f"data_backend auto: {backend}, as in the last start of this run: equal pixels")
        return backend
    interpolation = preprocessing.values(vars(args)).interpolation
    options = {"workers": args.workers, "interpolation": interpolation}
    rates = ranks.call_on_first(lambda: backends.rates(store, plan, device, **options))
    backend = backends.choose(rates)
    log.info(f"data_backend auto: {backend}; measured: {backends.text(rates)}")
    return backend


def _check_size(option: str, side: int, index: image_folder.ImageFolderIndex, form: str) -> None:
    """Raise BadInput if images of a pack or a cache are smaller than their files, and than the side (pixels)
    that an option asks for. form: of the pack or the cache."""
    most = forms.SHORT_SIDE
    if side > most and (np.minimum(index.widths, index.heights) > most).any():
        raise BadInput(
            f"{option} {side}: {form} images of a pack or cache have a short side of at most {most} pixels; "
            "store whole ones (--pack_form encoded or jpeg_full)"
        )


def _backend(args: argparse.Namespace, device: torch.device) -> str:
    """Return the name of --data_backend in BACKENDS, or "auto". Raises BadInput if it cannot run here."""
    return "auto" if args.data_backend == "auto" else backends.resolve(args.data_backend, device)


def _last_backend(args: argparse.Namespace, device: torch.device, output: Output) -> str:
    """Return the backend of the run's last start, or "" without one: backends round pixels differently."""
    is_continued = args.resume == "auto" and not args.evaluate
    last = starts.read_output(output)[-1:] if is_continued else []
    name = last[0].get("data backend", "") if last else ""
    if not name:
        return ""
    with contextlib.suppress(BadInput):
        return backends.resolve(name, device)
    print(f"warning: the run used --data_backend {name}, which cannot run here: pixels differ by rounding")
    return ""


def progressive_size(epochs: int, first: int | None, last: int, epoch: int) -> int:
    """Return the side of the training images in this epoch (from 1), pixels. It is `first` in the first 70 %
    of the epochs, and `last` in the last 15 %. Between them it rises linearly, in multiples of 32. None:
    always `last`. Source: G. Leclerc et al., "FFCV: Accelerating Training by Removing Data Bottlenecks", CVPR
    2023, whose ResNet-50 rises from 160 to 192 pixels."""
    first = first or last
    share = min(max((epoch - 0.7 * epochs) / (0.15 * epochs), 0), 1)
    if share in (0, 1):
        return last if share else first
    return min(max(round((first + (last - first) * share) / 32) * 32, first), last)


def _class_names(args: argparse.Namespace, folder: str, output: Output) -> tuple[str, ...] | None:
    """Return the names of the classes for a job that only evaluates: those of the training set in the folder,
    or of the run of the weights; None if neither has them. One process of each node calls it."""
    cache = args.cache_dir or output.index_folder
    division = {"val_share": args.val_share, "splits": args.splits}
    with contextlib.suppress(BadInput):  # the folder may have no training set
        return image_folder.look(folder, "train", cache, None, lambda line: None, **division).classes
    path = args.weights or args.resume
    return tuple(weights.read_class_names(path)) or None if os.path.exists(path) else None


def check_paths(**paths: str | None) -> None:
    """Raise BadInput on every rank if a file or folder is missing on rank 0. paths: option -> path."""
    for name, path in paths.items():
        if ranks.broadcast_object(path not in (None, "auto", "never") and not os.path.exists(path)):
            raise BadInput(f"--{name} {path}: no such file or folder")


def read_class_weights(text: str, index: Any) -> np.ndarray:
    """Return the weight of each image, float64 [n]. text: balanced, or the path of a file. index: an
    ImageFolderIndex. Raises BadInput."""
    labels = np.asarray(index.labels)
    if labels.ndim == 2:
        raise BadInput(f"--class_weights {text} needs one label for each image, and the list has several")
    if text == BALANCED:
        return 1 / np.bincount(labels)[labels]
    # one name of a class is enough: then all lines are classes, else all are images
    weights = _read_weights(text)
    is_of_classes = not weights.keys().isdisjoint(index.classes)
    names = list(index.classes)
    kind = "class"
    if not is_of_classes:
        for path, *_ in index.bad:  # these are skipped, and may have a weight
            weights.pop(path, None)
        names = [index.name(id) for id in range(len(index))]
        kind = "image"
    missing = [name for name in names if name not in weights]
    unknown = sorted(weights.keys() - set(names))
    if missing or unknown:
        raise BadInput(
            f"--class_weights {text}: {len(missing)} of {len(names)} {kind} names are missing, "
            f"{len(unknown)} are unknown: {[*missing, *unknown][0]}"
        )
    values = np.array([weights[name] for name in names])
    return values[labels] if is_of_classes else values


def _read_weights(path: str) -> dict[str, float]:
    """Return name -> weight of the lines of a file. Raises BadInput with the line."""
    weights: dict[str, float] = {}
    line = ""
    try:
        for line in filter(str.strip, read_file(path, _MOST_BYTES).decode("utf-8-sig").splitlines()):
            first, value = line.rsplit(maxsplit=1)
            name = first.strip()
            if name in weights:
                raise ValueError("this name has a weight already")
            weights[name] = parse_number(value, float)
    except (OSError, ValueError) as error:
        reason = f"{line:.80}: {error}; expected {BALANCED}, or a file of lines NAME WEIGHT"
        raise refusal(f"--class_weights {path}: {reason}", error) from error
    return weights
