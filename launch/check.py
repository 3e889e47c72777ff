"""Check this node before a job: print one line per finding and a verdict.

    python -m launch check
    python -m launch check --init_method tcp://HOST:PORT --rank 1 --world_size 2 --output_dir FOLDER

Pass the job's arguments: the check lists and ignores the ones that it does not know. The exit code is that
of the first error: 0 no error, 2 bad arguments, 10 accelerators, 11 shared memory, 12 disks, 13 limits, 14
network, 15 versions and packages.
"""

import os
import time

from common.console.arguments import Parser, boolean
from common.distributed import process_group
from common.ground import accelerator
from common.ground.exits import printable
from common.ground.files import ROOT
from common.platform import node
from common.platform.topology import resolve
from common.run.output import folder_of


def main(arguments: list[str]) -> int:
    """Print the findings and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch check")
    process_group.add_arguments(parser)
    parser.add_argument(
        "--output_dir",
        "--train_url",
        default=os.path.join(ROOT, "output_dir"),
        help="folder for results (default: output_dir/ next to jobs/)",
    )
    parser.add_argument("--enable_gpu", type=boolean, help="default: true if there is a GPU")
    args, ignored = parser.parse_known_args(arguments)
    gpus = 0 if args.enable_gpu is False else accelerator.count()

    start = time.monotonic()
    topology = resolve(args, os.environ, gpus)
    findings = node.inspect(args, os.environ, topology, folder_of)
    code = node.exit_code(findings)
    if ignored:
        print(f"ignored arguments: {' '.join(ignored)}")
    print(*map(printable, map(str, [topology, *findings])), sep="\n")
    print(f"check verdict={node.worst(findings)} exit_code={code} seconds={time.monotonic() - start:.2f}")
    return code
