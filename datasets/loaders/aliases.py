"""Options with the names of other programs: NVIDIA's ConvNets and the article "Diving into DALI"."""

import argparse
import os
import sys
from typing import Any

import torch

from common.console.arguments import FLAG
from common.ground.exits import BadInput
from datasets.loaders.backends import SPELLINGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("other spellings").add_argument
    flag: dict[str, Any] = FLAG | {"default": None}
    add("data", nargs="?", metavar="DIR", help="the same as --data_url DIR")
    add("--fp16", **flag, help="the same as --amp")
    add("--use_dali", **flag, help="the same as --data_backend dali-gpu, on a CPU dali")
    add("--dali_cpu", **flag, help="the same as --data_backend dali")
    add("--gather_checkpoints", type=int, nargs="?", const=-1, metavar="N", help="the same as --keep N (all)")


def merge(args: argparse.Namespace) -> dict[str, Any]:
    """Return data_url, amp, data_backend and keep as the options of add_arguments() define them. args: also
    enable_gpu. Raises BadInput if two options contradict each other."""
    data, fp16, use_dali, dali_cpu = args.data, args.fp16, args.use_dali, args.dali_cpu
    merged: dict[str, Any] = {"data_url": args.data_url or data}
    merged["amp"] = fp16 if args.amp is None else args.amp
    if data and args.data_url and os.path.abspath(data) != os.path.abspath(args.data_url):
        raise BadInput(f"the folder {data} contradicts --data_url {args.data_url}")
    if None not in (fp16, args.amp) and fp16 != args.amp:
        raise BadInput(f"--fp16 {fp16} contradicts --amp {args.amp}")
    if dali_cpu and use_dali is False:
        raise BadInput("--dali_cpu contradicts --use_dali false")
    if use_dali or dali_cpu:
        on_gpu = not dali_cpu and args.enable_gpu is not False and torch.cuda.device_count() > 0
        backend = SPELLINGS.get(args.data_backend, args.data_backend)
        if backend not in (("auto", "dali") if dali_cpu else ("auto", "dali", "dali-gpu", "dali-kspeed")):
            option = "--dali_cpu" if dali_cpu else "--use_dali"
            raise BadInput(f"{option} contradicts --data_backend {args.data_backend}")
        merged["data_backend"] = backend if backend != "auto" else "dali-gpu" if on_gpu else "dali"
    if args.gather_checkpoints:
        merged["keep"] = args.gather_checkpoints if args.gather_checkpoints > 0 else sys.maxsize
    return merged
