"""`python -m launch VERB`: check, simulate, pack, submit, fetch and compare jobs."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # if this folder is a link
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # before another `common`
from bootfile import cli
from common.distributed.entry import entry

VERBS = {  # verb: (module with main(arguments) -> exit code, what it does)
    "new": ("launch.new.cli", "write a project of your own: a job, a test, a job.toml"),
    "check": ("launch.check", "check this node: GPUs, shared memory, disks, limits, network, versions"),
    "simulate": ("launch.simulate.cli", "run a job on this machine as a platform would, with faults"),
    "pack": ("launch.bundle.cli", "make the code of a job ready for upload: a folder with a manifest"),
    "upload": ("launch.transfer.upload", "upload a snapshot or data to a store; --clean: remove old ones"),
    "submit": ("launch.platforms.submit", "create a job on a platform, or write the file for its tool"),
    "fetch": ("launch.transfer.fetch", "download outputs from an object store and compare them"),
    "report": ("launch.report.cli", "make one page of runs: curves, speed, restarts, receipts, settings"),
    "cache": ("launch.cache.cli", "fill, compare, list and empty caches of samples: packs, Redis and Valkey"),
    "bench": ("launch.bench", "measure the loaders on this machine: why does the GPU wait"),
    "predict": ("launch.inference.predict", "predict the classes of images: a CSV with the top 5"),
    "export": ("launch.inference.export", "export the network of a run: ONNX or torch.export"),
    "prove": ("launch.prove", "run a job with kills and restarts, and show whether it continues exactly"),
    "lint": cli.VERBS["lint"],
    "fix": cli.VERBS["fix"],
    "receipt": cli.VERBS["receipt"],
    "audit": ("bootfile.history.cli", "compute steps of an old run again, and compare them with its record"),
    "replay": ("bootfile.history.replay", "train a run again as if some samples had never been in it"),
    "data": ("launch.data.cli", "show the samples of a step, or the steps of a sample"),
}


@entry
def main() -> None:
    """Run the verb of this process and exit with its code."""
    sys.exit(cli.run("python -m launch", VERBS))


if __name__ == "__main__":
    main()
