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
_AIMS = {"H200": 4300, "H100": 3400}  # images/s of ResNet-50, estimated from the memory's bandwidth
_FLOPS = 3 * 2 * 4.09e9  # operations of a training step of ResNet-50, for an image of 224 pixels


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
        traces = os.path.join(os.path.dirname(run.setting.logs), "traces")
        os.makedirs(traces, exist_ok=True)
        trace = os.path.join(traces, f"{name[:-3]}.json.gz")
        text = run.call(
            name, "-m", "tests.gpu.watch", steps, trace, *job, "--max_steps", most, "--output_dir", output
        )
        found = _last_json(text)
        Path(traces, f"{name[:-3]}-kernels.json").write_text(json.dumps(found, indent=1))
        run.note(f"{name}: memory", found["memory_gb"], "GB")
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


def measure_limits(run: Run) -> None:
    """Measure the bandwidth and the matrix rate of this GPU, which limit all other figures."""
    for name, value in _probe(run, "limits").items():
        run.note(name.rpartition(" ")[0], value, name.rpartition(" ")[2])


def measure_resnet50(run: Run) -> None:
    """Measure images/s of ResNet-50 in bfloat16, in turns with a plain loop, and from a pack."""
    job = [*_resnet50(run), "--prof", "2" if run.is_small else "50", "--compile", _compile(run)]
    ours, plain = [], []
    for turn in range(1 if run.is_small else 2):
        ours.append(_prof(run, f"ours-{turn}", *job))
        plain.append(_probe(run, f"plain-{turn}", "plain")["images/s"])
    rate = statistics.median(ours)
    aim = next((aim for name, aim in _AIMS.items() if name in run.setting.gpu), None)
    run.note("synthetic, compiled", rate, "images/s", aim)
    run.note("synthetic, of a plain loop of torchvision", rate / statistics.median(plain), "x", 0.97)
    run.note("synthetic, operations", rate * _FLOPS / 1e12, "TFLOP/s")
    copies = 1 if run.is_small else _COPIES
    data = ["--data_url", generated.image_folder(_cache(run), copies), "--cache_dir", _cache(run)]
    rate_of_pack = _prof(run, "pack", *job, *data, "--pack", run.folder("pack"), "--data_backend", "threads")
    run.note("from a pack, compiled", rate_of_pack, "images/s")
    run.note("from a pack, of synthetic", rate_of_pack / rate, "x", 0.97)


def measure_loaders(run: Run) -> None:
    """Measure images/s of the backends that are installed, with JPEG files."""
    folder = generated.image_folder(_cache(run), 1)
    text = run.call("loaders", *_resnet50(run), "--data_backend", "auto", "--data_url", folder, "--prof", "1")
    rates = re.search(r"data_backend auto: \S+ of (.*) images/s", text)
    for name, rate in re.findall(r"([\w-]+) (\d+)", rates[1] if rates else ""):
        run.note(f"backend {name}", float(rate), "images/s")


def _probe(run: Run, label: str, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, float]:
    device = "cpu" if run.is_small else "cuda"
    return _last_json(run.call(label, *launcher, "-m", "tests.gpu.probe", device, *arguments))


def _last_json(text: str) -> dict:
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))


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
    """Measure how much longer the step after a save takes, in a job that reports each step."""
    every, most = ("2", "9") if run.is_small else ("20", "130")
    job = ["jobs/train.py", *_cifar(run), "--batch_size", "8" if run.is_small else "128", "--resume", "never"]
    job += ["--report_every", "1", "--save_every", every, "--epoch_weights", "false", "--max_steps", most]
    output = run.folder("saves")
    run.call("saves", *job, "--output_dir", output)
    times = {
        line["step"]: 1000 * (line["data_time"] + line["compute_time"])
        for line in jobs.read_metrics(output)
        if "compute_time" in line and line["step"] > int(every) + 1  # the first save allocates its memory
    }
    after = [time for step, time in times.items() if step % int(every) == 1]
    others = statistics.median(time for step, time in times.items() if step % int(every) != 1)
    run.note("a step of train.py", others, "ms")
    run.note("the step after a save, longer by", statistics.median(after) - others, "ms")


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
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(several)
    run.note("all_reduce of 100 MB", *_probe(run, "all_reduce", launcher=launcher).values(), "GB/s")


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


STAGES = [  # with those of checks.py they take at most 8 minutes: tests/test_gpu_check.py adds them up
    Stage("compile ahead", 140, compile_ahead, is_beside=True),
    Stage("limits", 15, measure_limits),
    Stage("ResNet-50", 110, measure_resnet50),
    Stage("ResNet-18", 70, measure_resnet18),
    Stage("waits", 65, watch_jobs),
    Stage("loaders", 35, measure_loaders),
    Stage("resident", 20, measure_resident),
    Stage("checkpoint", 20, measure_checkpoint),
]
SEVERAL = Stage("several GPUs", 120, measure_several, is_check=True)
ACCURACY = Stage("CIFAR-10", 260, measure_accuracy)
