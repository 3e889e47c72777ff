"""Are the bits of fixed runs those of another version? Before and after each change of the loop:

    python -m tests.judge OUT                      the states, receipts and metrics of all runs
    python -m tests.judge OUT --against OTHER      the same, compared with OTHER, the OUT of another version;
                                                   a copy of its interrupted runs is continued, too

RUNS: names of runs (default: all). The runs need the same machine, not the same version. Exit code 20: they
differ.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ("--dataset=digits", "--width=8", "--batch_size=64", "--epochs=2", "--save_every=8", "--keep=99")
TWO = "--processes_per_node=2"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TEXT = (
    "--data_url=LICENSE",  # a text that is the same in each version
    "--layers=1",
    "--heads=2",
    "--width=16",
    "--context=32",
    "--batch_size=16",
)
SHORT = ("--max_steps=12", "--save_every=4", "--keep=99", "--report_every=4")
OUT = "{}"  # the folder of a run, in a command
RUNS: dict[str, tuple[str, ...]] = {
    "train": ("jobs/train.py", *DIGITS, "--report_every=4", f"--output_dir={OUT}"),
    "fast": ("jobs/train_fast.py", "--dataset=digits", *SHORT, f"--output_dir={OUT}"),
    "ddp": ("jobs/train_ddp.py", *DIGITS, TWO, f"--output_dir={OUT}"),
    "exact": ("jobs/train_exact.py", *DIGITS, TWO, "--exact_shards=4", f"--output_dir={OUT}"),
    "fsdp": ("jobs/train_fsdp.py", *DIGITS, TWO, f"--output_dir={OUT}"),
    "parts": ("jobs/train_fsdp.py", *DIGITS, TWO, "--checkpoint_format=sharded", f"--output_dir={OUT}"),
    "amp": ("jobs/train_amp.py", *DIGITS, f"--output_dir={OUT}"),
    "own data": ("jobs/train_own.py", "--batch_size=16", *SHORT, f"--output_dir={OUT}"),
    "text": ("jobs/train_text.py", *TEXT, *SHORT, f"--output_dir={OUT}"),
    "imagenet": (
        "jobs/imagenet.py", "--data_backend=threads", "--custom_data=true", "--arch=resnet18",
        "--image_size=32", "--batch_size=16", *SHORT, "--ema=0.9", f"--output_dir={OUT}",
    ),
    "own loop": ("guides/own_loop/large.py", OUT),
    "own loop of any number": (*TORCHRUN, "guides/own_loop/any_number.py", OUT),
    "own loop of two": (*TORCHRUN, "guides/own_loop/after.py", OUT),
}  # fmt: skip
_TIMES = ("time", "_per_s", "memory_mb", "ranks")  # in a name of metrics


def start(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this Python to its end. Raises SystemExit with its output if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


def fill(command: tuple[str, ...], folder: Path) -> list[str]:
    """Return a command with its folder."""
    return [word.replace(OUT, str(folder)) for word in command]


def read(folder: Path) -> dict[str, Any]:
    """Return what the records of a run have, without times."""
    found: dict[str, Any] = {"state": {}, "metrics": [], "files": []}
    for line in (folder / "state.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "digest" in values:
            found["state"][str(values["step"])] = [values["digest"], values["planned"]]
    found["receipt"] = hashlib.sha256((folder / "receipt.bin").read_bytes()).hexdigest()[:16]
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        values = json.loads(line)
        kept = {key: value for key, value in values.items() if not any(part in key for part in _TIMES)}
        kept.pop("run", None)
        found["metrics"].append(kept)
    found["files"] = sorted(path.name for path in folder.rglob("*.pt*") if path.is_file())
    return found


def interrupt(folder: Path) -> None:
    """Delete what a run has saved after the first half of its checkpoints, as if it had been killed there."""
    paths = sorted((folder / "checkpoints").glob("step_*.pt"), key=lambda path: int(path.stem[5:]))
    for path in paths[(len(paths) + 1) // 2 :]:
        for other in path.parent.glob(f"{path.stem}.*"):
            shutil.rmtree(other) if other.is_dir() else other.unlink()


def stop(command: list[str], folder: Path) -> None:
    """Run a command until it has saved once, stop it with SIGTERM, and run it to its end."""
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL) as job:
        while not [*folder.glob("checkpoints/step_*.pt")] and job.poll() is None:
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
    start(*command)


def judge(out: Path, names: list[str], against: Path | None) -> dict[str, Any]:
    """Return what each run has recorded."""
    found: dict[str, Any] = {}
    for name in names:
        folder = out / name.replace(" ", "_")
        command = fill(RUNS[name], folder)
        start(*command)
        found[name] = read(folder)
        again = folder.with_name(f"{folder.name}_continued")
        shutil.copytree((against or out) / folder.name, again)  # runs of the other version continue
        interrupt(again)
        start(*fill(RUNS[name], again))
        found[f"{name}, continued"] = read(again)
        print(
            name, "continued" if found[name]["state"] == found[f"{name}, continued"]["state"] else "NOT EXACT"
        )
    if "train" in names:
        folder = out / "stopped"
        stop(fill(RUNS["train"], folder), folder)
        states = read(folder)["state"]  # the step of the stop differs from run to run
        found["train, stopped"] = {step: value for step, value in states.items() if value[1]}
        print("train, stopped")
        fork = out / "fork"
        start("jobs/train.py", "--from", str(out / "train"), "--at_step", "20", "--skip_steps", "23",
              "--output_dir", str(fork))  # fmt: skip
        found["fork"] = read(fork)
        audit = start("-m", "launch", "audit", str(out / "train"), "--job", "jobs/train.py")
        found["audit"] = audit.stdout.splitlines()[-1].partition(":")[0]
        print("fork; audit", found["audit"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="*", default=[*RUNS], metavar="RUN")
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    args.out.mkdir(parents=True)
    if args.against and not (args.against / "judge.json").is_file():
        parser.error(f"--against {args.against}: no OUT of an earlier `python -m tests.judge OUT`")
    found = judge(args.out.resolve(), args.runs, args.against and args.against.resolve())
    (args.out / "judge.json").write_text(json.dumps(found, indent=1) + "\n")
    if not args.against:
        return
    expected = json.loads((args.against / "judge.json").read_text())
    others = [name for name in found if found[name] != expected[name]]
    for name in others:
        parts = [part for part in found[name] if found[name][part] != expected[name].get(part)]
        print(
            f"DIFFERENT: {name}",
            *(f"\n  {part}: {expected[name][part]}\n  now {found[name][part]}" for part in parts),
        )
    print(f"{len(found) - len(others)} of {len(found)} are equal")
    sys.exit(20 if others else 0)


if __name__ == "__main__":
    main()
