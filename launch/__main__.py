"""`python -m launch VERB`: what is done with jobs, before, around and after them."""

import importlib
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # before any other `common`
from common import exits
from common.entry import entry

VERBS = {  # verb: (module of this package with main(arguments) -> exit code, what it does)
    "check": ("check", "whether this node is fit: GPUs, shared memory, disks, limits, network, versions"),
    "simulate": ("simulate.cli", "run a job on this machine as a platform would, its faults included"),
    "pack": (
        "pack.cli",
        "the code that a job needs, checked: a folder with a manifest, or one file",
    ),
    "upload": (
        "transfer.upload",
        "put a snapshot or data into an object store; equal files are skipped",
    ),
    "submit": ("platforms.submit", "create a job on a managed platform, or write the file that does"),
    "status": ("platforms.status", "how a job on ModelArts is: phase, exit codes, restarts, events"),
    "logs": ("platforms.logs", "the logs of all nodes of a job on ModelArts"),
    "stop": ("platforms.stop", "stop a job on ModelArts"),
    "fetch": (
        "transfer.fetch",
        "download outputs from an object store, whole and compared; continues",
    ),
    "clean": ("transfer.clean", "show, then remove, old snapshots and unfinished uploads in an object store"),
    "report": ("report.cli", "one page on runs: curves, speed, waiting, restarts, receipts, settings"),
    "cache": ("cache.cli", "fill, compare, list and empty caches of samples: packs, Redis and Valkey"),
    "bench": ("bench.cli", "what is fast on this machine, with these data"),
    "receipt": ("receipt", "whether two runs saw the same data, and the first step where not"),
}
USAGE = "\n".join(
    ["usage: python -m launch VERB [ARGUMENTS]   (VERB --help says more)", ""]
    + [f"  {verb:<10}{meaning}" for verb, (_, meaning) in VERBS.items()]
)


@entry
def main():
    verb, *arguments = sys.argv[1:] or [None]
    if verb in ("-h", "--help"):
        print(USAGE)
        return
    if verb not in VERBS:
        print(USAGE if verb is None else f"error: {verb!r} is no verb\n{USAGE}", file=sys.stderr)
        sys.exit(exits.BAD_INPUT)
    sys.exit(importlib.import_module(f"launch.{VERBS[verb][0]}").main(arguments))


if __name__ == "__main__":
    main()
