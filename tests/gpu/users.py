"""The stages of `make gpu` that measure what a user gets, compared with loops of PyTorch alone.

In this order: images from files and from a pack, the step of a loop of one's own, saves, a language model,
memory, and an elastic job with kills. In the other runs: the bits of two and four processes on one GPU (stage
`bits` of `right`), data sets in the GPU's memory and the time to 0.94 on Fashion-MNIST (`resident` and
`accuracy` of `fast`).

Estimated seconds on an H200 with 16 cores, where none of these stages has run: files 78 (photographs 6, bench
loaders 20, four trainings that start and compile at the same time 38, three rounds of turns 14), own loop 27,
saves 32, text 42, then elastic 136 with memory (40) at the same time: 315 of 352.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bootfile.machine.cores import available_cores
from common.ground.files import ROOT
from tests.benchmarks import jobs, loaders, rounds
from tests.gpu import figures, plain
from tests.gpu.lab import Failed, Run, Stage
from tests.gpu.turns import Turn, compare

_ROUNDS = 3
_KILOBYTES = 116  # of a photograph, as in ImageNet
_DIFFERENT, _PHOTOGRAPHS = 512, 10_240  # each is linked 20 times: 40 batches of 256 in an epoch
_LARGE_MEMORY = "H200"  # four trainings with batches of 256 need 100 GB; another GPU gets half of it
_SAVES = 16e9  # bytes on the disk: two checkpoints of the larger network, and the file of torch.save
_TOKENS = 16_000_000
_BFLOAT16 = "with torch.autocast(device.type, dtype=torch.bfloat16):"
# lines of train_text.py -> those of a user who wants bfloat16 and a compiled network
_OWN_FOLDER = "os.path.dirname(os.path.dirname(os.path.abspath(__file__)))"
_PART = "                logits = forward(part)\n                part_loss = criterion(logits, following)"
_HALF_PART = f"""                {_BFLOAT16}
                    logits = forward(part)
                    part_loss = criterion(logits, following)"""
_FORWARD, _COMPILED = "    forward = model  #", "    forward = torch.compile(model, dynamic=False)  #"
_BENCH = re.compile(r"^(threads(?: \+ pack)?) +(\d+) +\d+-\d+ +[\d.]+x +\S+ +([\d.]+)% ", re.MULTILINE)
_CEILING = re.compile(r"computes ([\d.]+) images/s here")


def measure_files(run: Run) -> None:
    """Compare imagenet.py from JPEG files and from a uint8 pack with a loop of torchvision on the same files.

    With a third of the cores for the loader, the host is slower than the GPU: `launch bench loaders` predicts
    this before the run. That run is not compiled, as the network of the prediction.
    """
    cores, third = available_cores(), max(1, available_cores() // 3)
    folder = _make_photographs(run)
    arch, side = plain.image_shape(run.is_small)
    batch = "256" if _LARGE_MEMORY in run.setting.gpu else "128"
    if run.is_small:
        batch = "4"
    stores = [f"--cache_dir={run.folder('index')}", "--data_url", folder]
    pack = ["--pack", run.folder("packs")]
    network = [f"--arch={arch}", f"--image_size={side}", f"--batch_size={batch}"]
    seconds = "0.1" if run.is_small else "1"
    bench = ["-m", "launch", "bench", "loaders", *stores, *pack, *network, f"--workers={third}"]
    text = run.call("bench", *bench, "--rounds", "1", "--seconds", seconds)
    ceiling = float(_CEILING.findall(text)[0])
    run.note(f"bench loaders: {arch} without data, not compiled", ceiling, "images/s")
    for name, rate, waiting in _BENCH.findall(text):
        title = f"bench loaders, {third} workers: {name}"
        run.note(title, float(rate), "images/s")
        run.note(f"{title}, of the network", float(rate) / ceiling, "x")
        run.note(f"{title}, predicted waiting", float(waiting), "%")

    every = "1" if run.is_small else "5"
    job = [
        "jobs/imagenet.py",
        *stores,
        *network,
        *figures.QUIET,
        "--report_every",
        every,
        "--epochs",
        "10000",
    ]
    job += ["--training_only", "--data_backend", "threads"]
    loop = ["-m", "tests.gpu.plain", figures.device(run), "images", folder]
    turns = compare(run, {
        "torchvision": (*loop, "--batch_size", batch, "--report_every", every),
        "files": (*job, "--compile", figures.compiles(run)),
        "pack": (*job, *pack, "--compile", figures.compiles(run)),
        "third": (*job, "--compile", "false", "--workers", str(third)),
    }, 1 if run.is_small else _ROUNDS)  # fmt: skip
    names = {
        "torchvision": f"loop of torchvision, {cores} workers",
        "files": f"imagenet.py, files, {cores} workers",
        "pack": f"imagenet.py, uint8 pack, {cores} workers",
        "third": f"imagenet.py, files, {third} workers, not compiled",
    }
    _note_turns(run, turns, names, "images/s", "torchvision")


def measure_own_loop(run: Run) -> None:
    """Measure what loaders of ours and Exact add to a step of a bare loop, not compiled and compiled."""
    path = run.folder("figures.json")
    size = ["--rounds", "1", "--steps", "20"] if run.is_small else ["--rounds", "3", "--steps", "200"]
    size += [] if run.is_small else ["--compile"]  # a rehearsal compiles nothing
    run.call(
        "own loop", "-m", "tests.benchmarks.own_step", "--device", figures.device(run), *size, "--json", path
    )
    [figure] = json.loads(Path(path).read_text())["figures"]
    times = {name: [1000 / speed for speed in speeds] for name, speeds in figure["rounds"].items()}
    for name, values in times.items():
        run.note(f"{name}, a step", values, "ms")
        base = times["bare, compiled" if name.endswith("compiled") else "bare"]
        if values is not base:
            more = [value - bare for value, bare in zip(values, base, strict=True)]
            run.note(f"{name}, more than bare", more, "ms")


def measure_saves(run: Run) -> None:
    """Measure how long a step waits for a save, and when it is on the disk, compared with torch.save."""
    networks = "tiny" if run.is_small else "resnet50,gpt350"
    size = ["--networks", networks, "--rounds", "1" if run.is_small else "2"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # on the disk, not in memory
        free = shutil.disk_usage(folder).free
        if not run.is_small and free < _SAVES:
            raise Failed(f"{folder} has {free / 1e9:.1f} GB, expected {_SAVES / 1e9:g}: set TMPDIR")
        command = ["-m", "tests.benchmarks.checkpoint", "--device", figures.device(run), *size]
        process = run.start("saves", *command, "--folder", folder)
        for line in _follow(run, process):
            if line.startswith("{"):
                _note_saves(run, json.loads(line))


def _note_saves(run: Run, saves: dict) -> None:
    name = f"{saves['network']}, {saves['MB']:.0f} MB"
    run.note(f"{name}: the first save stalls", saves["first stall"], "s")
    run.note(f"{name}: a save stalls", saves["stall"], "s")
    run.note(f"{name}: torch.save and fsync stall", saves["torch.save"], "s")
    run.note(f"{name}: torch.save / stall", rounds.divide(saves["torch.save"], saves["stall"]), "x")
    run.note(f"{name}: a save is on the disk after", saves["to disk"], "s")


def measure_text(run: Run) -> None:
    """Compare train_text.py of 124 million parameters with a loop of PyTorch alone, both with bfloat16 and
    compiled. In train_text.py these are two changes of its lines."""
    folder = Path(run.folder("tokens"))
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, count in (("train.bin", _TOKENS // (1000 if run.is_small else 1)), ("val.bin", 10_000)):
        (draw.random(count) ** 3 * 50_257).astype(np.uint16).tofile(folder / name)  # some are frequent
    every = "1" if run.is_small else "5"
    shape = [f"--{name}={value}" for name, value in plain.text_shape(run.is_small).items()]
    job = [_changed_job(run, folder / "train_text.py"), "--data_url", str(folder), *shape, *figures.QUIET]
    turns = compare(run, {
        "plain": ("-m", "tests.gpu.plain", figures.device(run), "text", str(folder), "--report_every", every),
        "job": (*job, "--report_every", every, "--epochs", "1000"),
    }, 1 if run.is_small else _ROUNDS)  # fmt: skip
    names = {"plain": "GPT, loop of PyTorch, bf16", "job": "GPT, train_text.py, bf16"}
    _note_turns(run, turns, names, "tokens/s", "plain")


def _changed_job(run: Run, path: Path) -> str:
    text = Path(ROOT, "jobs/train_text.py").read_text(encoding="utf-8")
    changes = {_OWN_FOLDER: repr(str(ROOT)), _PART: _HALF_PART}
    if not run.is_small:  # a rehearsal compiles nothing
        changes[_FORWARD] = _COMPILED
    for old, new in changes.items():
        if text.count(old) != 1:
            raise Failed(f"train_text.py does not have these lines once: {old!r}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return str(path)


def measure_memory(run: Run) -> None:
    """Find the largest batch of ResNet-50 in a loop of PyTorch alone, and compare the memory of imagenet.py
    with this batch. The rest of the memory is for the processes of the stage `elastic`."""
    command = ["-m", "tests.gpu.plain", figures.device(run), "memory"]
    found = figures.last_json(run.call("largest", *command))
    share = f"{plain.MEMORY:.0%} of the memory"
    run.note(f"largest batch of a loop of torchvision in {share}", found["images"], "images")
    run.note("its memory", found["memory_gb"], "GB")
    arch, side = plain.image_shape(run.is_small)
    job = ["jobs/imagenet.py", "--data_backend=synthetic", f"--arch={arch}", f"--image_size={side}"]
    job += [*figures.QUIET, "--batch_size", str(found["images"]), "--training_only"]
    output = run.folder("job")
    run.call("job", *job, "--compile=false", "--max_steps=4", "--report_every=2", "--output_dir", output)
    memory = [line["memory_mb"] for line in jobs.read_metrics(output) if "loss" in line][-1] / 1000
    run.note("imagenet.py with this batch, memory", memory, "GB")
    run.note("imagenet.py with this batch, of the loop", memory / found["memory_gb"], "x")


def kill_elastic(run: Run) -> None:
    """Kill a process of train_exact.py --elastic every 20 s for 2 minutes, and compare the bits."""
    size = ["--gpu", "--processes=4", "--seconds=120", "--every=20", "--pause=0.1"]
    if run.is_small:
        size = ["--processes=2", "--kills=1", "--every_steps=2", "--width=8"]
    process = run.start("elastic", "-m", "tests.benchmarks.elastic", "--steps=0", "--at_once", *size)
    units = {"lost processes": "", "generations": "", "steps": "", "seconds": "s", "longest stall": "s"}
    bits = "not compared"
    for line in _follow(run, process):
        name, value = line[:22].strip(), line[22:].strip()
        if name in units:
            run.note(name, float(value), units[name])
        elif name == "bits":
            bits = value
    run.check("bits of the killed run and of a whole one", bits.startswith("equal"), bits)


def _follow(run: Run, process: subprocess.Popen) -> Iterator[str]:
    """Yield each line of a process when it is written, until its end. Raises Failed as finish() does."""
    count = 0
    has_ended = False
    while not has_ended:
        has_ended = process.poll() is not None
        lines = run.read(process).splitlines(keepends=True)
        for line in lines[count:]:
            if line.endswith("\n"):
                count += 1
                yield line.rstrip()
        if not has_ended:
            run.pause()
    run.finish(process)


def _make_photographs(run: Run) -> str:
    """Return a folder of JPEG files that are cut from photographs, in train/<class>/."""
    different, count = (32, 64) if run.is_small else (_DIFFERENT, _PHOTOGRAPHS)
    kilobytes = min(loaders.SIZES) if run.is_small else _KILOBYTES
    source, folder = run.folder("photographs"), run.folder("images")
    text = loaders.write_images(source, loaders.SIZES[kilobytes], kilobytes, different)
    loaders.link_images(folder, source, count)
    run.note("photographs", f"{count} links to {text}", "")
    return folder


def _note_turns(run: Run, turns: dict[str, list[Turn]], names: dict[str, str], unit: str, base: str) -> None:
    """Note rate, waiting and memory of trainings, and the ratio to one of them in the same round."""
    for key, own in turns.items():
        run.note(names[key], [turn.rate for turn in own], unit)
        if base in turns and key != base:
            ratios = rounds.divide([turn.rate for turn in own], [turn.rate for turn in turns[base]])
            run.note(f"{names[key]}, of the loop", ratios, "x")
        run.note(f"{names[key]}, waits for data", [100 * turn.waiting for turn in own], "%")
        run.note(f"{names[key]}, memory", own[-1].memory_gb, "GB")


STAGES = [
    Stage("files", 96, measure_files),
    Stage("own loop", 30, measure_own_loop),
    Stage("saves", 36, measure_saves),
    Stage("text", 46, measure_text),
    Stage("memory", 100, measure_memory, is_beside=True),
    Stage("elastic", 144, kill_elastic, is_check=True, is_beside=True),
]
