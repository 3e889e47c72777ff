"""The stages of `make gpu` that measure: limits of the GPU, images/s, accuracy, host waits, several GPUs."""

import json
import os
import re
import statistics
from pathlib import Path

from tests.benchmarks import jobs
from tests.gpu.checks import read_receipt
from tests.gpu.lab import Failed, Run, Stage

_FOREVER = "1000000000"  # steps
QUIET = ("--resume", "never", "--save_every", _FOREVER, "--epoch_weights", "false")
_TARGET, _EPOCHS = "0.94", "15"  # test accuracy on Fashion-MNIST, and the epochs of the schedule
_RATE = re.compile(r"prof: ([\d.]+) images/s")
# images/s of ResNet-50 in bfloat16, compiled: 90 % of 6,671 (2026-11-28); estimated from the bandwidth
_AIMS = {"H200": 6000, "H100": 3400}
_FLOPS = 3 * 2 * 4.09e9  # operations of a training step of ResNet-50, for an image of 224 pixels
_EAGER, _EAGER_TF32 = 2470, 938  # images/s that NVIDIA gives for ResNet-50 v1.5 on an A100


def measure_once(run: Run) -> None:
    """Measure the most wanted figure, in case that there is no second run."""
    run.note(
        "ResNet-50 bf16, compiled", _prof(run, "compiled", "--compile", compiles(run)), "images/s", _aim(run)
    )


def measure_limits(run: Run) -> None:
    """Measure the bandwidth and the matrix rate of this GPU, which limit all other figures."""
    for name, value in _probe(run, "limits").items():
        run.note(name.rpartition(" ")[0], value, name.rpartition(" ")[2])


def measure_resnet50(run: Run) -> None:
    """Measure images/s of ResNet-50 with images in memory, and of a plain compiled loop of torchvision."""
    rate = _prof(run, "compiled", "--compile", compiles(run))
    run.note("bf16, compiled", rate, "images/s", _aim(run))
    run.note("bf16, compiled, operations", rate * _FLOPS / 1e12, "TFLOP/s")
    plain = _probe(run, "plain", "plain")["images/s"]
    run.note("plain loop of torchvision, bf16, compiled", plain, "images/s")
    run.note("bf16, compiled, of the plain loop", rate / plain, "x", 0.97)
    run.note("bf16", _prof(run, "eager", "--compile", "false"), "images/s", _EAGER)
    rate = _prof(run, "tf32", "--compile", "false", "--amp", "false")
    run.note("float32, convolutions in TF32", rate, "images/s", _EAGER_TF32)


def measure_resnet18(run: Run) -> None:
    """Measure images/s of the small jobs, and their share of waiting."""
    data = _data(run)
    # the first report does not count: so each run has more than one
    every, epochs = "50", "1"
    if run.is_small:
        every = "1"
    elif not run.setting.data:  # an epoch of digits has 11 steps
        every, epochs = "20", "20"
    for name in ("train.py", "train_amp.py", "train_fast.py"):
        length = ["--batch_size", "128", "--epochs", epochs, "--report_every", every]
        reports = _train(run, name, *_job(run, name, data), *length)
        seconds = [report["data_time"] + report["compute_time"] for report in reports]
        waited = [report["data_time"] / all for report, all in zip(reports, seconds, strict=True)]
        run.note(f"{name}, {data}, 128", jobs.rate(reports), "images/s")
        run.note(f"{name}, {data}, 128: waits for data", 100 * statistics.median(waited), "%")


def measure_accuracy(run: Run) -> None:
    """Measure the time of train_fast.py to a test accuracy: 0.94 on Fashion-MNIST, on digits that of its
    recipe."""
    data, path = _data(run), run.folder("runs.json")
    options = ["--dataset", data, "--jobs", "train_fast.py", "--seeds", "1", "--keep_compiled", "true"]
    if run.setting.data:
        options += ["--data_url", run.setting.data, "--target", _TARGET, "--epochs", _EPOCHS]
    if run.is_small:
        options += ["--epochs", "1"]
    run.call("accuracy", "-m", "tests.benchmarks.time_to_accuracy", *options, "--json", path)
    found = json.loads(Path(path).read_text())
    [job] = found["runs"]
    reached = job["seconds_to_target"] or "not reached"
    run.note(f"train_fast.py, {data}: to {found['target']}", reached, "s of training")
    run.note("its compilation", job["compilation"], "s")
    run.note("its training", job["curve"][-1][0], "s")
    run.note("its test accuracy at the end", 100 * job["curve"][-1][1], "%")


def watch_jobs(run: Run) -> None:
    """Measure how often and where the host waits in a step, and how busy the GPU is."""
    steps, most = ("1,2,3", "4") if run.is_small else ("10,40,60", "70")
    commands = {name: _job(run, name, _data(run)) for name in ("train.py", "train_fast.py")}
    commands["imagenet.py"] = [*_resnet50(run), "--compile", compiles(run), "--training_only"]
    for name, job in commands.items():
        trace = os.path.join(run.setting.traces, f"{name[:-3]}.json.gz")
        job += [*QUIET, "--report_every", _FOREVER, "--max_steps", most, "--output_dir", run.folder(name)]
        figures = last_json(run.call(name, "-m", "tests.gpu.watch", steps, trace, *job))
        Path(trace.replace(".json.gz", "-kernels.json")).write_text(json.dumps(figures, indent=1))
        run.note(f"{name}: memory", figures["memory_gb"], "GB")
        run.note(f"{name}: waits of the host in a step", figures["waits_per_step"], "", 0, at_most=True)
        for place, count in figures["places"].items():
            run.note(f"{name}: waits at {place}", count, "")
        run.note(f"{name}: GPU busy", 100 * figures["busy"], "%")
        kernels = f"ms, {figures['kernels_per_step']:.0f} kernels"
        run.note(f"{name}: a step, profiled", figures["ms_per_step"], kernels)


def measure_resident(run: Run) -> None:
    """Measure images/s of data sets that stay in the GPU's memory."""
    text = run.call("resident", "-m", "tests.benchmarks.resident", "--rounds", "1" if run.is_small else "3")
    for name, rate in re.findall(r"^(\w+): ([\d.]+) million images/s", text, re.MULTILINE):
        run.note(name, float(rate), "million images/s", 2 if name == "resident_loader" else None)


def measure_several(run: Run) -> None:
    """Compare the receipts of one and of several GPUs (nccl), and measure weak scaling."""
    several = 2 if run.is_small else run.setting.gpus
    digits = ["jobs/train_ddp.py", "--dataset", "digits", "--report_every", "1", *QUIET]
    digits += ["--max_steps", "4" if run.is_small else "30", "--batch_size", str(64 * several)]
    receipts = []
    rates = []
    for count in (1, several):
        output = run.folder(f"processes-{count}")
        processes = ["--processes_per_node", str(count), "--output_dir", output]
        run.call(f"processes-{count}", *digits, *processes)
        receipts.append(read_receipt(output))
        size = ["--batch_size", str((8 if run.is_small else 256) * count), "--processes_per_node", str(count)]
        rates.append(_prof(run, f"scaling-{count}", "--compile", compiles(run), *size))
    run.check(f"receipts of 1 and {several} processes are equal", receipts[0] == receipts[1])
    run.note(f"ResNet-50 on {several}", rates[1], "images/s")
    run.note("weak scaling, of ideal", rates[1] / rates[0] / several, "x")
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(several)
    run.note("all_reduce of 100 MB", *_probe(run, "all_reduce", launcher=launcher).values(), "GB/s")


def _probe(run: Run, label: str, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, float]:
    return last_json(run.call(label, *launcher, "-m", "tests.gpu.probe", device(run), *arguments))


def last_json(text: str) -> dict:
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith("{")))


def _prof(run: Run, label: str, *options: str) -> float:
    """Return images/s of imagenet.py with images in memory."""
    batches = "2" if run.is_small else "50"
    return _rate(
        run.call(label, *_resnet50(run), "--prof", batches, *options, "--output_dir", run.folder(label))
    )


def _rate(text: str) -> float:
    match = _RATE.search(text)
    if not match:
        raise Failed("no line `prof: ... images/s`")
    return float(match[1])


def _train(run: Run, label: str, *job: str) -> list[dict]:
    """Run a job, and return its reports on training steps but the first one."""
    output = run.folder(label)
    run.call(label, *job, *QUIET, "--output_dir", output)
    return [line for line in jobs.read_metrics(output) if "loss" in line][1:]


def _data(run: Run) -> str:
    """Return the name of the data set: of a second, not that of 60,000 files."""
    return "fashion_mnist" if run.setting.data else "digits"


def _job(run: Run, name: str, data: str) -> list[str]:
    """Return the command of a small job."""
    job = [f"jobs/{name}", "--dataset", data]
    if run.setting.data:
        job += ["--data_url", run.setting.data]
    if run.is_small:
        job += ["--width", "8"]
    if name == "train_fast.py":
        job += ["--compile", compiles(run)]
    return job


def _resnet50(run: Run) -> list[str]:
    """Return imagenet.py with images in memory."""
    job = ["jobs/imagenet.py", "--data_backend", "synthetic"]
    if run.is_small:
        return [*job, "--arch", "resnet18", "--image_size", "32", "--batch_size", "8"]
    return [*job, "--arch", "resnet50", "--batch_size", "256"]


def device(run: Run) -> str:
    return "cpu" if run.is_small else "cuda"


def compiles(run: Run) -> str:
    """Return the value of --compile; a rehearsal compiles nothing."""
    return str(not run.is_small).lower()


def _aim(run: Run) -> float | None:
    return next((aim for name, aim in _AIMS.items() if name in run.setting.gpu), None)


ONCE = Stage("ResNet-50 once", 75, measure_once)
STAGES = [
    Stage("limits", 20, measure_limits),
    Stage("ResNet-50", 120, measure_resnet50),
    Stage("ResNet-18", 55, measure_resnet18),
    Stage("accuracy", 72, measure_accuracy),
    Stage("waits", 70, watch_jobs),
    Stage("resident", 15, measure_resident),
]
SEVERAL = Stage("several GPUs", 120, measure_several, is_check=True)
