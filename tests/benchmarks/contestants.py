"""Choose the contestants of tests/benchmarks/train.py, and their arguments."""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

import torch

from common.ground.exits import BadInput
from common.ground.files import ROOT
from common.platform.platforms import available_cores
from tests.benchmarks import generated

BASELINE = "seed loop"  # ratios are to this contestant
_FOREVER = "1000000000"  # steps
_ENDLESS = ["--epochs", "10000", "--seed", "0"]
# Saves are not timed.
_JOB = [*_ENDLESS, "--resume", "never", "--save_every", _FOREVER, "--epoch_weights", "false"]
_PATIENT = ["--timeout", "864000"]  # seconds: a stopped process does not count as lost


class Contestant(NamedTuple):
    """A job. command: without the output folder."""

    command: list[str]
    compiled: bool = False


def choose(args: argparse.Namespace, device: torch.device) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return (contestants by name, reasons for those that are omitted), in the order of --jobs.

    Raises BadInput if a name in --jobs is unknown or omitted.
    """
    found = dict(_small(args, device) if args.arch == "resnet18" else _large(args, device))
    left_out = {name: each for name, each in found.items() if isinstance(each, str)}
    present = {name: each for name, each in found.items() if not isinstance(each, str)}
    for name in args.jobs or ():
        if name not in found:
            raise BadInput(f"--jobs: {name!r} is not one of {', '.join(found)} (--arch {args.arch})")
        if name in left_out:
            raise BadInput(f"--jobs: {name}: {left_out[name]}")
    return {name: present[name] for name in args.jobs or present}, {} if args.jobs else left_out


def _small(args: argparse.Namespace, device: torch.device) -> Iterable[tuple[str, Contestant | str]]:
    data = ["--custom_data", "true"]  # 5,000 images: on a GPU an epoch of them is shorter than a turn
    if args.data_url or device.type == "cuda":
        data = ["--data_url", os.path.abspath(args.data_url or generated.cifar_folder(args.cache_dir))]
    shared = [*_shared(args, device), *data, "--dataset", "cifar10"]

    def job(name: str, *extra: str) -> list[str]:
        return [sys.executable, os.path.join(ROOT, "jobs", name), *_JOB, *shared, *extra]

    sample = [sys.executable, "-m", "tests.benchmarks.seed_loop", *_ENDLESS, *shared]
    yield BASELINE, Contestant(sample)
    yield "train.py", Contestant(job("train.py"))
    yield "train_amp.py", Contestant(job("train_amp.py"))
    if os.path.exists(os.path.join(ROOT, "jobs", "train_fast.py")):
        compiled = [] if args.compile is None else ["--compile", str(args.compile).lower()]
        yield "train_fast.py", Contestant(job("train_fast.py", *compiled))
    several = ["--processes_per_node", "2"] if device.type == "cpu" else []
    if several and available_cores() < 2:
        yield "train_ddp.py", "two processes would share the one core"
    elif device.type == "cuda" and torch.cuda.device_count() > 1:
        yield "train_ddp.py", "an NCCL kernel that waits for a stopped process would slow down the others"
    else:
        yield "train_ddp.py", Contestant(job("train_ddp.py", *_PATIENT, *several))


def _large(args: argparse.Namespace, device: torch.device) -> Iterable[tuple[str, Contestant | str]]:
    job = [
        sys.executable,
        os.path.join(ROOT, "jobs", "imagenet.py"),
        *_JOB,
        *_PATIENT,
        *_shared(args, device),
    ]
    job += ["--arch", args.arch, "--image_size", str(args.image_size), "--training_only"]
    job += ["--cache_dir", os.path.abspath(args.cache_dir), "--compile", "false"]
    if device.type == "cuda":  # as train_ddp.py: no kernel of nccl may wait for a stopped process
        job += ["--processes_per_node", "1"]
    synthetic, mixed = [*job, "--data_backend", "synthetic"], ["--amp", "true"]
    yield "float32", Contestant([*synthetic, "--amp", "false"])
    yield "mixed", Contestant([*synthetic, *mixed])
    if device.type == "cuda" if args.compile is None else args.compile:
        yield "mixed compiled", Contestant([*synthetic, *mixed, "--compile", "true"], compiled=True)
    else:
        yield "mixed compiled", "--compile true includes it; compiling takes about a minute"
    folder = args.data_url or generated.image_folder(args.cache_dir)  # several steps an epoch
    data = ["--data_url", os.path.abspath(folder)]
    yield "mixed from JPEG", Contestant([*job, *mixed, *data, "--data_backend", "threads"])


def _shared(args: argparse.Namespace, device: torch.device) -> list[str]:
    return [
        "--batch_size", str(args.batch_size), "--report_every", str(args.report_every),
        "--enable_gpu", str(device.type == "cuda").lower(),
    ]  # fmt: skip
