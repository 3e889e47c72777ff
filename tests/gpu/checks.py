"""The stages of `make gpu` that test the results of a GPU and decide the exit code."""

import os
import re
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bootfile.histories import read_states
from bootfile.machine.cores import available_cores
from bootfile.receipt import receipt
from tests.gpu.lab import Failed, Run, Stage
from tests.support import on_gpu

ROOT = Path(__file__).resolve().parents[2]
_NOT_GRAPHS = re.compile(r"skipping cudagraph|recompiling|not compiled", re.IGNORECASE)
_LOGS = "recompiles,cudagraphs,perf_hints"  # logs of torch in which _NOT_GRAPHS is searched
_DETERMINISTIC = """
import runpy, sys, torch
torch.use_deterministic_algorithms(True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# the type of GPUs before Ampere, and its gradient scaler, on any GPU
_HALF = "from common.compute import precision\nprecision.half_type = lambda device: torch.float16\n"
_IMPORTS = "import runpy, sys, torch\n"
_DETERMINISTIC_HALF = _DETERMINISTIC.replace(_IMPORTS, _IMPORTS + _HALF)
_CONTEXT = """
import torch
x = torch.randn(2, 3, 8, 8, device="cuda")
(x @ x).sum().item()
torch.nn.functional.conv2d(x, torch.randn(4, 3, 3, 3, device="cuda")).sum().item()
print(torch.cuda.nccl.version(), torch.backends.cudnn.version(), torch.cuda.get_device_capability())
"""
# The jobs of `bits`: (options of Python, variables, whether two runs have equal bits). On an H200 with torch
# 2.11 two runs of train.py differed, and of train_fast.py, compiled, also with deterministic algorithms, with
# which cuDNN chose its algorithms by their times before 0.54.
_STRICT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_LOGGED = {"TORCH_LOGS": _LOGS}
_JOBS = {
    "train_exact.py": (["jobs/train_exact.py"], {}, True),
    "train.py, deterministic": (["-c", _DETERMINISTIC, "jobs/train.py"], _STRICT, True),
    "train_amp.py, deterministic": (["-c", _DETERMINISTIC, "jobs/train_amp.py"], _STRICT, True),
    "train_amp.py, float16": (["-c", _DETERMINISTIC_HALF, "jobs/train_amp.py"], _STRICT, True),
    "train_ddp.py, deterministic": (["-c", _DETERMINISTIC, "jobs/train_ddp.py"], _STRICT, True),
    "train_fsdp.py, deterministic": (["-c", _DETERMINISTIC, "jobs/train_fsdp.py"], _STRICT, True),
    "train_fast.py, deterministic": (["-c", _DETERMINISTIC, "jobs/train_fast.py"], _STRICT | _LOGGED, True),
    "train.py": (["jobs/train.py"], {}, False),
    "train_fast.py": (["jobs/train_fast.py"], _LOGGED, False),
}
_SMALL_JOBS = (
    "train_exact.py", "train.py, deterministic", "train_amp.py, deterministic", "train_amp.py, float16",
    "train_ddp.py, deterministic", "train_fast.py, deterministic", "train_fast.py",
)  # fmt: skip
_WHOLE, _AGAIN, _RESTARTED = "whole", "again", "restarted"
_JOB_TESTS = "tests/jobs/test_"
_ON_GPU = (
    "train_exact", "imagenet_exact", "resume", "gradients", "own_step", "replicas", "world_size",
    "train_text", "train_own", "finetune", "several_labels",
)  # fmt: skip
_BITS = "compares the bits of two runs without deterministic algorithms"
_WARNING = "expects no `warning: `, and processes that share a GPU are one"
_ON_CPU = "its criterion or layer is on the CPU"
NOT_FOR_A_GPU = {  # beginnings of names -> reason
    "train_exact.py::test_unusual_parts": _ON_CPU,
    "resume.py::test_sigterm_costs_no_step": _BITS,
    "resume.py::test_an_evaluation_within_an_epoch": _BITS,
    "resume.py::test_a_checkpoint_of_a_version": _BITS,
    "resume.py::test_a_batch_may_be_counted_by_process": "expects the threads of a CPU in the log",
    "resume.py::test_an_output_that_fills_up": "mounts a disk",
    "train_own.py::test_what_is_right_has_no_warning": _WARNING,
    "finetune.py::test_a_frozen_backbone": _BITS,
}
_RESULT = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED) (tests/.*?) *$", re.MULTILINE)
_NEXT = rf"^{on_gpu.REASON}|^\[gw\d+\] \[ *\d|\Z"
_FAILURE = re.compile(rf"^{on_gpu.REASON}(\S.*) (?:setup|call|teardown)\n(.*?)(?={_NEXT})", re.M | re.S)


def note_facts(run: Run) -> None:
    """Note memory, disk and the times of starts, on which the limits of the stages depend."""
    memory = dict(re.findall(r"(\w+): +(\d+) kB", Path("/proc/meminfo").read_text()))
    run.note("memory", int(memory["MemTotal"]) / 1e6, "GB")
    run.note("memory available", int(memory["MemAvailable"]) / 1e6, "GB")
    for folder in ("/dev/shm", tempfile.gettempdir()):
        run.note(f"free at {folder}", shutil.disk_usage(folder).free / 1e9, "GB")
    starts = {"import torch, torchvision": "import torch, torchvision"}
    if not run.is_small:
        starts["torch, a context, cuBLAS, cuDNN"] = _CONTEXT
    for name, code in starts.items():
        begin = time.monotonic()
        text = run.call(name, "-c", code)
        run.note(name, time.monotonic() - begin, "s")
    if not run.is_small:
        run.note("NCCL, cuDNN, capability", text.strip().splitlines()[-1][:200], "")


def compare_bits(run: Run) -> None:
    """Compare the states and receipts of runs of each job: two runs, and one that SIGTERM stops and that is
    resumed. Compare also train_exact.py on several processes, which share the GPU over gloo."""
    names = _SMALL_JOBS if run.is_small else tuple(_JOBS)
    runs = [("train_exact.py", f"{count} processes") for count in ((2,) if run.is_small else (2, 4))]
    runs = [*((name, kind) for name in names for kind in (_WHOLE, _AGAIN, _RESTARTED)), *runs]
    found: dict[tuple[str, str], tuple[str, bytes]] = {}
    with ThreadPoolExecutor(max(2, available_cores() // 2)) as pool:  # other stages run at the same time
        futures = {pool.submit(_train, run, *key): key for key in runs}
        for future in as_completed(futures):
            name, kind = futures[future]
            try:
                found[name, kind] = future.result()
            except Failed as error:
                run.check(f"{name}, {kind}", False, str(error))
                continue
            whole = found.get((name, _WHOLE))
            for key in list(found) if kind == _WHOLE else [(name, kind)]:
                if whole and key[0] == name and key[1] != _WHOLE:
                    _note_equality(run, *key, whole, found[key])


def _train(run: Run, name: str, kind: str) -> tuple[str, bytes]:
    """Run a job of _JOBS to its end, and return the digest of its last state, and its receipt. Raises Failed.
    Several run at the same time, each in a thread."""
    command, env, _ = _JOBS[name]
    label = f"{name}-{kind}".replace(", ", "-")
    output = run.folder(label)
    job = [*command, "--dataset", "digits", "--batch_size", "64", "--lr", "0.02", "--report_every", "1"]
    job += ["--save_every", "10", "--output_dir", output]
    job += ["--width", "8", "--epochs", "2"] if run.is_small else ["--epochs", "3"]
    if kind.endswith("processes"):
        job += ["--processes_per_node", kind.split()[0]]
    process = run.start(label, *job, **env)
    if kind == _RESTARTED:
        metrics = Path(output, "metrics.jsonl")
        run.wait_until(
            lambda: process.poll() is not None or (metrics.exists() and '"epoch": 2,' in metrics.read_text())
        )
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        run.finish(process, 128 + signal.SIGTERM)
        process = run.start(f"{label}-resumed", *job, **env)
    text = run.finish(process)
    if _LOGGED.keys() <= env.keys() and kind == _WHOLE:
        reasons = ", ".join(sorted(set(_NOT_GRAPHS.findall(text))))
        run.check(f"{name} is compiled once, as CUDA graphs", not reasons, reasons)
    return read_state(output), read_receipt(output)


def _note_equality(
    run: Run, name: str, kind: str, whole: tuple[str, bytes], other: tuple[str, bytes]
) -> None:
    is_equal, is_promised = whole[0] == other[0], _JOBS[name][2]
    figure = f"{name}: {kind}, bits"
    if is_promised:
        run.check(figure, is_equal, "equal" if is_equal else "DIFFER")
    else:
        run.note(figure, "equal" if is_equal else "differ, as documented", "")
    run.check(f"{name}: {kind}, receipt", whole[1] == other[1])


def compare_exact_imagenet(run: Run) -> None:
    """Compare the bits of two runs of a compiled network with max pooling and exact shards. Each begins with
    an empty cache of the compiler."""
    size, batch = ("32", "16") if run.is_small else ("224", "64")
    job = ["jobs/imagenet.py", "--data_backend", "synthetic", "--arch", "resnet18", "--image_size", size]
    job += [
        "--batch_size",
        batch,
        "--exact_shards",
        "4",
        "--max_steps",
        "4",
        "--training_only",
        "--warmup",
        "0",
    ]
    job += ["--compile", str(not run.is_small).lower(), "--resume", "never", "--save_every", "4"]
    outputs = [run.folder(name) for name in ("first", "second")]
    processes = []
    for output in outputs:
        env = {"TORCHINDUCTOR_CACHE_DIR": f"{output}-cache", "TORCH_LOGS": "recompiles"}
        processes.append(run.start(os.path.basename(output), *job, "--output_dir", output, **env))
    recompilations = [run.finish(process).count("Recompiling function") for process in processes]
    run.check("the network is compiled once", not recompilations[0], f"{recompilations[0]} recompilations")
    states = [read_state(output) for output in outputs]
    run.check("--exact_shards twice, bits", states[0] == states[1])


def run_marked_tests(run: Run) -> None:
    """Run the tests with the mark gpu."""
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]
    _run_tests(run, "marked", "-m", "gpu", "-n", "2" if run.is_small else "4", *files)


def run_tests_on_gpu(run: Run) -> None:
    """Run tests of the CPU whose jobs see the GPU. Those that ended before the time limit count."""
    files = [f"{_JOB_TESTS}{name}.py" for name in _ON_GPU]
    options = ["-m", "not gpu and not thorough and not real", "-n", "8"]
    if run.is_small:
        files, options = files[:1], ["-n", "1", "-k", "bad_number_of_shards or more_processes_than"]
    options += [f"--deselect={_JOB_TESTS}{name}" for name in NOT_FOR_A_GPU]
    _run_tests(run, "on gpu", *options, *files)


def _run_tests(run: Run, label: str, *options: str) -> None:
    command = ["-m", "pytest", "-vv", "--tb=short", "-p", "no:cacheprovider", "-p", on_gpu.__name__]
    process = run.start(label, *command, "--dist", "load", *options)
    try:
        run.wait_until(lambda: process.poll() is not None)
    finally:
        text = run.read(process)
        results = _RESULT.findall(text)
        for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            count = len({name for kind_of_test, name in results if kind_of_test == kind})
            run.note(f"tests {kind.lower()}", count, "")
        for name, reason in dict(_FAILURE.findall(text)).items():
            lines = [line[1:].strip() for line in reason.splitlines() if line.startswith("E  ")]
            run.check(name, False, (lines or ["no reason"])[0][:200])
    if not results:
        raise Failed(f"no test ran: {(text.strip().splitlines() or ['no output'])[-1][:200]}")


def prove_jobs(run: Run) -> None:
    """Prove jobs that use the GPU with `python -m launch prove`, which takes 200 s without other work."""
    names = ("train_exact.py",) if run.is_small else ("train_exact.py", "train.py")
    processes = {}
    for name in names:
        job = [f"jobs/{name}", "--", "--dataset", "digits", "--batch_size", "64", "--width", "8"]
        processes[name] = run.start(name, "-m", "launch", "prove", "--kills", "1", *job)
    for name, process in processes.items():
        run.finish(process)
        run.check(f"prove {name}", True)


def read_state(output: str) -> str:
    """Return the digest of the last state of a run."""
    last: str = list(read_states(output).values())[-1]["digest"]
    return last


def read_receipt(output: str) -> bytes:
    """Return the receipt of a run."""
    return Path(output, receipt.FILE).read_bytes()


STAGES = [
    Stage("facts", 30, note_facts),
    Stage("bits", 180, compare_bits, is_check=True, is_beside=True),
    Stage("exact imagenet", 180, compare_exact_imagenet, is_check=True, is_beside=True),
    Stage("marked", 180, run_marked_tests, is_check=True, is_beside=True),
    Stage("on gpu", 180, run_tests_on_gpu, is_check=True, is_beside=True),
]
PROVE = Stage("prove", 280, prove_jobs, is_check=True)
