"""Our jobs accept the command lines of the published works, with the same meaning."""

import importlib
import re
import shlex
import sys

import pytest

from bootfile.exact.due import Interval
from bootfile.ground.errors import BadInput
from common.distributed import devices
from tests.conftest import ROOT

# NVIDIA's ConvNets in KSpeed's documentation: a backend by name, and the folder as a positional argument
NVIDIA = (
    "imagenet --arch resnet50 --data-backend {} -b 256 -j5 -p 100 --lr 2.048 --lr-schedule cosine --warmup 8 "
    "--mom 0.875 --label-smoothing 0.1 --mixup 0.0 --epochs 90 --amp --training-only --gather-checkpoints {}"
)
# the line of the article "Diving into DALI"
DALI = "imagenet --fp16 --batch-size 512 --workers 10 --arch {} --prof --use-dali {}"


class _Parsed(Exception):
    pass


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """Return a function that passes a command line to a job and returns the parsed options."""

    def show(args, topology):
        raise _Parsed(args)

    monkeypatch.setattr(devices, "select", show)
    monkeypatch.setattr(devices, "count_gpus", lambda args: 0)  # also with --enable_gpu true

    def of(line):
        job, *words = shlex.split(line)
        monkeypatch.setattr(sys, "argv", [f"jobs/{job}.py", *words, f"--output_dir={tmp_path}"])
        with pytest.raises(_Parsed) as found:
            importlib.import_module(f"jobs.{job}").main.__wrapped__()
        return found.value.args[0]

    return of


def _nvidia(backend, folder="/imagenet"):
    return NVIDIA.format(backend, folder).replace(" --mom ", " --momentum ")


@pytest.mark.parametrize(("line", "expected"), [
    *[
        (
            _nvidia(backend),
            {
                "data_url": "/imagenet", "data_backend": backend, "batch_size": 256, "workers": 5,
                "report_every": Interval(100, "step"), "lr": 2.048, "lr_schedule": "cosine", "mixup": 0.0,
                "amp": True, "training_only": True, "keep": sys.maxsize, "epochs": 90,
            },
        )
        for backend in ("pytorch", "syntetic", "kspeed", "dali-kspeed", "dali")
    ],
    *[
        (
            DALI.format(arch, "/imagenet"),
            {
                "amp": True, "batch_size": 512, "workers": 10, "arch": arch, "prof": 100,
                "data_backend": "dali", "data_url": "/imagenet",
            },
        )
        for arch in ("shufflenet_v2_x0_5", "resnet18")
    ],
    ("imagenet /imagenet --prof --use-dali --dali-cpu", {"data_backend": "dali", "prof": 100}),
    ("imagenet --dali_cpu --prof=20 /imagenet", {"data_backend": "dali", "prof": 20}),
    ("imagenet --use_dali=true --data_backend dali-gpu --data_url /i", {"data_backend": "dali-gpu"}),
    ("imagenet --use_dali=false --fp16=false /i", {"data_backend": "auto", "amp": False}),
    ("imagenet --gather-checkpoints -1 /i", {"keep": sys.maxsize}),
    ("imagenet --gather-checkpoints 5 /i", {"keep": 5, "data_url": "/i"}),
    ("imagenet --prof 100 --data_url /i /i/", {"prof": 100, "data_url": "/i"}),
    (
        "imagenet /i --model resnet10t --pretrained --opt adamw --sched cosine --warmup-epochs 5 "
        "--smoothing 0 --reprob 0.2 --clip-grad 1 --model-ema-decay 0.9 --img-size 64 --crop-pct 0.9 "
        "--checkpoint-hist 2 --eval-metric top1",
        {
            "arch": "timm:resnet10t", "weights": "DEFAULT", "optimizer": "adamw", "warmup": 5.0,
            "label_smoothing": 0.0, "random_erasing": 0.2, "clip_grad": 1.0, "ema": 0.9, "keep": 2,
            "image_size": 64, "best_metric": "acc", "crop_share": 0.9, "data_url": "/i",
        },
    ),
    ("train_dp", {}),
    ("train --weights w.pth,partial", {"weights": "w.pth", "partial_weights": True}),
    ("train --weights w.pth --batch-size 64", {"weights": "w.pth", "partial_weights": False}),
    ("train_ddp --processes_per_node 3 --batch-size 8/gpu", {"batch_size": 24, "batch_size_per_gpu": 8}),
    ("train_ddp --local_rank=0", {"local_rank": 0}),  # as torch.distributed.launch starts it
    ("train_ddp --local-rank=0", {"local_rank": 0}),
    ("train_amp", {}),
    ("loader_dali --data_source /path/to/dataset", {"data_url": "/path/to/dataset"}),
    (
        "train_ddp --init_method tcp://127.0.0.1:6666 --rank 0 --world_size 2 --enable_gpu true "
        "--lr 0.01 --epochs 100 --custom_data false --data_url /in",
        {
            "init_method": "tcp://127.0.0.1:6666", "rank": 0, "world_size": 2, "enable_gpu": True,
            "lr": 0.01, "epochs": 100, "custom_data": False, "data_url": "/in",
        },
    ),
])  # fmt: skip
def test_published_command_lines(line, expected, parse):
    parsed = vars(parse(line))
    assert {name: parsed[name] for name in expected} == expected


@pytest.mark.parametrize(("line", "said"), [
    ("imagenet --use-dali --data_backend threads /i", "--use_dali contradicts --data_backend threads"),
    ("imagenet --dali-cpu --data-backend dali-gpu /i", "--dali_cpu contradicts --data_backend dali-gpu"),
    ("imagenet --use-dali=false --dali-cpu /i", "--dali_cpu contradicts --use_dali false"),
    ("imagenet --fp16 --amp=false /i", "--fp16 True contradicts --amp False"),
    ("imagenet --data_url /i /j", "the folder /j contradicts --data_url /i"),
    ("imagenet --drop-path 0.1 /i", r"--drop-path \(--model_kwargs '{drop_path_rate"),
    ("imagenet --opt-betas 0.9 /i", r"--opt-betas \(.*copy .*optimizers.build\("),
    ("imagenet --num-classes 5 /i", r"--num-classes \(leave it out: .*counted"),
    ("imagenet --channels-last /i", r"--channels-last \(leave it out: .*always on"),
    ("imagenet --input-size 3 64 64 /i", r"--input-size \(--image_size N"),
    ("imagenet --aa rand-m9-n2 /i", r"--aa \(--rand_augment N,M"),
    ("imagenet --rand_augment=2,31 /i", "--rand_augment: '2,31' is not N,M"),
    ("imagenet --bce-loss /i", r"--bce-loss \(--loss bce"),
    ("imagenet --grad-checkpointing --compile=true /i", "--grad_checkpointing and --compile true"),
    ("imagenet --amp-dtype bfloat16 /i", r"--amp-dtype \(leave it out"),
    ("imagenet --clip-mode norm /i", r"--clip-mode \(leave it out: --clip_grad"),
    ("imagenet --hflip 0.5 /i", r"--hflip \(leave it out"),
    ("imagenet --lr-base 0.1 /i", r"--lr-base \(--lr"),
    ("imagenet --mean 0.5 0.5 0.5", "--mean: '0.5' is not three .*0..1, .*0.5,0.5,0.5"),
    ("imagenet --interpolation random /i", "--interpolation: .*random.*bilinear.*bicubic"),
    ("imagenet --mom 0.9 /i", r"--mom \(did you mean --momentum\?\)"),
    ("train --batch_size=32/node", "'32/node' is not .*samples .128., .*GPU .32/gpu."),
    ("train --batch_size=0/gpu", "'0' is not .*whole number .*at least 1"),
    ("train --weights=,partial", "--weights ,partial: expected FILE,partial"),
    ("train --batch_size_per_gpu=64", r"--batch_size_per_gpu \(removed: use --batch_size N/gpu\)"),
    ("train --partial_weights=true", r"--partial_weights \(removed: use --weights FILE,partial\)"),
    ("train_fsdp --checkpoint_activations=true", r"\(removed: use --grad_checkpointing\)"),
    ("train --dataset=cifar100", "cifar100"),
    ("train --custom_data=maybe", "'maybe' is neither true nor false"),
    ("train_ddp --processes_per_node=0", "'0' is not a whole number"),
    ("train_ddp --rank_level=process", r"--rank_level \(removed: --rank counts nodes"),
    ("imagenet --bn-weight-decay /i", r"--bn-weight-decay \(removed: .*biases .*not decay"),
    ("imagenet --sample_weights=f /i", r"--sample_weights \(removed: use --class_weights FILE"),
    ("imagenet --antialias=true /i", r"--antialias \(removed: .*always resized"),
    ("imagenet --optimizer-kwargs={} /i", r"--optimizer-kwargs \(removed: in a copy, optimizers.build\("),
    ("imagenet --gradient_compression=bf16 /i", r"--gradient_compression \(removed: .*bf16_compress_hook"),
    ("train --upload_timeout=60", r"--upload_timeout \(removed: the last upload .* 300 s"),
])  # fmt: skip
def test_contradictions_and_wrong_values(line, said, parse):
    with pytest.raises(BadInput, match=said):
        parse(line)


# The options of NVIDIA's main.py and launch.py, each as a user may give it: those that imagenet.py takes, and
# those that it refuses with a line that says what to use.
TAKEN = """--data-backend pytorch|-a resnet50|--arch resnet50|-j 5|--workers 5|--epochs 90
--image-size 64|--interpolation bilinear|--lr 0.1|--momentum 0.9|--weight-decay 1e-4
--label-smoothing 0.1|--mixup 0.2|--amp|--seed 1|--evaluate --weights w.pth
--training-only|-p 10|--print-freq 10|-b 256|--batch-size 256|--lr-schedule linear
--warmup 5|--optimizer sgd|--resume auto|--prof 10|--gather-checkpoints
--learning-rate 0.1|--wd 1e-4|--end-lr 0.001|--use-ema 0.999|--early-stopping-patience 5
--pretrained|--pretrained-from-file w.pth|--pretrained-weights w.pth|--workspace OUT"""
REFUSED = """--optimizer-batch-size 256|--nesterov|--augmentation autoaugment|--last_bn_0_init True
--run-epochs 5|--start-epoch 3|--no-checkpoints|--raport-file r.json
--checkpoint-filename c.tar|--memory-format nhwc|--jit no|--static-loss-scale 128
--dynamic-loss-scale|--gpu-affinity none|--topk 5|--prefetch 2|--num_classes 1000
--conv_init fan_in|--trt False|--fused_se False|--model-config fanin|-c fanin
--bn-weight-decay|--rmsprop-alpha 0.9|--rmsprop-eps 0.001|--precision AMP
--mode convergence|--platform DGXA100|--cfg_file configs.yml"""
TABLE = (ROOT / "guides" / "coming_from.md").read_text(encoding="utf-8").partition("### Options of NVIDIA")[2]


@pytest.mark.parametrize("words", re.split(r"[|\n]", TAKEN))
def test_an_option_of_nvidia_is_taken(words, parse):
    parse(f"imagenet {words} /i")


@pytest.mark.parametrize("words", re.split(r"[|\n]", REFUSED))
def test_an_option_of_nvidia_is_refused_with_what_to_use(words, parse):
    option = words.split()[0]
    with pytest.raises(BadInput) as refused:
        parse(f"imagenet {words} /i")
    assert re.match(rf"unknown option: {option} \((?!did you mean).+\)", str(refused.value))


def test_the_table_has_options_that_are_taken():
    rows = [line.split(" | ")[0] for line in TABLE.splitlines() if line.startswith("| `")]
    named = {option for row in rows for option in re.findall(r"`(--?[\w-]+)", row)}
    assert len(rows) > 5 and named <= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", TAKEN))


def test_options_of_nvidia_have_their_meaning(parse):
    words = "--learning-rate 0.5 --wd 1e-3 --end-lr 0.01 --use-ema 0.9 --early-stopping-patience 4"
    parsed = parse(f"imagenet {words} --pretrained-from-file w.pth /i")
    assert (parsed.lr, parsed.weight_decay, parsed.min_lr, parsed.ema) == (0.5, 1e-3, 0.01, 0.9)
    assert (parsed.early_stopping, parsed.weights, parsed.data_url) == (4, "w.pth", "/i")


@pytest.mark.parametrize("words", ["--foo bar", "--foo='a b' --x -1"])
def test_the_value_of_an_unknown_option_is_not_the_folder(words, parse):
    assert parse(f"imagenet --num_gpus=8 {words}").data_url is None
