"""Show the whole workflow on this machine: upload, a job on two nodes, a kill, a restart, the report.

    python -m tests.demo [--to FOLDER] [--epochs N] [--samples N]

The store is moto's server on 127.0.0.1, the platform is `launch simulate`, the data are scikit-learn's 1,797
digits as PNG files. Each command is shown before it runs. An existing
FOLDER (default: output_dir/demo) is replaced.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys

import PIL.Image
from sklearn.datasets import load_digits

from tests.conftest import ROOT
from tests.support.object_store_server import ObjectStoreServer

BUCKET = "bootfile-demo"
BATCH = 64
JOB = (
    "--arch=shufflenet_v2_x0_5", "--image_size=32", "--data_backend=threads", "--workers=1", "--lr=0.02",
    "--warmup=0", f"--batch_size={BATCH}",
)  # fmt: skip


def make_data(folder: str, samples: int) -> int:
    """Write FOLDER/{train,val}/<digit>/<number>.png, 32x32 pixels, every fifth image for validation. Return
    the number of training images."""
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = os.path.join(folder, "val" if number % 5 == 4 else "train", str(label))
        os.makedirs(part, exist_ok=True)
        picture = PIL.Image.fromarray((image * 15.9375).astype("uint8")).resize((32, 32))
        picture.convert("RGB").save(os.path.join(part, f"{number:04}.png"))
        if number + 1 == samples:
            break
    return samples - samples // 5


def launch(environment: dict, *arguments: str) -> str:
    """Run a verb as a user does, and return its output. End the demo if the verb fails."""
    print(f"\n$ python -m launch {shlex.join(arguments)}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "launch", *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    if process.wait():
        sys.exit(f"exit code {process.returncode}")
    return "".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", default=os.path.join(ROOT, "output_dir", "demo"), metavar="FOLDER")
    parser.add_argument("--epochs", type=int, default=5, help="default: 5")
    parser.add_argument("--samples", type=int, default=1797, help="of the digits (default: all 1797)")
    options = parser.parse_args()
    folder = os.path.abspath(options.to)
    shutil.rmtree(folder, ignore_errors=True)
    data, packed, code = (os.path.join(folder, name) for name in ("data", "packed", "code"))
    results, page = os.path.join(folder, "results"), os.path.join(folder, "report.html")
    steps = options.epochs * (make_data(data, options.samples) // BATCH)
    often = max(1, steps // 10)
    with ObjectStoreServer(BUCKET) as server:
        environment = os.environ | server.environment
        launch(environment, "upload", data, "--to", f"s3://{BUCKET}/data")
        launch(environment, "pack", "jobs/imagenet.py", "--to", packed)
        (snapshot,) = os.listdir(packed)
        launch(environment, "upload", os.path.join(packed, snapshot), "--to", f"s3://{BUCKET}/code")
        # as the platform does it before it starts the boot file
        launch(environment, "fetch", f"s3://{BUCKET}/code/{snapshot}", "--to", code)
        launch(
            environment, "simulate", "--nodes=2", f"--fault=reschedule:step={steps // 2}",
            os.path.join(code, "jobs", "imagenet.py"), "--", *JOB, f"--epochs={options.epochs}",
            f"--print_freq={often}", f"--save_every={often}", f"--data_url=s3://{BUCKET}/data",
            f"--train_url=s3://{BUCKET}/runs/1",
        )  # fmt: skip
        launch(environment, "fetch", f"s3://{BUCKET}/runs/1", "--to", results)
    launch(os.environ, "report", results, "--to", page, "--title", "Two nodes, killed once")
    print(f"\n{page}")


if __name__ == "__main__":
    main()
