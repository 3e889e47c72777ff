"""Options with the names of other programs: NVIDIA's ConvNets, the article "Diving into DALI", and timm."""

import argparse
import os
import sys
from typing import Any

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from common.checkpoint import weights
from common.compute.networks import TIMM, arch
from common.console.arguments import FLAG, OPERATION, Parser
from datasets.loaders.backends import SPELLINGS

_TIMM = {  # option of timm's train.py -> ours
    "data_dir": "data_url", "initial_checkpoint": "weights", "img_size": "image_size", "opt": "optimizer",
    "sched": "lr_schedule", "warmup_epochs": "warmup", "smoothing": "label_smoothing",
    "reprob": "random_erasing", "model_ema_decay": "ema", "grad_accum_steps": "accumulate",
    "recovery_interval": "save_every", "checkpoint_hist": "keep", "log_interval": "report_every",
    "output": "output_dir", "eval_metric": "best_metric", "crop_pct": "crop_share",
}  # fmt: skip
_WAYS = {  # option of timm's train.py -> what to use here
    "drop": "--model_kwargs '{drop_rate = 0.1}'", "drop_path": "--model_kwargs '{drop_path_rate = 0.1}'",
    "opt_betas": "in a copy of the job, optimizers.build(args, model, device, betas=(0.9, 0.95))",
    "opt_kwargs": "in a copy of the job, optimizers.build(args, model, device, name=value)",
    "aa": "--rand_augment N,M", "model_ema": "--ema 0.9998", "log_wandb": "--tracker wandb",
    "train_interpolation": "--interpolation", "torchcompile": "--compile true",
    "num_classes": "leave it out: the classes are counted", "channels_last": "leave it out: it is always on",
    "pin_mem": "leave it out: it is always on with a GPU", "input_size": "--image_size N",
    "hflip": "leave it out: it is 0.5, or see Augmentation in datasets/README.md",
    "clip_mode": "leave it out: --clip_grad clips the norm",
    "amp_dtype": "leave it out: the GPU determines the type", "lr_base": "--lr, for the whole --batch_size",
    "bce_loss": "--loss bce",
}  # fmt: skip
_NVIDIA = {  # option of NVIDIA's main.py -> ours
    "learning_rate": "lr", "wd": "weight_decay", "end_lr": "min_lr", "use_ema": "ema",
    "early_stopping_patience": "early_stopping", "pretrained_from_file": "weights",
    "pretrained_weights": "weights", "workspace": "output_dir",
}  # fmt: skip
_CONFIGS = "options of its launch.py: give the values of its configs.yml as options"
_NVIDIA_WAYS = {  # option of NVIDIA's main.py or launch.py -> what to use here
    "optimizer_batch_size": "--batch_size, which counts the images of all GPUs, with --accumulate N",
    "nesterov": "in a copy of the job, optimizers.build(args, model, device, nesterov=True)",
    "augmentation": "--rand_augment N,M",
    "last_bn_0_init": "--model_kwargs '{zero_init_residual = true}'",
    "run_epochs": "--max_steps N", "start_epoch": "leave it out: --resume continues at its step",
    "no_checkpoints": "--epoch_weights false --save_every 1000000; --prof only measures",
    "raport_file": "leave it out: the figures are in metrics.jsonl in --output_dir",
    "checkpoint_filename": "leave it out: checkpoints are checkpoints/step_<n>.pt in --output_dir",
    "memory_format": "leave it out: channels_last is always on", "jit": "leave it out, or --compile true",
    "static_loss_scale": "leave it out: float16 has a scaler, bfloat16 needs none",
    "dynamic_loss_scale": "leave it out: float16 has a scaler, bfloat16 needs none",
    "gpu_affinity": "leave it out, or start the job with numactl", "topk": "leave it out: top5 is reported",
    "prefetch": "leave it out: each loader prepares batches ahead",
    "rmsprop_alpha": "--optimizer adamw or sgd", "rmsprop_eps": "--optimizer adamw or sgd",
    "conv_init": "leave it out: weights begin as torchvision's", "trt": "leave it out: only for inference",
    "fused_se": "leave it out: networks are torchvision's or timm's",
    "model_config": "leave it out: networks are torchvision's or timm's", "c": "networks are torchvision's",
    **dict.fromkeys(("precision", "mode", "platform", "cfg_file"), _CONFIGS),
}  # fmt: skip


def add_arguments(parser: Parser) -> None:
    """Add the options that merge() reads, and the hints for those that have another way here."""
    parser.other_names = {**_TIMM, **_NVIDIA}
    parser.hints = {**_WAYS, **_NVIDIA_WAYS, **parser.hints}
    add = parser.add_argument_group("other spellings").add_argument
    flag: dict[str, Any] = FLAG | {"default": None}
    add("data", role=OPERATION, nargs="?", metavar="DIR", help="the same as --data_url DIR")
    network: dict[str, Any] = {"dest": "arch", "type": lambda name: arch(f"{TIMM}{name}")}
    network |= {"default": argparse.SUPPRESS, "metavar": "NAME"}
    add("--model", **network, help="the same as --arch timm:NAME")
    published: dict[str, Any] = FLAG | {"default": argparse.SUPPRESS, "dest": "weights"}
    add("--pretrained", action=_Published, **published, help="the same as --weights DEFAULT")
    add("--fp16", role=OPERATION, **flag, help="the same as --amp")
    add("--use_dali", role=OPERATION, **flag, help="--data_backend dali-gpu, without a GPU dali")
    add("--dali_cpu", role=OPERATION, **flag, help="the same as --data_backend dali")
    help = "the same as --keep N; without N all checkpoints are kept"
    add("--gather_checkpoints", role=OPERATION, type=int, nargs="?", const=-1, metavar="N", help=help)


class _Published(argparse.Action):
    """Takes the published weights for --pretrained, and nothing for `--pretrained false`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        if values:
            setattr(namespace, self.dest, weights.DEFAULT)


def merge(args: argparse.Namespace) -> dict[str, Any]:
    """Return data_url, amp, data_backend and keep as the options of add_arguments() define them. The parser
    calls it on every rank when all options are known. args: also enable_gpu. Raises BadInput if two options
    contradict each other."""
    # each option is None if it was not given: only two that were given can contradict each other
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
        # DALI on the GPU is the default of these options, and its CPU engine takes its place without a GPU
        option, others = ("--dali_cpu", ()) if dali_cpu else ("--use_dali", ("dali-gpu", "dali-kspeed"))
        backend = SPELLINGS.get(args.data_backend, args.data_backend)
        if backend not in ("auto", "dali", *others):
            raise BadInput(f"{option} contradicts --data_backend {args.data_backend}")
        is_cpu = dali_cpu or args.enable_gpu is False or not accelerator.of("cuda").device_count()
        of_device = "dali" if is_cpu else "dali-gpu"
        merged["data_backend"] = of_device if backend == "auto" else backend
    if args.gather_checkpoints:  # below 0: without a number, all
        merged["keep"] = args.gather_checkpoints if args.gather_checkpoints > 0 else sys.maxsize
    return merged
