"""The stages of `make gpu` that measure: waits, images/s, seconds to an accuracy, several GPUs."""

import json
import math
import os
import re
import statistics
from pathlib import Path

from tests.benchmarks import generated, jobs
from tests.gpu.checks import read_receipt
from tests.gpu.lab import Failed, Run, Stage

_FOREVER = "1000000000"  # steps
_QUIET = ("--resume", "never", "--save_every", _FOREVER, "--epoch_weights", "false")
_COPIES = 24  # of 640 JPEG files: 60 batches of 256
_TARGET = 0.94  # test accuracy on CIFAR-10
_RATE = re.compile(r"prof: ([\d.]+) images/s")


def compile_ahead(run: Run) -> None:
    """Compile the networks of all stages, so that later stages find the code in the compiler's cache."""
    commands = [_fast(run, 512, "--max_steps", "2"), _fast(run, 128, "--max_steps", "2")]
    commands += [[*_resnet50(run), "--compile", _compile(run), "--prof", "1"]]
    processes = [
        run.start(str(number), *job, "--output_dir", run.folder(str(number)))
        for number, job in enumerate(commands)
    ]
    for process in processes:
        run.finish(process)


def watch_jobs(run: Run) -> None:
    """Measure how often and where the host waits in a step, and how busy the GPU is."""
    steps, most = ("1,2,3", "4") if run.is_small else ("10,40,60", "70")
    small = [*_cifar(run), "--batch_size", "8" if run.is_small else "128", *_QUIET]
    small += ["--report_every", _FOREVER]
    commands = {name: [f"jobs/{name}", *small] for name in ("train.py", "train_amp.py")}
    commands["train_fast.py"] = [*_fast(run, 128), "--report_every", _FOREVER]
    commands["imagenet.py"] = [*_resnet50(run), "--compile", _compile(run), "--training_only", *_QUIET]
    commands["imagenet.py"] += ["--report_every", _FOREVER]
    for name, job in commands.items():
        output = run.folder(name)
        text = run.call(
            name, "-m", "tests.gpu.watch", steps, *job, "--max_steps", most, "--output_dir", output
        )
        found = json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))
        run.note(f"{name}: waits of the host in a step", found["waits_per_step"], "", 0, at_most=True)
        for place, count in found["places"].items():
            run.note(f"{name}: waits at {place}", count, "")
        run.note(f"{name}: GPU busy", 100 * found["busy"], "%")
        run.note(
            f"{name}: a step, profiled", found["ms_per_step"], f"ms, {found['kernels_per_step']:.0f} kernels"
        )


def measure_resnet18(run: Run) -> None:
    """Measure images/s of the jobs and the published loop, in turns, at 128, and of train_fast.py at 512."""
    options = ["--rounds", "2", "--batch_size", "128", "--cache_dir", _cache(run)]
    if run.is_small:
        options = ["--rounds", "1", "--batch_size", "8", "--report_every", "1", "--compile", "false"]
    names = "seed loop,train.py,train_amp.py,train_fast.py"
    text = run.call("bench", "-m", "tests.benchmarks.train", *options, "--jobs", names, "--json")
    found, _ = json.JSONDecoder().raw_decode(
        text, text.index("\n{") + 1
    )  # the log lines are printed before the JSON
    rows = {row["name"]: row for row in found["rows"]}
    for name, row in rows.items():
        rate = statistics.median(row["images_per_s"])
        run.note(f"{name}, batches of 128", rate, "images/s", _aim(name, 40_000))
    for name, row in rows.items():
        run.note(f"{name}, times the published loop", statistics.median(row["ratio"]), "x", _aim(name, 5))
    run.note("train_fast.py, compiling without a cache", rows["train_fast.py"]["compile_s"] or 0.0, "s")
    job, epochs = _fast(run, 512), 10
    job += ["--report_every", "1", "--max_steps", "6"] if run.is_small else ["--epochs", str(epochs)]
    output = run.folder("512")
    run.call("512", *job, "--output_dir", output)
    reports = [line for line in jobs.read_metrics(output) if "loss" in line]
    run.note("train_fast.py, batches of 512", jobs.rate(reports[2:]), "images/s", 40_000)


def _aim(name: str, aim: float) -> float | None:
    return aim if name == "train_fast.py" else None


def measure_resnet50(run: Run) -> None:
    """Measure images/s of ResNet-50 in bfloat16: synthetic images, eager and compiled, and a pack."""
    job, rates = [*_resnet50(run), "--prof", "2" if run.is_small else "50"], {}
    for name, compile in {"eager": "false", "compiled": _compile(run)}.items():
        rates[name] = _prof(run, name, *job, "--compile", compile)
        run.note(f"synthetic, {name}", rates[name], "images/s", 4500 if name == "compiled" else None)
    copies = 1 if run.is_small else _COPIES
    data = ["--data_url", generated.image_folder(_cache(run), copies), "--cache_dir", _cache(run)]
    data += ["--pack", run.folder("pack"), "--data_backend", "threads", "--compile", _compile(run)]
    rate = _prof(run, "pack", *job, *data)
    run.note("from a pack, compiled", rate, "images/s")
    run.note("from a pack, of synthetic", rate / rates["compiled"], "x", 0.97)


def _prof(run: Run, label: str, *job: str) -> float:
    text = run.call(label, *job, "--output_dir", run.folder(label))
    match = _RATE.search(text)
    if not match:
        raise Failed(f"{label}: no line `prof: ... images/s`")
    return float(match[1])


def measure_resident(run: Run) -> None:
    """Measure images/s of data sets that stay in the GPU's memory."""
    text = run.call("resident", "-m", "tests.benchmarks.resident", "--rounds", "1" if run.is_small else "3")
    for name, rate in re.findall(r"^(\w+): ([\d.]+) million images/s", text, re.MULTILINE):
        run.note(name, float(rate), "million images/s", 2 if name == "resident_loader" else None)


def measure_checkpoint(run: Run) -> None:
    """Measure the time for which a checkpoint of ResNet-18 blocks training."""
    options = ["--device", "cpu", "--rounds", "1"] if run.is_small else ["--device", "cuda"]
    text = run.call("checkpoint", "-m", "tests.benchmarks.checkpoint", *options)
    blocked, whole = re.findall(
        r"^a save blocks ([\d.]+) ms, on the disk after ([\d.]+) ms", text, re.MULTILINE
    )[0]
    run.note("a checkpoint blocks the training", float(blocked), "ms")
    run.note("a checkpoint is written, to memory, after", float(whole), "ms")


def measure_accuracy(run: Run) -> None:
    """Measure the seconds of training to 94 % on CIFAR-10 with 5 seeds."""
    result = os.path.join(run.setting.scratch, "curves.json")
    options = ["--dataset", "cifar10", "--target", str(_TARGET), "--seeds", "5", "--limit", "60"]
    options += ["--data_url", run.setting.data or ""]
    if run.is_small:
        options = ["--dataset", "digits", "--target", "0.05", "--seeds", "1", "--limit", "20"]
    command = ["-m", "tests.benchmarks.time_to_accuracy", "--jobs", "train_fast.py"]
    command += ["--keep_compiled", "true"]
    try:
        run.call("curves", *command, *options, "--json", result)
    finally:
        if os.path.exists(result):
            _note_curves(run, json.loads(Path(result).read_text()))


def _note_curves(run: Run, found: dict) -> None:
    target, runs = found["target"], found["runs"]
    times = [each["seconds_to_target"] or math.inf for each in runs]
    median = statistics.median(times)
    best = [max((accuracy for _, accuracy in each["curve"]), default=0.0) for each in runs]
    reached = sum(map(math.isfinite, times))
    run.note(f"runs of {len(runs)} that reached {target:.0%}", reached, "")
    figure = f"seconds to {target:.0%}, median of {len(runs)}"
    run.note(figure, median if median < math.inf else "not reached", "s", 25, at_most=True)
    run.note("best test accuracy, median", 100 * statistics.median(best), "%", 100 * target)


def measure_several(run: Run) -> None:
    """Compare the receipts of one and of several GPUs (nccl), and measure weak scaling."""
    several = 2 if run.is_small else run.setting.gpus
    digits = ["jobs/train_ddp.py", "--dataset", "digits", "--report_every", "1", "--resume", "never"]
    digits += ["--save_every", _FOREVER, "--max_steps", "4" if run.is_small else "30"]
    digits += ["--batch_size", str(64 * several)]
    outputs = [run.folder(f"processes-{count}") for count in (1, several)]
    for count, output in zip((1, several), outputs, strict=True):
        options = ["--processes_per_node", str(count), "--output_dir", output]
        run.call(f"processes-{count}", *digits, *options)
    equal = read_receipt(outputs[0]) == read_receipt(outputs[1])
    run.check(f"receipts of 1 and {several} processes are equal", equal)
    rates = []
    for count in (1, several):
        job = [*_resnet50(run, count), "--compile", _compile(run), "--prof", "2" if run.is_small else "40"]
        rates.append(_prof(run, f"scaling-{count}", *job))
    run.note(f"ResNet-50 on {several}", rates[1], "images/s")
    run.note("weak scaling, of ideal", rates[1] / rates[0] / several, "x")


def _cache(run: Run) -> str:
    return os.path.join(run.setting.scratch, "index")


def _compile(run: Run) -> str:
    """Return the value of --compile; a rehearsal compiles only in the stage `compiled`."""
    return str(not run.is_small).lower()


def _cifar(run: Run) -> list[str]:
    """Return the options for generated images of CIFAR-10's shape; on a GPU the number of CIFAR-10."""
    data = ["--custom_data", "true"] if run.is_small else ["--data_url", generated.cifar_folder(_cache(run))]
    return ["--dataset", "cifar10", *data]


def _fast(run: Run, batch: int, *options: str) -> list[str]:
    size = str(batch // 16 if run.is_small else batch)
    return [
        "jobs/train_fast.py", *_cifar(run), "--batch_size", size, *_QUIET, "--compile", _compile(run),
        *options,
    ]  # fmt: skip


def _resnet50(run: Run, processes: int = 1) -> list[str]:
    """Return imagenet.py with images in memory, on one GPU or several."""
    job = ["jobs/imagenet.py", "--data_backend", "synthetic", "--processes_per_node", str(processes)]
    if run.is_small:
        small = ["--arch", "resnet18", "--image_size", "32", "--amp", "true"]
        return [*job, *small, "--batch_size", str(8 * processes)]
    return [*job, "--arch", "resnet50", "--batch_size", str(256 * processes)]


STAGES = [
    Stage("compile ahead", 150, compile_ahead, is_beside=True),
    Stage("waits", 110, watch_jobs),
    Stage("ResNet-18", 160, measure_resnet18),
    Stage("ResNet-50", 130, measure_resnet50),
    Stage("resident", 30, measure_resident),
    Stage("checkpoint", 30, measure_checkpoint),
]
SEVERAL = Stage("several GPUs", 120, measure_several, is_check=True)
ACCURACY = Stage("CIFAR-10", 260, measure_accuracy)
