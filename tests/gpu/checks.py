"""The stages of `make gpu` that test the results of a GPU and decide the exit code."""

import json
import os
import re
import signal
from pathlib import Path

import torch

from bootfile.receipt import receipt
from tests.benchmarks import jobs
from tests.gpu.lab import Failed, Run, Stage

ROOT = Path(__file__).resolve().parents[2]
_NOT_GRAPHS = re.compile(r"skipping cudagraph|recompiling|not compiled", re.IGNORECASE)
_AGAIN = "Re-recording function"
_LOGS = "recompiles,cudagraphs,perf_hints"  # logs of torch in which the stages search
# Steps whose losses are compared, and their largest difference. Rounding grows: in bfloat16 on a CPU the
# losses of the first 5 steps differed by 0.07, that of step 8 by 0.25 (2026-11-22, n=1).
_FIRST, _APART = 5, 0.1
_DIGITS = ("--dataset", "digits", "--report_every", "1", "--lr", "0.02")
# Two runs on one GPU are compared bit for bit. A warning names an operation without a deterministic form.
_DETERMINISTIC = """
import runpy, sys, torch
torch.use_deterministic_algorithms(True, warn_only=True)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_NO_SAVES = ("--resume", "never", "--save_every", "1000000000")


def run_tests(run: Run) -> None:
    """Run the tests with the mark gpu."""
    files = [
        str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()
    ]
    options = ["-p", "no:cacheprovider", "-m", "gpu", "-n", "2" if run.is_small else "4"]
    text = run.call("pytest", "-m", "pytest", *options, *files)
    last = text.rstrip().splitlines()[-1]  # 12 passed, 3 skipped in 45.67s
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|skipped)", last)}
    run.note("tests that passed", counts.get("passed", 0), "")
    run.note("tests that were skipped", counts.get("skipped", 0), "")
    run.check("tests ran", counts.get("skipped" if run.is_small else "passed", 0) > 0)


def compare_compiled(run: Run) -> None:
    """Compare train_fast.py compiled, as CUDA graphs, with train_fast.py without compiling."""
    job = ["jobs/train_fast.py", *_DIGITS, *_NO_SAVES, "--batch_size", "128", "--epochs", "4"]
    job += ["--max_steps", "12"] if run.is_small else []
    outputs = {name: run.folder(name) for name in ("plain", "compiled")}
    processes = {
        name: run.start(
            name, *job, "--compile", str(name == "compiled").lower(), "--output_dir", output, TORCH_LOGS=_LOGS
        )
        for name, output in outputs.items()
    }
    texts = {name: run.finish(process) for name, process in processes.items()}
    losses = [read_losses(output) for output in outputs.values()]
    apart = max(abs(one - other) for one, other in zip(*(each[:_FIRST] for each in losses), strict=True))
    found = _NOT_GRAPHS.findall(texts["compiled"])
    run.check("receipts are equal", read_receipt(outputs["plain"]) == read_receipt(outputs["compiled"]))
    run.check("compiled once, as CUDA graphs", not found, ", ".join(sorted(set(found))))
    run.note("CUDA graphs recorded again", texts["compiled"].count(_AGAIN), "", 0, at_most=True)
    detail = f"{apart:.4f} of the first {_FIRST} losses at most, expected {_APART}"
    run.check("difference of the losses", len(losses[0]) == len(losses[1]) > 0 and apart <= _APART, detail)


def compare_restart(run: Run) -> None:
    """Compare a run that was stopped by SIGTERM and resumed with two uninterrupted runs."""
    epochs, batch = (3, "240") if run.is_small else (12, "32")
    job = ["-c", _DETERMINISTIC, "jobs/train.py", *_DIGITS, "--save_every", "5"]
    job += ["--epochs", str(epochs), "--batch_size", batch]
    outputs = {name: run.folder(name) for name in ("whole", "again", "cut")}
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    processes = {
        name: run.start(name, *job, "--output_dir", output, **env) for name, output in outputs.items()
    }
    cut, metrics = processes["cut"], Path(outputs["cut"], "metrics.jsonl")
    middle = f'"epoch": {1 + epochs // 3},'
    run.wait_until(lambda: cut.poll() is not None or (metrics.exists() and middle in metrics.read_text()))
    if cut.poll() is None:
        os.kill(cut.pid, signal.SIGTERM)
    run.finish(cut, 128 + signal.SIGTERM)
    run.call("resumed", *job, "--output_dir", outputs["cut"], **env)
    for name in ("whole", "again"):
        run.finish(processes[name])
    weights = {name: read_weights(output, epochs) for name, output in outputs.items()}
    noise, apart = (largest_difference(weights["whole"], weights[name]) for name in ("again", "cut"))
    starts = Path(outputs["cut"], "starts.jsonl").read_text().splitlines()
    resumed = json.loads(starts[-1])["step"]
    run.check("resumed at a step", len(starts) == 2 and resumed > 0, f"step {resumed}")
    detail = f"{apart:.3g} at most; two runs without a restart: {noise:.3g}"
    run.check("difference of the weights", apart <= 3 * noise, detail)  # 0 without noise
    run.check("receipts are equal", read_receipt(outputs["whole"]) == read_receipt(outputs["cut"]))


def read_receipt(output: str) -> bytes:
    """Return the receipt of a run."""
    return Path(output, receipt.FILE).read_bytes()


def read_losses(output: str) -> list[float]:
    """Return the reported losses of a run, in order."""
    return [line["loss"] for line in jobs.read_metrics(output) if "loss" in line]


def read_weights(output: str, epoch: int) -> dict[str, torch.Tensor]:
    """Return the weights of a run after an epoch."""
    return torch.load(Path(output, f"epoch_{epoch}.pth"), weights_only=True)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight. Raises Failed if the networks differ."""
    if one.keys() != other.keys():
        raise Failed("the weights are those of different networks")
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


STAGES = [
    Stage("tests", 140, run_tests, is_check=True, is_beside=True),
    Stage("compiled", 140, compare_compiled, is_check=True, is_beside=True),
    Stage("restart", 140, compare_restart, is_check=True, is_beside=True),
]
