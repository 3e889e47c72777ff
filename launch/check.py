"""Check this node before a job: print one line per finding and a verdict.

    python -m launch check
    python -m launch check --init_method tcp://HOST:PORT --rank 1 --world_size 2 --output_dir FOLDER
    python -m launch check --nodes --init_method tcp://HOST:PORT --rank 1 --world_size 2

Pass the job's arguments: the check lists and ignores the ones that it does not know. With --nodes, started on
every node as the job would be, the processes also connect and measure one all_reduce of 100 MB. Compare
bus_gb_per_s, which is computed as in NCCL's tests, with the speed of the network card.

The exit code is that of the first error: 0 no error, 2 bad arguments, 4 or 5 the processes did not connect or
lost contact, 10 accelerators, 11 shared memory, 12 disks, 13 limits, 14 network, 15 versions.
"""

import argparse
import os
import time

from bootfile.ground.errors import BadInput, printable
from common.console.arguments import Parser, boolean
from common.distributed import options
from common.ground import endings
from common.ground.files import ROOT
from common.platform.place import resolve
from common.platform.signs import STARTED_BY
from common.platform.topology import Topology
from common.run.output import folder_of

_FLOATS = 25_000_000  # float32 values of one all_reduce: 100 MB
_GRACE = 5.0  # seconds from a signal to the end of the processes


def main(arguments: list[str]) -> int:
    """Print the findings and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch check")
    options.add_arguments(parser)
    add = parser.add_argument
    results = os.path.join(ROOT, "output_dir")
    help = "folder for results (default: output_dir/ next to jobs/)"
    add("--output_dir", "--train_url", default=results, help=help)
    add("--enable_gpu", type=boolean, help="default: true if there is a GPU")
    add("--nodes", action="store_true", help="measure the network between the processes")
    args, ignored = parser.parse_known_args(arguments)
    from bootfile.ground import accelerator  # imports torch, which --help does not need
    from common.platform import node

    gpus = accelerator.count() if args.enable_gpu is not False else 0
    start = time.monotonic()
    topology = resolve(args, os.environ, gpus)
    if args.nodes and topology.world_size < 2:
        raise BadInput(f"--nodes needs 2 processes or more, and {topology} is one: pass the job's arguments")
    code = 0
    if STARTED_BY not in os.environ:  # the parent has printed the findings of the node
        findings = node.inspect(args, os.environ, topology, folder_of)
        code = node.exit_code(findings)
        if ignored:
            print(f"ignored arguments: {' '.join(ignored)}")
        print(*map(printable, map(str, [topology, *findings])), sep="\n")
        seconds = time.monotonic() - start
        print(f"check verdict={node.worst(findings)} exit_code={code} seconds={seconds:.2f}", flush=True)
    # not on a node with an error: the measurement would wait for processes that cannot run
    return _measure(args, topology) if args.nodes and not code else code


def _measure(args: argparse.Namespace, topology: Topology) -> int:
    """Connect all processes of the job, print the speed of an all_reduce on rank 0, and return the exit code.
    Each process calls it. One that has to start the others of its node only starts them and waits."""
    import torch

    from common.distributed import devices, launcher, process_group

    # the steps of a job: its device, the other processes of the node, the group
    device = devices.select(args, topology)
    if topology.starts_processes:
        return launcher.start(topology, _GRACE)
    torch.distributed.init_process_group(**process_group.meet(args, topology))
    values = torch.ones(_FLOATS, device=device)
    for _ in range(2):  # the first one connects the processes
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
        values[0].item()  # waits for the device
        seconds = time.perf_counter() - began
    if topology.rank == 0:
        ranks = topology.world_size
        size = values.numel() * values.element_size()
        bus = 2 * (ranks - 1) / ranks * size / seconds / 1e9
        backend = torch.distributed.get_backend()
        print(
            f"all_reduce bytes={size} ranks={ranks} backend={backend} {seconds=:.4g} bus_gb_per_s={bus:.4g}"
        )
    endings.end(None)  # it leaves the group, and ends the process
    return 0
