"""`python -m launch VERB`: check, simulate, pack, submit, follow, fetch and compare jobs."""

import importlib
import os
import sys
from types import ModuleType

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # if this folder is a link
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # before another `common`
from bootfile import __version__
from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from common.distributed.entry import entry

VERBS = {  # verb: (module of launch or bootfile with main(arguments) -> exit code, what it does)
    "new": ("new.cli", "write a project of your own: a job, a test, a job.toml"),
    "check": ("check", "check this node: GPUs, shared memory, disks, limits, network, versions"),
    "simulate": ("simulate.cli", "run a job on this machine as a platform would, with faults"),
    "pack": ("bundle.cli", "make the code of a job ready for upload: a folder with a manifest"),
    "upload": ("transfer.upload", "upload a snapshot or data to an object store; skip equal files"),
    "submit": ("platforms.submit", "create a job on a managed platform, or write the file for its tool"),
    "status": ("platforms.status", "show a job on ModelArts: phase, exit codes, restarts, events"),
    "logs": ("platforms.logs", "print the logs of all nodes of a job on ModelArts"),
    "stop": ("platforms.stop", "stop a job on ModelArts"),
    "fetch": ("transfer.fetch", "download outputs from an object store and compare them"),
    "clean": ("transfer.clean", "remove old snapshots and unfinished uploads from an object store"),
    "report": ("report.cli", "make one page of runs: curves, speed, waiting, restarts, receipts, settings"),
    "cache": ("cache.cli", "fill, compare, list and empty caches of samples: packs, Redis and Valkey"),
    "bench": ("bench", "measure the loaders on this machine: why does the GPU wait"),
    "predict": ("inference.predict", "predict the classes of the images in a folder: a CSV with the top 5"),
    "export": ("inference.export", "export the network of a run: ONNX or torch.export"),
    "prove": ("prove.cli", "run a job with kills and restarts, and show whether it continues exactly"),
    "receipt": (
        "bootfile.receipt.cli",
        "compare the data and the states of two runs; show the first step that differs",
    ),
    "data": ("data.cli", "show the samples of a step, or the steps of a sample, checked against the receipt"),
}
USAGE = "\n".join(
    ["usage: python -m launch VERB [ARGUMENTS]   (VERB --help: details; --version)", ""]
    + [f"  {verb:<10}{meaning}" for verb, (_, meaning) in VERBS.items()]
)


def load(verb: str) -> ModuleType:
    """Import the module of a verb."""
    module = VERBS[verb][0]
    return importlib.import_module(module if module.startswith("bootfile.") else f"launch.{module}")


@entry
def main() -> None:
    verb, *arguments = sys.argv[1:] or [""]
    if verb in ("-h", "--help"):
        print(USAGE)
        sys.exit()
    if verb == "--version":
        print(f"bootfile {__version__}")
        sys.exit()
    if verb not in VERBS:
        print(USAGE if not verb else f"error: unknown command {verb!r}\n{USAGE}", file=sys.stderr)
        sys.exit(errors.BAD_INPUT)
    try:
        sys.exit(load(verb).main(arguments))
    except OSError as error:  # of a path, or of a folder that is needed to work; a verb names most itself
        place = f"{error.filename}: " if error.filename is not None else ""
        raise BadInput(f"{verb}: {place}{error.strerror or error}") from error
    except UnicodeError as error:
        raise BadInput(f"{verb}: a file or a name is not UTF-8: {error}") from error


if __name__ == "__main__":
    main()
